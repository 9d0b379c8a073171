"""Summary of a converted model: spec, grid, own position information, encodings, backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from vispe.attention.automatic_backend import MIN_LOWRANK_KEYS
from vispe.attention.backend_selection import selected
from vispe.encodings.base import Biased, Encoding, Rotary
from vispe.encodings.compose import bias_of, value_term_of
from vispe.encodings.parts.rotary.head_basis import HeadBasis, describe_bases
from vispe.errors import counted
from vispe.grid import Grid
from vispe.hosts.common.context import HostState, is_cached_mask
from vispe.hosts.common.conversion.sampler_checks import aliased_rotations, ineffective_samplers
from vispe.hosts.common.conversion.training_grid import base_too_small
from vispe.hosts.common.host_family import HostFamily
from vispe.utils.offloading import loaded


def describe_model(model: Any, family: HostFamily) -> str:
    """Return a summary of a converted model, with one line for each part."""
    state: HostState = model.vispe
    table = "in use" if state.keep_abs else "removed" if state.table is not None else "none"
    lines = [
        f"{family.title}{state.stock.__name__} with {' + '.join(str(s) for s in state.spec)}",
        f"  grid {family.grid_text(model)}",
        f"  absolute table: {table}",
    ]
    if family.has_rope(model) or state.rope:
        lines.append(f"  own rotary embedding: {'in use' if state.keep_rope else 'removed'}")
    if model.pos_enc is not None:
        lines.append(f"  pos_enc: {model.pos_enc.name}, {counted(_count([model.pos_enc]), 'parameter')}")
    acting = [e for _, encoding in model._vispe_paths() for e in encoding.parts()]
    inside = family.always_inside or any(isinstance(e, Biased | Rotary) for e in acting)
    layers: list[Any] = [m for _, _, m in family.attentions(model)] if inside else []
    of_layers = [m.pos_enc for m in layers if m.pos_enc is not None]
    if of_layers:
        name, count = of_layers[0].name, _count(of_layers)
        lines.append(
            f"  {counted(len(of_layers), 'attention layer')} with their own: {name}, {counted(count, 'parameter')}"
        )
    parts = [part for e in (model.pos_enc, *of_layers[:1]) if e is not None for part in e.parts()]
    shape = family.facts(model, list(family.attentions(model)))["grid"]
    notes = [
        *base_too_small(parts, shape, state.reference),
        *ineffective_samplers(parts),
        *aliased_rotations(parts, shape),
        *describe_bases([m for e in of_layers for m in e.modules() if isinstance(m, HeadBasis)]),
    ]
    lines += [f"  {note}" for note in notes]
    if layers:
        backend = _backend_text(all(m.fused_attn for m in layers), family.unfused)
        shortcut = _stock_mask_text(layers, acting, Grid(tuple(shape))) if shape else None
        lines += [f"  {shortcut}"] if shortcut else []
        lines.append(f"  {counted(len(layers), 'attention layer')} swapped; backend {backend}")
    return "\n".join(lines)


def _count(encodings: Sequence[Encoding]) -> int:
    return sum(p.numel() for e in encodings for p in e.parameters())


def _backend_text(fused: bool, unfused_reason: str) -> str:
    """Return the backend of converted layers, human-readable, for `describe`.

    Args:
        fused: whether fused attention is enabled in all converted layers.
        unfused_reason: why fused attention is off.
    """
    if not fused:
        return f"reference ({unfused_reason})"
    backend, by = selected()
    return f"{backend} (chosen by {by})" if by else backend


def _stock_mask_text(layers: Sequence[nn.Module], encodings: Sequence[Encoding], grid: Grid) -> str | None:
    """Return a sentence for `describe` if eager layers use the model's own attention with a dense mask, else None.

    Args:
        layers: the converted attention layers.
        encodings: all encodings that act inside these layers.
        grid: the grid that the model is built for.
    """
    takes_masks = all(m.fused_attn and getattr(m, "vispe_stock_takes_masks", False) for m in layers)
    inside = [e for e in encodings if isinstance(e, Biased | Rotary)]
    is_simple = not any(isinstance(e, Rotary) or e.multi_softmax or e.reads_tokens for e in inside)
    if not takes_masks or not is_simple or grid.tokens >= MIN_LOWRANK_KEYS:
        return None
    if selected().backend not in ("auto", "sdpa") or any(m.pos_enc is not None for m in layers):
        return None
    with torch.no_grad(), loaded(inside):
        bias = bias_of(inside, grid.positions(), 0)
        has_value_term = value_term_of(inside, grid.positions(), 0) is not None
    if not is_cached_mask(bias) or has_value_term:
        return None
    return (
        f"in eager mode on fewer than {MIN_LOWRANK_KEYS} tokens, the fixed bias is a dense mask of the model's own "
        "attention"
    )
