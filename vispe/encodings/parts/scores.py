"""Logits that are made of queries, keys and their places in another way than by a product."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from vispe.attention.bias.abstract_bias import Bias, Request
from vispe.attention.precision import at_least_float32
from vispe.errors import ShapeError
from vispe.grid import Positions


class ScoreBias(Bias):
    """The logits themselves, in place of ``scale * q . k``, which pairs with a token without a place keep.

    Subclasses give `scores`, and the name of their encoding as `of`. All is dense: no kernel can see the structure.
    """

    __slots__ = ()
    of: ClassVar[str]

    def __init__(self, pos: Positions) -> None:
        super().__init__(pos)
        self.whole = True

    @property
    def per_sample(self) -> bool:
        """Whether samples of a batch differ: content does."""
        return True

    def scores(
        self, q: Tensor, k: Tensor, scale: float, pos_q: Positions, pos_k: Positions, ask: Request
    ) -> Tensor:
        """Return the logits (b, h, n, m) of pairs of tokens that both have a place.

        Args:
            q: queries (b, h, n, d_h) of the asked heads, float32 or better.
            k: keys (b, h, m, d_h), likewise.
            scale: factor of the logits.
            pos_q: positions of the queries.
            pos_k: positions of the keys.
            ask: what was asked for, to pick heads of what else depends on them.
        """
        raise NotImplementedError

    def _dense(self, ask: Request) -> Tensor:
        if ask.q is None or ask.k is None:
            raise ShapeError(
                f"The logits of {self.of} are made of queries and keys; pass q and k to dense()."
            )
        pos_q, pos_k = ask.where(self.pos)
        q, k = (at_least_float32(ask.pick(x, 1)) for x in (ask.q, ask.k))
        scale = q.shape[-1] ** -0.5 if ask.scale is None else ask.scale
        made = self.scores(q, k, scale, pos_q, pos_k, ask)
        # tokens without a place attend by content alone, and are attended to so
        placed = (pos_q.spatial[:, :, None] & pos_k.spatial[:, None])[:, None]
        return torch.where(placed, made, scale * q @ k.transpose(-1, -2))
