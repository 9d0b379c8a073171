"""Fixed sines and cosines of coordinates: the base of `sincos2d` and `sincos3d`."""

from __future__ import annotations

import torch
from torch import Tensor

from vispe.attention.precision import at_least_float32
from vispe.encodings.base import Additive
from vispe.encodings.parts.additive.fourier import ProgressiveBands
from vispe.encodings.parts.coords import exact_device
from vispe.grid import Positions
from vispe.utils.options import PositiveFloat


class SinCos(ProgressiveBands, Additive):
    """Sines, then cosines, per axis, concatenated; subclasses define the frequencies per axis by `counts`."""

    temperature: PositiveFloat = 10000.0
    spacing: tuple[PositiveFloat, ...] | None = None
    std: PositiveFloat | None = None

    def counts(self) -> tuple[int, ...]:
        """Return the number of frequencies of each axis; they sum to half of the width."""
        raise NotImplementedError

    def table(self, pos: Positions, image: Tensor | None = None) -> Tensor:
        """Return the table, (1 or b, n, d) float32, 0 for prefix tokens."""
        self._need_axes(pos)
        key = (self.name, self.counts(), self.temperature, self.spacing, self.std)
        # cached with all bands active, so that training does not cache a table per step
        return self.with_band_weights(pos.remember(key, lambda: self._table(pos)), *self.counts())

    def _table(self, pos: Positions) -> Tensor:
        table = self._waves(pos)
        if self.std is None:
            return table
        # normalise by the whole grid, also when tokens are dropped
        dropped = pos.grid is not None and pos.index is not None
        full = pos.grid.positions(pos.coords.device) if dropped else pos
        waves = self._waves(full) if dropped else table
        # mean and standard deviation over tokens with positions
        has_position = full.spatial[..., None].expand_as(waves)
        count = has_position.sum((1, 2), keepdim=True)
        mean = waves.sum((1, 2), keepdim=True) / count
        spread = (((waves - mean) * has_position).square().sum((1, 2), keepdim=True) / (count - 1)).sqrt()
        return table / spread * self.std

    def _waves(self, pos: Positions) -> Tensor:
        coords = at_least_float32(
            pos.coords if self.spacing is None else pos.with_spacing(self.spacing).coords
        )
        parts: list[Tensor] = []
        for axis, count in enumerate(self.counts()):
            parts.append(waves(coords[..., axis, None] * rates(count, self.temperature, coords)))
        return torch.cat(parts, -1) * pos.spatial[..., None]


def rates(count: int, temperature: float, like: Tensor) -> Tensor:
    """Return ``temperature ** (-k / count)``, k = 0 .. count - 1, with the dtype and on the device of `like`."""
    # powers in float64, so that long wavelengths are exact before they are rounded once
    powers = torch.arange(count, dtype=torch.float64, device=exact_device(like)) / max(count, 1)
    return (temperature**-powers).to(like)


def waves(angle: Tensor) -> Tensor:
    """Return the sines of angles (..., k), then their cosines, (..., 2 k)."""
    return torch.cat([angle.sin(), angle.cos()], -1)
