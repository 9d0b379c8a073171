"""Equivariant pixel features: 26 multi-scale filters per channel.

Intensity and, for every Gaussian scale, the smoothed grey level, the gradient magnitude, the two eigenvalues
of the Hessian and the local standard deviation. All of them are equivariant to the eight rotations by 90° and
reflections of the image, so a sample in another orientation has the same features.

Any region of the image gets the same numbers as the complete image. Sums and finite differences are computed in
float64, since a variance, or a second derivative at a wide scale, is a difference of nearly equal numbers; the results
are float32. Strips bound the intermediate arrays to the CPU cache.
"""

import hashlib

import numpy as np
import torch
from torch import Tensor

from vispe.errors import OptionError, ShapeError
from vispe.segment.features.filters.smoothing import Axis, kernel_radius, smooth_rows, smoothing
from vispe.segment.features.spill_cache import SpillCache
from vispe.segment.features.tiles import Region

SIGMAS = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Default Gaussian scales, in pixels."""

_STRIP = 64  # rows smoothed and differentiated per step
_CHUNK = 1024  # columns per step
_RECTANGLE = 4096  # fixed cost of a rectangle, in pixels
_CACHE = 384 << 20  # bytes of planes that are stored between the training and the prediction of an image


class Filters:
    """Filter features of a page, or of a region of it.

    Args:
        sigmas: Gaussian scales in pixels, each > 0.
        device: torch device of the sums; needs float64, so `'mps'` falls back to the CPU.

    Raises:
        OptionError: there is no scale, or a scale is not positive.
    """

    def __init__(self, sigmas: tuple[float, ...] = SIGMAS, device: str = "cpu") -> None:
        if not sigmas or min(sigmas) <= 0:
            raise OptionError(f"filters need scales above 0 px, got sigmas={tuple(sigmas)}; use {SIGMAS}.")
        self.sigmas = tuple(float(s) for s in sigmas)
        self.device = torch.device("cpu" if device.startswith("mps") else device)
        self._cache = SpillCache(_CACHE, disk=0)

    @property
    def reach(self) -> int:
        """Margin in pixels around a region that its features depend on."""
        return 1 + max(kernel_radius(s) for s in self.sigmas)

    def names(self, channels: int = 1) -> list[str]:
        """Return the name of every output channel, in order, for an image of `channels` channels."""
        kinds = ("gaussian", "gradient", "hessian_large", "hessian_small", "std")
        names_of_channel = ["intensity", *(f"{kind}_{sigma:g}" for sigma in self.sigmas for kind in kinds)]
        return (
            names_of_channel
            if channels == 1
            else [f"c{c}.{name}" for c in range(channels) for name in names_of_channel]
        )

    def __call__(self, page: np.ndarray, region: Region | None = None) -> np.ndarray:
        """Compute the features of `region` (default: all) of a page.

        Args:
            page: (h, w, c) float, grey levels; NaN and infinite pixels have no data. Such a pixel has no
                weight in the features of its neighbours (normalised convolution), and all its own features
                are 0.
            region: rectangle inside the page; the surrounding pixels are used, so the result equals the same
                rectangle of the features of the complete page.

        Returns:
            (rows, columns, c * (1 + 5 * scales)) float32; the features of each image channel in turn.
            The array is a view: in memory each feature is one plane.

        Raises:
            ShapeError: `page` is not (h, w, c) with at least one pixel.
        """
        return np.moveaxis(self.planes(page, region), 0, -1)

    def planes(self, page: np.ndarray, region: Region | None = None, again: bool = False) -> np.ndarray:
        """Return the features as `__call__`, with the features first: (c * (1 + 5 * scales), rows, columns) float32.

        `again` is true if the same region will be requested once more: its features are cached until then, up to a
        limit.
        """
        if page.ndim != 3 or 0 in page.shape:
            raise ShapeError(
                f"filters need a page (h, w, c) with at least one pixel, got shape {page.shape}."
            )
        region = region or Region(0, page.shape[0], 0, page.shape[1])
        # windows of images larger than memory are not cached: the memory of those runs is planned
        key = self._key(page, region) if isinstance(page, np.ndarray) else None
        if key is not None and (cached := self._cache.take(key)) is not None:
            planes = cached
        else:
            planes = self._computed(page, region)
        if key is not None and again:
            self._cache.put(key, planes)
        return planes.numpy()

    def _computed(self, page: np.ndarray, region: Region) -> Tensor:
        count = 1 + 5 * len(self.sigmas)
        out = torch.empty((page.shape[2] * count, *region.shape), device=self.device)
        for channel in range(page.shape[2]):
            self._channel(page[..., channel], region, out[channel * count : (channel + 1) * count])
        return out.cpu()

    def _key(self, page: np.ndarray, region: Region) -> bytes:
        """Return a key of everything that the features of a region depend on: its pixels, and the edges of the page."""
        halo = self.reach
        top, left = max(region.top - halo, 0), max(region.left - halo, 0)
        crop = page[top : region.bottom + halo, left : region.right + halo]
        at = (region.top - top, region.left - left, *region.shape, *crop.shape)
        content = hashlib.blake2b(np.ascontiguousarray(crop), digest_size=16).digest()
        return repr((at, str(crop.dtype))).encode() + content

    def at(self, page: np.ndarray, y: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Return the features (n, f) of pixels (y, x), each (n,), computed in rectangles around groups of pixels."""
        out = np.empty((len(y), len(self.names(page.shape[2]))), np.float32)
        for index in group_pixels(y, x, self.reach):
            rows, columns = y[index], x[index]
            bounds = Region(*(int(n) for n in (rows.min(), rows.max() + 1, columns.min(), columns.max() + 1)))
            out[index] = self.planes(page, bounds)[:, rows - bounds.top, columns - bounds.left].T
        return out

    def _channel(self, grey: np.ndarray, region: Region, out: Tensor) -> None:
        """Fill `out` (1 + 5 scales, rows, columns) with the features of one channel."""
        height, width = grey.shape
        halo = self.reach
        top, left = max(region.top - halo, 0), max(region.left - halo, 0)
        crop = grey[top : region.bottom + halo, left : region.right + halo]
        valid = np.isfinite(crop)
        complete = bool(valid.all())
        grey64 = crop if complete else np.where(valid, crop, 0)
        values = torch.from_numpy(grey64.astype(np.float64)).to(self.device)
        # first and second moments, for the mean and the standard deviation
        moments = [values, values * values]
        if not complete:
            moments.append(torch.from_numpy(valid.astype(np.float64)).to(self.device))
        stack = torch.cat(moments)  # stacked along the rows, for one matrix product
        out[0] = values[region.top - top : region.bottom - top, region.left - left : region.right - left]
        rows = Axis(top, height)
        columns = Axis(left, width)
        for start in range(region.left, region.right, _CHUNK):
            stop = min(start + _CHUNK, region.right)
            for number, sigma in enumerate(self.sigmas):
                smooth = smooth_rows(stack, sigma, columns, start - 1, stop + 1)
                smooth = smooth.view(len(moments), len(values), -1)
                part = out[1 + 5 * number : 6 + 5 * number, :, start - region.left : stop - region.left]
                for first in range(region.top, region.bottom, _STRIP):
                    last = min(first + _STRIP, region.bottom)
                    begin, end, matrix = smoothing(first - 1, last + 1, sigma, rows)
                    moment_maps = matrix.to(self.device) @ smooth[:, begin:end]
                    if not complete:
                        moment_maps[:2] /= moment_maps[2].clamp_min(torch.finfo(torch.float64).tiny)
                    _features(moment_maps[0], moment_maps[1], part[:, first - region.top : last - region.top])
        if not complete:
            no_data = torch.from_numpy(~np.isfinite(grey[region.slices])).to(self.device)
            out.masked_fill_(no_data, 0)


