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
    centres = np.empty((len(radii), 2))
    for i, radius in enumerate(radii):
        min_distance, tries, free = radii[:i] + radius + gap, 0, np.zeros(0, bool)
        while not free.any() and tries < _TRIES:
            count = min(max(8, tries), 1024)
            candidates = rng.random((count, 2)) * period
            offsets = shortest(candidates[:, None] - centres[:i], period)
            free = (np.square(offsets).sum(-1) >= np.square(min_distance)).all(1)
            tries += count
        if not free.any():
            area = np.square(radii).cumsum() * np.pi / (period[0] * period[1])
            raise OptionError(
                f"the discs do not fit: coverage {area[-1]:.3g} with gaps of {counted(f'{gap:g}', 'pixel')} was "
                f"requested, {area[i - 1]:.3g} was reached. Reduce the coverage or the gaps."
            )
        centres[i] = candidates[free.argmax()]
    return centres
