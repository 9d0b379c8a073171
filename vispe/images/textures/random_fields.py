"""Textures made of waves: thresholded Gaussian random fields, and layers with wavy interfaces."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import numpy as np

from vispe.errors import OptionError
from vispe.images.textures.checks import Fractions, Seed, Size, both, cumulated, frozen, smooth
from vispe.images.textures.texture import Texture
from vispe.images.textures.waves import Places, Raster, Waves, fine, plane_quantiles, ring_waves
from vispe.options import Chance, Limits, NotNegative, Number, Positive, checked

Wavelength = Positive | Annotated[tuple[Positive, ...], Limits(least=1)]


@dataclass(frozen=True, eq=False, kw_only=True)
class RandomField(Texture):
    """A Gaussian random field, cut into classes at thresholds; made by `random_field`.

    Attributes:
        waves: the field, of unit variance.
        thresholds: between the classes (classes - 1,), ascending.
        contrast: grey levels for one standard deviation of the field, around 0.5.
    """

    waves: Waves = field(repr=False)
    thresholds: np.ndarray
    contrast: float

    def _evaluate(self, places: Places) -> tuple[np.ndarray, np.ndarray]:
        values = self.waves.on(places)
        return 0.5 + self.contrast * values, np.searchsorted(self.thresholds, values)


@checked
def random_field(
    seed: Seed,
    *,
    wavelength: Wavelength = 16.0,
    waves: Annotated[int, Limits(least=8, step=2)] = 128,
    bandwidth: Chance = 0.15,
    fractions: Fractions = (0.5, 0.5),
    exact_over: Size | None = None,
    period: Size | None = None,
    contrast: Positive = 0.125,
    detail: NotNegative = 0.0,
    stretch: Positive = 1.0,
    direction: Number = 0.0,
    spacing: Positive = 1.0,
) -> RandomField:
    """Return a Gaussian random field as a finite sum of cosines, with thresholded phases: worms, blobs, foams.

    The picture shows the field itself, so a threshold of the grey level is the perfect segmentation.

    Args:
        seed: whole number, or a numpy Generator, which is advanced.
        wavelength: pixels; several make several rings of wave vectors.
        waves: cosines on each ring; even, at least 8. Time grows with it.
        bandwidth: half width of each ring, as a share of its radius.
        fractions: shares of area of the classes, from dark to bright; they sum to 1.
        exact_over: size of the centred, unturned picture on whose pixels the shares hold to the pixel. By default
            they hold so over one period, or else, without a period, on the infinite plane, around which every picture
            varies. Takes 32 bytes for each of these pixels while the texture is made.
        period: pixels after which the field repeats; by default it never does.
        contrast: standard deviation of the grey level; nearly all levels are in [0, 1] up to 0.125.
        detail: standard deviation of a fine field (wavelength 4 pixels) that is added to the grey level alone.
        stretch: elongation; above 1 for a control that is not isotropic.
        direction: of the elongation, degrees counter-clockwise from the horizontal.
        spacing: length of a pixel, in any unit.

    Raises:
        OptionError: an option is out of its range.
    """
    rng = np.random.default_rng(seed)
    cuts = cumulated(fractions)
    shape = None if period is None else both(period)
    made = ring_waves(rng, wavelength, waves, bandwidth, period=shape)
    over = shape if exact_over is None else both(exact_over)
    shared = {"period": shape, "stretch": stretch, "direction": direction, "spacing": spacing}
    field_ = {"waves": made, "thresholds": np.zeros(len(cuts)), "contrast": contrast}
    names = tuple(f"phase {i}" for i in range(len(cuts) + 1))
    texture = RandomField(classes=names, detail=fine(rng, detail, shape), **field_, **shared)
    if over is None:
        thresholds = plane_quantiles(made.amplitudes[0], len(made.phases), cuts)
    else:
        rows, cols = (np.arange(n) - (n - 1) / 2 for n in over)
        values = np.sort(made.on(Raster(rows, cols, texture.unstretched(), np.zeros(2), shape)), axis=None)
        at = np.clip(np.rint(cuts * values.size).astype(int), 1, values.size - 1)
        thresholds = (values[at - 1] + values[at]) / 2
    frozen(thresholds)
    object.__setattr__(texture, "thresholds", thresholds)
    return texture


@dataclass(frozen=True, eq=False, kw_only=True)
class Layered(Texture):
    """Layers one below the other; made by `layered`.

    Attributes:
        waves: height of every interface about its mean, pixels; None for flat ones.
        interfaces: mean heights (layers - 1,), pixels below the centre, ascending.
        levels: grey levels (layers,).
        edge: width over which the grey level changes, pixels.
    """

    waves: Waves | None = field(repr=False)
    interfaces: np.ndarray
    levels: np.ndarray
    edge: float

    def _evaluate(self, places: Places) -> tuple[np.ndarray, np.ndarray]:
        depth = places.points()[..., 0]
        if self.waves is not None:
            depth = depth - self.waves.on(places)
        grey = np.full(depth.shape, self.levels[0])
        for y, step in zip(self.interfaces, np.diff(self.levels), strict=True):
            below = (depth - y) / self.edge + 0.5 if self.edge else depth >= y
            grey += step * smooth(below)
        return grey, np.searchsorted(self.interfaces, depth, side="right")


@checked
def layered(
    seed: Seed,
    *,
    interfaces: Annotated[tuple[Number, ...], Limits(least=1)] = (-32.0, 32.0),
    levels: tuple[Number, ...] | None = None,
    waviness: NotNegative = 2.0,
    wavelength: Wavelength = 48.0,
    edge: NotNegative = 2.0,
    detail: NotNegative = 0.03,
    spacing: Positive = 1.0,
) -> Layered:
    """Return horizontal layers with wavy interfaces: a control where the place does tell the class.

    Args:
        seed: whole number, or a numpy Generator, which is advanced.
        interfaces: mean heights, pixels below the centre of the picture, ascending.
        levels: grey level of every layer from the top; equal steps from 0.25 to 0.75 by default.
        waviness: standard deviation of the height of the interfaces, which are parallel; 0 for flat ones.
        wavelength: of the interfaces, pixels.
        edge: width over which the grey level changes, pixels; 0 for steps.
        detail: standard deviation of a fine field (wavelength 4 pixels) that is added to the grey level.
        spacing: length of a pixel, in any unit.

    Raises:
        OptionError: an option is out of its range.
    """
    rng = np.random.default_rng(seed)
    heights = np.array(interfaces, dtype=np.float64)
    if (np.diff(heights) <= 0).any():
        raise OptionError(f"interfaces must be ascending heights, got {interfaces}.")
    greys = np.linspace(0.25, 0.75, len(heights) + 1)
    if levels is not None:
        greys = np.array(levels, dtype=np.float64)
    if len(greys) != len(heights) + 1:
        raise OptionError(
            f"{len(heights)} interfaces separate {len(heights) + 1} layers, got {len(greys)} levels."
        )
    waves = None
    if waviness:
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
