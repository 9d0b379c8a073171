"""Maps of features that are coarser than pixels, tile by tile: brought to pixels, or scored before they are."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor

from vispe.segment.features.tiles import Tiling

_CACHED = 1 << 12  # values of each feature that stay in the cache


class CoarseMaps(Tiling, ABC):
    """Features of the tiles of one page, each at its own stride; bilinear interpolation brings them to pixels.

    The cells of a tile lie side by side over all of it but `rim` pixels at each border, which take the nearest cell.
    """

    rim: float = 0.0

    @abstractmethod
    def coarse(self, number: int, again: bool = False) -> Tensor:
        """Return the features of a whole tile, (f, rows, columns) float32 on the CPU.

        `again` says that they will be asked for once more.
        """

    def planes(self, number: int, again: bool = False) -> np.ndarray:
        """Return the features at every pixel of `inside(number)`: (f, rows, columns) float32."""
        return self._full(number, self.coarse(number, again)).numpy()

    def project(self, number: int, weight: Tensor, mean: Tensor) -> Tensor:
        """Return weight (k, f) @ (features - mean (f,)) at every pixel of `inside(number)`: (k, rows, columns).

        The product is taken before interpolation, which gives the same up to rounding and works on far fewer numbers.
        """
        found = self.coarse(number)
        planes, scores = found.flatten(1), torch.empty((len(weight), found[0].numel()))
        for start in range(0, planes.shape[1], _CACHED):
            part = slice(start, start + _CACHED)
            torch.mm(weight, planes[:, part] - mean[:, None], out=scores[:, part])
        return self._full(number, scores.view(-1, *found.shape[1:]))

    def at(self, number: int, y: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Return the features (n, f) at pixels (y, x) of `inside(number)`, and keep the tile for prediction."""
        found = self.coarse(number, again=True)
        rows, columns = self.crop(number)
        side = self.regions[number].shape
        (top, bottom, fy), (left, right, fx) = (
            _neighbours(torch.from_numpy(place) + start, size, length, self.rim)
            for place, start, size, length in zip(
                (y, x), (rows.start, columns.start), found.shape[1:], side, strict=True
            )
        )
        upper = found[:, top, left] * (1 - fx) + found[:, top, right] * fx
        lower = found[:, bottom, left] * (1 - fx) + found[:, bottom, right] * fx
        return (upper * (1 - fy) + lower * fy).T.numpy()

    def _full(self, number: int, grid: Tensor) -> Tensor:
        """Bring (f, rows, columns) of a tile to the pixels of `inside(number)`."""
        side = self.regions[number].shape
        if self.rim:
            return self._between(number, grid)
        # planes as separate images: faster than as channels of one
        full = torch.nn.functional.interpolate(grid[:, None], size=side, mode="bilinear", align_corners=False)
        return full[(slice(None), 0, *self.crop(number))]

    def _between(self, number: int, grid: Tensor) -> Tensor:
        """Do the same where cells begin behind a rim, which may be half a pixel wide."""
        (top, bottom, fy), (left, right, fx) = (
            _neighbours(torch.arange(part.start, part.stop), size, length, self.rim)
            for part, size, length in zip(
                self.crop(number), grid.shape[1:], self.regions[number].shape, strict=True
            )
        )
        # rows first: columns are still few then
        rows = torch.lerp(grid[:, top], grid[:, bottom], fy[:, None])
        return torch.lerp(rows[..., left], rows[..., right], fx)


def _neighbours(pixel: Tensor, size: int, length: int, rim: float) -> tuple[Tensor, Tensor, Tensor]:
    """Give the cells before and after pixels of an axis, and the share of the one after; beyond all the last counts."""
    place = ((pixel + 0.5 - rim) * (size / (length - 2 * rim)) - 0.5).clamp_min(0)
    before = place.long().clamp_max(size - 1)
    return before, (before + 1).clamp_max(size - 1), (place - before).float()
