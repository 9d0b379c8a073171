"""Places at random that keep apart, on a plane that repeats, and which of them is nearest."""

from __future__ import annotations

from typing import Any

import numpy as np

from vispe.errors import OptionError, require

_TRIES = 1 << 14  # places that are tried for a disc


def shortest(away: np.ndarray, period: tuple[int, int]) -> np.ndarray:
    """Return the shortest of the vectors that differ by whole periods.

    Args:
        away: (..., 2) as (y, x).
        period: (y, x).
    """
    return away - np.rint(away / np.array(period)) * period


def neighbours(points: np.ndarray, period: tuple[int, ...]) -> Any:
    """Return scipy's tree for nearest neighbours on a plane that repeats.

    Args:
        points: (n, axes), from 0 to the period.
        period: of every axis; 0 for one that does not repeat.

    Raises:
        MissingExtra: scipy is not installed.
    """
    require("scipy", "cli", "A texture of grains")
    from scipy.spatial import cKDTree

    return cKDTree(points, boxsize=period)


def packed(rng: np.random.Generator, radii: np.ndarray, period: tuple[int, int], gap: float) -> np.ndarray:
    """Return centres (n, 2) of discs that do not overlap, each put where it first fits, in their order.

    Args:
        rng: draws the places.
        radii: (n,), best in descending order.
        period: (y, x) after which the packing repeats.
        gap: least distance between two discs.

    Raises:
        OptionError: the discs do not fit.
    """
    if 2 * radii.max() + gap > min(period):
        raise OptionError(
            f"A disc of radius {radii.max():.3g} does not fit into the period {period}; enlarge it."
        )
    centres = np.empty((len(radii), 2))
    for i, radius in enumerate(radii):
        room, tries, free = radii[:i] + radius + gap, 0, np.zeros(0, bool)
        while not free.any() and tries < _TRIES:
            count = min(max(8, tries), 1024)
            tried = rng.random((count, 2)) * period
            away = shortest(tried[:, None] - centres[:i], period)
            free = (np.square(away).sum(-1) >= np.square(room)).all(1)
            tries += count
        if not free.any():
            area = np.square(radii).cumsum() * np.pi / (period[0] * period[1])
            raise OptionError(
                f"Discs that cover {area[-1]:.3g} were asked with gaps of {gap:g} pixels, and no room was found beyond "
                f"{area[i - 1]:.3g}; ask for less coverage or smaller gaps."
            )
        centres[i] = tried[free.argmax()]
    return centres
