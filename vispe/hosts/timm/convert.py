"""Putting an encoding into a timm model, and taking it out again.

The class of the model and of its attention layers is swapped; parameters keep their names. Encodings shared
by all blocks live at `pos_enc.*`, those with parameters per layer at `blocks.<i>.attn.pos_enc.*`. All that can
fail comes before the first change.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from timm.layers import DiffAttention
from timm.models.vision_transformer import DiffParallelScalingBlock
from torch import nn

from vispe.encodings.base import Additive, Biased, Compose, Encoding, Mixing, Rotary
from vispe.encodings.registry import create_encoding, encoding_class
from vispe.errors import UnsupportedCombination, UnsupportedHost
from vispe.grid import Grid, Positions
from vispe.hosts.timm.attention import SWAPS, attentions, stock_type
from vispe.hosts.timm.family import NAFLEX, Family, family_of, has_rope, put_rope, take_rope
from vispe.hosts.timm.hosted import HostedTimm
from vispe.hosts.timm.naflex import LaterDropout
from vispe.hosts.timm.refusals import refusal
from vispe.hosts.transplant.context import HostState
from vispe.hosts.transplant.fitting import (
    attach,
    check_axes,
    joined,
    refuse_patched,
    take_over,
    with_training_grid,
)


@dataclass
class _Plan:
    family: Family
    grid: tuple[int, ...]
    cls: type[HostedTimm]
    shared: Encoding | None
    own: list[Encoding | None]  # one per attention layer
    inside: bool
    layered: bool
    saved: list[dict[str, Any]]  # the spec with the training grid


def convert_timm(
    model: nn.Module,
    spec: list[dict[str, Any]],
    keep_abs: bool,
    built: bool = False,
    sources: Sequence[Encoding | None] = (),
    keep_rope: bool = False,
) -> None:
    """Convert a timm model in place, or exchange the encoding of a converted one.

    Args:
        model: a timm model of one of `vispe.hosts.timm.family.FAMILIES`.
        spec: parsed spec of the encoding.
        keep_abs: keep timm's absolute table in use beside it.
        built: whether the model is being built with the encoding, so that its own table and rope never counted.
        sources: finished encodings whose weights are taken over, one or None per term of the spec.
        keep_rope: keep the model's own rotary embedding in use beside it.
    """
    plan = _plan(model, spec, sources, keep_rope)
    family = plan.family
    old = model.vispe if isinstance(model, HostedTimm) else None
    table, rope, lost = (old.table, old.rope, old.lost) if old else (None, None, ())
    if keep_abs and not family.has_table(model) and table is None:
        _needs("absolute table", "keep")
    if keep_rope and not has_rope(model) and rope is None:
        _needs("rotary embedding", "keep")
    if built:  # `family.word` has kept the constructor from making a table
        gone = {
            "absolute table": not keep_abs and (family.word is not None or family.has_table(model)),
            "rotary embedding": not keep_rope and has_rope(model),
        }
        lost = tuple(what for what, is_gone in gone.items() if is_gone)
    if old:
        _strip(model, old)
    if keep_abs:
        table = _bring_back(model, family.has_table(model), family.put_table, table)
    elif family.has_table(model):
        taken = family.take_table(model)
        table = None if built else taken
    if keep_rope:
        rope = _bring_back(model, has_rope(model), put_rope, rope)
    elif has_rope(model):
        taken = take_rope(model)
        rope = None if built else taken
    model.vispe = HostState(
        spec=spec,
        stock=type(model),
        reference=old.reference if old else plan.grid,
        table=table,
        lost=lost,
        keep_abs=keep_abs,
        inside=plan.inside,
        layered=plan.layered,
        resolved=plan.saved,
        args=old.args if old else getattr(model, "_model_args", {}).get("pos_embed"),
        keep_rope=keep_rope,
        rope=rope,
    )
    model.__class__ = plan.cls
    attach(model, plan.shared)
    if plan.inside:
        for (layer, _, module), encoding in zip(attentions(model), plan.own, strict=True):
            module.__class__ = SWAPS[stock_type(module)]
            module.vispe_layer = layer
            attach(module, encoding)
    if family is NAFLEX:
        model.embeds.pos_drop.__class__ = LaterDropout
    model._model_args = getattr(model, "_model_args", {})


def restore_timm(model: nn.Module) -> None:
    """Give a converted model its own classes, absolute table and rotary embedding back.

    Raises:
        UnsupportedHost: the model is not converted.
        UnsupportedCombination: it was built with the encoding, and without something that the stock model has.
    """
    if not isinstance(model, HostedTimm):
        raise UnsupportedHost(
            f"{type(model).__name__} has no encoding of vispe, so there is nothing to restore."
        )
    state, family = model.vispe, family_of(model)
    if state.lost:
        _needs(" and ".join(state.lost), "restore")
    _strip(model, state)
    _bring_back(model, family.has_table(model), family.put_table, state.table)
    _bring_back(model, has_rope(model), put_rope, state.rope)
    args = {k: v for k, v in getattr(model, "_model_args", {}).items() if k != "pos_embed"}
    if state.args is not None:
        args["pos_embed"] = state.args
    vars(model).pop("_model_args", None)
    if args:
        model._model_args = args


def _plan(
    model: nn.Module, spec: list[dict[str, Any]], sources: Sequence[Encoding | None], keep_rope: bool
) -> _Plan:
    """Check everything and build the encodings, without touching the model."""
    family = family_of(model)
    if family is None:
        raise UnsupportedHost(refusal(type(model)))
    stock = model.vispe.stock if isinstance(model, HostedTimm) else type(model)
    cls = family.hosted(stock)
    refuse_patched(model, stock.__name__, family.overridden)
    grid = family.grid(model)
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
            terms = [create_encoding(t, **facts | {"dim": _width(t, layers, model.embed_dim)}) for t in spec]
            built = (terms[0] if len(terms) == 1 else Compose(terms)).to(dtype=like.dtype)
        built = built.train(model.training).parts()
        for encoding, source in zip(built, sources, strict=False):
            if source is not None:
                take_over(encoding, source, "model")
        return built

    parts = build()
    for e in parts:
        check_axes(e, len(grid), stock)
        if isinstance(e, Mixing) and (e.per_layer or not family.mixes):
            raise UnsupportedCombination(
                f"{e.name} mixes tokens between blocks, on one grid; {_no_mixing(stock, family)}."
            )
        if isinstance(e, Rotary) and keep_rope:
            raise UnsupportedCombination(
                f"rope + {e.name} was asked, but two rotary encodings would turn the same channels; leave 'rope' out "
                "to replace the model's own."
            )
        if isinstance(e, Biased):
            _check_values(e, layers, Grid(tuple(grid)).positions(like.device))
    inside = any(isinstance(e, Biased | Rotary) for e in parts)
    for _, path, module in layers if inside else ():
        if stock_type(module) not in SWAPS:
            raise UnsupportedHost(
                f"The attention at {path} is a {type(module).__name__}; vispe knows "
                f"{', '.join(c.__name__ for c in SWAPS)}. Use an additive encoding, or vispe.Attention in your blocks."
            )
        refuse_patched(module, path, ("forward",))
    for i, block in enumerate(model.blocks if inside else ()):
        arguments = [*inspect.signature(block.forward).parameters][1:]
        reached = "attn_mask" in arguments
        if family.mask_at is not None:
            reached = arguments[family.mask_at : family.mask_at + 1] == ["attn_mask"]
        if not reached:
            raise UnsupportedHost(
                f"blocks.{i} is a {type(block).__name__} whose forward takes {arguments or 'nothing'} after the tokens "
                "and not attn_mask, so nothing reaches its attention; use an additive encoding."
            )
    layered = any(e.per_layer for e in parts)
    own: list[Encoding | None] = []
    for layer, _, _ in layers:
        mine = [e for e in build() if e.per_layer and e.active(layer)] if layered else []
        own.append(joined(mine))
    shared = joined([e for e in parts if not e.per_layer])
    reference = model.vispe.reference if isinstance(model, HostedTimm) else tuple(grid)
    saved = with_training_grid(spec, parts, reference)
    return _Plan(family, tuple(grid), cls, shared, own, inside, layered, saved)


def _no_mixing(stock: type[nn.Module], family: Family) -> str:
    """Return why a mixing encoding has no place in a model, and what has."""
    if family.mixes:
        return "keep its parameters in one module for all blocks (per_layer False)"
    return (
        f"{stock.__name__} packs patches of several grids, so use a plain ViT such as 'vit_base_patch16_224' with "
        "it, or another encoding here"
    )


def _width(term: dict[str, Any], layers: Sequence[Any], dim: int) -> int:
    """Return what an encoding is told as the width of the tokens: what works on heads gets that of all heads.

    Heads of differential attention have half the width of others.
    """
    cls = encoding_class(term["name"])
    if issubclass(cls, Additive | Mixing) or not issubclass(cls, Biased | Rotary):
        return dim
    widths = {m.head_dim * m.num_heads: path for _, path, m in layers if hasattr(m, "head_dim")}
    if len(widths) > 1:
        raise UnsupportedCombination(
            f"{cls.name} works on heads of one width, but those of {' and '.join(widths.values())} differ; use an "
            "additive encoding."
        )
    return next(iter(widths), dim)


def _check_values(e: Biased, layers: Sequence[Any], pos: Positions) -> None:
    """Raise when relative values meet values that are wider than queries, as in differential attention."""
    for layer, path, module in layers:
        wide = isinstance(module, DiffAttention | DiffParallelScalingBlock) and e.active(layer)
        if wide and e.value_term(pos, layer) is not None:
            raise UnsupportedCombination(
                f"{e.name} adds to values of width {module.head_dim}, but {path} has queries of that width and values "
                "of twice it; take an encoding of queries and keys."
            )


def _strip(model: HostedTimm, state: HostState) -> None:
    """Take the encodings and swapped classes away; absolute table and rope stay as they are."""
    if state.inside:
        for _, _, module in attentions(model):
            module.__class__ = stock_type(module)
            del module.vispe_layer, module.pos_enc
    if family_of(model) is NAFLEX:
        model.embeds.pos_drop.__class__ = nn.Dropout
    del model.pos_enc, model.vispe
    model.__class__ = state.stock


def _bring_back(model: nn.Module, there: bool, put: Callable[[Any, Any], None], kept: Any) -> None:
    """Put back what was taken out, unless it is there."""
    if not there and kept is not None:
        put(model, kept)


def _needs(what: str, verb: str) -> None:
    raise UnsupportedCombination(
        f"There is no {what} to {verb}: the model was built without one. Build the stock model with "
        "timm.create_model(...) and load its weights instead."
    )
