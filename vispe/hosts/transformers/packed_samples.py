"""Isolation of samples packed into one row: attention masks, and errors for layers that cannot isolate samples.

The ordinary position ids of a call separate samples: an id that is not the previous id plus 1 starts a
sample. The host's own masks define causality, bidirectional image blocks and sliding windows; each layer
additionally masks tokens of other samples, so isolation does not depend on whether the host creates a cache.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from vispe.errors import InputError, UnsupportedHost

SAMPLES = "vispe_samples"  # keyword that passes `Samples` from the model to its layers
# layer types without a recurrent state
ATTENTION = (
    "full_attention",
    "sliding_attention",
    "chunked_attention",
)
PREFIX = "prefix_attention"
"""Type of layers in which all tokens of a prompt attend to each other (PaliGemma)."""

_LIBRARIES = ("torch", "transformers", "accelerate", "peft", "vispe")


class Samples(NamedTuple):
    """Packed samples of a call; a tuple, so that hooks move it to the device of a layer.

    Attributes:
        number: index of the sample of each token in its row (b, s).
        masks: masks computed so far, (mask of the host, number of keys, isolated mask), as layers share them.
    """

    number: Tensor
    masks: list[tuple[Any, int, Any]]


def sample_numbers(token_index: Tensor) -> Tensor:
    """Return the index (b, s), from 0, of the sample of each token, for ordinary position ids (b, s)."""
    return pad((token_index[:, 1:] != token_index[:, :-1] + 1).long().cumsum(1), (1, 0))


def samples_of(token_index: Tensor) -> Samples | None:
    """Return the packed samples of a call without a mask; None if every row is one sample.

    Compiled programs cannot branch on values, so their rows are always treated as packed.
    """
    if token_index.shape[1] == 1:
        return None
    number = sample_numbers(token_index)
    if not torch.compiler.is_compiling() and not bool(number[:, -1].any()):
        return None
    return Samples(number, [])


def check_layers(text: Any, owner: str, prefix_lm: bool = False) -> None:
    """Raise `UnsupportedHost` if layers of a language model do not isolate samples of a row: states, indexers."""
    kinds = {*_layer_types(text), *([PREFIX] if prefix_lm else [])}
    others = sorted(kinds - {*ATTENTION})
    if others:
        raise UnsupportedHost(
            f"{owner}: samples cannot be packed into one row of a {type(text).__name__}, got layers of type "
            f"{', '.join(others)}, which do not isolate samples of a row. Use one sample per row, padded with an "
            "attention_mask."
        )


def isolates(text: Any) -> bool:
    """Return whether all layers of a language model can isolate packed samples."""
    return all(kind in ATTENTION for kind in _layer_types(text))


def check_call(
    model: Any, text: Any, token_index: Tensor, mask: Tensor | None, masked: bool, cached: bool
) -> bool:
    """Return whether the rows of a call are packed samples to be isolated; while compiling, whether they may be.

    Args:
        model: the converted model inside, for its name.
        text: its language model.
        token_index: ordinary position ids (b, s) of the caller.
        mask: the padding mask (b, all tokens so far), or None.
        masked: whether there is a mask of any kind.
        cached: whether the cache contains tokens.

    Raises:
        UnsupportedHost: the layers cannot isolate samples.
        InputError: packed samples follow cached tokens.

    Warns:
        UserWarning: packed samples are passed with a padding mask, with which transformers does not isolate them.
    """
    if token_index.shape[1] == 1:
        return False
    if torch.compiler.is_compiling() and isolates(text):
        return not masked and not cached
    number = sample_numbers(token_index)
    if mask is not None:
        valid = mask[:, -token_index.shape[1] :].bool()
        # a start counts only between two valid tokens
        number = (number.diff(dim=1) > 0) & valid[:, 1:] & valid[:, :-1]
        if bool(number.any()):
            _warn_of_mask(model, isolates(text))
        return False
    if not bool(number[:, -1].any()):
        return False
    check_layers(text, f"{type(model).__name__}.forward")
    if masked:
        return False
    if cached:
        raise InputError(
            f"{type(model).__name__}.forward: position_ids restart within a row of tokens that follow cached tokens, "
            "so the sample of the cached tokens is unknown. Pass packed samples without a cache, or a mask "
            "(b, 1, s, all tokens)."
        )
    return True


def check_cache(state: Any) -> None:
    """Raise `InputError` if the tokens of a call would attend to all packed samples in a cache."""
    if state is not None and state.packed:
        raise InputError(
            "The cache must contain one sample per row, got packed samples, all of which the tokens of this call would "
            "attend to. Fill the cache with one sample per row."
        )


def flash_arguments(text: Any, samples: Samples) -> dict[str, Any]:
    """Return the arguments that isolate samples in flash attention (cumulative lengths, maximum), otherwise {}.

    Raises:
        UnsupportedHost: the attention implementation accepts neither these arguments nor a mask.
    """
    base = _attention(text)
    if base in ("sdpa", "eager", "flex_attention"):
        return {}
    if not base.startswith("flash_attention"):
        raise UnsupportedHost(
            f"Packed samples need attention 'sdpa', 'eager', 'flex_attention' or flash attention to be isolated, got "
            f"{base!r}. Call model.set_attn_implementation('sdpa') first."
        )
    first = torch.ones_like(samples.number[:, :1], dtype=torch.bool)
    starts = torch.cat([first, samples.number.diff(dim=1) > 0], 1).flatten().nonzero()[:, 0]
    ends = torch.cat([starts, starts.new_tensor([samples.number.numel()])]).to(torch.int32)
    longest = int(ends.diff().max())
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


def isolated(mask: Any, samples: Samples, layer: Any, cache: Any, dtype: torch.dtype) -> Any:
    """Return the mask of a layer with no token attending to another sample.

    Args:
        mask: mask of the host: (b, 1, s, m) bool or additive, a block mask of flex attention, or None for causal.
        samples: packed samples of the call.
        layer: the decoder layer.
        cache: the empty cache of the call, or None.
        dtype: dtype of the layer's input, for additive masks.
    """
    attention = getattr(layer, "self_attn", layer)
    base = _attention(attention)
    if base.startswith("flash_attention"):
        return mask
    length = samples.number.shape[1]
    if mask is not None:
        keys = int(mask.shape[-1])
    else:  # a static cache is longer than its keys; a dynamic one may already contain those of this call
        index = getattr(attention, "layer_idx", None)
        keys = length if cache is None else max(length, int(cache.get_mask_sizes(0, index)[0]))
    for host_mask, size, result in samples.masks:
        if host_mask is mask and size == keys:
            return result
    result = _isolated(mask, samples.number, keys, base, dtype)
    samples.masks.append((mask, keys, result))
    return result


def _isolated(mask: Any, number: Tensor, keys: int, base: str, dtype: torch.dtype) -> Any:
    length = number.shape[1]
    # unused keys of a static cache belong to no sample
    of_key = pad(number, (0, keys - length), value=-1)
    if base == "flex_attention":
        return _block_mask(mask, number, of_key)
    # same sample: (b, 1, s, keys)
    same_sample = number[:, None, :, None] == of_key[:, None, None]
    if mask is None:
        index = torch.arange(keys, device=number.device)
        same_sample = same_sample & (index <= index[:length, None])
        if base != "eager":
            return same_sample
        mask = torch.zeros((), dtype=dtype, device=number.device)
    if mask.dtype == torch.bool:
        return mask & same_sample
    return mask.masked_fill(~same_sample, torch.finfo(mask.dtype).min)


def _block_mask(mask: Any, number: Tensor, of_key: Tensor) -> Any:
    from torch.nn.attention.flex_attention import and_masks, create_block_mask

    def same_sample(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return number[row, query] == of_key[row, key]

    return create_block_mask(
        and_masks(mask.mask_mod, same_sample), B=len(number), H=None, Q_LEN=number.shape[1], KV_LEN=of_key.shape[1],
        device=str(number.device),
    )  # fmt: skip


def _layer_types(text: Any) -> list[str]:
    kinds = list(getattr(getattr(text, "config", None), "layer_types", None) or ())
    # all tokens of a prompt attend to each other, whatever sample they belong to
    return [*kinds, PREFIX] if getattr(getattr(text, "vispe_text", None), "prefix_lm", False) else kinds


def _attention(module: Any) -> str:
    """Return the attention implementation of a module, without the prefix of vispe's own."""
    return str(getattr(module.config, "_attn_implementation", "")).removeprefix("vispe_")


def _warn_of_mask(model: Any, isolable: bool) -> None:
    """Warn, at the line of the user's call, that a padding mask does not separate packed samples."""
    frame, level = sys._getframe(1), 2  # level 1 is this function
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _LIBRARIES:
        frame, level = frame.f_back, level + 1
    advice = "Pass position_ids without attention_mask, or a mask (b, 1, s, s)."
    if not isolable:
        advice = "Use one sample per row: layers of this model do not isolate samples."
    warnings.warn(
        f"{type(model).__name__}.forward: position_ids restart within a row, but with a padding mask (b, s) the packed "
        f"samples are not separated: they attend to each other. {advice}",
        UserWarning,
        stacklevel=level,
    )
