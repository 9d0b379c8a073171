"""Isolation of the samples that are packed into one row: their masks, and the layers that cannot isolate them.

Samples are numbered by the ordinary position ids of a call: an id that does not go on by 1 starts another one. The
masks that a host makes say where text is causal, which image blocks see themselves and how wide windows are; each layer
adds to them that no token attends to another sample. So isolation does not depend on whether the host opens a cache.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from vispe.errors import InputError, UnsupportedHost

SAMPLES = "vispe_samples"  # keyword that carries `Samples` from the model to its layers
ATTENTION = (
    "full_attention",
    "sliding_attention",
    "chunked_attention",
)  # layer types that read nothing but a mask
_LIBRARIES = ("torch", "transformers", "accelerate", "peft", "vispe")


class Samples(NamedTuple):
    """Packed samples of a call; a tuple, so that hooks move it to the device of a layer.

    Attributes:
        number: which sample of its row each token belongs to (b, s).
        masks: masks made so far, each as (mask of the host, number of keys, isolated mask), as layers share them.
    """

    number: Tensor
    masks: list[tuple[Any, int, Any]]


def sample_numbers(keys: Tensor) -> Tensor:
    """Return the number (b, s), from 0, of the sample that each token belongs to, for ordinary position ids (b, s)."""
    return pad((keys[:, 1:] != keys[:, :-1] + 1).long().cumsum(1), (1, 0))


def samples_of(keys: Tensor) -> Samples | None:
    """Return the packed samples of a call without a mask; None where every row is one sample.

    Compiled programs cannot branch on values, so their rows are always taken for packed ones.
    """
    if keys.shape[1] == 1:
        return None
    number = sample_numbers(keys)
    if not torch.compiler.is_compiling() and not bool(number[:, -1].any()):
        return None
    return Samples(number, [])


def check_layers(text: Any, owner: str) -> None:
    """Raise `UnsupportedHost` where layers of a language model carry a state from sample to sample."""
    others = sorted({kind for kind in _layer_types(text) if kind not in ATTENTION})
    if others:
        raise UnsupportedHost(
            f"{owner}: samples cannot be packed into one row of a {type(text).__name__}, got layers of type "
            f"{', '.join(others)}, which carry a state from each sample into the next. Use one sample for each row, "
            "padded with an attention_mask."
        )


def isolates(text: Any) -> bool:
    """Whether all layers of a language model can isolate packed samples."""
    return all(kind in ATTENTION for kind in _layer_types(text))


def check_call(model: Any, text: Any, keys: Tensor, mask: Tensor | None, masked: bool, cached: bool) -> bool:
    """Return whether the rows of a call are packed samples to be isolated; while compiling, whether they may be.

    Args:
        model: the converted model inside, for its name.
        text: its language model.
        keys: ordinary position ids (b, s) of the caller.
        mask: the padding mask (b, all tokens so far), or None.
        masked: whether there is a mask of any kind.
        cached: whether tokens are in the cache.

    Raises:
        UnsupportedHost: the layers cannot isolate them.
        InputError: they were to follow what is in a cache.

    Warns:
        UserWarning: a padding mask hides from the host that samples are packed.
    """
    if keys.shape[1] == 1:
        return False
    if torch.compiler.is_compiling() and isolates(text):
        return not masked and not cached
    number = sample_numbers(keys)
    if mask is not None:
        seen = mask[:, -keys.shape[1] :].bool()
        number = (number.diff(dim=1) > 0) & seen[:, 1:] & seen[:, :-1]
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
            f"{type(model).__name__}.forward: position_ids restart within a row of tokens that follow a filled cache, "
            "so which sample the cached tokens belong to is unknown. Pass packed samples without a cache, or a mask "
            "(b, 1, s, all tokens)."
        )
    return True


def check_cache(state: Any) -> None:
    """Raise `InputError` where the samples in a cache would all be seen by the tokens of a call."""
    if state is not None and state.packed:
        raise InputError(
            "The cache holds packed samples, which the tokens of this call would all attend to, got a call that goes "
            "on from it. Fill a cache with one sample for each row."
        )


def flash_arguments(text: Any, samples: Samples) -> dict[str, Any]:
    """Return what flash attention needs to isolate samples: their ends among all tokens, and the longest; else none.

    Raises:
        UnsupportedHost: the attention of the model is of a kind that takes neither these nor a mask.
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
        mask: that of the host: (b, 1, s, m) bool or additive, a block mask of flex attention, or None: causal.
        samples: of the call.
        layer: the decoder layer.
        cache: of the call, or None; empty.
        dtype: of the layer's input, for additive masks.
    """
    attention = getattr(layer, "self_attn", layer)
    base = _attention(attention)
    if base.startswith("flash_attention"):
        return mask
    length = samples.number.shape[1]
    if mask is not None:
        keys = int(mask.shape[-1])
    else:  # a cache of fixed size has room behind its keys; one that grows may hold those of this call already
        number = getattr(attention, "layer_idx", None)
        keys = length if cache is None else max(length, int(cache.get_mask_sizes(0, number)[0]))
    for before, size, after in samples.masks:
        if before is mask and size == keys:
            return after
    after = _isolated(mask, samples.number, keys, base, dtype)
    samples.masks.append((mask, keys, after))
    return after


def _isolated(mask: Any, number: Tensor, keys: int, base: str, dtype: torch.dtype) -> Any:
    """Return a mask, made anew."""
    length = number.shape[1]
    of_key = pad(number, (0, keys - length), value=-1)
    if base == "flex_attention":
        return _in_blocks(mask, number, of_key)
    same = number[:, None, :, None] == of_key[:, None, None]
    if mask is None:
        at = torch.arange(keys, device=number.device)
        same = same & (at <= at[:length, None])
        if base != "eager":
            return same
        mask = torch.zeros((), dtype=dtype, device=number.device)
    if mask.dtype == torch.bool:
        return mask & same
    return mask.masked_fill(~same, torch.finfo(mask.dtype).min)


def _in_blocks(mask: Any, number: Tensor, of_key: Tensor) -> Any:
    """Return a block mask of flex attention."""
    from torch.nn.attention.flex_attention import and_masks, create_block_mask

    def same(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return number[row, query] == of_key[row, key]

    return create_block_mask(
        and_masks(mask.mask_mod, same), B=len(number), H=None, Q_LEN=number.shape[1], KV_LEN=of_key.shape[1],
        device=str(number.device),
    )  # fmt: skip


def _layer_types(text: Any) -> list[str]:
    return list(getattr(getattr(text, "config", None), "layer_types", None) or ())


def _attention(module: Any) -> str:
    """Return the name of a module's attention, without the prefix of vispe's own."""
    return str(getattr(module.config, "_attn_implementation", "")).removeprefix("vispe_")


def _warn_of_mask(model: Any, isolable: bool) -> None:
    """Warn, at the line that called the model, that a padding mask does not separate packed samples."""
    frame, level = sys._getframe(1), 2  # 1 is this function
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _LIBRARIES:
        frame, level = frame.f_back, level + 1
    advice = "Pass position_ids without attention_mask, or a mask (b, 1, s, s)."
    if not isolable:
        advice = "Use one sample for each row: layers of this model carry a state from sample to sample."
    warnings.warn(
        f"{type(model).__name__}.forward: position_ids restart within a row, but with a padding mask (b, s) the packed "
        f"samples are not separated: they attend to each other. {advice}",
        UserWarning,
        stacklevel=level,
    )
