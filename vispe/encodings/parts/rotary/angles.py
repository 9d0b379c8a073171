"""Base of rotary encodings that start from RoPE angles, with channels divided evenly among the axes."""

from __future__ import annotations

from torch import Tensor

from vispe.attention.transform.abstract_transform import Layout
from vispe.encodings.base import Rotary
from vispe.encodings.parts.rotary.rope.axial_pairs import even_counts, spread_angles
from vispe.errors import OptionError, ShapeError, counted
from vispe.grid import Positions
from vispe.utils.options import PositiveFloat, PositiveInt, Spacing


class AxialRotary(Rotary):
    """Rotary encoding based on RoPE angles, with the pairs divided evenly among the axes, the last axis (x) first.

    Subclasses compute their transform from `angles`.
    """

    ndim = (1, 2, 3)

    dim: PositiveInt
    num_heads: PositiveInt
    head_dim: PositiveInt | None = None
    base: PositiveFloat = 100.0
    layout: Layout = "half"
    spacing: Spacing | None = None

    def __post_init__(self) -> None:
        self.pairs = self._pair_count()
        spacing = self.spacing
        # without spacing: every number of axes with at least one pair each
        self._accept(*(n for n in self.ndim if (n <= self.pairs if spacing is None else n == len(spacing))))

    def _pair_count(self) -> int:
        """Return the number of channel pairs per head; raise `OptionError` for an odd head_dim."""
        width = self._resolve_head_dim()
        if width % 2:
            raise OptionError(
                f"{self.name} needs pairs of channels, got head_dim={width} (dim={self.dim}, num_heads="
                f"{self.num_heads}). Choose another num_heads."
            )
        return width // 2

    def _need_axes(self, pos: Positions) -> None:
        if pos.axes in self.ndim:
            return
        if pos.axes in type(self).ndim:
            raise ShapeError(
                f"{self.name} needs {counted(' or '.join(map(str, self.ndim)), 'axis')}, for its "
                f"{counted(self.pairs, 'pair')} with spacing={self.spacing}, got {counted(pos.axes, 'axis')} ({pos})."
            )
        super()._need_axes(pos)

    def angles(self, pos: Positions) -> Tensor:
        """Return the angles of RoPE (b or 1, 1, n, pairs) in float32 or better, 0 for tokens without a position."""
        scaled = pos if self.spacing is None else pos.with_spacing(self.spacing)
        counts = even_counts(self.pairs, pos.axes)
        return spread_angles(scaled, counts, self.base) * pos.spatial[:, None, :, None]
