"""Queries and keys of doubled width, whose product is a cosine of the difference of angles."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from vispe.attention.transform.abstract_transform import Layout, Transform
from vispe.attention.transform.affine import widened
from vispe.errors import OptionError, ShapeError

Magnitude = Literal["softplus"] | None


class Expand(Transform):
    """Turn each of the first r channels of q and k into two: ``[m cos, m sin]``, with m the channel or its magnitude.

    Scores then weigh channel c by ``cos(angle_c(i) - angle_c(j))``. Channels beyond r pass unchanged.

    Args:
        cos: (b or 1, h or 1, n, r).
        sin: like cos.
        keys: cos and sin of the keys where they are not those of the queries, of the same shape.
        magnitude: what m is: None for the channel as it is, 'softplus' for its softplus.
        layout: 'half' puts all cosines before all sines, 'interleaved' both of a channel side by side.

    Raises:
        ShapeError: tables are not of one shape, there are more angles than channels, or there is no such layout.
        OptionError: there is no such magnitude.

    Example:
        >>> import torch
        >>> angle = torch.zeros(1, 1, 2, 3)
        >>> Expand(angle.cos(), angle.sin()).query(torch.ones(1, 1, 2, 3))[0, 0, 0]
        tensor([1., 1., 1., 0., 0., 0.])
    """

    __slots__ = ("cos", "layout", "magnitude", "of_keys", "sin")

    def __init__(
        self,
        cos: Tensor,
        sin: Tensor,
        keys: tuple[Tensor, Tensor] | None = None,
        magnitude: Magnitude = None,
        layout: Layout = "half",
    ) -> None:
        for what, (c, s) in (("cos and sin", (cos, sin)), ("those of keys", keys or (cos, sin))):
            if c.ndim != 4 or not c.shape == s.shape == cos.shape:
                raise ShapeError(
                    f"Expand needs cos and sin of one shape (b, h, n, r), got {tuple(c.shape)} and {tuple(s.shape)} "
                    f"for {what}."
                )
        if layout not in ("half", "interleaved"):
            raise ShapeError(f"Expand needs layout 'half' or 'interleaved', got {layout!r}.")
        if magnitude not in (None, "softplus"):
            raise OptionError(f"magnitude must be None or 'softplus', got {magnitude!r}.")
        self.cos, self.sin, self.layout = cos, sin, layout
        self.magnitude: Magnitude = magnitude
        self.of_keys = self if keys is None else Expand(*keys, None, magnitude, layout)

    @property
    def extra(self) -> int:
        """How many columns queries and keys gain: r."""
        return self.cos.shape[-1]

    def query(self, q: Tensor) -> Tensor:
        """Return queries (b, h, n, d + r)."""
        return self._expand(q)

    def key(self, k: Tensor) -> Tensor:
        """Return keys (b, h_kv, m, d + r)."""
        return self.of_keys._expand(k)

    def _expand(self, x: Tensor) -> Tensor:
        width = self.cos.shape[-1]
        if width > x.shape[-1]:
            raise ShapeError(f"The expansion has {width} angles but the head has {x.shape[-1]} channels.")
        wide, rest = widened(x[..., :width], self.cos), x[..., width:]
        if self.magnitude == "softplus":
            wide = F.softplus(wide)
        parts = wide * self.cos, wide * self.sin
        both = torch.cat(parts, -1) if self.layout == "half" else torch.stack(parts, -1).flatten(-2)
        return torch.cat([both.to(x.dtype), rest], -1) if rest.shape[-1] else both.to(x.dtype)
