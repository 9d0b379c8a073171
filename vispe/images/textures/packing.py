"""Random sequential addition of discs, and nearest neighbours, on a periodic plane."""

from __future__ import annotations

from typing import Any

import numpy as np

from vispe.errors import OptionError, counted, require

_TRIES = 1 << 14  # candidate positions per disc


def shortest(away: np.ndarray, period: tuple[int, int]) -> np.ndarray:
    """Return vectors under the minimum image convention: the shortest ones modulo the period.

    Args:
        away: (..., 2) as (y, x).
        period: (y, x).
    """
    return away - np.rint(away / np.array(period)) * period


def neighbours(points: np.ndarray, period: tuple[int, ...]) -> Any:
    """Return a scipy k-d tree for nearest neighbours on a periodic plane.

    Args:
        points: (n, axes), from 0 to the period.
        period: period of every axis; 0 for an axis that is not periodic.

    Raises:
        MissingExtra: scipy is not installed.
    """
    require("scipy", "cli", "A texture of grains")
    from scipy.spatial import cKDTree

    return cKDTree(points, boxsize=period)


def packed(rng: np.random.Generator, radii: np.ndarray, period: tuple[int, int], gap: float) -> np.ndarray:
    """Return centres (n, 2) of non-overlapping discs by random sequential addition, in the order of `radii`.

    Args:
        rng: random generator of the positions.
        radii: (n,), preferably in descending order.
        period: (y, x) period of the packing.
        gap: smallest distance between two discs.

    Raises:
        OptionError: the discs do not fit.
    """
    if 2 * radii.max() + gap > min(period):
        raise OptionError(
            f"the period must exceed a disc and its gap, got {period} for radius {radii.max():.3g}. Increase `period`."
        )
    cells = _Cells(len(radii), period, 2 * radii.max() + gap)
    for i, radius in enumerate(radii):
        tries, free = 0, np.zeros(0, bool)
        while not free.any() and tries < _TRIES:
            count = min(max(8, tries), 1024)
            candidates = rng.random((count, 2)) * period
            near = cells.near(candidates)  # (count, m), -1 for none
            offsets = shortest(candidates[:, None] - cells.points[near], period)
            min_distance = radii[near] + radius + gap
            free = ((near < 0) | (np.square(offsets).sum(-1) >= np.square(min_distance))).all(1)
            tries += count
        if not free.any():
            area = np.square(radii).cumsum() * np.pi / (period[0] * period[1])
            raise OptionError(
                f"the discs do not fit: coverage {area[-1]:.3g} with gaps of {counted(f'{gap:g}', 'pixel')} was "
                f"requested, {area[i - 1]:.3g} was reached. Reduce the coverage or the gaps."
            )
        cells.add(i, candidates[free.argmax()])
    return cells.points


class _Cells:
    """Points of a periodic plane, sorted into cells, so that close points are found without testing all of them.

    Args:
        count: number of points.
        period: (y, x) period of the plane.
        reach: largest distance of points that `near` must find.
    """

    def __init__(self, count: int, period: tuple[int, int], reach: float) -> None:
        self.points = np.zeros((count, 2))
        reach = max(reach, min(period) / 256)  # points without extent
        # with fewer than 3 cells along an axis, a cell would be its own neighbour twice
        self.shape = [n if (n := int(side // reach)) > 2 else 1 for side in period]
        self.side = np.array(period) / self.shape
        self.members = np.full((*self.shape, 1), -1)
        self.sizes = np.zeros(self.shape, int)

    def add(self, index: int, point: np.ndarray) -> None:
        """Store a point."""
        self.points[index] = point
        y, x = self._cell(point)
        if self.sizes[y, x] == self.members.shape[2]:
            self.members = np.concatenate([self.members, np.full_like(self.members, -1)], axis=2)
        self.members[y, x, self.sizes[y, x]] = index
        self.sizes[y, x] += 1

    def near(self, points: np.ndarray) -> np.ndarray:
        """Return indices (n, m) of the stored points within reach of points (n, 2), and of others; -1 for none."""
        rows, columns = (
            (index[:, None] + (np.arange(-1, 2) if n > 2 else [0])) % n
            for index, n in zip(self._cell(points).T, self.shape, strict=True)
        )
        indices = self.members[rows[:, :, None], columns[:, None, :]]
        return indices.reshape(len(points), -1)

    def _cell(self, points: np.ndarray) -> np.ndarray:
        # rounding may give the cell after the last one
        return np.minimum((points // self.side).astype(int), np.array(self.shape) - 1)
