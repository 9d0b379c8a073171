"""Gaussian random fields as finite sums of cosines, evaluated at scattered places or on the pixels of a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vispe.errors import OptionError
from vispe.images.textures.checks import frozen

DETAIL = 4.0  # wavelength of the fine field that is added to grey levels, pixels


class Places:
    """Places in a texture, (..., 2) as (y, x).

    Args:
        points: coordinates (..., 2), float64.
        period: (y, x) after which the texture repeats, or None.
    """

    def __init__(self, points: np.ndarray, period: tuple[int, int] | None) -> None:
        self._points, self.period = points, period

    def points(self) -> np.ndarray:
        """Return the coordinates (..., 2), those of a periodic texture from 0 to its period."""
        return self._points if self.period is None else np.mod(self._points, self.period)

    def waves(self, vectors: np.ndarray, phases: np.ndarray, amplitudes: np.ndarray) -> np.ndarray:
        """Return Σ amplitude · cos(vector · place + phase), (...), float64.

        Args:
            vectors: (n, 2), radians per pixel.
            phases: (n,), radians.
            amplitudes: (n,).
        """
        return np.cos(self.points() @ vectors.T + phases) @ amplitudes


class Raster(Places):
    """The places that the pixels of a block show: matrix · (y, x) + offset, for all rows y and columns x.

    Args:
        rows: (h,) y of the pixels, from the centre of the picture.
        cols: (w,) x likewise.
        matrix: (2, 2).
        offset: (2,).
        period: (y, x) after which the texture repeats, or None.
    """

    def __init__(
        self,
        rows: np.ndarray,
        cols: np.ndarray,
        matrix: np.ndarray,
        offset: np.ndarray,
        period: tuple[int, int] | None,
    ) -> None:
        self.rows, self.cols, self.matrix, self.offset, self.period = rows, cols, matrix, offset, period

    def points(self) -> np.ndarray:
        """Return the coordinates (h, w, 2); see `Places.points`."""
        y, x = self.rows[:, None], self.cols[None, :]
        axes = [m[0] * y + m[1] * x + b for m, b in zip(self.matrix, self.offset, strict=True)]
        if self.period is not None:
            axes = [np.mod(a, p) for a, p in zip(axes, self.period, strict=True)]
        return np.stack(axes, -1)

    def waves(self, vectors: np.ndarray, phases: np.ndarray, amplitudes: np.ndarray) -> np.ndarray:
        """Return the sum of cosines (h, w); each is a product of functions of the row and of the column.

        Sums run in the order of the waves, so a pixel has the same value in whatever block it is.
        """
        upright = self.matrix[0, 1] == 0 == self.matrix[1, 0]
        if upright:
            axes = [self.matrix[0, 0] * self.rows, self.matrix[1, 1] * self.cols]
            axes = [a + b for a, b in zip(axes, self.offset, strict=True)]
            if self.period is not None:
                axes = [np.mod(a, p) for a, p in zip(axes, self.period, strict=True)]
        else:
            axes = [self.rows, self.cols]
            phases = phases + vectors @ self.offset
            vectors = vectors @ self.matrix
        along = np.exp(1j * (vectors[:, :1] * axes[0] + phases[:, None])) * amplitudes[:, None]  # (n, h)
        across = np.exp(1j * (vectors[:, 1:] * axes[1]))  # (n, w)
        parts = [(along.real, across.real.copy()), (-along.imag, across.imag.copy())]
        total = np.zeros((len(self.rows), len(self.cols)))
        term = np.empty_like(total)
        for i in range(len(vectors)):
            for a, b in parts:
                total += np.multiply(a[i, :, None], b[i], out=term)
        return total


@dataclass(frozen=True)
class Waves:
    """A sum of cosines over the plane: a Gaussian random field, with zero mean.

    Attributes:
        vectors: wave vectors (n, 2) as (y, x), radians per pixel.
        phases: (n,), radians.
        amplitudes: (n,).
    """

    vectors: np.ndarray
    phases: np.ndarray
    amplitudes: np.ndarray

    def __post_init__(self) -> None:
        frozen(self.vectors, self.phases, self.amplitudes)

    def on(self, places: Places) -> np.ndarray:
        """Return the values (...) at places."""
        return places.waves(self.vectors, self.phases, self.amplitudes)


def ring_waves(
    rng: np.random.Generator,
    wavelength: float | Sequence[float],
    waves: int,
    bandwidth: float = 0.0,
    deviation: float = 1.0,
    period: tuple[int, int] | None = None,
) -> Waves:
    """Return an isotropic field with its wave vectors on rings.

    Directions are drawn one from each of equal sectors, and every wave has a partner of the same length at a right
    angle, so that the mean square slope is the same in all directions. With a period, vectors are moved to the next
    ones that fit, and isotropic up to that.

    Args:
        rng: draws directions, lengths and phases.
        wavelength: pixels, one for each ring.
        waves: on each ring; even.
        bandwidth: half width of a ring, as a share of its radius.
        deviation: standard deviation of the field.
        period: (y, x) in pixels after which the field repeats.

    Raises:
        OptionError: a wave is longer than the period.
    """
    rings = [wavelength] if not isinstance(wavelength, Sequence) else wavelength
    half, found = waves // 2, []
    for length in rings:
        angle = (np.arange(half) + rng.random(half)) * (np.pi / 2 / half)
        radius = 2 * np.pi / length * (1 + bandwidth * rng.uniform(-1, 1, half))
        one = np.stack([np.sin(angle), np.cos(angle)], -1) * radius[:, None]
        found += [one, np.stack([one[:, 1], -one[:, 0]], -1)]
    vectors = np.concatenate(found)
    if period is not None:
        step = 2 * np.pi / np.array(period)
        vectors = np.rint(vectors / step) * step
        if not vectors.any(1).all():
            raise OptionError(f"A wavelength of {max(rings):g} pixels does not fit into the period {period}.")
    n = len(vectors)
    amplitude = deviation * np.sqrt(2.0 / n)
    return Waves(vectors, rng.uniform(0, 2 * np.pi, n), np.full(n, amplitude))


def plane_quantiles(amplitude: float, waves: int, shares: np.ndarray) -> np.ndarray:
    """Return the values below which given shares of the whole plane lie, for waves of equal amplitude.

    On the plane the phases of unrelated waves are independent and uniform, so the characteristic function of the
    sum is a power of the Bessel function J0; its inversion by equal steps is exact, as the sum is bounded.

    Args:
        amplitude: of every wave.
        waves: how many.
        shares: (n,), between 0 and 1.
    """
    bound = amplitude * waves
    t = np.arange(1, 40 * waves) * (np.pi / 2 / bound)
    angles = (np.arange(128) + 0.5) * (np.pi / 128)
    bessel = np.mean(np.cos(amplitude * t[:, None] * np.cos(angles)), axis=1)
    weights = bessel**waves / t * (t[0] / np.pi)
    low, high = np.full(len(shares), -bound), np.full(len(shares), bound)
    for _ in range(60):
        middle = (low + high) / 2
        below = 0.5 + middle * (t[0] / (2 * np.pi)) + np.sin(middle[:, None] * t) @ weights < shares
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    return (low + high) / 2


def fine(rng: np.random.Generator, deviation: float, period: tuple[int, int] | None) -> Waves | None:
    """Return the fine field that is added to grey levels, None for a deviation of 0."""
    if not deviation:
        return None
    return ring_waves(rng, DETAIL, 64, 0.4, deviation, period)
