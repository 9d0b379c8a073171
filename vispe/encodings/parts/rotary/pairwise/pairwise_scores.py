"""Base class of rotary logits that one rotation per token cannot express."""

from __future__ import annotations

import torch
from torch import Tensor

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.dense_request import DenseRequest
from vispe.attention.precision import at_least_float32
from vispe.attention.transform.abstract_transform import Layout
from vispe.attention.transform.pairs import PairRotation
from vispe.errors import ShapeError


class PairwiseRotaryScores(Bias):
    """Dense logits that replace ``scale * q . k`` (a `whole` bias). Subclasses implement `scores`.

    Args:
        queries: coordinates of the queries (b or 1, n, axes), float64.
        keys: coordinates of the keys (b or 1, m, axes).
        rates: frequencies in radians per step of each axis for each pair of channels, (h or h_kv or 1, axes, pairs).
        layout: pairing of channels, as in `PairRotation`.
        factor: scale of cosines and sines (attention factor of YaRN).

    Raises:
        ShapeError: shapes disagree.
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
                f"{type(self).__name__} needs queries (b, n, axes), keys (b, m, axes) and rates (h, axes, pairs), "
                f"got {tuple(queries.shape)}, {tuple(keys.shape)} and {tuple(rates.shape)}."
            )
        self.replaces_product = True
        self.queries, self.keys, self.rates = queries.double(), keys.double(), rates.double()
        self.layout: Layout = layout
        self.factor = factor

    @property
    def per_sample(self) -> bool:
        """True: the logits depend on the content."""
        return True

    def rotate(self, x: Tensor, coords: Tensor) -> Tensor:
        """Return `x` (b, h, n, d) rotated by its coordinates (b or 1, n, axes) or (b or 1, h, n, axes)."""
        coords = coords[:, None] if coords.ndim == 3 else coords
        rates = self.rates
        # rates of key heads are repeated for the query heads of their group
        if 1 < len(rates) < x.shape[1]:
            rates = rates.repeat_interleave(x.shape[1] // len(rates), 0)
        # float64: large coordinates would give inexact angles in float32
        angle = coords.to(rates) @ rates
        wide = torch.promote_types(x.dtype, torch.float32)
        # round the tables only after the trigonometric functions
        cos, sin = ((f * self.factor).to(wide) for f in (angle.cos(), angle.sin()))
        return PairRotation(cos, sin, self.layout).query(x)

    def scores(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        """Return the logits (b, h, n, m) of queries (b, h, n, d) and keys (b, h, m, d), float32 or better."""
        raise NotImplementedError

    def _dense(self, request: DenseRequest) -> Tensor:
        if request.q is None or request.k is None:
            raise ShapeError(
                f"{type(self).__name__} computes logits from queries and keys. Pass q and k to dense()."
            )
        for name, x, coords in (("queries", request.q, self.queries), ("keys", request.k, self.keys)):
            if coords.shape[1] != x.shape[2] or coords.shape[0] not in (1, len(x)):
                raise ShapeError(
                    f"{type(self).__name__} has coordinates {tuple(coords.shape)} for {name} {tuple(x.shape)}. "
                    "Pass one per token and sample, or share them between samples."
                )
        q, k = (at_least_float32(request.pick(x, 1)) for x in (request.q, request.k))
        scale = q.shape[-1] ** -0.5 if request.scale is None else request.scale
        return self.scores(q, k, scale)
