"""Conversion between the two layouts of rotary channels: halves, and interleaved neighbours."""

from __future__ import annotations

from torch import Tensor

from vispe.errors import ShapeError
from vispe.multimodal.streams.torch_typing import unfolded


def to_interleaved(x: Tensor, dim: int = -1) -> Tensor:
    """Reorder the channels of one head along `dim` from halves (c, c + pairs) to neighbours (2 c, 2 c + 1).

    Apply it to the rows of q and k projections, head by head, to run weights of one layout with the other.

    Raises:
        ShapeError: the number of channels is odd.

    Example:
        >>> import torch
        >>> to_interleaved(torch.arange(6))
        tensor([0, 3, 1, 4, 2, 5])
    """
    return _transposed(x, dim, (2, _pairs(x, dim)))


def to_half(x: Tensor, dim: int = -1) -> Tensor:
    """Undo `to_interleaved`.

    Raises:
        ShapeError: the number of channels is odd.

    Example:
        >>> import torch
        >>> to_half(torch.tensor([0, 3, 1, 4, 2, 5]))
        tensor([0, 1, 2, 3, 4, 5])
    """
    return _transposed(x, dim, (_pairs(x, dim), 2))


def _transposed(x: Tensor, dim: int, sizes: tuple[int, int]) -> Tensor:
    """Return a tensor with one dimension read as a matrix of `sizes` and transposed."""
    axes = (dim - 1, dim) if dim < 0 else (dim, dim + 1)
    return unfolded(x, dim, sizes).transpose(*axes).flatten(*axes)


def _pairs(x: Tensor, dim: int) -> int:
    if x.shape[dim] % 2:
        raise ShapeError(
            f"Rotary embeddings need an even number of channels, got {x.shape[dim]} in dimension {dim}."
        )
    return x.shape[dim] // 2
