"""Runs of a bias table in a `Layout`: built from the table, and expanded to all pairs."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from vispe.attention.bias.strip.layout import Layout


def build(table: Tensor, edge: Tensor | None, layout: Layout) -> tuple[Tensor, Tensor]:
    """Return the runs (h, `Layout.length`) and the biases of prefix keys (h, 2), differentiable.

    Args:
        table: (h, 2 n_1 - 1, ...).
        edge: (h, 3) biases from prefix to patch, patch to prefix, prefix to prefix; zeros if None.
        layout: memory layout.
    """
    if edge is not None and not layout.prefix:
        # no element of the runs depends on it
        edge = edge[: table.shape[0]]
    heads = table.shape[0] if edge is None else max(table.shape[0], edge.shape[0])
    table = table.expand(heads, *table.shape[1:])
    prefix_values = table.new_zeros(heads, 3) if edge is None else edge.to(table.dtype).expand(heads, 3)
    if layout.rows:
        return _rows(table, prefix_values, layout), prefix_values[:, 1:]
    # sliding windows over all axes but the first; along the first the strip itself slides
    windows = _windows(table, layout.shape, 2).flatten(1)
    parts = [windows]
    if layout.prefix:
        # padding for prefix keys in front, and a constant run for prefix queries at the end
        front, run = table.new_zeros(heads, layout.prefix), prefix_values[:, :1].expand(-1, layout.patches)
        parts = [front, windows, run]
    return torch.cat(parts, 1), prefix_values[:, 1:]


def fill_dense(out: Tensor, table: Tensor, shape: tuple[int, ...], prefix: int) -> None:
    """Write the bias of all pairs into `out` (h, n, n), from a table (h, 2 n_1 - 1, ...); 0 for prefix tokens."""
    out[:, :prefix] = 0
    out[:, :, :prefix] = 0
    out[:, prefix:, prefix:].view(len(out), *shape, *shape).copy_(_windows(table, shape, 1))


def _windows(table: Tensor, shape: tuple[int, ...], first: int) -> Tensor:
    """Return sliding windows ``W[h, x..., r, x'...] = T[.., x - x' + n - 1, ..]``, with r for axes before `first`."""
    axes = len(shape)
    # a larger key coordinate means a smaller offset, so tables are reversed
    flipped = table.flip([1 + axis for axis in range(axes)])
    for axis in range(first, axes + 1):
        flipped = _sliding_windows(flipped, axis, shape[axis - 1])
    if first <= axes:
        flipped = flipped.flip([first + axis for axis in range(axes + 1 - first)])
    order = [0, *range(first, axes + 1), *range(1, first), *range(axes + 1, flipped.ndim)]
    return flipped.permute(order)


def _rows(table: Tensor, prefix_values: Tensor, layout: Layout) -> Tensor:
    heads, patches, prefix = table.shape[0], layout.patches, layout.prefix
    dense = _windows(table, layout.shape, 1).reshape(heads, patches, patches)
    if prefix:
        to_patch, to_prefix, between = (
            column[:, None, None].expand(-1, *size)
            for column, size in zip(
                prefix_values.unbind(1), ((prefix, patches), (patches, prefix), (prefix, prefix)), strict=True
            )
        )
        dense = torch.cat([torch.cat([between, to_patch], 2), torch.cat([to_prefix, dense], 2)], 1)
    return F.pad(dense, (0, layout.pitch - layout.tokens)).flatten(1)


def _sliding_windows(x: Tensor, axis: int, n: int) -> Tensor:
    """Return ``x.unfold(axis, n, 1)`` of 2 n - 1 entries, without specialising a symbolic n as `unfold` does."""
    if not torch.compiler.is_compiling():
        return x.unfold(axis, n, 1)
    # a sequence of period 2 n read in rows of 2 n - 1 shifts by one per row
    x = F.pad(x.movedim(axis, -1), (0, 1))
    rows = x[..., None, :].expand(*x.shape[:-1], n, 2 * n).flatten(-2)[..., : n * (2 * n - 1)]
    return rows.reshape(*x.shape[:-1], n, 2 * n - 1)[..., n - 1 :].flip(-2).movedim(-2, axis)
