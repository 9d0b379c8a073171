"""Gaussian random fields as finite sums of cosines, evaluated at scattered points or on the pixels of an image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vispe.errors import OptionError, counted
from vispe.images.textures.checks import frozen

DETAIL = 4.0  # pixels; wavelength of the fine field that is added to grey levels


class Places:
    """Positions in a texture, (..., 2) as (y, x).

    Args:
        points: coordinates (..., 2), float64.
        period: (y, x) period of the texture, or None.
    """

    def __init__(self, points: np.ndarray, period: tuple[int, int] | None) -> None:
        self._points, self.period = points, period

    def points(self) -> np.ndarray:
        """Return the coordinates (..., 2), modulo the period if there is one."""
        return self._points if self.period is None else np.mod(self._points, self.period)

    def waves(self, vectors: np.ndarray, phases: np.ndarray, amplitudes: np.ndarray) -> np.ndarray:
        """Return Σ amplitude · cos(vector · position + phase), (...), float64.

        Args:
            vectors: (n, 2), radians per pixel.
            phases: (n,), radians.
            amplitudes: (n,).
        """
        return np.cos(self.points() @ vectors.T + phases) @ amplitudes


class Raster(Places):
    """Positions of a block of pixels: matrix · (y, x) + offset, for all rows y and columns x.

    Args:
        rows: (h,) y of the pixels, from the centre of the image.
        cols: (w,) x of the pixels, from the centre of the image.
        matrix: (2, 2).
        offset: (2,).
        period: (y, x) period of the texture, or None.
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
        """Return the sum of cosines (h, w), each separable into functions of the row and of the column.

        The order of summation is fixed, so the value of a pixel does not depend on its block.
        """
        upright = self.matrix[0, 1] == 0 == self.matrix[1, 0]
        if upright:
            # the period applies to texture coordinates, which depend on one pixel axis each
            axes = [self.matrix[0, 0] * self.rows, self.matrix[1, 1] * self.cols]
            axes = [a + b for a, b in zip(axes, self.offset, strict=True)]
            if self.period is not None:
                axes = [np.mod(a, p) for a, p in zip(axes, self.period, strict=True)]
        else:
            # k · (M p + b) = (k M) · p + k · b: the transform is absorbed into wave vectors and phases
            axes = [self.rows, self.cols]
            phases = phases + vectors @ self.offset
            vectors = vectors @ self.matrix
        # cos(u + v) = Re(exp(iu) exp(iv)), two real products per wave instead of a cosine per pixel
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
    """Sum of cosines over the plane: a Gaussian random field with zero mean.

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

    def on(self, coordinates: Places) -> np.ndarray:
        """Return the values (...) at positions."""
        return coordinates.waves(self.vectors, self.phases, self.amplitudes)


def ring_waves(
    rng: np.random.Generator,
    wavelength: float | Sequence[float],
    waves: int,
    bandwidth: float = 0.0,
    deviation: float = 1.0,
    period: tuple[int, int] | None = None,
) -> Waves:
    """Return an isotropic field with its wave vectors on rings.

    Directions are stratified over equal sectors, and every wave has a partner of the same length at a right angle, so
    that the mean square slope is equal in all directions. With a period, vectors are rounded to the reciprocal lattice
    and isotropic up to that rounding.

    Args:
        rng: random generator of directions, lengths and phases.
        wavelength: pixels, one value per ring.
        waves: number of waves per ring; even.
        bandwidth: half width of a ring, as a fraction of its radius.
        deviation: standard deviation of the field.
        period: (y, x) period of the field in pixels.

    Raises:
        OptionError: a wave is longer than the period.
    """
    rings = [wavelength] if not isinstance(wavelength, Sequence) else wavelength
    half, wave_vectors = waves // 2, []
    for length in rings:
        # one random direction per sector of a quadrant; perpendicular partners cover the other quadrant
        angle = (np.arange(half) + rng.random(half)) * (np.pi / 2 / half)
        radius = 2 * np.pi / length * (1 + bandwidth * rng.uniform(-1, 1, half))
        vector = np.stack([np.sin(angle), np.cos(angle)], -1) * radius[:, None]
        wave_vectors += [vector, np.stack([vector[:, 1], -vector[:, 0]], -1)]
    vectors = np.concatenate(wave_vectors)
    if period is not None:
        # multiples of 2 pi / period are periodic
        step = 2 * np.pi / np.array(period)
        vectors = np.rint(vectors / step) * step
        if not vectors.any(1).all():
            raise OptionError(
                f"wavelength must not exceed the period {period}, got {counted(f'{max(rings):g}', 'pixel')}."
            )
    n = len(vectors)
    # the variance of a cosine of amplitude a is a²/2, and the variances of n waves add
    amplitude = deviation * np.sqrt(2.0 / n)
    return Waves(vectors, rng.uniform(0, 2 * np.pi, n), np.full(n, amplitude))


def plane_quantiles(amplitude: float, waves: int, shares: np.ndarray) -> np.ndarray:
    """Return the quantiles (n,) of a sum of waves of equal amplitude over the infinite plane.

    Over the plane the phases of unrelated waves are independent and uniform, so the characteristic function of the
    sum is a power of the Bessel function J0. The sum is bounded, so inversion with equal steps is exact.

    Args:
        amplitude: amplitude of every wave.
        waves: number of waves.
        shares: probabilities (n,), between 0 and 1.
    """
    bound = amplitude * waves
    t = np.arange(1, 40 * waves) * (np.pi / 2 / bound)
    # J0(x), the mean of cos(x cos θ) over θ; the midpoint rule converges exponentially
    angles = (np.arange(128) + 0.5) * (np.pi / 128)
    bessel = np.mean(np.cos(amplitude * t[:, None] * np.cos(angles)), axis=1)
    weights = bessel**waves / t * (t[0] / np.pi)
    low, high = np.full(len(shares), -bound), np.full(len(shares), bound)
    # bisection of F(x) = 1/2 + x t0 / 2π + Σ φ(t) sin(t x) / (π t) t0, to double precision
    for _ in range(60):
        middle = (low + high) / 2
        below = 0.5 + middle * (t[0] / (2 * np.pi)) + np.sin(middle[:, None] * t) @ weights < shares
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    return (low + high) / 2


def fine(rng: np.random.Generator, deviation: float, period: tuple[int, int] | None) -> Waves | None:
    """Return the fine field that is added to grey levels; None if the deviation is 0."""
    if not deviation:
        return None
    return ring_waves(rng, DETAIL, 64, 0.4, deviation, period)
