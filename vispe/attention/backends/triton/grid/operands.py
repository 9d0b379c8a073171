"""Operands of the grid kernels from a bias: its packed strip, and where the run of each query starts.

The strip of a fixed bias is cached with the positions, that of a learned bias in evaluation.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.cache.entries import Strip
from vispe.attention.bias.cache.strips import cached_strip
from vispe.attention.bias.content import GatedBias
from vispe.attention.bias.lower_to_table import (
    lower_to_table,
    row_maxima,
    visible_offsets,
    with_causal_mask,
)
from vispe.attention.bias.strip.adjoint import gradient_inputs
from vispe.attention.bias.strip.float16_runs import copy_range, fits_float16, pack_with_copy
from vispe.attention.bias.strip.layout import Layout, layout_of
from vispe.attention.bias.strip.packed import entries, pack, pack_index
from vispe.attention.bias.strip.runs import build
from vispe.attention.call import Call
from vispe.attention.precision import exporting, is_eager
from vispe.errors import ShapeError
from vispe.grid import Grid, Positions
from vispe.utils.autocast import no_autocast


def strip_options(dtype: torch.dtype, factor: float, is_causal: bool, heads: int) -> tuple[Hashable, ...]:
    """Return what a packed bias depends on in addition to the bias and its positions."""
    return dtype, float(factor), is_causal, heads


def layout_at(pos: Positions, tokens: int) -> Layout:
    """Return the layout of the strip, cached with the positions."""
    grid = pos.grid
    if grid is None:
        return layout_of((tokens,), 0)
    return pos.remember("layout of strips", lambda: layout_of(grid.shape, grid.prefix))


def run_starts(pos: Positions, layout: Layout) -> tuple[Tensor, Tensor]:
    """Return `Layout.patches_first`, cached with the positions."""
    return pos.remember(
        ("run starts, patches first", layout.rows), lambda: layout.patches_first(pos.coords.device)
    )


def packed_bias(call: Call, layout: Layout) -> tuple[Strip, Tensor | None, Tensor | None]:
    """Return the packed bias, and its differentiable runs and prefix biases if it needs a gradient, else None.

    For a `GatedBias`, they are those of its profile, which kernels multiply by the gates: its constants per row cannot
    be subtracted.
    """
    bias, heads, is_gated = _ungated(call.bias), call.q.shape[1], isinstance(call.bias, GatedBias)
    if bias is None or bias.pos is None or bias.pos.grid is None:
        raise ShapeError(
            "The triton backend needs a bias with positions, got pos=None. Bind it to positions."
        )
    grid, (stored, both) = bias.pos.grid, _storage(call, bias.pos.grid)

    def lowered() -> tuple[Tensor, Tensor | None]:
        table, edge = _table(call, bias, grid)
        if table.shape[0] not in (1, heads):
            raise ShapeError(f"The bias must have 1 or {heads} heads, got {table.shape[0]}.")
        return table, edge

    @torch.no_grad()
    def packed_strip(table: Tensor, edge: Tensor | None, index: Tensor | None = None) -> Strip:
        # small grids (row layout) have one or two tiles, so skipping is useless there
        is_sparse = (bias.is_sparse or call.is_causal) and not is_gated
        visible = visible_offsets(table, heads) if is_sparse and not layout.rows else None
        # softmax ignores a constant per query, but not per gated query; without it float16 copies would overflow
        if both:
            return *pack_with_copy(table, edge, layout, call.factor, call.dtype, index), visible
        return *pack(table, edge, layout, call.factor, stored, index, shift=not is_gated), None, visible

    with no_autocast(call.q.device):
        if bias.key is not None:
            dtype = call.dtype if both else stored
            # fixed biases are packed once per scale, dtype and layout
            key = ("packed bias", bias.key, call.factor, dtype, layout.rows, call.is_causal, is_gated)
            return bias.pos.remember(key, lambda: packed_strip(*lowered())), None, None
        runs = prefix_runs = None

        def make() -> Strip:
            nonlocal runs, prefix_runs
            table, edge = lowered()
            if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (table, edge)):
                # kernels read the packed strip, and return the gradient of the runs
                runs, prefix_runs = (gradient_inputs if is_eager(table) else build)(
                    table.float(), edge, layout
                )
            return packed_strip(table, edge, _strip_index(call, layout))

        # not called if the strip is cached; the runs stay None then, as no gradient is needed
        options = strip_options(call.dtype, call.factor, call.is_causal, heads) + ("gated",) * is_gated
        return cached_strip(bias, options, make), runs, prefix_runs


def _strip_index(call: Call, layout: Layout) -> Tensor:
    """Return `pack_index` of the layout, cached with the positions."""
    device = call.q.device
    if call.bias is None or call.bias.pos is None:
        return pack_index(layout, device)
    return call.bias.pos.remember(("strip index", layout.rows, device), lambda: pack_index(layout, device))


def _ungated(bias: Bias | None) -> Bias | None:
    return bias.profile if isinstance(bias, GatedBias) else bias


def _storage(call: Call, grid: Grid) -> tuple[torch.dtype, bool]:
    """Return the dtype of the strip, and whether it has a float16 copy."""
    # distance biases: float16 only; tables: float32 and a float16 copy; gated ones, which are not shifted: float32
    half = call.dtype != torch.float32 and not isinstance(call.bias, GatedBias)
    narrow = half and call.bias is not None and fits_float16(call.bias, grid, call.factor)
    return torch.float16 if narrow else torch.float32, half and not narrow and not exporting()


def _table(call: Call, bias: Bias, grid: Grid) -> tuple[Tensor, Tensor | None]:
    """Return the results of `lower_to_table` on the device of the queries, with causal masking."""
    table, edge = lower_to_table(bias)
    table = table.to(call.q.device)
    return with_causal_mask(table, edge, grid) if call.is_causal else (table, edge)


def row_constants(call: Call, layout: Layout) -> Tensor:
    """Return the constants that were subtracted from the rows of the bias, (h or 1, n)."""
    bias = call.bias
    if bias is None or bias.pos is None or bias.pos.grid is None or isinstance(bias, GatedBias):
        return call.q.new_zeros(1, 1, dtype=torch.float32)
    grid = bias.pos.grid
    with torch.no_grad(), no_autocast(call.q.device):
        table, edge = _table(call, bias, grid)
        # of patches and of prefix queries
        constants = [t.float() for t in row_maxima(table, edge, bool(grid.prefix))]
        if _storage(call, grid)[1]:
            # from the float16 copy, the middle of its range is subtracted as well
            flat = entries(table, edge, layout, True)
            middle = copy_range(flat, layout, call.factor, call.dtype)[1][:, 0] / 2
            constants = [t + middle for t in constants]
        is_prefix = torch.arange(call.q.shape[2], device=call.q.device) < grid.prefix
        patches, prefix = (t[:, None] for t in constants)
        return torch.where(is_prefix, prefix, patches)
