"""Attributes of positions with values per token."""

from __future__ import annotations

from torch import Tensor


class PerToken:
    """An attribute of `Positions` with values per token, or per pair of tokens, which `Positions.gather` subsets.

    Args:
        values: (b or 1, ...).
        axes: dimensions of `values` that are token axes.

    Example:
        >>> import torch
        >>> depth = PerToken(torch.tensor([[5.0, 6.0, 7.0]]), axes=(1,))
        >>> depth.gather(torch.tensor([[2, 0]])).values
        tensor([[7., 5.]])
    """

    __slots__ = ("axes", "values")

    def __init__(self, values: Tensor, axes: tuple[int, ...]) -> None:
        self.values, self.axes = values, axes

    def gather(self, keep: Tensor) -> PerToken:
        """Return the values of the tokens with indices `keep` (b, m); see `Positions.gather`."""
        b, m = keep.shape
        values = self.values.expand(b, *self.values.shape[1:])
        for axis in self.axes:
            # gather along each token axis in turn
            index = keep.reshape(b, *(m if i == axis else 1 for i in range(1, values.ndim)))
            values = values.gather(axis, index.expand(*values.shape[:axis], m, *values.shape[axis + 1 :]))
        return PerToken(values, self.axes)
