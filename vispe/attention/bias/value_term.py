"""What is added to the values of attention by place."""

from __future__ import annotations

from torch import Tensor

from vispe.attention.bias.content import per_head
from vispe.attention.precision import exact_product
from vispe.errors import ShapeError


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
        sums = sums.scatter_add(-1, per_head(self.buckets).expand(b, h, -1, -1), attn)
        return exact_product(sums, self.weights)
