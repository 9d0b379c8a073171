"""What a transform is, and how channels are laid out."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

Layout = Literal["half", "interleaved"]


class Transform:
    """Base of the transforms: the identity on everything."""

    __slots__ = ()

    @property
    def extra(self) -> int:
        """How many columns queries and keys gain."""
        return 0

    @property
    def changes_values(self) -> bool:
        """Whether values or the output change too."""
        return False

    def query(self, q: Tensor) -> Tensor:
        """Transform queries (b, h, n, d_h)."""
        return q

    def key(self, k: Tensor) -> Tensor:
        """Transform keys (b, h_kv, m, d_h)."""
        return k

    def value(self, v: Tensor) -> Tensor:
        """Transform values (b, h_kv, m, d_v)."""
        return v

    def output(self, out: Tensor) -> Tensor:
        """Transform the attention output (b, h, n, d_v)."""
        return out

    def inputs(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Transform queries, keys and values."""
        return self.query(q), self.key(k), self.value(v)
