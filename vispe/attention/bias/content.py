"""Members of the bias vocabulary that depend on the content of the tokens, and the value-side term."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Literal

from torch import Tensor

from vispe.attention.bias.abstract_bias import Bias, Request
from vispe.attention.precision import exact_product, no_infinity
from vispe.errors import ShapeError
from vispe.grid import Positions


class GatedBias(Bias):
    """``(row[b, h, i] + col[b, h, j]) * profile(i, j)``: a profile with gates from queries and keys.

    Args:
        row: (b, h, n), or None for 0.
        col: (b, h, m), or None for 0.
        profile: the bias that is gated.

    Example:
        >>> import torch
        >>> from vispe import Grid
        >>> from vispe.attention import DistanceBias
        >>> gate = torch.tensor([[[1.0, 2.0]]])  # of two queries
        >>> GatedBias(gate, None, DistanceBias((1.0,), Grid((1, 2)).positions())).dense()[0, 0]
        tensor([[-0., -1.],
                [-2., -0.]])
    """

    __slots__ = ("col", "profile", "row")

    def __init__(self, row: Tensor | None, col: Tensor | None, profile: Bias) -> None:
        super().__init__(profile.pos)
        if row is None and col is None and type(self) is GatedBias:
            raise ShapeError("GatedBias needs a row gate, a column gate or both, got neither.")
        self.row, self.col, self.profile = row, col, profile

    @property
    def per_sample(self) -> bool:
        """Whether samples of a batch differ."""
        return True

    @property
    def finite(self) -> bool:
        """Whether it is known to hold no infinity."""
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
        content: what reads the table (b, h, n or m, d_h), in place of queries or keys.
        known: a name of these buckets among all that `pos` may have, under which what follows from them is kept.

    Example:
        >>> import torch
        >>> weights = torch.tensor([[[1.0], [5.0]]])  # of buckets 0 and 1
        >>> bias = ContextBias(weights, torch.tensor([[0, 1], [1, 0]]), "query", scaled=False)
        >>> bias.dense(q=torch.tensor([[[[2.0], [3.0]]]]), k=torch.zeros(1, 1, 2, 1))[0, 0]
        tensor([[ 2., 10.],
                [15.,  3.]])
    """

    __slots__ = ("buckets", "content", "dot", "known", "scaled", "weights")

    def __init__(
        self,
        weights: Tensor,
        buckets: Tensor,
        dot: Literal["query", "key"],
        scaled: bool,
        pos: Positions | None = None,
        content: Tensor | None = None,
        known: Hashable | None = None,
    ) -> None:
        super().__init__(pos)
        if weights.ndim != 3 or buckets.ndim not in (2, 3):
            raise ShapeError(
                "ContextBias needs weights (h, buckets, d_h) and buckets (n, m) or (b, n, m), got "
                f"{tuple(weights.shape)} and {tuple(buckets.shape)}."
            )
        self.weights, self.buckets, self.dot, self.scaled = weights, buckets, dot, scaled
        self.content, self.known = content, known

    @property
    def per_sample(self) -> bool:
        """Whether samples of a batch differ."""
        return True

    @property
    def finite(self) -> bool:
        """Whether it is known to hold no infinity."""
        return no_infinity(self.weights)

    def asked(self, ask: Request, samples: slice | None = None) -> Tensor:
        """Return what reads the table, (b, h, n or m, d_h); `samples` are those of `content` that belong to q and k."""
        content = self.content if self.content is None or samples is None else self.content[samples]
        x = content if content is not None else ask.q if self.dot == "query" else ask.k
        if x is None or (self.scaled and ask.scale is None):
            raise ShapeError(
                f"ContextBias reads the {self.dot} with scaled={self.scaled}; pass q, k and scale."
            )
        return ask.pick(x, 1)

    def read(self, ask: Request, samples: slice | None = None) -> Tensor:
        """Return what each query, or each key, reads in each bucket, (b, h, n or m, buckets)."""
        read = exact_product(self.asked(ask, samples), ask.pick(self.weights).transpose(-1, -2))
        return read * ask.scale if self.scaled and ask.scale is not None else read

    def _dense(self, ask: Request) -> Tensor:
        read = self.read(ask)
        buckets = per_head(self.buckets)
        if self.dot == "query":
            return read.gather(-1, buckets.expand(*read.shape[:2], -1, -1))
        return read.gather(-1, buckets.transpose(-1, -2).expand(*read.shape[:2], -1, -1)).transpose(-1, -2)


def per_head(buckets: Tensor) -> Tensor:
    """Return buckets (n, m) or (b, n, m) with an axis for heads, (b or 1, 1, n, m)."""
    return buckets[None, None] if buckets.ndim == 2 else buckets[:, None]
