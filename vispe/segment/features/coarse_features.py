"""Feature maps coarser than pixels, tile by tile: upsampled, or scored before upsampling."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor

from vispe.segment.features.tiles import Tiling

_CACHED = 1 << 12  # values per feature that fit into the CPU cache


class CoarseMaps(Tiling, ABC):
    """Features of the tiles of one page, at a coarse stride, bilinearly interpolated to pixels.

    The cells of a tile cover all of it except `margin` pixels at each border, which use the nearest cell.
    """

    margin: float = 0.0

    @abstractmethod
    def coarse(self, number: int, again: bool = False) -> Tensor:
        """Return the features of a complete tile, (f, rows, columns) float32 on the CPU.

        `again` is true if the same tile will be requested once more.
        """

    def planes(self, number: int, again: bool = False) -> np.ndarray:
        """Return the features at every pixel of `inside(number)`: (f, rows, columns) float32."""
        return self._full(number, self.coarse(number, again)).numpy()

    def project(self, number: int, weight: Tensor, mean: Tensor) -> Tensor:
        """Return weight (k, f) @ (features - mean (f,)) at every pixel of `inside(number)`: (k, rows, columns).

        The product is computed before interpolation: equal up to rounding, with far fewer multiplications.
        """
        cells = self.coarse(number)
        planes, scores = cells.flatten(1), torch.empty((len(weight), cells[0].numel()))
        for start in range(0, planes.shape[1], _CACHED):
            part = slice(start, start + _CACHED)
            torch.mm(weight, planes[:, part] - mean[:, None], out=scores[:, part])
        return self._full(number, scores.view(-1, *cells.shape[1:]))

    def at(self, number: int, y: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Return the features (n, f) at pixels (y, x) of `inside(number)`, and cache the tile for prediction."""
        cells = self.coarse(number, again=True)
        rows, columns = self.crop(number)
        side = self.regions[number].shape
        # bilinear interpolation: four neighbouring cells and two weights per pixel
        (top, bottom, fy), (left, right, fx) = (
            _neighbours(torch.from_numpy(pixel) + start, size, length, self.margin)
            for pixel, start, size, length in zip(
                (y, x), (rows.start, columns.start), cells.shape[1:], side, strict=True
            )
        )
        upper = cells[:, top, left] * (1 - fx) + cells[:, top, right] * fx
        lower = cells[:, bottom, left] * (1 - fx) + cells[:, bottom, right] * fx
        return (upper * (1 - fy) + lower * fy).T.numpy()

    def _full(self, number: int, grid: Tensor) -> Tensor:
        """Upsample (f, rows, columns) of a tile to the pixels of `inside(number)`."""
        side = self.regions[number].shape
        if self.margin:
            return self._between(number, grid)
        # (f, 1, rows, columns): planes as a batch are faster than as channels
        full = torch.nn.functional.interpolate(grid[:, None], size=side, mode="bilinear", align_corners=False)
        return full[(slice(None), 0, *self.crop(number))]

    def _between(self, number: int, grid: Tensor) -> Tensor:
        """Upsample as `_full`, for cells that start after a margin, which may be half a pixel wide."""
        (top, bottom, fy), (left, right, fx) = (
            _neighbours(torch.arange(part.start, part.stop), size, length, self.margin)
            for part, size, length in zip(
                self.crop(number), grid.shape[1:], self.regions[number].shape, strict=True
            )
        )
        # interpolate rows first, while there are few columns
        rows = torch.lerp(grid[:, top], grid[:, bottom], fy[:, None])
        return torch.lerp(rows[..., left], rows[..., right], fx)


def _neighbours(pixel: Tensor, size: int, length: int, margin: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the cells before and after pixels of an axis, and the weight of the second; clamped at both ends."""
    # pixel centre in units of cells, as align_corners=False in torch
    cell = ((pixel + 0.5 - margin) * (size / (length - 2 * margin)) - 0.5).clamp_min(0)
    before = cell.long().clamp_max(size - 1)
    return before, (before + 1).clamp_max(size - 1), (cell - before).float()
