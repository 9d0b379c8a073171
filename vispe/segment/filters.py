"""Pixel features that turn with the image: 26 multi-scale filters per channel.

Intensity and, for every Gaussian scale, the smoothed grey level, the gradient magnitude, the two eigenvalues
of the Hessian and the local standard deviation. All of them commute with the eight rotations by 90° and
reflections of the image, so a sample lying another way round gets the same features.

Smoothing is written as products with banded matrices, block by block: on a CPU this is several times faster
than a loop over taps for the wide kernels, the reflecting border is part of the matrix, and any region of
the image gets the same numbers as the whole. Sums run in float64, since a variance is a difference of
near-equal numbers.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vispe.errors import OptionError, ShapeError
from vispe.segment.tiles import Region

SIGMAS = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Default Gaussian scales, in pixels."""

_TRUNCATE = 4.0  # kernel radius in units of sigma
_BLOCK = 128  # output positions per matrix product


class Filters:
    """Computes the filter features of a page, whole or region by region.

    Args:
        sigmas: Gaussian scales in pixels, each > 0.
        device: torch device of the sums; needs float64, so `'mps'` falls back to the CPU.

    Raises:
        OptionError: no scale, or one that is not positive.
    """

    def __init__(self, sigmas: tuple[float, ...] = SIGMAS, device: str = "cpu") -> None:
        if not sigmas or min(sigmas) <= 0:
            raise OptionError(f"filters need scales above 0 px, got sigmas={tuple(sigmas)}; use {SIGMAS}.")
        self.sigmas = tuple(float(s) for s in sigmas)
        self.device = torch.device("cpu" if device.startswith("mps") else device)

    def names(self, channels: int = 1) -> list[str]:
        """Name every output channel, in order, for an image of `channels` channels."""
        kinds = ("gaussian", "gradient", "hessian_large", "hessian_small", "std")
        one = ["intensity", *(f"{kind}_{sigma:g}" for sigma in self.sigmas for kind in kinds)]
        return one if channels == 1 else [f"c{c}.{name}" for c in range(channels) for name in one]

    def __call__(self, page: np.ndarray, region: Region | None = None) -> np.ndarray:
        """Compute the features of `region` (default: all) of a page.

        Args:
            page: (h, w, c) float, grey levels; NaN and infinite pixels are no data. Such a pixel has no
                weight in the features of its neighbours (normalised convolution), and all its own features
                are 0.
            region: rectangle inside the page; the pixels around it are used, so the result equals the same
                rectangle of the whole page's features.

        Returns:
            (rows, columns, c * (1 + 5 * scales)) float32; the channels of the image one after the other.

        Raises:
            ShapeError: `page` is not (h, w, c) with at least one pixel.
        """
        if page.ndim != 3 or 0 in page.shape:
            raise ShapeError(
                f"filters need a page (h, w, c) with at least one pixel, got shape {page.shape}."
            )
        region = region or Region(0, page.shape[0], 0, page.shape[1])
        count = 1 + 5 * len(self.sigmas)
        out = np.empty((*region.shape, page.shape[2] * count), np.float32)
        for channel in range(page.shape[2]):
            self._channel(page[..., channel], region, out[..., channel * count : (channel + 1) * count])
        return out

    def _channel(self, grey: np.ndarray, region: Region, out: np.ndarray) -> None:
        """Fill `out` (rows, columns, 1 + 5 scales) with the features of one channel."""
        height, width = grey.shape
        halo = 1 + max(_radius(s) for s in self.sigmas)
        top, left = max(region.top - halo, 0), max(region.left - halo, 0)
        crop = grey[top : region.bottom + halo, left : region.right + halo]
        valid = np.isfinite(crop)
        complete = bool(valid.all())
        values = torch.from_numpy(np.where(valid, crop, 0).astype(np.float64)).to(self.device)
        moments = [values, values * values]
        if not complete:
            moments.append(torch.from_numpy(valid.astype(np.float64)).to(self.device))
        stack = torch.stack(moments)
        out[..., 0] = values[
            region.top - top : region.bottom - top, region.left - left : region.right - left
        ].cpu()
        rows = _Span(region.top, region.bottom, top, height)
        columns = _Span(region.left, region.right, left, width)
        for number, sigma in enumerate(self.sigmas):
            smooth = _smooth(stack, sigma, rows, columns)
            if not complete:
                smooth = smooth[:2] / smooth[2].clamp_min(torch.finfo(torch.float64).tiny)
            out[..., 1 + 5 * number : 6 + 5 * number] = _features(smooth[0], smooth[1], rows, columns).cpu()
        if not complete:
            out[~np.isfinite(grey[region.slices])] = 0