def group_pixels(y: np.ndarray, x: np.ndarray, reach: int) -> list[np.ndarray]:
    """Group pixels (y, x), each (n,), into rectangles that are cheaper to filter than their common bounding box.

    Args:
        y: rows.
        x: columns.
        reach: margin in pixels around a rectangle that is filtered with it.

    Returns:
        The indices of the pixels of each rectangle.
    """

    def cost(index: np.ndarray) -> int:
        return (int(np.ptp(y[index])) + 1 + reach) * (int(np.ptp(x[index])) + 1) + _RECTANGLE

    def split(index: np.ndarray) -> list[np.ndarray]:
        choices = []
        for coordinates in (y[index], x[index]):
            lower = coordinates < (int(coordinates.min()) + int(coordinates.max()) + 1) // 2
            if lower.any():
                choices.append((index[lower], index[~lower]))
        best = min(choices, key=lambda halves: sum(map(cost, halves)), default=None)
        if best is None or sum(map(cost, best)) >= cost(index):
            return [index]
        return split(best[0]) + split(best[1])

    return split(np.arange(len(y)))


def _features(mean: Tensor, square: Tensor, out: Tensor) -> None:
    """Compute the five features of a scale from its smoothed moments.

    Args:
        mean: (rows + 2, columns + 2) float64, with a margin of one pixel.
        square: (rows + 2, columns + 2) float64, smoothed squares.
        out: (5, rows, columns) float32, overwritten.
    """
    smooth, gradient, large, small, std = out
    inner = mean[1:-1, 1:-1]
    smooth.copy_(inner)
    # standard deviation: E[x^2] - E[x]^2
    std.copy_(torch.addcmul(square[1:-1, 1:-1], inner, inner, value=-1)).clamp_min_(0).sqrt_()
    dx = (mean[:, 1:] - mean[:, :-1]).float()
    dy = (mean[1:, 1:-1] - mean[:-1, 1:-1]).float()
    gx, gy = dx[:, 1:] + dx[:, :-1], dy[1:] + dy[:-1]  # twice the central difference
    xx, yy, xy = dx[1:-1, 1:] - dx[1:-1, :-1], dy[1:] - dy[:-1], gx[2:] - gx[:-2]  # xy: four times
    torch.mul(gy, gy, out=gradient).addcmul_(gx[1:-1], gx[1:-1]).sqrt_().mul_(0.5)
    # eigenvalues of the 2 x 2 Hessian: half the trace plus and minus half the discriminant
    trace, spread = xx + yy, xx.sub_(yy).square_().addcmul_(xy, xy, value=0.25).sqrt_()
    torch.add(trace, spread, out=large).mul_(0.5)
    torch.sub(trace, spread, out=small).mul_(0.5)
