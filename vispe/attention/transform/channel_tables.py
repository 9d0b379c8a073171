"""Rotary tables with an angle per channel, as V-JEPA 2 applies them."""

from __future__ import annotations

import torch
from torch import Tensor

from vispe.attention.transform.abstract_transform import Transform
from vispe.attention.transform.affine import widened
from vispe.errors import ShapeError, counted


class ChannelTables(Transform):
    """Multiply each pair of channels (2i, 2i + 1) by ``[[cos a, -sin a], [sin b, cos b]]``, with a and b per channel.

    In elementwise form, ``x * cos + r(x) * sin`` with ``r(x) = (-x_1, x_0, -x_3, x_2, ...)``. It is a rotation only
    where a = b: otherwise norms change, the inverse is not the transpose, and scores depend on absolute positions.
    Channels beyond the tables are unchanged.

    Args:
        cos: (b or 1, h or 1, n, c) with an even number c of channels, float32 or float64.
        sin: like cos.

    Raises:
        ShapeError: tables differ in shape or have an odd number of channels, or on use, more channels than the heads.

    Example:
        >>> angle = torch.tensor([0.0, torch.pi / 2]).reshape(1, 1, 1, 2)  # one token, one pair
        >>> ChannelTables(angle.cos(), angle.sin()).query(torch.tensor([[[[3.0, 4.0]]]])).round().flatten()
        tensor([3., 3.])
    """

    __slots__ = ("cos", "sin")

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        if cos.ndim != 4 or cos.shape != sin.shape or cos.shape[-1] % 2:
            raise ShapeError(
                "ChannelTables needs cos and sin of equal shape (b, h, n, even number of channels), got "
                f"{tuple(cos.shape)} and {tuple(sin.shape)}."
            )
        self.cos, self.sin = cos, sin

    @property
    def key_heads(self) -> int:
        """Number of heads of the tables."""
        return self.cos.shape[1]

    def query(self, q: Tensor) -> Tensor:
        """Return transformed queries, computed in the dtype of the tables or better and rounded once."""
        return self._apply(q)

    def key(self, k: Tensor) -> Tensor:
        """Return transformed keys, as `query`."""
        return self._apply(k)

    def _apply(self, x: Tensor) -> Tensor:
        channels = self.cos.shape[-1]
        if channels > x.shape[-1]:
            raise ShapeError(
                f"ChannelTables has tables for {counted(channels, 'channel')}, but head_dim is {x.shape[-1]}. Use at "
                "most as many."
            )
        wide, rest = widened(x[..., :channels], self.cos), x[..., channels:]
        swapped = torch.stack([-wide[..., 1::2], wide[..., 0::2]], -1).flatten(-2)
        rotated = (wide * self.cos + swapped * self.sin).to(x.dtype)
        return torch.cat([rotated, rest], -1) if rest.shape[-1] else rotated
