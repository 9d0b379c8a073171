"""Order of the axes of a tensor."""

from __future__ import annotations

from torch import Tensor


def last_axis_to(x: Tensor, axis: int) -> Tensor:
    """Return `x` with its last axis moved to `axis`.

    The legacy ONNX export of torch fails on ``movedim`` from a negative axis.

    Example:
        >>> import torch
        >>> last_axis_to(torch.zeros(2, 3, 4), 0).shape
        torch.Size([4, 2, 3])
    """
    return x.movedim(x.ndim - 1, axis)