@dataclass(frozen=True)
class _Span:
    """Wanted positions `start..stop` along one axis of `length`, read from an array that begins at `origin`."""

    start: int
    stop: int
    origin: int
    length: int

    @property
    def padded(self) -> tuple[int, int]:
        """The span with one more position on both sides, where the image has one."""
        return max(self.start - 1, 0), min(self.stop + 1, self.length)


def _radius(sigma: float) -> int:
    return int(_TRUNCATE * sigma + 0.5)


def _operator(start: int, stop: int, sigma: float, length: int) -> tuple[int, int, Tensor]:
    """Give the matrix that smooths positions `start..stop`, with the range of positions it reads.

    The border reflects with the edge pixel repeated (d c b a | a b c d | d c b a), as often as the kernel is
    wider than the axis.
    """
    radius = _radius(sigma)
    offsets = np.arange(-radius, radius + 1)
    kernel = np.exp(-0.5 * (offsets / sigma) ** 2)
    kernel /= kernel.sum()
    first, last = max(start - radius, 0), min(stop + radius, length)
    reads = (np.arange(start, stop)[:, None] + offsets) % (2 * length)
    reads = np.where(reads < length, reads, 2 * length - 1 - reads) - first
    matrix = np.zeros((stop - start, last - first))
    np.add.at(matrix, (np.arange(stop - start)[:, None], reads), kernel)
    return first, last, torch.from_numpy(matrix)


def _smooth(stack: Tensor, sigma: float, rows: _Span, columns: _Span) -> Tensor:
    """Smooth (m, h, w) on the padded spans -> (m, padded rows, padded columns)."""
    start, stop = columns.padded
    parts = []
    for block in range(start, stop, _BLOCK):
        first, last, matrix = _operator(block, min(block + _BLOCK, stop), sigma, columns.length)
        piece = stack[:, :, first - columns.origin : last - columns.origin]
        parts.append(piece @ matrix.T.to(stack.device))
    stack = torch.cat(parts, dim=2)
    start, stop = rows.padded
    parts = []
    for block in range(start, stop, _BLOCK):
        first, last, matrix = _operator(block, min(block + _BLOCK, stop), sigma, rows.length)
        parts.append(matrix.to(stack.device) @ stack[:, first - rows.origin : last - rows.origin])
    return torch.cat(parts, dim=1)


def _features(mean: Tensor, square: Tensor, rows: _Span, columns: _Span) -> Tensor:
    """Derive the five features of a scale from its smoothed moments -> (rows, columns, 5)."""
    pads = [edge for span in (columns, rows) for edge in (span.start == 0, span.stop == span.length)]
    s = torch.nn.functional.pad(mean[None], [int(p) for p in pads], mode="replicate")[
        0
    ]  # one pixel on every side
    inner, up, down = s[1:-1, 1:-1], s[:-2, 1:-1], s[2:, 1:-1]
    left, right = s[1:-1, :-2], s[1:-1, 2:]
    gradient = torch.hypot(down - up, right - left) / 2
    yy, xx = up + down - 2 * inner, left + right - 2 * inner
    xy = ((s[2:, 2:] + s[:-2, :-2]) - (s[2:, :-2] + s[:-2, 2:])) / 4
    half_trace, spread = (yy + xx) / 2, torch.hypot((yy - xx) / 2, xy)
    top, left_ = int(not pads[2]), int(not pads[0])
    height, width = inner.shape
    second = square[top : top + height, left_ : left_ + width]
    std = (second - inner * inner).clamp_min(0).sqrt()
    return torch.stack([inner, gradient, half_trace + spread, half_trace - spread, std], dim=-1)
