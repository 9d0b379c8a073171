"""Members of the bias vocabulary that depend on the content of the tokens, and the value-side term."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from vispe.attention.bias import Bias, Request
from vispe.attention.precision import at_least_float32, exact_product, no_infinity
from vispe.errors import ShapeError
from vispe.grid import Positions


class GatedBias(Bias):
    """``(row[b, h, i] + col[b, h, j]) * profile(i, j)``: a profile with gates from queries and keys.

    Args:
        row: (b, h, n), or None for 0.
        col: (b, h, m), or None for 0.
        profile: the bias that is gated.
    """

    __slots__ = ("col", "profile", "row")

    def __init__(self, row: Tensor | None, col: Tensor | None, profile: Bias) -> None:
        super().__init__(profile.pos)
        if row is None and col is None and type(self) is GatedBias:
            raise ShapeError("GatedBias needs a row gate, a column gate or both, got neither.")
        self.row, self.col, self.profile = row, col, profile

    @property
    def per_sample(self) -> bool:
        """See `Bias.per_sample`."""
        return True

    @property
    def finite(self) -> bool:
        """See `Bias.finite`."""
        return self.profile.finite and no_infinity(self.row, self.col)

    def gates(self, ask: Request) -> tuple[Tensor | None, Tensor | None]:
        """Return the gates of rows and columns of the asked heads, None for 0."""
        row, col = (None if gate is None else ask.pick(gate, 1) for gate in (self.row, self.col))
        return row, col

    def _dense(self, ask: Request) -> Tensor:
        row, col = (None if gate is None else gate[..., None] for gate in self.gates(ask))
        col = None if col is None else col.transpose(-1, -2)
        gate = col if row is None else row if col is None else row + col
        profile = self.profile._dense(ask)
        return profile if gate is None else gate * profile


class ContextBias(Bias):
    """``q_i . w[bucket(i, j)]`` or ``k_j . w[bucket(i, j)]``: an offset table that the content reads.

    Args:
        weights: (h or 1, buckets, d_h).
        buckets: (n, m) or, where samples differ, (b or 1, n, m) int64.
        dot: which side the content comes from.
        scaled: whether the term is multiplied by the scale of the logits.
        pos: the positions it is bound to.
    """

    __slots__ = ("buckets", "dot", "scaled", "weights")

    def __init__(
        self,
        weights: Tensor,
        buckets: Tensor,
        dot: Literal["query", "key"],
        scaled: bool,
        pos: Positions | None = None,
    ) -> None:
        super().__init__(pos)
        if weights.ndim != 3 or buckets.ndim not in (2, 3):
            raise ShapeError(
                "ContextBias needs weights (h, buckets, d_h) and buckets (n, m) or (b, n, m), got "
                f"{tuple(weights.shape)} and {tuple(buckets.shape)}."
            )
        self.weights, self.buckets, self.dot, self.scaled = weights, buckets, dot, scaled

    @property
    def per_sample(self) -> bool:
        """See `Bias.per_sample`."""
        return True

    @property
    def finite(self) -> bool:
        """See `Bias.finite`."""
        return no_infinity(self.weights)

    def _dense(self, ask: Request) -> Tensor:
        x = ask.q if self.dot == "query" else ask.k
        if x is None or (self.scaled and ask.scale is None):
            raise ShapeError(
                f"ContextBias reads the {self.dot} with scaled={self.scaled}; pass q, k and scale."
            )
        x = ask.pick(x, 1)
        read = exact_product(x, ask.pick(self.weights).transpose(-1, -2))  # (b, h, n or m, buckets)
        if self.scaled and ask.scale is not None:
            read = read * ask.scale
        buckets = _per_head(self.buckets)
        if self.dot == "query":
            return read.gather(-1, buckets.expand(*read.shape[:2], -1, -1))
        return read.gather(-1, buckets.transpose(-1, -2).expand(*read.shape[:2], -1, -1)).transpose(-1, -2)


class DecomposedBias(Bias):
    """``rows[b, h, i, y_j] + cols[b, h, i, x_j]``: what a token reads for each row and each column of the grid.

    The decomposed relative positions of SAM and the method 'cross' of iRPE are of this form.

    Args:
        rows: (b or 1, h or 1, n, gh + 1), the last for tokens j without a place.
        cols: (b or 1, h or 1, n, gw + 1), likewise.
        dot: 'query': i is the query and j the key; 'key': the other way round.
        pos: the positions it is bound to, those of a grid with 2 axes.
    """

    __slots__ = ("cols", "dot", "rows")

    def __init__(
        self, rows: Tensor | None, cols: Tensor | None, dot: Literal["query", "key"], pos: Positions
    ) -> None:
        super().__init__(pos)
        if pos.grid is None or pos.axes != 2:
            raise ShapeError(f"DecomposedBias needs the tokens of a 2-axis grid, got {pos}.")
        for name, read, axis in (("rows", rows, 0), ("cols", cols, 1)):
            wanted = pos.tokens, pos.grid.shape[axis] + 1
            if read is not None and (read.ndim != 4 or tuple(read.shape[2:]) != wanted):
                raise ShapeError(
                    f"DecomposedBias needs {name} (b, h, {wanted[0]}, {wanted[1]}) for {pos.grid}, got "
                    f"{tuple(read.shape)}."
                )
        self.rows, self.cols, self.dot = rows, cols, dot

    @property
    def per_sample(self) -> bool:
        """See `Bias.per_sample`."""
        return True

    @property
    def finite(self) -> bool:
        """See `Bias.finite`."""
        return no_infinity(self.rows, self.cols)

    def lookups(self, ask: Request) -> tuple[Tensor, Tensor]:
        """Return rows and cols of the asked heads, in float32 or better, scaled as the logits are."""
        if self.rows is None or self.cols is None:
            raise ShapeError(f"{type(self).__name__} was given nothing to read.")
        return at_least_float32(ask.pick(self.rows, 1)), at_least_float32(ask.pick(self.cols, 1))

    def _dense(self, ask: Request) -> Tensor:
        rows, cols = self.lookups(ask)
        pos = self.pos
        if pos is not None and pos.regular and pos.grid is not None:
            patches = (rows[..., :-1, None] + cols[..., None, :-1]).flatten(-2)
            prefix = (rows[..., -1:] + cols[..., -1:]).expand(*patches.shape[:-1], pos.grid.prefix)
            dense = torch.cat([prefix, patches], -1)
        else:
            row, col = (line_of(pos, axis)[:, None, None] for axis in (0, 1))
            batch = max(rows.shape[0], cols.shape[0], row.shape[0])
            shape = batch, max(rows.shape[1], cols.shape[1]), rows.shape[2], -1
            dense = rows.expand(shape).gather(-1, row.expand(shape))
            dense = dense + cols.expand(shape).gather(-1, col.expand(shape))
        return dense if self.dot == "query" else dense.transpose(-1, -2)


def line_of(pos: Positions | None, axis: int) -> Tensor:
    """Return the row (axis 0) or column of each token, (b or 1, n); for tokens without a place one more."""
    if pos is None or pos.grid is None:
        raise ShapeError("Rows and columns were asked of tokens that come from no grid.")
    n = pos.grid.shape[axis]
    return pos.remember(("line", axis), lambda: torch.where(pos.spatial, pos.cells()[..., axis], n))


class ValueTerm:
    """``sum_j attn[i, j] * w[bucket(i, j)]``, added to the output of attention (relative values).

    Args:
        weights: (h or 1, buckets, d_v).
        buckets: (n, m) or, where samples differ, (b or 1, n, m) int64.
    """

    __slots__ = ("buckets", "weights")

    def __init__(self, weights: Tensor, buckets: Tensor) -> None:
        if weights.ndim != 3 or buckets.ndim not in (2, 3):
            raise ShapeError(
                "ValueTerm needs weights (h, buckets, d_v) and buckets (n, m) or (b, n, m), got "
                f"{tuple(weights.shape)} and {tuple(buckets.shape)}."
            )
        self.weights, self.buckets = weights, buckets

    def apply(self, attn: Tensor) -> Tensor:
        """Return what is added to the output, (b, h, n, d_v), for attention weights (b, h, n, m).

        Weights are summed per bucket first, so nothing of size n x m x d_v is ever made.
        """
        b, h, n, _ = attn.shape
        sums = attn.new_zeros(b, h, n, self.weights.shape[1])
        sums = sums.scatter_add(-1, _per_head(self.buckets).expand(b, h, -1, -1), attn)
        return exact_product(sums, self.weights)


def _per_head(buckets: Tensor) -> Tensor:
    """Return buckets (n, m) or (b, n, m) with an axis for heads, (b or 1, 1, n, m)."""
    return buckets[None, None] if buckets.ndim == 2 else buckets[:, None]
