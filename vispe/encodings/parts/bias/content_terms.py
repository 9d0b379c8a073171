"""Biases of learned vectors or factors that interact with queries and keys."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.content import ContextBias, with_head_axis
from vispe.attention.bias.dense_request import DenseRequest
from vispe.attention.precision import exact_product, no_infinity
from vispe.encodings.parts.bias.axis_terms import shifted
from vispe.errors import ShapeError
from vispe.grid import Positions


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
        dot: Literal["query", "key"],
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
