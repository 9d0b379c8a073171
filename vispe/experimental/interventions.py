"""Training-free interventions against positional bias at inference time, as context managers.

They are experimental: sign, magnitude and layers must be tuned for each model. Scaling of a positional channel: arXiv
2406.02536; calibrated attention: arXiv 2406.16008.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vispe.errors import OptionError, ShapeError, UnsupportedHost, counted
from vispe.experimental.attention_layers import attention_layers, query_key_projections, selected_layers
from vispe.hosts.slot_calibration import calibrate
from vispe.hosts.transformers.version import CACHE_NAMES, cache_of

BASES = ("sdpa", "eager")


@contextmanager
def scale_channel(
    model: nn.Module,
    channel: int,
    factor: float,
    *,
    layers: Sequence[int] | None = None,
    reader: bool | None = None,
) -> Iterator[None]:
    """Scale one channel of the input of attention layers, for queries and keys but not for values.

    Args:
        model: a timm ViT, with or without an encoding of vispe, or a decoder of transformers with the projections
            q_proj, k_proj and v_proj.
        channel: index of the channel of the normalised hidden state, the input of the projections.
        factor: 0 removes the channel, 1 changes nothing.
        layers: layer indices; default: all layers.
        reader: change only the attention of the token that is read out (the reader), that is, its query and all keys.
            The reader is the class token of a ViT, or the last token of a decoder, which then runs on complete
            sequences (`use_cache=False`, padded on the left). Default: True for decoders, False for ViTs.

    Raises:
        UnsupportedHost: the model is not supported.
        OptionError: there is no such channel or layer.
        ShapeError: the KV cache of a decoder is not empty, or sequences end in padding.

    >>> import timm
    >>> model, x = timm.create_model("test_vit").eval(), torch.rand(1, 3, 160, 160)
    >>> before = model(x)
    >>> with scale_channel(model, 3, 0.0):
    ...     torch.equal(model(x), before)
    False
    >>> torch.equal(model(x), before)
    True
    """
    modules, row = attention_layers(model)
    chosen = selected_layers(modules, layers, range(len(modules)))
    reader_only = row == -1 if reader is None else reader
    if reader_only and row is None:
        raise UnsupportedHost(
            f"scale_channel: reader=True needs a class token in all blocks, got {type(model).__name__}. Pass "
            "reader=False."
        )
    width = query_key_projections(chosen[0])[0][0].in_features
    if not 0 <= channel < width:
        raise OptionError(f"scale_channel: channel must be within 0 to {width - 1}, got {channel}.")
    with ExitStack() as handles:
        if reader_only and row == -1:
            handles.callback(model.register_forward_pre_hook(_check_complete, with_kwargs=True).remove)
        for module in chosen:
            scaling = _Scaling(channel, factor, on=not reader_only)
            for linear, parts in query_key_projections(module):
                handles.callback(linear.register_forward_hook(partial(scaling.project, parts)).remove)
            if reader_only:
                hook = module.register_forward_hook(partial(scaling.read, row), with_kwargs=True)
                handles.callback(hook.remove)
        yield


@contextmanager
def calibrated(
    model: nn.Module,
    item: Tensor,
    dummy: Tensor,
    *,
    temperature: float = 5e-5,
    layers: Sequence[int] | None = None,
) -> Iterator[None]:
    """Remove the prior of slots from the attention of the token that is read out.

    In every head, the attention of a ViT's class token or of a decoder's last token to the tokens of items is rescaled
    by `vispe.hosts.slot_calibration.calibrate`; its sum over items is unchanged. A decoder may generate with a cache.

    Args:
        model: a model as for `scale_channel`; decoders need the attention 'sdpa' or 'eager'.
        item: index of the item of each token, prefix tokens included, (tokens,) int64; below 0 for tokens
            outside of items, such as those that a decoder generates.
        dummy: mean attention to a content-free item in each slot (items,), as returned by `slot_curve`.
        temperature: temperature of the softmax over items.
        layers: layer indices; default: the last half.

    Raises:
        UnsupportedHost: the model is not supported.
        OptionError: there is no such layer, or the temperature is not above 0.
        ShapeError: the numbers of items, slots and tokens differ.
    """
    modules, row = attention_layers(model)
    chosen = selected_layers(modules, layers, range(len(modules) // 2, len(modules)))
    # shapes are checked before the model runs
    calibrate(torch.full(item.shape, 1.0), item, dummy, temperature)
    if row is None:
        raise UnsupportedHost(
            f"calibrated: the model needs a class token in all blocks, got {type(model).__name__} without one."
        )

    def rescale(attn: Tensor) -> Tensor:
        """Rescale attention (b, h, 1, tokens) of the reader."""
        generated = attn.shape[-1] - len(item)
        if generated < 0 or (generated and row == 0):
            raise ShapeError(
                f"calibrated: item must have one index per token, {attn.shape[-1]}, got {len(item)}."
            )
        padded = torch.nn.functional.pad(item, (0, generated), value=-1).to(attn.device)
        return calibrate(attn, padded, dummy.to(attn.device), temperature).attention.to(attn.dtype)

    with ExitStack() as undo:
        if row == 0:
            _calibrate_vit(chosen, rescale, undo)
        else:
            _calibrate_decoder(model, chosen, rescale, undo)
        yield


class _Scaling:
    """Scaling of a channel in the input of projections, always or only while the reader's row is computed."""

    def __init__(self, channel: int, factor: float, on: bool) -> None:
        self.channel, self.factor, self.on = channel, factor, on

    def project(self, parts: int | None, linear: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        """Return a projection whose first `parts` features, queries and keys, are those of the scaled input."""
        if not self.on:
            return None
        scale = torch.ones_like(args[0][0, 0])
        scale[self.channel] = self.factor
        scaled = linear.forward(args[0] * scale)
        return scaled if parts is None else torch.cat([scaled[..., :parts], output[..., parts:]], -1)

    def read(self, row: int, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        """Return the output of a layer with the row of the reader from a second run."""
        # the first run has already appended unscaled keys to the KV cache
        uncached = {name: None if name in CACHE_NAMES else value for name, value in kwargs.items()}
        self.on = True
        try:
            scaled = module.forward(*args, **uncached)
        finally:
            self.on = False
        if isinstance(output, tuple):
            return (_with_row(output[0], scaled[0], row), *output[1:])
        return _with_row(output, scaled, row)


def _with_row(output: Tensor, other: Tensor, row: int) -> Tensor:
    output = output.clone()
    output[:, row] = other[:, row]
    return output


def _check_complete(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Raise `ShapeError` if the input is not the complete sequence."""
    if (cache := cache_of(kwargs)) is not None and (length := cache.get_seq_length()):
        raise ShapeError(
            "scale_channel: the keys of complete sequences are scaled, got a cache of "
            f"{counted(length, 'token')}. Call the model with use_cache=False."
        )
    _check_end(model, args, kwargs)


def _check_end(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Raise `ShapeError` if the last token is padding."""
    mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
    if isinstance(mask, Tensor) and mask.ndim == 2 and not bool(mask[:, -1].all()):
        raise ShapeError(
            "Interventions read the last token, got sequences that end in padding. Pad on the left."
        )


def _calibrate_vit(chosen: list[Any], rescale: Callable[[Tensor], Tensor], undo: ExitStack) -> None:
    """Rescale the class token's attention in a hook on the attention dropout, which runs without fused attention."""

    def hook(module: nn.Module, args: tuple[Tensor], attn: Tensor) -> Tensor:
        return torch.cat([rescale(attn[:, :, :1]), attn[:, :, 1:]], 2)

    for module in chosen:
        undo.callback(setattr, module, "fused_attn", module.fused_attn)
        module.fused_attn = False
        undo.callback(module.attn_drop.register_forward_hook(hook).remove)


def _calibrate_decoder(
    model: nn.Module, chosen: list[Any], rescale: Callable[[Tensor], Tensor], undo: ExitStack
) -> None:
    """Replace the attention function while layers run; masks are built beforehand for the model's own function."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    config = chosen[0].config
    base = config._attn_implementation
    if base not in BASES:
        raise UnsupportedHost(
            f"calibrated: the attention implementation must be {' or '.join(BASES)}, got {base!r}. Call "
            "model.set_attn_implementation('sdpa') first."
        )

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        if any(kwargs.get(name) is not None for name in ("softcap", "s_aux")):
            raise UnsupportedHost(
                f"calibrated: the attention must be a plain softmax, got {type(module).__name__} with softcap or sinks."
            )
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        out, weights = ALL_ATTENTION_FUNCTIONS.get_interface(base, eager)(module, q, k, v, mask, **kwargs)
        # grouped-query attention: each key head serves consecutive query heads, (b, h_kv, n, d) -> (b, h, n, d)
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        logits = (q[:, :, -1:].float() * (kwargs.get("scaling") or q.shape[-1] ** -0.5)) @ k.float().mT
        if mask is not None:
            last = mask[:, :, -1:, : k.shape[2]]
            logits = logits.masked_fill(~last, -torch.inf) if last.dtype == torch.bool else logits + last
        attn = rescale(logits.softmax(-1))
        out = torch.cat([out[:, :-1], (attn @ v.float()).to(out.dtype).transpose(1, 2)], 1)
        return out, weights if weights is None else torch.cat([weights[:, :, :-1], attn.to(weights.dtype)], 2)

    def enter(*_: Any) -> None:
        config._attn_implementation = name

    def leave(*_: Any) -> None:
        config._attn_implementation = base

    # a unique name, so that context managers can be nested
    name = f"vispe_calibrated_{id(rescale)}"
    ALL_ATTENTION_FUNCTIONS[name] = attend
    undo.callback(ALL_ATTENTION_FUNCTIONS.pop, name)
    undo.callback(leave)
    undo.callback(model.register_forward_pre_hook(_check_end, with_kwargs=True).remove)
    for module in chosen:
        undo.callback(module.register_forward_pre_hook(enter).remove)
        undo.callback(module.register_forward_hook(leave, always_call=True).remove)
