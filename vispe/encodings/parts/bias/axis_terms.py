"""Bias and value term separable by axis: a bucket per row and one per column of the grid instead of one per pair."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from vispe.attention.bias.decomposed import DecomposedBias, grid_line_index
from vispe.attention.bias.dense_request import DenseRequest
from vispe.attention.precision import at_least_float32, exact_product, no_infinity
from vispe.attention.value_term import ValueTerm
from vispe.encodings.parts.bias.buckets import grid_of
from vispe.errors import ShapeError
from vispe.grid import Positions


class CrossBias(DecomposedBias):
    """``scale * (x_i + shift) . (R[row bucket(i, j)] + C[column bucket(i, j)])``, in separable form.

    A token reads h + w buckets, one per row and column of the grid, instead of two for each of the h * w keys.

    Args:
        weights: R and C (h or 1, buckets, d_h).
        lines: bucket of each token for every row and every column, see `grid_lines`.
        dot: 'query' reads x = q; 'key' reads x = k, and the result is transposed.
        pos: positions of the tokens.
        scaled: whether it is multiplied by the scale of the logits.
        shift: (h, d_h), added to the content first, or None.
    """

    __slots__ = ("lines", "scaled", "shift", "weights")

    def __init__(
        self,
        weights: tuple[Tensor, Tensor],
        lines: tuple[Tensor, Tensor],
        dot: Literal["query", "key"],
        pos: Positions,
        scaled: bool = True,
        shift: Tensor | None = None,
    ) -> None:
        super().__init__(None, None, dot, pos)
        self.weights, self.lines, self.scaled, self.shift = weights, lines, scaled, shift

    @property
    def finite(self) -> bool:
        """Whether no entry is infinite."""
        return no_infinity(*self.weights)

    def lookups(self, request: DenseRequest) -> tuple[Tensor, Tensor]:
        """Return the scores of each token for every row (b, h, n, rows + 1) and column of the grid."""
        x, scale = request.q if self.dot == "query" else request.k, request.scale if self.scaled else 1.0
        if x is None or scale is None:
            raise ShapeError(
                f"CrossBias with scaled={self.scaled} needs the {self.dot} (and scale), got None. Pass q, k and scale."
            )
        x = request.pick(shifted(x, self.shift), 1)
        scores: list[Tensor] = []
        for weights, reads in zip(self.weights, self.lines, strict=True):
            read = exact_product(x, request.pick(weights).transpose(-1, -2)) * scale
            # scores of all buckets, then select those of each row or column of the grid
            scores.append(read.gather(-1, reads[:, None].expand(*read.shape[:2], -1, -1)))
        return scores[0], scores[1]


def shifted(x: Tensor, shift: Tensor | None) -> Tensor:
    """Return queries or keys (b, h, n, d_h) plus a vector per head (h, d_h), in float32 or better."""
    return x if shift is None else at_least_float32(x) + at_least_float32(shift)[:, None]


class CrossValue(ValueTerm):
    """Value term of 'cross': attention weights are summed per row and column of the grid, then per bucket.

    Args:
        rows: (h or 1, buckets, d_v).
        cols: likewise.
        lines: bucket of each token for every row and every column, see `grid_lines`.
        pos: the positions of the tokens.
    """

    __slots__ = ("cols", "lines", "pos", "rows")

    def __init__(self, rows: Tensor, cols: Tensor, lines: tuple[Tensor, Tensor], pos: Positions) -> None:
        self.rows, self.cols, self.lines, self.pos = rows, cols, lines, pos

    def apply(self, attn: Tensor) -> Tensor:
        """Return the term added to the output, (b, h, n, d_v), from attention weights (b, h, n, n)."""
        rows, cols = (self._lines(attn, axis) for axis in (0, 1))
        return rows + cols

    def _lines(self, attn: Tensor, axis: int) -> Tensor:
        reads, weights = self.lines[axis], (self.rows, self.cols)[axis]
        if self.pos.regular:
            grid = grid_of(self.pos)
            patches = attn[..., grid.prefix :].reshape(*attn.shape[:3], *grid.shape)
            # (b, h, n, rows, columns) -> (b, h, n, rows or columns); prefix tokens have one entry at the end
            patches = patches.sum(-1 if axis == 0 else -2)
            per_line = torch.cat([patches, attn[..., : grid.prefix].sum(-1, keepdim=True)], -1)
        else:
            zeros = attn.new_zeros(*attn.shape[:3], reads.shape[-1])
            per_line = zeros.scatter_add(
                -1, grid_line_index(self.pos, axis)[:, None, None].expand(*attn.shape), attn
            )
        # then per bucket, so that each vector is multiplied only once
        sums = attn.new_zeros(*attn.shape[:3], weights.shape[1])
        sums = sums.scatter_add(-1, reads[:, None].expand(*attn.shape[:2], -1, -1), per_line)
        return exact_product(sums, weights)
