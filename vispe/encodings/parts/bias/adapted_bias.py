"""Bias that a network adapts to the scaled products of queries and keys (DAPE)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.dense_request import DenseRequest
from vispe.attention.precision import exact_product
from vispe.errors import ShapeError
from vispe.grid import Positions


class AdaptedBias(Bias):
    """``a + f([x, a])``, a the inner bias and x the scaled products of queries and keys, of all heads.

    Args:
        inner: the bias a.
        network: f, from (b, 2 h, n, n), x before a, to (b, h, n, n).
        pos: positions of the tokens.
    """

    __slots__ = ("inner", "network")

    def __init__(self, inner: Bias, network: Callable[[Tensor], Tensor], pos: Positions) -> None:
        super().__init__(pos)
        self.inner, self.network = inner, network

    @property
    def per_sample(self) -> bool:
        """True: the bias depends on content."""
        return True

    def _dense(self, request: DenseRequest) -> Tensor:
        if request.q is None or request.k is None or request.scale is None:
            raise ShapeError(
                "dape adapts a bias to the logits and needs q, k and scale, got None for one of them. Pass q, k and "
                "scale to dense()."
            )
        x = exact_product(request.q, request.k.transpose(-1, -2)) * request.scale
        # the network mixes heads, so the inner bias of all heads is needed
        a = self.inner._dense(request._replace(heads=None)).expand_as(x)
        # -inf (masked) entries are hidden from the network and stay masked
        adapted = self.network(torch.cat([x, a.masked_fill(a == float("-inf"), 0.0)], 1))
        pos_q, pos_k = request.positions(self.pos)
        valid = pos_q.spatial[:, :, None] & pos_k.spatial[:, None]
        # requested heads are selected last; pairs with prefix tokens are not adapted
        return request.pick(a + adapted.where(valid[:, None], 0.0), 1)
