"""Rows of tables of relative offsets, for each offset, pair of tokens or line of the grid, and their biases by axis."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.content import OffsetBuckets
from vispe.attention.bias.table import table_index
from vispe.encodings.parts.bias.axis_terms import CrossBias
from vispe.encodings.parts.bias.content_terms import ShiftedContext
from vispe.grid import Grid, Positions

Dot = Literal["query", "key"]


def offset_rows(n: int, device: torch.device, clip: tuple[int, int] | None, reverse: bool) -> Tensor:
    """Return the table row of each offset of an axis of n cells, (2 n - 1,) int64, query minus key.

    n: number of cells.
    device: device of the result.
    clip: the table covers offsets from ``-clip[0]`` to ``clip[1]``, to which others are clamped; None: all offsets.
    reverse: offsets are key minus query.
    """
    offset = torch.arange(1 - n, n, device=device)
    offset = -offset if reverse else offset
    # offsets beyond the clip share the outermost rows
    return offset + n - 1 if clip is None else offset.clamp(-clip[0], clip[1]) + clip[0]


def with_none(table: Tensor) -> Tensor:
    """Return a table (h, rows, d) with a row of zeros prepended, for tokens without a position."""
    return F.pad(table, (0, 0, 1, 0))


def pair_rows(pos: Positions, key: Hashable, rows: Callable[[], Tensor]) -> Tensor:
    """Return the row in a table `with_none` of each pair of tokens, (b or 1, n, n) int64.

    Args:
        pos: positions of a grid.
        key: cache key of all that `rows` depends on besides the grid.
        rows: computes the rows of all offsets (2 n_1 - 1, ...), query minus key, without the zero row.
    """

    def make() -> Tensor:
        index = table_index(pos, pos)
        # the last three entries are for pairs with prefix tokens
        return F.pad(rows().flatten() + 1, (0, 3))[index]

    return pos.remember(("rows of pairs", key), make)


def grid_rows(pos: Positions, key: Hashable, rows: Callable[[], Tensor]) -> Tensor | OffsetBuckets:
    """Return the result of `pair_rows`, by offset on a full grid."""
    if torch.compiler.is_compiling() or not pos.regular or not pos.static:
        return pair_rows(pos, key, rows)
    table = pos.remember(("rows of offsets", key), lambda: rows() + 1)
    return OffsetBuckets(table, (0, 0, 0), lambda: pair_rows(pos, key, rows))


def line_rows(pos: Positions, key: Hashable, axis: int, rows: Callable[[], Tensor], dot: Dot) -> Tensor:
    """Return the row in a table `with_none` of each token and each line of an axis, (b or 1, n, n_a + 1) int64.

    Args:
        pos: positions of a grid.
        key: cache key of all that `rows` depends on besides the grid.
        axis: of the grid.
        rows: computes the rows of all offsets of this axis (2 n_a - 1,), query minus key, without the zero row.
        dot: side that supplies the content.
    """

    def make() -> Tensor:
        of_offset = rows() + 1
        n = (of_offset.shape[0] + 1) // 2
        step = pos.cells()[..., axis, None] - torch.arange(n, device=of_offset.device)
        read = of_offset[(step if dot == "query" else -step) + n - 1]
        # the last line is for tokens without a position
        return F.pad(read * pos.spatial[..., None], (0, 1))

    return pos.remember(("rows of lines", key, axis, dot), make)


def read_by_axis(
    pos: Positions,
    grid: Grid,
    key: Hashable,
    tables: Sequence[Tensor],
    rows: Callable[[int], Tensor],
    dot: Dot = "query",
    scaled: bool = True,
    shift: Tensor | None = None,
) -> list[Bias]:
    """Return the sum over axes a of ``(q_i + shift) . table_a[rows(n_a)[offset_a(i, j)]]``, or of the key.

    On two axes it is one separable term, which fused kernels support. Pairs with a token without a position get 0.

    Args:
        pos: positions of a grid.
        grid: their grid.
        key: cache key of all that `rows` depends on besides the grid.
        tables: of each axis, (h or 1, rows, d_h).
        rows: computes the rows of the offsets of an axis of n cells, (2 n - 1,), query minus key.
        dot: side that supplies the content.
        scaled: whether it is multiplied by the scale of the logits.
        shift: (h, d_h), added to the content first.
    """
    if grid.axes == 2:
        y, x = (line_rows(pos, key, axis, lambda n=n: rows(n), dot) for axis, n in enumerate(grid.shape))
        return [CrossBias((with_none(tables[0]), with_none(tables[1])), (y, x), dot, pos, scaled, shift)]

    def spread(axis: int) -> Tensor:
        # rows of one axis, constant along the others
        along = rows(grid.shape[axis]).reshape([-1 if a == axis else 1 for a in range(grid.axes)])
        return along.expand([2 * n - 1 for n in grid.shape])

    terms: list[Bias] = []
    for axis, table in enumerate(tables):
        pairs = pair_rows(pos, (key, axis), lambda a=axis: spread(a))
        terms.append(ShiftedContext(with_none(table), pairs, dot, scaled, pos, shift))
    return terms
