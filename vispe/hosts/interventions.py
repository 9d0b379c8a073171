"""Corrections of positional bias while a model runs, without training; each is undone when its block is left.

Experiments, not remedies: sign, size and layers must be searched for each model. Scaling of a positional channel:
arXiv 2406.02536; calibrated attention: arXiv 2406.16008.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from timm.layers import Attention, AttentionRope
from timm.models.eva import EvaAttention
from torch import Tensor, nn

from vispe.errors import OptionError, ShapeError, UnsupportedHost
from vispe.hosts.slot_calibration import calibrate
from vispe.hosts.timm.attention import attentions, stock_type
from vispe.hosts.transformers.version import CACHE_NAMES, cache_of

KINDS = (Attention, AttentionRope, EvaAttention)
BASES = ("sdpa", "eager")
NAME = "vispe_calibrated"


@contextmanager
def scale_channel(
    model: nn.Module,
    channel: int,
    factor: float,
    *,
    layers: Sequence[int] | None = None,
    reader: bool | None = None,
) -> Iterator[None]:
    """Multiply one channel of the input of attention layers for queries and keys, not for values.

    Args:
        model: a ViT of timm, with or without an encoding of vispe, or a decoder of transformers with the projections
            q_proj, k_proj and v_proj.
        channel: number of the channel; the hidden state is taken behind the norm, as projections get it.
        factor: 0 takes the channel out, 1 changes nothing.
        layers: their numbers; all by default.
        reader: only attention of the token from which an answer is read is changed, its query and all keys: the class
            token of a ViT, the last token of a decoder, which then runs on whole sequences (`use_cache=False`, padded
            on the left). By default so for decoders, while in a ViT all tokens are changed.

    Raises:
        UnsupportedHost: the model cannot be steered.
        OptionError: there is no such channel or layer.
        ShapeError: a decoder was given a filled cache, or padding at the end.

    >>> import timm
    >>> model, x = timm.create_model("test_vit").eval(), torch.rand(1, 3, 160, 160)
    >>> before = model(x)
    >>> with scale_channel(model, 3, 0.0):
    ...     torch.equal(model(x), before)
    False
    >>> torch.equal(model(x), before)
    True
    """
    found, row = _layers(model)
    chosen = _chosen(found, layers, range(len(found)))
    only = row == -1 if reader is None else reader
    if only and row is None:
        raise UnsupportedHost(
            f"{type(model).__name__} has no class token in all blocks that would read; pass reader=False."
        )
    width = _projections(chosen[0])[0][0].in_features
    if not 0 <= channel < width:
        raise OptionError(f"There is no channel {channel}; hidden states have channels 0 to {width - 1}.")
    with ExitStack() as handles:
        if only and row == -1:
            handles.callback(model.register_forward_pre_hook(_check_whole, with_kwargs=True).remove)
        for module in chosen:
            scaling = _Scaling(channel, factor, on=not only)
            for linear, parts in _projections(module):
                handles.callback(linear.register_forward_hook(partial(scaling.project, parts)).remove)
            if only:
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
    """Take the prior of slots out of the attention of the token from which an answer is read.

    Of every head, the attention of a ViT's class token or of a decoder's last token to the tokens of items is rescaled
    by `vispe.hosts.slot_calibration.calibrate`; its sum over items stays as it is. A decoder may generate with a cache.

    Args:
        model: as for `scale_channel`; a decoder with attention 'sdpa' or 'eager'.
        item: number of the item of each token, prefix tokens included, (tokens,) int64; below 0 for none. Tokens that
            a decoder adds behind them are of none.
        dummy: mean attention to a content-free item in each slot (items,), as `slot_curve` gives it.
        temperature: of the softmax over items.
        layers: their numbers; by default the last half.

    Raises:
        UnsupportedHost: the model cannot be steered.
        OptionError: there is no such layer, or a temperature that is not above 0.
        ShapeError: items, slots and tokens do not agree.
    """
    found, row = _layers(model)
    chosen = _chosen(found, layers, range(len(found) // 2, len(found)))
    # what does not agree is said before the model runs
    calibrate(torch.full(item.shape, 1.0), item, dummy, temperature)
    if row is None:
        raise UnsupportedHost(
            f"{type(model).__name__} has no class token in all blocks whose attention could be calibrated."
        )

    def rescale(attn: Tensor) -> Tensor:
        """Rescale attention (b, h, 1, tokens) of the reader."""
        late = attn.shape[-1] - len(item)
        if late < 0 or (late and row == 0):
            raise ShapeError(f"There are {attn.shape[-1]} tokens, but items of {len(item)}.")
        where = torch.nn.functional.pad(item, (0, late), value=-1).to(attn.device)
        return calibrate(attn, where, dummy.to(attn.device), temperature).attention.to(attn.dtype)

    with ExitStack() as undo:
        if row == 0:
            _calibrate_vit(chosen, rescale, undo)
        else:
            _calibrate_decoder(model, chosen, rescale, undo)
        yield


class _Scaling:
    """A channel that is scaled where projections read it, always or while the reader's row is computed."""

    def __init__(self, channel: int, factor: float, on: bool) -> None:
        self.channel, self.factor, self.on = channel, factor, on

    def project(self, parts: int | None, linear: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        """Return a projection with its first features, queries and keys, of the scaled input."""
        if not self.on:
            return None
        scale = torch.ones_like(args[0][0, 0])
        scale[self.channel] = self.factor
        scaled = linear.forward(args[0] * scale)
        return scaled if parts is None else torch.cat([scaled[..., :parts], output[..., parts:]], -1)

    def read(self, row: int, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        """Return the output of a layer with the row of the reader from a second run."""
        # the first run has put the keys of all tokens, as they are, into the cache
        own = {name: None if name in CACHE_NAMES else value for name, value in kwargs.items()}
        self.on = True
        try:
            again = module.forward(*args, **own)
        finally:
            self.on = False
        if isinstance(output, tuple):
            return (_with_row(output[0], again[0], row), *output[1:])
        return _with_row(output, again, row)


def _with_row(output: Tensor, other: Tensor, row: int) -> Tensor:
    output = output.clone()
    output[:, row] = other[:, row]
    return output


def _layers(model: nn.Module) -> tuple[list[nn.Module], int | None]:
    """Return the attention layers of a model, and which token reads: 0, -1, or None where none does."""
    found = [m for m in model.modules() if hasattr(m, "layer_idx") and getattr(m, "is_causal", False)]
    if found and all(hasattr(m, name) for m in found for name in ("q_proj", "k_proj", "v_proj", "config")):
        return found, -1
    if found or not hasattr(model, "blocks"):
        raise UnsupportedHost(
            f"{type(model).__name__} cannot be steered; that takes a ViT of timm, or a decoder of transformers with "
            "the projections q_proj, k_proj and v_proj."
        )
    found = [module for _, _, module in attentions(model)]
    for module in found:
        # some compute with the weights of a layer and do not call it
        if stock_type(module) not in KINDS or (module.qkv is not None and _own_bias(module)):
            raise UnsupportedHost(
                f"{type(model).__name__} cannot be steered: queries and keys of {type(module).__name__} are not "
                "those of a layer of its own."
            )
    token = getattr(getattr(model, "embeds", model), "cls_token", None)
    # prefix tokens may enter behind the first blocks
    late = getattr(model, "_vispe_prefix_from", int)()
    return found, None if token is None or late else 0


def _own_bias(module: nn.Module) -> bool:
    return getattr(module, "q_bias", None) is not None


def _chosen(found: list[nn.Module], layers: Sequence[int] | None, default: Sequence[int]) -> list[nn.Module]:
    wanted = list(default if layers is None else layers)
    if wrong := [k for k in wanted if not 0 <= k < len(found)] or ([] if wanted else [None]):
        raise OptionError(
            f"Steering needs layers from 0 to {len(found) - 1}, got {wrong[0]} in layers={layers}."
        )
    return [found[k] for k in sorted(set(wanted))]


def _projections(module: Any) -> list[tuple[Any, int | None]]:
    """Return what makes queries and keys, and how many features of it they are; None for all."""
    if getattr(module, "qkv", None) is not None:
        return [(module.qkv, 2 * module.qkv.out_features // 3)]
    return [(module.q_proj, None), (module.k_proj, None)]


def _check_whole(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Raise `ShapeError` where the last token is not the end of a whole sequence."""
    cache = cache_of(kwargs)
    if cache is not None and cache.get_seq_length():
        raise ShapeError(
            "A channel is scaled in the keys of whole sequences, but the cache is filled; use_cache=False."
        )
    _check_end(model, args, kwargs)


def _check_end(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Raise `ShapeError` where the last token is padding."""
    mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
    if isinstance(mask, Tensor) and mask.ndim == 2 and not bool(mask[:, -1].all()):
        raise ShapeError("The last token reads, but some sequences end in padding; pad on the left.")


def _calibrate_vit(chosen: list[Any], rescale: Callable[[Tensor], Tensor], undo: ExitStack) -> None:
    """Make layers show their attention to their dropout, behind which the class token's is rescaled."""

    def hook(module: nn.Module, args: tuple[Tensor], attn: Tensor) -> Tensor:
        return torch.cat([rescale(attn[:, :, :1]), attn[:, :, 1:]], 2)

    for module in chosen:
        undo.callback(setattr, module, "fused_attn", module.fused_attn)
        module.fused_attn = False
        undo.callback(module.attn_drop.register_forward_hook(hook).remove)


def _calibrate_decoder(
    model: nn.Module, chosen: list[Any], rescale: Callable[[Tensor], Tensor], undo: ExitStack
) -> None:
    """Make layers attend by a function of ours while they run; masks are made for the model's own before."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    config = chosen[0].config
    base = config._attn_implementation
    if base not in BASES:
        raise UnsupportedHost(
            f"Calibration needs attention that takes a dense mask, {' or '.join(BASES)}; the model uses {base!r}. Call "
            "model.set_attn_implementation('sdpa') first."
        )

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        if any(kwargs.get(name) is not None for name in ("softcap", "s_aux")):
            raise UnsupportedHost(
                f"{type(module).__name__} does more than a softmax; it cannot be calibrated."
            )
        own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        out, weights = ALL_ATTENTION_FUNCTIONS.get_interface(base, own)(module, q, k, v, mask, **kwargs)
        # grouped keys and values serve a run of query heads
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

    # blocks may stand inside each other
    name = f"{NAME}_{id(rescale)}"
    ALL_ATTENTION_FUNCTIONS[name] = attend
    undo.callback(ALL_ATTENTION_FUNCTIONS.pop, name)
    undo.callback(leave)
    undo.callback(model.register_forward_pre_hook(_check_end, with_kwargs=True).remove)
    for module in chosen:
        undo.callback(module.register_forward_pre_hook(enter).remove)
        undo.callback(module.register_forward_hook(leave, always_call=True).remove)
