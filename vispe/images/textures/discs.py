"""Periodic packing of non-overlapping discs in a matrix."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np

from vispe.errors import OptionError
from vispe.images.textures.checks import Seed, Size, both, frozen, smooth
from vispe.images.textures.packing import neighbours, packed, shortest
from vispe.images.textures.texture import Texture
from vispe.images.textures.waves import Places, fine
from vispe.utils.interval import Interval
from vispe.utils.options import FiniteFloat, NonNegativeFloat, PositiveFloat, checked

_FEWEST = 16  # discs; with fewer, scaling them to the exact coverage would change the radii noticeably


@dataclass(frozen=True, eq=False, kw_only=True)
class DiscPacking(Texture):
    """Non-overlapping discs, class 1, in a matrix, class 0; see `disc_packing`.

    Attributes:
        centres: (n, 2) as (y, x), within the period.
        radii: (n,), pixels.
        levels: grey levels of matrix and discs.
        edge: width of the grey-level transition, and smallest gap between discs, pixels.
    """

    centres: np.ndarray = field(repr=False)
    radii: np.ndarray = field(repr=False)
    levels: tuple[float, float]
    edge: float
    _tree: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        frozen(self.centres, self.radii)
        # discs dilated by half of the edge are still disjoint, so a point in a dilated disc is nearest to that disc
        grown = self.radii + self.edge / 2
        # power distance (squared distance minus squared radius) as a Euclidean distance with a third coordinate
        height = np.sqrt(grown.max() ** 2 - grown**2)
        tree = neighbours(np.column_stack([self.centres, height]), (*self.period, 0))
        object.__setattr__(self, "_tree", tree)

    @property
    def coverage(self) -> float:
        """Exact area fraction of the discs over one period."""
        return float(np.pi * np.square(self.radii).sum() / (self.period[0] * self.period[1]))

    def _evaluate(self, coordinates: Places) -> tuple[np.ndarray, np.ndarray]:
        points = coordinates.points()
        _, nearest = self._tree.query(np.concatenate([points, np.zeros_like(points[..., :1])], -1))
        offset = shortest(points - self.centres[nearest], self.period)
        inside = self.radii[nearest] - np.hypot(offset[..., 0], offset[..., 1])
        blend = smooth(inside / self.edge + 0.5) if self.edge else (inside >= 0).astype(np.float64)
        low, high = self.levels
        return low + (high - low) * blend, (inside >= 0).astype(np.int64)


@checked
def disc_packing(
    seed: Seed,
    *,
    radius: PositiveFloat = 8.0,
    spread: NonNegativeFloat = 0.25,
    coverage: Annotated[float, Interval(above=0, below=1)] = 0.4,
    period: Size = 512,
    levels: tuple[FiniteFloat, FiniteFloat] = (0.3, 0.7),
    edge: NonNegativeFloat = 2.0,
    detail: NonNegativeFloat = 0.03,
    stretch: PositiveFloat = 1.0,
    direction: FiniteFloat = 0.0,
    spacing: PositiveFloat = 1.0,
) -> DiscPacking:
    """Return discs at random positions that do not overlap: particles, precipitates, pores.

    Radii are log-normal; discs are added in descending order of radius by random sequential addition.

    Args:
        seed: integer, or a numpy Generator, which is advanced.
        radius: mean radius in pixels; radii are then scaled slightly to the exact coverage.
        spread: standard deviation of the radii as a fraction of their mean; 0 for equal discs.
        coverage: area fraction of the discs, exact over one period; the upper limit is about 0.5.
        period: period of the packing in pixels, (y, x) or one number for both.
        levels: grey levels of matrix and discs.
        edge: width of the grey-level transition, and smallest gap between discs, pixels; 0 for steps.
        detail: standard deviation of a fine field (wavelength 4 pixels) that is added to the grey level.
        stretch: elongation; above 1 for an anisotropic control.
        direction: direction of the elongation, degrees counter-clockwise from the horizontal.
        spacing: length of a pixel, in any unit.

    Raises:
        OptionError: an option is out of range, there are fewer than 16 discs in a period, or they do not fit.
        MissingExtra: scipy is not installed.

    Example:
        >>> image, classes = disc_packing(0, coverage=0.3).render((64, 64))
        >>> tuple(image.shape), classes.unique().tolist()
        ((3, 64, 64), [0, 1])
    """
    rng, shape = np.random.default_rng(seed), both(period)
    area, sigma = coverage * shape[0] * shape[1], np.sqrt(np.log1p(spread**2))
    count = round(area / (np.pi * radius**2 * (1 + spread**2)))
    if count < _FEWEST:
        raise OptionError(
            f"disc_packing: needs {_FEWEST} or more discs per period, got {count} with period={shape}, "
            f"coverage={coverage:g} and radius={radius:g}. Increase `period`."
        )
    radii = np.sort(radius * np.exp(sigma * rng.standard_normal(count) - sigma**2 / 2))[::-1]
    radii = radii * np.sqrt(area / (np.pi * np.square(radii).sum()))
    shared = {"period": shape, "stretch": stretch, "direction": direction, "spacing": spacing}
    discs = {"centres": packed(rng, radii, shape, edge), "radii": radii, "levels": levels, "edge": edge}
    return DiscPacking(classes=("matrix", "disc"), detail=fine(rng, detail, shape), **discs, **shared)
