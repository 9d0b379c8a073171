"""Putting an encoding into a timm ViT, and taking it out again.

The class of the model and of its attention layers is swapped; parameters keep their names. Encodings shared
by all blocks live at `pos_enc.*`, those with parameters per layer at `blocks.<i>.attn.pos_enc.*`. All that can
fail comes before the first change.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from timm.layers import resample_abs_pos_embed
from timm.models import VisionTransformer
from torch import nn

from vispe.base import Biased, Compose, Encoding, Mixing, Rotary
from vispe.errors import UnsupportedCombination, UnsupportedHost
from vispe.hosts.context import HostState
from vispe.hosts.timm_attention import SWAPS, attentions, stock_type
from vispe.hosts.timm_vit import OVERRIDDEN, HostedViT, hosted
from vispe.registry import create_encoding


@dataclass
class _Plan:
    cls: type[VisionTransformer]
    shared: Encoding | None
    own: list[Encoding | None]  # one per attention layer
    inside: bool
    layered: bool


def convert_vit(
    model: VisionTransformer,
    spec: list[dict[str, Any]],
    keep_abs: bool,
    built: bool = False,
    sources: Sequence[Encoding | None] = (),
) -> None:
    """Convert a timm ViT in place, or exchange the encoding of a converted one.

    Args:
        model: a timm ViT.
        spec: parsed spec of the encoding.
        keep_abs: keep timm's absolute table in use beside it.
        built: whether the model is being built with the encoding, so that its table never counted.
        sources: finished encodings whose weights are taken over, one or None per term of the spec.
    """
    plan = _plan(model, spec, sources)
    old = model.vispe if isinstance(model, HostedViT) else None
    table = old.table if old else None
    if keep_abs and model.pos_embed is None:
        _needs_table(old, "keep")
    if old:
        _strip(model, old)
    grid = tuple(model.patch_embed.grid_size)
    if keep_abs:
        _bring_back(model, table)
    elif model.pos_embed is not None:
        table = None if built else (model.pos_embed, grid)
        model.register_parameter("pos_embed", None)
    model.vispe = HostState(
        spec=spec,
        stock=type(model),
        reference=old.reference if old else grid,
        table=None if keep_abs else table,
        built=built or (old is not None and old.built),
        keep_abs=keep_abs,
        inside=plan.inside,
        layered=plan.layered,
        args=old.args if old else getattr(model, "_model_args", {}).get("pos_embed"),
    )
    model.__class__ = plan.cls
    model.register_module("pos_enc", plan.shared)
    if plan.inside:
        for (layer, _, module), encoding in zip(attentions(model), plan.own, strict=True):
            module.__class__ = SWAPS[stock_type(module)]
            module.vispe_layer = layer
            module.register_module("pos_enc", encoding)
    model._model_args = getattr(model, "_model_args", {})


def restore_vit(model: VisionTransformer) -> None:
    """Give a converted ViT its own classes and absolute table back.

    Raises:
        UnsupportedHost: the model is not converted.
        UnsupportedCombination: it was built with the encoding, so it never had a table.
    """
    if not isinstance(model, HostedViT):
        raise UnsupportedHost(
            f"{type(model).__name__} has no encoding of vispe, so there is nothing to restore."
        )
    state = model.vispe
    if state.built and model.pos_embed is None:
        _needs_table(state, "restore")
    _strip(model, state)
    _bring_back(model, state.table)
    args = {k: v for k, v in getattr(model, "_model_args", {}).items() if k != "pos_embed"}
    if state.args is not None:
        args["pos_embed"] = state.args
    vars(model).pop("_model_args", None)
    if args:
        model._model_args = args


def _plan(model: VisionTransformer, spec: list[dict[str, Any]], sources: Sequence[Encoding | None]) -> _Plan:
    """Check everything and build the encodings, without touching the model."""
    stock = model.vispe.stock if isinstance(model, HostedViT) else type(model)
    cls = hosted(stock)
    _refuse_patched(model, stock.__name__, OVERRIDDEN)
    grid = model.patch_embed.grid_size
    if grid is None:
        raise UnsupportedHost(
            f"The patch embedding of {stock.__name__} has no grid; build the model with an img_size."
        )
    layers = list(attentions(model))
    like = next(model.parameters())
    facts = {
        "dim": model.embed_dim,
        "num_heads": getattr(layers[0][2], "num_heads", None) if layers else None,
        "depth": len(model.blocks),
        "grid": tuple(grid),
    }

    def build() -> tuple[Encoding, ...]:
        with torch.device(like.device):
            built = create_encoding(spec, **facts).to(dtype=like.dtype).train(model.training).parts()
        for encoding, source in zip(built, sources, strict=False):
            if source is not None:
                _take_over(encoding, source)
        return built

    parts = build()
    for e in parts:
        if len(grid) not in e.ndim:
            raise UnsupportedCombination(
                f"{e.name} is for {' or '.join(map(str, e.ndim))} axes, but the tokens of {stock.__name__} form a "
                f"{len(grid)}-axis grid; choose one of vispe.list_encodings(ndim={len(grid)})."
            )
        if isinstance(e, Mixing):
            raise UnsupportedCombination(
                f"{e.name} mixes tokens between blocks, which {stock.__name__} cannot do yet; choose another encoding."
            )
    inside = any(isinstance(e, Biased | Rotary) for e in parts)
    for _, path, module in layers if inside else ():
        if stock_type(module) not in SWAPS:
            raise UnsupportedHost(
                f"The attention at {path} is a {type(module).__name__}; vispe knows "
                f"{', '.join(c.__name__ for c in SWAPS)}. Use an additive encoding, or vispe.Attention in your blocks."
            )
        _refuse_patched(module, path, ("forward",))
    for i, block in enumerate(model.blocks if inside else ()):
        second = [*inspect.signature(block.forward).parameters][1:2]
        if second != ["attn_mask"]:
            raise UnsupportedHost(
                f"blocks.{i} is a {type(block).__name__} whose forward takes {second or 'nothing'} after the tokens "
                "and not attn_mask, so nothing reaches its attention; use an additive encoding."
            )
    layered = any(e.per_layer for e in parts)
    own: list[Encoding | None] = []
    for layer, _, _ in layers:
        mine = [e for e in build() if e.per_layer and e.active(layer)] if layered else []
        own.append(_joined(mine))
    return _Plan(cls, _joined([e for e in parts if not e.per_layer]), own, inside, layered)


def _refuse_patched(module: nn.Module, where: str, names: Sequence[str]) -> None:
    """Raise when an instance carries methods of its own, which would hide those of the class it gets."""
    patched = [name for name in names if name in vars(module)]
    if patched:
        raise UnsupportedHost(
            f"{where} has {', '.join(patched)} replaced on the instance, which would hide the encoding; convert the "
            "model first and patch it then."
        )


def _take_over(encoding: Encoding, source: Encoding) -> None:
    """Copy the weights of a finished encoding, or raise when they are for another host."""
    theirs, ours = source.state_dict(), encoding.state_dict()
    for name, value in ours.items():
        if theirs[name].shape != value.shape:
            raise UnsupportedCombination(
                f"The given {source.name} has {name} of shape {tuple(theirs[name].shape)}, but this model needs "
                f"{tuple(value.shape)}; make it for this model, or give its spec to start anew."
            )
        value.copy_(theirs[name])


def _joined(encodings: list[Encoding]) -> Encoding | None:
    return Compose(encodings) if len(encodings) > 1 else encodings[0] if encodings else None


def _strip(model: HostedViT, state: HostState) -> None:
    """Take the encodings and swapped classes away; the absolute table stays as it is."""
    if state.inside:
        for _, _, module in attentions(model):
            module.__class__ = stock_type(module)
            del module.vispe_layer, module.pos_enc
    del model.pos_enc, model.vispe
    model.__class__ = state.stock


def _bring_back(model: VisionTransformer, kept: tuple[nn.Parameter, tuple[int, ...]] | None) -> None:
    """Put the absolute table back, resampled if the grid has changed since."""
    if kept is None or model.pos_embed is not None:
        return
    table, old = kept
    grid, like = tuple(model.patch_embed.grid_size), next(model.parameters())
    if grid != old or table.device != like.device or table.dtype != like.dtype:
        prefix = 0 if model.no_embed_class else model.num_prefix_tokens
        values = resample_abs_pos_embed(table.detach(), new_size=grid, old_size=old, num_prefix_tokens=prefix)
        table = nn.Parameter(values.to(like), requires_grad=table.requires_grad)
    model.pos_embed = table


def _needs_table(state: HostState | None, verb: str) -> None:
    if state is None or state.table is None:
        raise UnsupportedCombination(
            f"There is no absolute table to {verb}: the model was built without one. Build the stock model with "
            "timm.create_model(...) and load its weights instead."
        )
