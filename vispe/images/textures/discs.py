"""Discs that do not overlap, in a matrix; the packing repeats after a period."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np

from vispe.errors import OptionError
from vispe.images.textures.checks import Seed, Size, both, frozen, smooth
from vispe.images.textures.packing import neighbours, packed, shortest
from vispe.images.textures.texture import Texture
from vispe.images.textures.waves import Places, fine
from vispe.options import Limits, NotNegative, Number, Positive, checked

_FEWEST = 16  # discs, so that scaling them to meet the coverage changes them little


@dataclass(frozen=True, eq=False, kw_only=True)
class DiscPacking(Texture):
    """Discs that do not overlap, class 1, in a matrix, class 0; made by `disc_packing`.

    Attributes:
        centres: (n, 2) as (y, x), within the period.
        radii: (n,), pixels.
        levels: grey levels of matrix and discs.
        edge: width over which the grey level changes, and smallest gap between discs, pixels.
    """

    centres: np.ndarray = field(repr=False)
    radii: np.ndarray = field(repr=False)
    levels: tuple[float, float]
    edge: float
    _tree: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        frozen(self.centres, self.radii)
        # discs with half of the edge around them are still apart: a place within one of them is nearest to that one
        grown = self.radii + self.edge / 2
        # nearest in squared distance less squared radius, as if the centres had a height over the plane
        height = np.sqrt(grown.max() ** 2 - grown**2)
        tree = neighbours(np.column_stack([self.centres, height]), (*self.period, 0))
        object.__setattr__(self, "_tree", tree)

    @property
    def coverage(self) -> float:
        """Share of the area that is covered by discs, exactly, over one period."""
        return float(np.pi * np.square(self.radii).sum() / (self.period[0] * self.period[1]))

    def _evaluate(self, places: Places) -> tuple[np.ndarray, np.ndarray]:
        points = places.points()
        _, nearest = self._tree.query(np.concatenate([points, np.zeros_like(points[..., :1])], -1))
        away = shortest(points - self.centres[nearest], self.period)
        inside = self.radii[nearest] - np.hypot(away[..., 0], away[..., 1])
        share = smooth(inside / self.edge + 0.5) if self.edge else (inside >= 0).astype(np.float64)
        low, high = self.levels
        return low + (high - low) * share, (inside >= 0).astype(np.int64)


@checked
def disc_packing(
    seed: Seed,
    *,
    radius: Positive = 8.0,
    spread: NotNegative = 0.25,
    coverage: Annotated[float, Limits(above=0, below=1)] = 0.4,
    period: Size = 512,
    levels: tuple[Number, Number] = (0.3, 0.7),
    edge: NotNegative = 2.0,
    detail: NotNegative = 0.03,
    stretch: Positive = 1.0,
    direction: Number = 0.0,
    spacing: Positive = 1.0,
) -> DiscPacking:
    """Return discs at random places that do not overlap: particles, precipitates, pores.

    Radii are log-normal; the largest discs are placed first, each where it first fits (random sequential addition).

    Args:
        seed: whole number, or a numpy Generator, which is advanced.
        radius: mean radius in pixels; radii are then scaled together, by a little, to meet the coverage.
        spread: standard deviation of the radii as a share of their mean; 0 for equal discs.
        coverage: share of the area that discs cover, exact over one period; about 0.5 can be reached.
        period: pixels after which the packing repeats, (y, x) or one for both.
        levels: grey levels of matrix and discs.
        edge: width over which the grey level changes, and smallest gap between discs, pixels; 0 for steps.
        detail: standard deviation of a fine field (wavelength 4 pixels) that is added to the grey level.
        stretch: elongation; above 1 for a control that is not isotropic.
        direction: of the elongation, degrees counter-clockwise from the horizontal.
        spacing: length of a pixel, in any unit.

    Raises:
        OptionError: an option is out of its range, there are fewer than 16 discs in a period, or they do not fit.
        MissingExtra: scipy is not installed.
    """
    rng, shape = np.random.default_rng(seed), both(period)
    wanted, sigma = coverage * shape[0] * shape[1], np.sqrt(np.log1p(spread**2))
    count = round(wanted / (np.pi * radius**2 * (1 + spread**2)))
    if count < _FEWEST:
        raise OptionError(
            f"A period of {shape} pixels is covered to {coverage:g} by {count} discs of radius {radius:g}; enlarge it, "
            f"so that there are {_FEWEST}."
        )
    radii = np.sort(radius * np.exp(sigma * rng.standard_normal(count) - sigma**2 / 2))[::-1]
    radii = radii * np.sqrt(wanted / (np.pi * np.square(radii).sum()))
    shared = {"period": shape, "stretch": stretch, "direction": direction, "spacing": spacing}
    discs = {"centres": packed(rng, radii, shape, edge), "radii": radii, "levels": levels, "edge": edge}
    return DiscPacking(classes=("matrix", "disc"), detail=fine(rng, detail, shape), **discs, **shared)
