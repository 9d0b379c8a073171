"""Arguments of a dense bias: positions, queries and keys, scale and heads."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from vispe.errors import ShapeError
from vispe.grid import Positions


class DenseRequest(NamedTuple):
    """The arguments of `Bias.dense`.

    `heads` is None for all heads, since the compiler of torch 2.11 cannot build a slice that indexes no tensor.
    `cacheable`: whether tensors that depend only on positions may be cached with them.
    """

    pos_q: Positions | None
    pos_k: Positions | None
    q: Tensor | None
    k: Tensor | None
    scale: float | None
    heads: slice | None
    cacheable: bool = True

    def pick(self, per_head: Tensor, axis: int = 0) -> Tensor:
        """Return the requested heads of a tensor with h or 1 heads on `axis`."""
        if per_head.shape[axis] == 1 or self.heads is None:
            return per_head
        return per_head[self.heads] if axis == 0 else per_head[:, self.heads]

    def positions(self, bound: Positions | None) -> tuple[Positions, Positions]:
        """Return the positions of queries and keys for a bias that is bound to the positions `bound`.

        Raises:
            ShapeError: neither the request nor the bias has positions.
        """
        # explicit positions override those that the bias is bound to
        pos_q = bound if self.pos_q is None else self.pos_q
        pos_k = pos_q if self.pos_k is None else self.pos_k
        if pos_q is None or pos_k is None:
            raise ShapeError("The bias is not bound to positions. Pass pos_q (and pos_k) to dense().")
        return pos_q, pos_k
