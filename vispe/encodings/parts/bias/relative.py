"""Relative position vectors that interact with queries and keys: tables of offsets, joint or per axis."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.content import ContextBias, OffsetBuckets, with_head_axis
from vispe.attention.bias.dense_request import DenseRequest
from vispe.attention.bias.table import table_index
from vispe.attention.precision import exact_product, no_infinity
from vispe.encodings.parts.bias.buckets import CrossBias, shifted
from vispe.errors import ShapeError
from vispe.grid import Grid, Positions

Dot = Literal["query", "key"]


class ShiftedContext(ContextBias):
    """``(q_i + shift) . w[bucket(i, j)]``, or of the key: with a vector per head added to the content.

    Args:
        weights: (h or 1, buckets, d_h).
        buckets: (n, m) or (b or 1, n, m) int64.
        dot: side that supplies the content.
        scaled: whether the term is multiplied by the scale of the logits.
        pos: positions of the tokens.
        shift: (h, d_h), or None for nothing.
    """

    __slots__ = ("shift",)

    def __init__(
        self,
        weights: Tensor,
        buckets: Tensor,
        dot: Dot,
        scaled: bool,
        pos: Positions,
        shift: Tensor | None = None,
    ) -> None:
        super().__init__(weights, buckets, dot, scaled, pos)
        self.shift = shift

    @property
    def finite(self) -> bool:
        """Whether all entries are known to be finite."""
        return no_infinity(self.weights, self.shift)

    def _dense(self, request: DenseRequest) -> Tensor:
        if self.dot == "query" and request.q is not None:
            request = request._replace(q=shifted(request.q, self.shift))
        elif self.dot == "key" and request.k is not None:
            request = request._replace(k=shifted(request.k, self.shift))
        return super()._dense(request)


class FactorBias(Bias):
    """``scale * t[bucket(i, j)] * q_i . k_j``: with the dot product, a factor ``1 + t`` per bucket.

    Args:
        factors: t (h or 1, buckets).
        buckets: (n, m) or (b or 1, n, m) int64.
        pos: positions of the tokens.
    """

    __slots__ = ("buckets", "factors")

    def __init__(self, factors: Tensor, buckets: Tensor, pos: Positions) -> None:
        super().__init__(pos)
        self.factors, self.buckets = factors, buckets

    @property
    def per_sample(self) -> bool:
        """True: the bias depends on content."""
        return True

    @property
    def finite(self) -> bool:
        """Whether all entries are known to be finite."""
        return no_infinity(self.factors)

    def _dense(self, request: DenseRequest) -> Tensor:
        if request.q is None or request.k is None or request.scale is None:
            raise ShapeError("FactorBias needs q, k and scale, got None for one of them. Pass all three.")
        product = (
            exact_product(request.pick(request.q, 1), request.pick(request.k, 1).transpose(-1, -2))
            * request.scale
        )
        buckets = with_head_axis(self.buckets)
        # of shape (1, h or 1, buckets, 1)
        factors = request.pick(self.factors)[None, :, :, None].to(product.dtype)
        shape = buckets.shape[0], factors.shape[1], *buckets.shape[2:]
        # one factor per bucket, then per pair
        chosen = factors.expand(shape[0], -1, -1, shape[3]).gather(2, buckets.expand(shape))
        return chosen * product


class WaveBias(Bias):
    """``scale * (q_i + shift) . (sin(d) of_sin + cos(d) of_cos)`` with angles d = a_i - a_j, of any coordinates.

    Args:
        of_sin: (h or 1, angles, d_h), vectors weighted by sines.
        of_cos: likewise for cosines.
        cos: cosines of the angles of every token, (b or 1, n, angles), 0 for tokens without a position.
        sin: likewise.
        shift: (h, d_h), added to the queries first.
        pos: positions of the tokens.
    """

    __slots__ = ("cos", "of_cos", "of_sin", "shift", "sin")

    def __init__(
        self, of_sin: Tensor, of_cos: Tensor, cos: Tensor, sin: Tensor, shift: Tensor, pos: Positions
    ) -> None:
        super().__init__(pos)
        self.of_sin, self.of_cos, self.cos, self.sin, self.shift = of_sin, of_cos, cos, sin, shift

    @property
    def per_sample(self) -> bool:
        """True: the bias depends on content."""
        return True

    @property
    def finite(self) -> bool:
        """Whether all entries are known to be finite."""
        return no_infinity(self.of_sin, self.of_cos, self.shift)

    def _dense(self, request: DenseRequest) -> Tensor:
        if request.q is None or request.scale is None:
            raise ShapeError(
                "WaveBias needs the query and scale, got None for one of them. Pass q, k and scale."
            )
        q = request.pick(shifted(request.q, self.shift), 1) * request.scale
        a, b = (exact_product(q, request.pick(t).transpose(-1, -2)) for t in (self.of_sin, self.of_cos))
        # angle-difference identities: products per token replace sines and cosines per pair
        cos, sin = self.cos[:, None], self.sin[:, None]
        row = torch.cat([a * sin + b * cos, b * sin - a * cos], -1)
        # (b, h, n, 2 angles) @ (b or 1, 1, 2 angles, n)
        return exact_product(row, torch.cat([cos, sin], -1).transpose(-1, -2))


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
