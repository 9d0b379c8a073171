"""Base of encodings that compute attention logits other than by a dot product."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.dense_request import DenseRequest
from vispe.attention.precision import at_least_float32
from vispe.errors import ShapeError
from vispe.grid import Positions
from vispe.utils.autocast import no_autocast


class ScoreBias(Bias):
    """Logits that replace ``scale * q . k``; pairs with a token without a position keep the dot product.

    Subclasses define `scores`, and `of`, the name of their encoding. Always dense: no kernel can use the structure.
    """

    __slots__ = ()
    of: ClassVar[str]

    def __init__(self, pos: Positions) -> None:
        super().__init__(pos)
        # replaces the product of queries and keys instead of being added to it
        self.replaces_product = True

    @property
    def per_sample(self) -> bool:
        """True: the logits depend on content."""
        return True

    def scores(
        self, q: Tensor, k: Tensor, scale: float, pos_q: Positions, pos_k: Positions, request: DenseRequest
    ) -> Tensor:
        """Return the logits (b, h, n, m) of pairs of tokens with positions.

        Args:
            q: queries (b, h, n, d_h) of the requested heads, float32 or better.
            k: keys (b, h, m, d_h), likewise.
            scale: factor of the logits.
            pos_q: positions of the queries.
            pos_k: positions of the keys.
            request: the request, to select heads of other tensors.
        """
        raise NotImplementedError

    def _dense(self, request: DenseRequest) -> Tensor:
        if request.q is None or request.k is None:
            raise ShapeError(
                f"The logits of {self.of} need queries and keys, got None. Pass q and k to dense()."
            )
        pos_q, pos_k = request.positions(self.pos)
        q, k = (at_least_float32(request.pick(x, 1)) for x in (request.q, request.k))
        scale = q.shape[-1] ** -0.5 if request.scale is None else request.scale
        with no_autocast(q.device):
            scores, product = self.scores(q, k, scale, pos_q, pos_k, request), scale * q @ k.transpose(-1, -2)
        # tokens without a position attend, and are attended to, by content alone
        has_position = (pos_q.spatial[:, :, None] & pos_k.spatial[:, None])[:, None]
        return torch.where(has_position, scores, product)
