"""Affine transforms of queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor

from vispe.attention.precision import check_floating
from vispe.attention.transform.abstract_transform import Transform


class Affine(Transform):
    """Scale and shift queries and keys: ``q * q_mul + q_add``, ``k * k_mul + k_add``.

    Args:
        q_mul, k_mul, q_add, k_add: broadcastable to (b, h, n, d_h), or None for the identity.

    Raises:
        ShapeError: a tensor is not floating point.

    Example:
        >>> import torch
        >>> q, k = torch.ones(1, 1, 2, 3), torch.ones(1, 1, 2, 3)
        >>> Affine(q_mul=torch.tensor(2.0), k_add=torch.tensor(1.0)).query(q).max()
        tensor(2.)
    """

    __slots__ = ("k_add", "k_mul", "q_add", "q_mul")

    def __init__(
        self,
        q_mul: Tensor | None = None,
        k_mul: Tensor | None = None,
        q_add: Tensor | None = None,
        k_add: Tensor | None = None,
    ) -> None:
        check_floating("Affine", q_mul=q_mul, k_mul=k_mul, q_add=q_add, k_add=k_add)
        self.q_mul, self.k_mul, self.q_add, self.k_add = q_mul, k_mul, q_add, k_add

    @property
    def key_heads(self) -> int:
        """Number of heads of the tensors of keys."""
        tensors = (t for t in (self.k_mul, self.k_add) if t is not None and t.ndim >= 3)
        return max((t.shape[-3] for t in tensors), default=1)

    def query(self, q: Tensor) -> Tensor:
        """Return ``q * q_mul + q_add`` in q's dtype."""
        return _affine(q, self.q_mul, self.q_add)

    def key(self, k: Tensor) -> Tensor:
        """Return ``k * k_mul + k_add`` in k's dtype."""
        return _affine(k, self.k_mul, self.k_add)


def widened(x: Tensor, like: Tensor) -> Tensor:
    """Return `x` in the promoted dtype of both."""
    return x.to(torch.promote_types(x.dtype, like.dtype))


def _affine(x: Tensor, mul: Tensor | None, add: Tensor | None) -> Tensor:
    y = x if mul is None else x * mul
    # computed in the promoted dtype, rounded once
    return (y if add is None else y + add).to(x.dtype)
