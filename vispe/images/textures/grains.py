"""Periodic polycrystals: Voronoi cells of random seeds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np

from vispe.errors import OptionError
from vispe.images.textures.checks import Fractions, Seed, Size, both, cumulated, frozen, smooth
from vispe.images.textures.packing import neighbours, packed, shortest
from vispe.images.textures.texture import Texture
from vispe.images.textures.waves import Places, fine
from vispe.utils.interval import Interval
from vispe.utils.options import FiniteFloat, NonNegativeFloat, PositiveFloat, checked

_DARK = 0.1  # grey level of grain boundaries


@dataclass(frozen=True, eq=False, kw_only=True)
class Voronoi(Texture):
    """Voronoi cells (grains) of random seeds; see `voronoi`.

    Attributes:
        seeds: (n, 2) as (y, x), within the period.
        phases: (n,), phase of every grain.
        levels: (n,), grey level of every grain.
        width: width of the boundaries, pixels.
        labels: kind of classes: 'phases', 'grains' or 'boundaries'.
    """

    seeds: np.ndarray = field(repr=False)
    phases: np.ndarray = field(repr=False)
    levels: np.ndarray = field(repr=False)
    width: float
    labels: str
    _tree: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        frozen(self.seeds, self.phases, self.levels)
        object.__setattr__(self, "_tree", neighbours(self.seeds, self.period))

    def _evaluate(self, coordinates: Places) -> tuple[np.ndarray, np.ndarray]:
        points = coordinates.points()
        grain, distance = self._nearest(points.reshape(-1, 2), 4)
        grain, distance = grain.reshape(points.shape[:-1]), distance.reshape(points.shape[:-1])
        grey = self.levels[grain]
        if self.width:
            grey = _DARK + (grey - _DARK) * smooth(distance / self.width)
        if self.labels == "grains":
            return grey, grain
        if self.labels == "boundaries":
            return grey, (distance < self.width / 2).astype(np.int64)
        return grey, self.phases[grain]

    def _nearest(self, points: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the grain (n,) of points (n, 2), and their distance (n,) to its boundary, exact up to `width`."""
        k = min(k, len(self.seeds))
        distances, order = self._tree.query(points, k)
        # (n, k, 2), from each point to its nearest seeds
        offsets = shortest(self.seeds[order] - points[:, None], self.period)
        between = offsets[:, 1:] - offsets[:, :1]
        gap = np.square(distances[:, 1:]) - np.square(distances[:, :1])
        boundary = (gap / (2 * np.hypot(between[..., 0], between[..., 1]))).min(1)
        # lower bound of the distance to the bisector of any seed beyond the k nearest
        uncertain = (distances[:, -1] - distances[:, 0]) / 2 < np.minimum(boundary, self.width)
        if k < len(self.seeds) and uncertain.any():
            boundary[uncertain] = self._nearest(points[uncertain], 2 * k)[1]
        return order[:, 0], boundary


@checked
def voronoi(
    seed: Seed,
    *,
    grain: PositiveFloat = 32.0,
    regularity: Annotated[float, Interval(least=0, most=0.75)] = 0.6,
    labels: Literal["phases", "grains", "boundaries"] = "phases",
    fractions: Fractions = (0.5, 0.5),
    variation: NonNegativeFloat = 0.03,
    width: NonNegativeFloat = 3.0,
    period: Size = 512,
    detail: NonNegativeFloat = 0.03,
    stretch: PositiveFloat = 1.0,
    direction: FiniteFloat = 0.0,
    spacing: PositiveFloat = 1.0,
) -> Voronoi:
    """Return a polycrystal: Voronoi cells of random seeds, in phases of different grey levels, with dark boundaries.

    Args:
        seed: integer, or a numpy Generator, which is advanced.
        grain: mean grain size in pixels, the square root of the mean grain area.
        regularity: smallest distance of seeds as a fraction of `grain`, 0 (a Poisson process) to 0.75.
        labels: classes are the phases, the indices of the grains, or 1 on boundaries and 0 inside grains.
        fractions: fractions of the grains in each phase, from dark to bright; they sum to 1.
        variation: standard deviation of the grey level between grains of one phase.
        width: width of the boundaries in pixels for labels='boundaries'; the grey level darkens over the same
            distance on either side. 0 for steps.
        period: period of the grains in pixels, (y, x) or one number for both; at least 4 grains.
        detail: standard deviation of a fine field (wavelength 4 pixels) that is added to the grey level.
        stretch: elongation; above 1 for an anisotropic control.
        direction: direction of the elongation, degrees counter-clockwise from the horizontal.
        spacing: length of a pixel, in any unit.

    Raises:
        OptionError: an option is out of range.
        MissingExtra: scipy is not installed.

    Example:
        >>> image, classes = voronoi(0, fractions=(0.2, 0.3, 0.5)).render((128, 128))
        >>> tuple(image.shape), classes.unique().tolist()
        ((3, 128, 128), [0, 1, 2])
    """
    rng, shape, cuts = np.random.default_rng(seed), both(period), cumulated(fractions)
    if labels == "boundaries" and not width:
        raise OptionError(
            "voronoi: width must be above 0 for labels='boundaries', got 0. Set `width` in pixels."
        )
    if min(shape) < 4 * grain:
        raise OptionError(
            f"voronoi: period must be at least 4 grains, got period={shape} and grain={grain:g}. Increase `period`."
        )
    n = round(shape[0] * shape[1] / grain**2)
    seeds = packed(rng, np.full(n, regularity * grain / 2), shape, 0.0)
    phases = np.searchsorted(np.rint(cuts * n), rng.permutation(n), side="right")
    levels = np.linspace(0.4, 0.75, len(cuts) + 1)[phases]
    levels = levels + variation * rng.standard_normal(n)
    names = {
        "phases": tuple(f"phase {i}" for i in range(len(cuts) + 1)),
        "grains": tuple(f"grain {i}" for i in range(n)),
        "boundaries": ("grain", "boundary"),
    }
    shared = {"period": shape, "stretch": stretch, "direction": direction, "spacing": spacing}
    grains = {"seeds": seeds, "phases": phases.astype(np.int64), "levels": levels, "width": width}
    return Voronoi(classes=names[labels], labels=labels, detail=fine(rng, detail, shape), **grains, **shared)
