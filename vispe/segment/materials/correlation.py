"""Two-point correlation: probability that two points at distance r are both of a class."""

from dataclasses import dataclass

import numpy as np

from vispe.errors import ShapeError

REACH = 256
"""Longest lag in pixels; for pages below 512 px along their shorter side, half of that side."""

_TILE = 1024  # side in pixels of the tiles of the FFT
_FIT = 3  # number of shells in the fit of the slope at 0


@dataclass(frozen=True, eq=False)
class Correlation:
    """Two-point correlation of a class, averaged over directions.

    Attributes:
        distance: (n,) mean length of the lags of a shell, in the unit of `pixel`; the first is 0.
        value: (n,) fraction of the pairs of points at this distance that are both of the class; NaN without pairs.
        specific_surface: boundary surface per volume from the slope at 0, 1 / unit of `pixel`; NaN if the fit is
            impossible.
    """

    distance: np.ndarray
    value: np.ndarray
    specific_surface: float


def two_point_correlation(
    inside: np.ndarray, valid: np.ndarray, pixel: tuple[float, float] = (1.0, 1.0)
) -> Correlation:
    """Compute S2(r) of a class on a page without periodic boundary conditions.

    S2(h) = pairs of pixels at lag h that are both inside / pairs of pixels at lag h that both have data, and S2(r) is
    its mean over all lags of a shell one pixel wide. Counts are exact (FFT of integers, rounded).
    S_V = -4 S2'(0) (Debye, Anderson and Brumberger, Journal of Applied Physics 28, 1957), with the slope of a parabola
    through S2(0) and the first three shells.

    Args:
        inside: (h, w) bool.
        valid: (h, w) bool, pixels with data.
        pixel: (y, x), side lengths of a pixel.

    Raises:
        ShapeError: shapes differ, or not one page.

    Example:
        >>> inside = np.arange(40)[None].repeat(30, 0) < 20
        >>> float(two_point_correlation(inside, np.ones_like(inside)).value[0])
        0.5
    """
    if inside.ndim != 2 or inside.shape != valid.shape:
        raise ShapeError(
            f"inside {inside.shape} and valid {valid.shape} must be one page (h, w) of equal shape."
        )
    reach = max(min(min(inside.shape) // 2, REACH), 1)
    both = lag_counts(inside & valid, reach)
    pairs = lag_counts(valid, reach)
    # shells of lags, one pixel wide, up to the longest lag along the shorter reach
    offsets = np.arange(-reach, reach + 1)
    length = np.hypot(offsets[:, None] * pixel[0], offsets * pixel[1])
    width = max(pixel)
    shell = np.rint(length / width).astype(int)
    last = int(reach * min(pixel) / width)
    within_reach = shell <= last
    count = np.bincount(shell[within_reach], minlength=last + 1)
    distance = np.bincount(shell[within_reach], length[within_reach], last + 1) / np.maximum(count, 1)
    total = np.bincount(shell[within_reach], pairs[within_reach], last + 1)
    hits = np.bincount(shell[within_reach], both[within_reach], last + 1)
    value = np.divide(hits, total, out=np.full(last + 1, np.nan), where=total > 0)
    return Correlation(distance, value, _surface(distance[: _FIT + 1], value[: _FIT + 1]))


def lag_counts(mask: np.ndarray, reach: int) -> np.ndarray:
    """Count the pairs of pixels of a mask at every lag up to `reach` along each axis.

    Args:
        mask: (h, w) bool.
        reach: longest lag in pixels.

    Returns:
        (2 reach + 1, 2 reach + 1) int64; the lag (0, 0) is in the middle.
    """
    from scipy.fft import irfft2, next_fast_len, rfft2

    h, w = mask.shape
    out = np.zeros((2 * reach + 1, 2 * reach + 1), np.int64)
    for top in range(0, h, _TILE):
        for left in range(0, w, _TILE):
            tile = mask[top : top + _TILE, left : left + _TILE]
            if not tile.any():
                continue
            # cross-correlate a tile with itself and its surroundings; zeros beyond the page
            surroundings = np.zeros([n + 2 * reach for n in tile.shape], bool)
            y, x = max(top - reach, 0), max(left - reach, 0)
            part = mask[y : top + tile.shape[0] + reach, x : left + tile.shape[1] + reach]
            y, x = y - top + reach, x - left + reach
            surroundings[y : y + part.shape[0], x : x + part.shape[1]] = part
            size = [next_fast_len(n, real=True) for n in surroundings.shape]
            product = np.conj(rfft2(tile.astype(float), size)) * rfft2(surroundings.astype(float), size)
            tile_counts = irfft2(product, size)[: len(out), : len(out)]
            out += np.rint(tile_counts).astype(np.int64)
    return out


def _surface(distance: np.ndarray, value: np.ndarray) -> float:
    """Return -4 times the slope at 0 of a parabola through the first value."""
    if len(value) <= _FIT or not np.isfinite(value).all():
        return float("nan")
    r, drop = distance[1:], value[1:] - value[0]
    slope = np.linalg.lstsq(np.stack([r, r * r], 1), drop, rcond=None)[0][0]
    return float(-4 * slope)
