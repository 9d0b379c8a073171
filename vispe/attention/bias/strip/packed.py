"""Packed runs, the operand of the fused kernels: one gather from the entries of a table.

The entries of a head are the biases of prefix keys for patch and prefix queries (`EDGES`), a flag, a zero that pads the
runs, the bias of prefix queries on patches, and the table. The index depends only on the layout, so it can be cached.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from vispe.attention.bias.strip.layout import Layout, gcd_8

EDGES = 2  # number of leading entries: patch to prefix, prefix to prefix
FLAG = 2  # flag of `float16_runs.pack_with_copy`
ZERO = 3
TO_PATCH = 4  # prefix to patch
FIRST = 5  # first entry of the table


def pack(
    table: Tensor,
    edge: Tensor | None,
    layout: Layout,
    scale: float,
    dtype: torch.dtype,
    index: Tensor | None = None,
    *,
    shift: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return runs as the kernels read them, (h, copies x length) in `dtype`, and biases of prefix keys (h, 2) float32.

    They are divided by the scale of the logits, since kernels add them before scaling. Neither has a gradient.

    Args:
        table: (h, 2 n_1 - 1, ...).
        edge: (h, 3) biases from prefix to patch, patch to prefix, prefix to prefix; zeros if None.
        layout: layout of the runs.
        scale: factor of the logits.
        dtype: dtype of the runs; float16 only if `fits_float16`.
        index: `pack_index` of the layout, which is computed if None.
        shift: shift them to a maximum of 0, as `entries` does; False for a profile that is multiplied by gates.
    """
    flat = entries(table, edge, layout, shift) / scale
    index = pack_index(layout, table.device) if index is None else index
    return flat.to(dtype).index_select(1, index), flat[:, :EDGES]


def entries(table: Tensor, edge: Tensor | None, layout: Layout, shift: bool) -> Tensor:
    """Return the entries (h, 5 + table) of a table and of prefix biases, float32 without a gradient.

    Args:
        table: as in `pack`.
        edge: as in `pack`.
        layout: as in `pack`.
        shift: subtract the constants of `lower_to_table.row_maxima`, so that the largest biases are stored most
            precisely.
    """
    flat = table.detach().flatten(1)
    if edge is None or not layout.prefix:
        flat = torch.cat([flat.new_zeros(len(flat), FIRST), flat], 1)
    else:
        heads, edge = max(len(flat), len(edge)), edge.detach()
        flat, edge = flat.expand(heads, -1), edge.expand(heads, 3)
        flat = torch.cat([edge[:, 1:], flat.new_zeros(heads, FIRST - 1 - EDGES), edge[:, :1], flat], 1)
    if shift:
        _shift(flat, layout, edge is not None)
    return flat.float()


def _shift(flat: Tensor, layout: Layout, has_edge: bool) -> None:
    """Subtract the maximum of patch queries and that of prefix queries from `flat` itself; 0 if all biases are -inf."""
    # without prefix values, the biases of prefix keys are 0 as the other leading entries
    values = flat if layout.prefix and not has_edge else flat[:, FIRST:]
    maximum = values.amax(1, keepdim=True)
    if layout.prefix and has_edge:
        maximum = torch.maximum(maximum, flat[:, :1])
        prefix = flat[:, EDGES - 1 : FIRST : TO_PATCH - EDGES + 1]
        prefix.sub_(prefix.amax(1, keepdim=True).nan_to_num_(0.0, 0.0, 0.0))
    maximum.nan_to_num_(0.0, 0.0, 0.0)
    flat[:, FIRST:].sub_(maximum)
    if layout.prefix:
        flat[:, :1].sub_(maximum)


def pack_index(layout: Layout, device: torch.device | str | None = None) -> Tensor:
    """Return the entry of each element of the packed runs, (copies x length,) int32.

    The runs are those of `runs.build`: copies with a padding of `Layout.lead`, shifted by multiples of a step, so that
    each run is aligned in one.
    """
    index = _rows(layout, device) if layout.rows else _strip(layout, device)
    step, lead = gcd_8(layout.pitch), layout.lead
    shifted = [
        F.pad(
            index,
            (lead + copy * step, layout.copy_length - layout.length - lead - copy * step),
            value=ZERO,
        )
        for copy in range(layout.copies)
    ]
    return torch.cat(shifted).to(torch.int32)


def _strip(layout: Layout, device: torch.device | str | None) -> Tensor:
    first, *rest = layout.shape
    cell, size = _cells(rest, device), math.prod([2 * n - 1 for n in rest])
    # a larger key coordinate means a smaller offset
    row = torch.arange(2 * first - 2, -1, -1, device=device) * size
    # (x, r, x')
    index = cell[:, None, None] + row[:, None] - cell + (size // 2 + FIRST)
    index = F.pad(index.flatten(), (layout.prefix, 0), value=ZERO)
    return F.pad(index, (0, layout.patches), value=TO_PATCH) if layout.prefix else index


def _rows(layout: Layout, device: torch.device | str | None) -> Tensor:
    cell, size = _cells(layout.shape, device), math.prod([2 * n - 1 for n in layout.shape])
    index = cell[:, None] - cell + (size // 2 + FIRST)
    if layout.prefix:
        between = index.new_ones(layout.prefix, layout.prefix)
        prefix = F.pad(between, (0, layout.patches), value=TO_PATCH)
        index = torch.cat([prefix, F.pad(index, (layout.prefix, 0), value=0)])
    return F.pad(index, (0, layout.pitch - layout.tokens), value=ZERO).flatten()


def _cells(shape: tuple[int, ...] | list[int], device: torch.device | str | None) -> Tensor:
    """Return the index of each cell in a flat table, which is linear in its coordinates, (cells,) int64."""
    cell = torch.zeros(1, dtype=torch.int64, device=device)
    for n in shape:
        cell = (cell[:, None] * (2 * n - 1) + torch.arange(n, device=device)).flatten()
    return cell
