"""Terms of a bias as functions of one pair of tokens, for FlexAttention and the coordinate kernels.

An entry of an offset table is read at the difference of two integers per token, since the index of a pair is linear in
both cells. Functions of FlexAttention compute one score at a time: only pointwise operations, no tensor of all pairs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vispe.grid import Positions

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""``f(score, b, h, i, j) -> score``, where i is the query and j the key, as FlexAttention expects."""
ScoreTerm = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""``f(b, h, i, j) -> bias``."""


def cell_numbers(pos: Positions) -> Tensor:
    """Return two integers per token, (b or 1, 2, n) int32: a pair reads entry ``[0, i] - [1, j]`` of `extended`."""
    cells, size = pos.cells(), 1
    index = torch.zeros_like(cells[..., 0])
    for axis, n in enumerate(pos.grid.shape if pos.grid else ()):
        # the same linear index as in `table_index`
        size = size * (2 * n - 1)
        index = index * (2 * n - 1) + cells[..., axis]
    # prefix tokens: differences beyond the table, in the constant runs of `extended`
    middle = size // 2
    from_ = torch.where(pos.spatial, index + middle, 4 * middle + 2)
    to = torch.where(pos.spatial, index, -middle - 1)
    return torch.stack([from_, to], 1).to(torch.int32)


def extended(table: Tensor, edge: Tensor | None) -> Tensor:
    """Return the flat table followed by constant runs for pairs with prefix tokens, (h or 1, length).

    Args:
        table: (h or 1, 2 n_1 - 1, ...).
        edge: (h or 1, 3) biases from prefix to patch, patch to prefix, prefix to prefix; zeros if None.
    """
    flat = table.flatten(1)
    # long enough for any difference of indices
    run = flat.shape[1] // 2 + 1
    prefix_values = flat.new_zeros(1, 3) if edge is None else edge.to(flat.dtype)
    heads = max(flat.shape[0], prefix_values.shape[0])
    to_patch, to_prefix, between = (value[:, None].expand(heads, run) for value in prefix_values.unbind(1))
    return torch.cat([flat.expand(heads, -1), to_prefix, to_patch, between], 1)


def lookup_term(table: Tensor, numbers: Tensor) -> ScoreTerm:
    """Return a term that reads a flat table (h or 1, length) at differences of integers (b or 1, 2, n)."""
    per_head, per_sample = table.shape[0] > 1, numbers.shape[0] > 1

    def term(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        sample = numbers[b] if per_sample else numbers[0]
        index = sample[0, i] - sample[1, j]
        return table[h, index] if per_head else table[0, index]

    return term


def distance_term(slopes: Tensor, coords: Tensor, period: Tensor | None, metric: str) -> ScoreTerm:
    """Return ``-slope[h] * distance(i, j)``, which is 0 for tokens without a position.

    Args:
        slopes: (h or 1,).
        coords: (b or 1, 1 + axes, n), flags of tokens with a position, then coordinates.
        period: (b or 1, axes), or None for a distance that is not periodic.
        metric: 'euclidean', 'manhattan', 'chebyshev' or 'squared'.
    """
    per_head, per_sample, axes = slopes.shape[0] > 1, coords.shape[0] > 1, coords.shape[1] - 1

    def term(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        sample = coords[b] if per_sample else coords[0]
        total = torch.zeros_like(sample[0, i])
        for axis in range(axes):
            step = (sample[1 + axis, i] - sample[1 + axis, j]).abs()
            if period is not None:  # the shorter way around
                length = period[b, axis] if period.shape[0] > 1 else period[0, axis]
                step = torch.minimum(step, length - step)
            if metric == "chebyshev":
                total = torch.maximum(total, step)
            else:
                total = total + (step if metric == "manhattan" else step * step)
        distance = total.sqrt() if metric == "euclidean" else total
        slope = slopes[h] if per_head else slopes[0]
        return -slope * distance * sample[0, i] * sample[0, j]

    return term


def entry_term(values: Tensor) -> ScoreTerm:
    """Return a term that reads a tensor (b or 1, h or 1, n, m)."""
    per_sample, per_head = values.shape[0] > 1, values.shape[1] > 1

    def term(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        sample = values[b] if per_sample else values[0]
        head = sample[h] if per_head else sample[0]
        return head[i, j]

    return term


def product_term(row: Tensor, col: Tensor) -> ScoreTerm:
    """Return ``row_i . col_j`` of (b or 1, h or 1, n, r) and (b or 1, h or 1, m, r), written out by channel."""
    rows = [entry_term(row[..., r : r + 1]) for r in range(row.shape[-1])]
    cols = [entry_term(col[..., r : r + 1]) for r in range(row.shape[-1])]

    def term(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        first = torch.zeros_like(i)
        return sum(
            (x(b, h, i, first) * y(b, h, j, first) for x, y in zip(rows, cols, strict=True)),
            start=torch.zeros((), device=row.device),
        )

    return term
