"""Expansion of channels into cosine and sine parts, so that scores depend on the cosine of angle differences."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from vispe.attention.precision import check_floating
from vispe.attention.transform.abstract_transform import Layout, Transform
from vispe.attention.transform.affine import widened
from vispe.errors import OptionError, ShapeError, counted

Magnitude = Literal["softplus"] | None


class Expand(Transform):
    """Expand each of the first r channels of q and k into two: ``[m cos, m sin]``, with m the channel or its softplus.

    The scores then weight channel c by ``cos(angle_c(i) - angle_c(j))``. Channels from r on are unchanged.

    Args:
        cos: (b or 1, h or 1, n, r).
        sin: like cos.
        keys: cos and sin of the keys, of the same shape; those of the queries by default.
        magnitude: None to use the channel itself as m, 'softplus' for its softplus.
        layout: 'half' puts all cosine parts before all sine parts, 'interleaved' alternates them.

    Raises:
        ShapeError: tables differ in shape or are not floating point, there are more angles than channels, or
            `layout` is unknown.
        OptionError: `magnitude` is unknown.

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
        # both pairs of tables are checked against the shape of `cos`
        for what, (c, s) in (("cos and sin", (cos, sin)), ("those of keys", keys or (cos, sin))):
            if c.ndim != 4 or not c.shape == s.shape == cos.shape:
                raise ShapeError(
                    f"Expand needs cos and sin of equal shape (b, h, n, r), got {tuple(c.shape)} and {tuple(s.shape)} "
                    f"for {what}."
                )
        if layout not in ("half", "interleaved"):
            raise ShapeError(f"Expand: layout must be 'half' or 'interleaved', got {layout!r}.")
        if magnitude not in (None, "softplus"):
            raise OptionError(f"magnitude must be None or 'softplus', got {magnitude!r}.")
        check_floating("Expand", cos=cos, sin=sin)
        self.cos, self.sin, self.layout = cos, sin, layout
        self.magnitude: Magnitude = magnitude
        self.of_keys = self if keys is None else Expand(*keys, None, magnitude, layout)

    @property
    def extra(self) -> int:
        """Number of channels added to queries and keys: r."""
        return self.cos.shape[-1]

    @property
    def key_heads(self) -> int:
        """Number of heads of the tables of keys."""
        return self.of_keys.cos.shape[1]

    def query(self, q: Tensor) -> Tensor:
        """Return queries (b, h, n, d + r)."""
        return self._expand(q)

    def key(self, k: Tensor) -> Tensor:
        """Return keys (b, h_kv, m, d + r)."""
        return self.of_keys._expand(k)

    def _expand(self, x: Tensor) -> Tensor:
        width = self.cos.shape[-1]
        if width > x.shape[-1]:
            raise ShapeError(
                f"Expand has {counted(width, 'angle')}, but head_dim is {x.shape[-1]}. Use at most that many."
            )
        # computed in the dtype of the tables or better, rounded once at the end
        wide, rest = widened(x[..., :width], self.cos), x[..., width:]
        if self.magnitude == "softplus":
            wide = F.softplus(wide)
        parts = wide * self.cos, wide * self.sin
        # (..., r) twice -> (..., 2 r)
        both = torch.cat(parts, -1) if self.layout == "half" else torch.stack(parts, -1).flatten(-2)
        return torch.cat([both.to(x.dtype), rest], -1) if rest.shape[-1] else both.to(x.dtype)
