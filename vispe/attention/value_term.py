"""Relative position terms on the value side of attention."""

from __future__ import annotations

from torch import Tensor

from vispe.attention.bias.content import with_head_axis
from vispe.attention.precision import check_floating, exact_product
from vispe.errors import ShapeError


class ValueTerm:
    """``sum_j attn[i, j] * w[bucket(i, j)]``, added to the output of attention (Shaw et al., arXiv 1803.02155, eq. 3).

    Args:
        weights: (h or 1, buckets, d_v).
        buckets: bucket index of each pair, (n, m) or, if samples differ, (b or 1, n, m), int64.

    Raises:
        ShapeError: shapes of `weights` or `buckets` are wrong, or `weights` is not floating point.

    Example:
        >>> import torch
        >>> weights = torch.tensor([[[0.0], [10.0]]])  # of buckets 0 and 1
        >>> term = ValueTerm(weights, torch.tensor([[0, 1], [1, 0]]))
        >>> term.apply(torch.tensor([[[[0.5, 0.5], [0.25, 0.75]]]]))[0, 0]
        tensor([[5.0000],
                [2.5000]])
    """

    __slots__ = ("buckets", "weights")

    def __init__(self, weights: Tensor, buckets: Tensor) -> None:
        if weights.ndim != 3 or buckets.ndim not in (2, 3):
            raise ShapeError(
                "ValueTerm needs weights (h, buckets, d_v) and buckets (n, m) or (b, n, m), got "
                f"{tuple(weights.shape)} and {tuple(buckets.shape)}."
            )
        check_floating("ValueTerm", weights=weights)
        self.weights, self.buckets = weights, buckets

    def apply(self, attn: Tensor) -> Tensor:
        """Return the term (b, h, n, d_v) for attention weights (b, h, n, m).

        Weights are summed per bucket first, so no (n, m, d_v) tensor is needed.
        """
        b, h, n, _ = attn.shape
        # (b, h, n, m) weights -> (b, h, n, buckets) sums
        sums = attn.new_zeros(b, h, n, self.weights.shape[1])
        sums = sums.scatter_add(-1, with_head_axis(self.buckets).expand(b, h, -1, -1), attn)
        return exact_product(sums, self.weights)
