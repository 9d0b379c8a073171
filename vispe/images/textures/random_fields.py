"""Wave-based textures: thresholded Gaussian random fields, and layers with wavy interfaces."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import numpy as np

from vispe.errors import OptionError, counted
from vispe.images.textures.checks import Fractions, Seed, Size, both, cumulated, frozen, smooth
from vispe.images.textures.texture import Texture
from vispe.images.textures.waves import Places, Raster, Waves, fine, plane_quantiles, ring_waves
from vispe.utils.interval import Interval
from vispe.utils.options import FiniteFloat, NonNegativeFloat, PositiveFloat, Probability, checked

Wavelength = PositiveFloat | Annotated[tuple[PositiveFloat, ...], Interval(least=1)]


@dataclass(frozen=True, eq=False, kw_only=True)
class RandomField(Texture):
    """Gaussian random field with classes separated by thresholds; see `random_field`.

    Attributes:
        waves: the field, with unit variance.
        thresholds: thresholds between the classes (classes - 1,), ascending.
        contrast: grey levels per standard deviation of the field, around 0.5.
    """

    waves: Waves = field(repr=False)
    thresholds: np.ndarray
    contrast: float

    def _evaluate(self, coordinates: Places) -> tuple[np.ndarray, np.ndarray]:
        values = self.waves.on(coordinates)
        return 0.5 + self.contrast * values, np.searchsorted(self.thresholds, values)


@checked
def random_field(
    seed: Seed,
    *,
    wavelength: Wavelength = 16.0,
    waves: Annotated[int, Interval(least=8, step=2)] = 128,
    bandwidth: Probability = 0.15,
    fractions: Fractions = (0.5, 0.5),
    exact_over: Size | None = None,
    period: Size | None = None,
    contrast: PositiveFloat = 0.125,
    detail: NonNegativeFloat = 0.0,
    stretch: PositiveFloat = 1.0,
    direction: FiniteFloat = 0.0,
    spacing: PositiveFloat = 1.0,
) -> RandomField:
    """Return a Gaussian random field as a finite sum of cosines, with thresholded phases: worms, blobs, foams.

    The image shows the field itself, so thresholding the grey level is the perfect segmentation.

    Args:
        seed: integer, or a numpy Generator, which is advanced.
        wavelength: pixels; several values define several rings of wave vectors.
        waves: number of cosines per ring; even, at least 8. The cost is proportional to this number.
        bandwidth: half width of each ring, as a fraction of its radius.
        fractions: area fractions of the classes, from dark to bright; they sum to 1.
        exact_over: size of the centred, unrotated image in which the fractions are exact to the pixel. By default
            they are exact over one period, or, without a period, in expectation over the infinite plane. Needs 32
            bytes per pixel during construction.
        period: period of the field in pixels; default not periodic.
        contrast: standard deviation of the grey level; up to 0.125 nearly all levels are in [0, 1].
        detail: standard deviation of a fine field (wavelength 4 pixels) that is added to the grey level only.
        stretch: elongation; above 1 for an anisotropic control.
        direction: direction of the elongation, degrees counter-clockwise from the horizontal.
        spacing: length of a pixel, in any unit.

    Raises:
        OptionError: an option is out of range.

    Example:
        >>> _, classes = random_field(0, fractions=(0.25, 0.75), period=64).render((64, 64))
        >>> (classes == 0).sum().item() / classes.numel()
        0.25
    """
    rng = np.random.default_rng(seed)
    cuts = cumulated(fractions)
    shape = None if period is None else both(period)
    ring_field = ring_waves(rng, wavelength, waves, bandwidth, period=shape)
    reference_size = shape if exact_over is None else both(exact_over)
    shared = {"period": shape, "stretch": stretch, "direction": direction, "spacing": spacing}
    field_ = {"waves": ring_field, "thresholds": np.zeros(len(cuts)), "contrast": contrast}
    names = tuple(f"phase {i}" for i in range(len(cuts) + 1))
    texture = RandomField(classes=names, detail=fine(rng, detail, shape), **field_, **shared)
    if reference_size is None:
        # the marginal distribution over the plane is known in closed form
        thresholds = plane_quantiles(ring_field.amplitudes[0], len(ring_field.phases), cuts)
    else:
        rows, cols = (np.arange(n) - (n - 1) / 2 for n in reference_size)
        values = np.sort(
            ring_field.on(Raster(rows, cols, texture.unstretched(), np.zeros(2), shape)), axis=None
        )
        # midway between neighbouring order statistics, so that no pixel equals a threshold
        index = np.clip(np.rint(cuts * values.size).astype(int), 1, values.size - 1)
        thresholds = (values[index - 1] + values[index]) / 2
    frozen(thresholds)
    # the dataclass is frozen, and the thresholds need the transform of the texture
    object.__setattr__(texture, "thresholds", thresholds)
    return texture


@dataclass(frozen=True, eq=False, kw_only=True)
class Layered(Texture):
    """Horizontal layers; see `layered`.

    Attributes:
        waves: deviation of every interface from its mean, pixels; None for flat interfaces.
        interfaces: mean positions (layers - 1,), pixels below the centre, ascending.
        levels: grey levels (layers,).
        edge: width of the grey-level transition, pixels.
    """

    waves: Waves | None = field(repr=False)
    interfaces: np.ndarray
    levels: np.ndarray
    edge: float

    def _evaluate(self, coordinates: Places) -> tuple[np.ndarray, np.ndarray]:
        depth = coordinates.points()[..., 0]
        # interfaces are parallel: one deviation for all of them
        if self.waves is not None:
            depth = depth - self.waves.on(coordinates)
        grey = np.full(depth.shape, self.levels[0])
        for y, step in zip(self.interfaces, np.diff(self.levels), strict=True):
            # 0 above and 1 below the interface, with a transition of `edge` pixels
            below = (depth - y) / self.edge + 0.5 if self.edge else depth >= y
            grey += step * smooth(below)
        return grey, np.searchsorted(self.interfaces, depth, side="right")


@checked
def layered(
    seed: Seed,
    *,
    interfaces: Annotated[tuple[FiniteFloat, ...], Interval(least=1)] = (-32.0, 32.0),
    levels: tuple[FiniteFloat, ...] | None = None,
    waviness: NonNegativeFloat = 2.0,
    wavelength: Wavelength = 48.0,
    edge: NonNegativeFloat = 2.0,
    detail: NonNegativeFloat = 0.03,
    spacing: PositiveFloat = 1.0,
) -> Layered:
    """Return horizontal layers with wavy interfaces: a control in which position determines the class.

    Args:
        seed: integer, or a numpy Generator, which is advanced.
        interfaces: mean positions, pixels below the centre of the image, ascending.
        levels: grey level of every layer from the top; default equal steps from 0.25 to 0.75.
        waviness: standard deviation of the interfaces, which are parallel; 0 for flat ones.
        wavelength: wavelength of the interfaces, pixels.
        edge: width of the grey-level transition, pixels; 0 for steps.
        detail: standard deviation of a fine field (wavelength 4 pixels) that is added to the grey level.
        spacing: length of a pixel, in any unit.

    Raises:
        OptionError: an option is out of range.

    Example:
        >>> layered(0, interfaces=(0,)).render((64, 64))[1].unique().tolist()
        [0, 1]
    """
    rng = np.random.default_rng(seed)
    heights = np.array(interfaces, dtype=np.float64)
    if (np.diff(heights) <= 0).any():
        raise OptionError(f"layered: interfaces must be ascending, got {interfaces}.")
    greys = np.linspace(0.25, 0.75, len(heights) + 1)
    if levels is not None:
        greys = np.array(levels, dtype=np.float64)
    if len(greys) != len(heights) + 1:
        raise OptionError(
            f"layered: levels must have {counted(len(heights) + 1, 'entry')} for "
            f"{counted(len(heights), 'interface')}, got {len(greys)}."
        )
    waves = None
    if waviness:
        # a function of the column only: wave vectors of the same length, with zero vertical component
        waves = ring_waves(rng, wavelength, 32, 0.3, waviness)
        waves = Waves(
            np.stack([0 * waves.vectors[:, 0], np.hypot(*waves.vectors.T)], -1),
            waves.phases,
            waves.amplitudes,
        )
    frozen(heights, greys)
    return Layered(
        classes=tuple(f"layer {i}" for i in range(len(greys))),
        waves=waves,
        interfaces=heights,
        levels=greys,
        edge=edge,
        detail=fine(rng, detail, None),
        spacing=spacing,
    )
