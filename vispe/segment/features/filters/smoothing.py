"""Gaussian smoothing along an axis, as products with banded matrices.

On a CPU this is several times faster than a loop over taps for wide kernels, and the reflecting border is part of the
matrix, so any region of an image has the same numbers as the complete image.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

_TRUNCATE = 4.0  # kernel radius in units of sigma


@dataclass(frozen=True)
class Axis:
    """An image axis of `length` pixels, in an array that starts at position `origin`."""

    origin: int
    length: int


def kernel_radius(sigma: float) -> int:
    """Return the radius in pixels at which a Gaussian is truncated."""
    return int(_TRUNCATE * sigma + 0.5)


def smoothing(start: int, stop: int, sigma: float, axis: Axis) -> tuple[int, int, Tensor]:
    """Return the matrix that smooths positions `start..stop`, and the range of the array it reads (first, last).

    Positions outside the image are clamped to the edge.
    """
    radius = kernel_radius(sigma)
    first, last = _reach(start, stop, radius, axis.length)
    # far from the border all positions share one cached matrix
    if start >= radius and stop + radius <= axis.length:
        matrix = _matrix(radius, radius + stop - start, sigma, 2 * radius + stop - start)
    else:
        matrix = _matrix(start, stop, sigma, axis.length)
    return first - axis.origin, last - axis.origin, matrix


def _reach(start: int, stop: int, radius: int, length: int) -> tuple[int, int]:
    """Return the range of pixels needed to smooth positions `start..stop`."""
    return max(min(start, length - 1) - radius, 0), min(max(stop, 1) + radius, length)


@lru_cache(maxsize=128)
def _matrix(start: int, stop: int, sigma: float, length: int) -> Tensor:
    """Return the weights (positions, pixels in reach) of a Gaussian on an axis of `length` pixels.

    The border reflects with the edge pixel repeated (d c b a | a b c d | d c b a), several times if the kernel is
    wider than the axis.
    """
    radius = kernel_radius(sigma)
    offsets = np.arange(-radius, radius + 1)
    kernel = np.exp(-0.5 * (offsets / sigma) ** 2)
    kernel /= kernel.sum()
    first, last = _reach(start, stop, radius, length)
    reads = (np.arange(start, stop).clip(0, length - 1)[:, None] + offsets) % (2 * length)
    reads = np.where(reads < length, reads, 2 * length - 1 - reads) - first
    matrix = np.zeros((stop - start, last - first))
    np.add.at(matrix, (np.arange(stop - start)[:, None], reads), kernel)
    return torch.from_numpy(matrix)


def smooth_rows(stack: Tensor, sigma: float, axis: Axis, start: int, stop: int) -> Tensor:
    """Smooth each row of a matrix at positions `start..stop`."""
    out = stack.new_empty((len(stack), stop - start))
    block = min(max(2 * kernel_radius(sigma), 32), 128)
    for at in range(start, stop, block):
        end = min(at + block, stop)
        first, last, matrix = smoothing(at, end, sigma, axis)
        torch.mm(stack[:, first:last], matrix.T.to(stack.device), out=out[:, at - start : end - start])
    return out
