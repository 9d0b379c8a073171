"""Logits made of turned queries and keys, where one rotation of each is not enough."""

from __future__ import annotations

import torch
from torch import Tensor

from vispe.attention.bias.abstract_bias import Bias, Request
from vispe.attention.precision import at_least_float32
from vispe.attention.transform.abstract_transform import Layout
from vispe.attention.transform.pairs import PairRotation
from vispe.errors import ShapeError


class TurnedScores(Bias):
    """The logits themselves, in place of ``scale * q . k``: a bias that is `whole`, so dense.

    Subclasses give `scores`.

    Args:
        queries: coordinates (b or 1, n, axes) of the queries, float64.
        keys: coordinates (b or 1, m, axes) of the keys.
        rates: radians per step of each axis for each pair of channels, (h or h_kv or 1, axes, pairs).
        layout: which channels are a pair.
        factor: what cosines and sines are multiplied by.
    """

    __slots__ = ("factor", "keys", "layout", "queries", "rates")

    def __init__(
        self, queries: Tensor, keys: Tensor, rates: Tensor, layout: Layout = "half", factor: float = 1.0
    ) -> None:
        super().__init__(None)
        if not (queries.ndim == keys.ndim == rates.ndim == 3) or not (
            queries.shape[2] == keys.shape[2] == rates.shape[1]
        ):
            raise ShapeError(
                f"{type(self).__name__} needs coordinates (b, n, axes) and (b, m, axes) and rates (h, axes, pairs), "
                f"got {tuple(queries.shape)}, {tuple(keys.shape)} and {tuple(rates.shape)}."
            )
        self.whole = True
        self.queries, self.keys, self.rates = queries.double(), keys.double(), rates.double()
        self.layout: Layout = layout
        self.factor = factor

    @property
    def per_sample(self) -> bool:
        """Whether samples of a batch differ: content does."""
        return True

    def turn(self, x: Tensor, at: Tensor) -> Tensor:
        """Return `x` (b, h, n, d) turned to coordinates (b or 1, n, axes) or (b or 1, h, n, axes)."""
        at = at[:, None] if at.ndim == 3 else at
        rates = self.rates
        # tables of key heads serve the query heads of their group
        if 1 < len(rates) < x.shape[1]:
            rates = rates.repeat_interleave(x.shape[1] // len(rates), 0)
        # angles of far tokens need all digits of their coordinates
        angle = at.to(rates) @ rates
        wide = torch.promote_types(x.dtype, torch.float32)
        cos, sin = ((f * self.factor).to(wide) for f in (angle.cos(), angle.sin()))
        return PairRotation(cos, sin, self.layout).query(x)

    def scores(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        """Return the logits (b, h, n, m) of queries (b, h, n, d) and keys (b, h, m, d), float32 or better."""
        raise NotImplementedError

    def _dense(self, ask: Request) -> Tensor:
        if ask.q is None or ask.k is None:
            raise ShapeError(
                f"{type(self).__name__} makes logits of queries and keys; pass q and k to dense()."
            )
        for name, x, at in (("queries", ask.q, self.queries), ("keys", ask.k, self.keys)):
            if at.shape[1] != x.shape[2] or at.shape[0] not in (1, len(x)):
                raise ShapeError(
                    f"{type(self).__name__} has coordinates {tuple(at.shape)} of {name}, which are {tuple(x.shape)}."
                )
        q, k = (at_least_float32(ask.pick(x, 1)) for x in (ask.q, ask.k))
        scale = q.shape[-1] ** -0.5 if ask.scale is None else ask.scale
        return self.scores(q, k, scale)
