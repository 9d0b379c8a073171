"""Linear maps of the channels of each head, equal for all tokens."""

from __future__ import annotations

from torch import Tensor

from vispe.attention.precision import exact_product
from vispe.attention.transform.abstract_transform import Transform
from vispe.errors import ShapeError, counted


class HeadLinear(Transform):
    """Multiply the channels of each head by a matrix, ``q -> Q q`` and ``k -> K k``, for every token.

    Args:
        q: (h, d_h, d_h), or None to leave queries unchanged. With grouped queries it may have as many matrices as there
            are key heads; each then serves the query heads of its group.
        k: (h_kv, d_h, d_h), or None.

    Raises:
        ShapeError: a tensor has another shape, or on use, there are other heads or channels.

    Example:
        >>> import torch
        >>> swap = torch.tensor([[[0.0, 1.0], [1.0, 0.0]]])  # one head of two channels
        >>> HeadLinear(q=swap).query(torch.tensor([[[[1.0, 2.0]]]]))
        tensor([[[[2., 1.]]]])
    """

    __slots__ = ("k", "q")

    def __init__(self, q: Tensor | None = None, k: Tensor | None = None) -> None:
        for name, m in {"q": q, "k": k}.items():
            if m is not None and (m.ndim != 3 or m.shape[-1] != m.shape[-2]):
                raise ShapeError(f"HeadLinear needs {name} of shape (h, d_h, d_h), got {tuple(m.shape)}.")
        self.q, self.k = q, k

    def query(self, q: Tensor) -> Tensor:
        """Return queries times their matrices, computed in float32 or better and rounded once."""
        return _multiplied(self.q, q, "queries")

    def key(self, k: Tensor) -> Tensor:
        """Return keys times their matrices, computed in float32 or better and rounded once."""
        return _multiplied(self.k, k, "keys")


def _multiplied(matrices: Tensor | None, x: Tensor, what: str) -> Tensor:
    if matrices is None:
        return x
    heads, (count, width, _) = x.shape[1], matrices.shape
    if x.shape[-1] != width or heads % count:
        raise ShapeError(
            f"HeadLinear has matrices for {counted(count, 'head')} of {counted(width, 'channel')}, got {what} with "
            f"{counted(heads, 'head')} of {counted(x.shape[-1], 'channel')}. Use one matrix for each key head."
        )
    matrices = matrices if heads == count else matrices.repeat_interleave(heads // count, 0)
    return exact_product(x, matrices.mT).to(x.dtype)
