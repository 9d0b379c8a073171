"""A page larger than memory, seen through a window: the numbers of the page, read where they are asked for."""

from dataclasses import dataclass

import numpy as np

from vispe.images.normalize import unit_range
from vispe.segment.features.tiles import Region
from vispe.segment.out_of_core.image_source import BigImage, valid_pixels
from vispe.segment.out_of_core.intensity_limits import Limits

_ROWS = 64  # rows that are scaled at once


class Window:
    """Reads normalised grey levels of one page; keeps one region, until another is loaded.

    Args:
        image: the image.
        page: number of the page.
        limits: the grey levels that become 0 and 1; None makes everything 0.
    """

    def __init__(self, image: BigImage, page: int, limits: Limits) -> None:
        self.image, self.page, self.limits = image, page, limits
        self._held: tuple[Region, np.ndarray, np.ndarray] | None = None

    def load(self, region: Region) -> None:
        """Read a region and keep it in place of the last one; parts of it are then at hand."""
        self._held = None
        self._held = (region, *self._read(region))

    def cut(self, region: Region) -> tuple[np.ndarray, np.ndarray]:
        """Return grey levels (rows, columns, c) float32, 0 where there is no data, and (rows, columns) bool of data."""
        held = self._held
        if held is None or not _contains(held[0], region):
            return self._read(region)
        top, left = region.top - held[0].top, region.left - held[0].left
        where = slice(top, top + region.shape[0]), slice(left, left + region.shape[1])
        return held[1][where], held[2][where]

    def _read(self, region: Region) -> tuple[np.ndarray, np.ndarray]:
        """Read and scale, along stored chunks, so that each is decoded once and little is held twice."""
        grey = np.zeros((*region.shape, self.image.channels), np.float32)
        valid = np.empty(region.shape, bool)
        height = self.image.chunk[0]
        for first in range(region.top - region.top % height, region.bottom, height):
            top, bottom = max(first, region.top), min(first + height, region.bottom)
            raw = self.image.read(self.page, Region(top, bottom, region.left, region.right))
            for start in range(0, bottom - top, _ROWS):
                part = raw[start : start + _ROWS]
                rows = slice(top - region.top + start, top - region.top + start + len(part))
                valid[rows] = valid_pixels(part)
                if self.limits is not None:
                    grey[rows] = unit_range(part, valid[rows], *self.limits)
        return grey, valid


@dataclass(frozen=True)
class LazyPage:
    """Stands for the array (h, w, c) of a page where `vispe.segment` indexes it by regions.

    `page[rows, columns]` gives (rows, columns, c) float32 and `page[..., c]` one channel, to be indexed likewise.
    """

    window: Window
    value: float = 0.0

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and number of channels of the whole page."""
        return (*self.window.image.shape, self.window.image.channels)

    ndim = 3

    def filled(self, value: float) -> "LazyPage":
        """Return the same page with another value where there is no data."""
        return LazyPage(self.window, value)

    def __getitem__(self, key: tuple) -> "np.ndarray | LazyChannel":
        if key[0] is Ellipsis:
            return LazyChannel(self, key[1])
        grey, valid = self.window.cut(_region(key, self.shape))
        if self.value == 0 or valid.all():
            return grey
        return np.where(valid[..., None], grey, np.float32(self.value))


@dataclass(frozen=True)
class LazyChannel:
    """One channel of a `LazyPage`, (h, w)."""

    page: LazyPage
    channel: int

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width of the whole page."""
        return self.page.shape[:2]

    def __getitem__(self, key: tuple) -> np.ndarray:
        return self.page[key][..., self.channel]


@dataclass(frozen=True)
class LazyValid:
    """Stands for the array (h, w) of the pixels with data."""

    window: Window

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width of the whole page."""
        return self.window.image.shape

    def __getitem__(self, key: tuple) -> np.ndarray:
        return self.window.cut(_region(key, self.shape))[1]


def _contains(outer: Region, inner: Region) -> bool:
    rows = outer.top <= inner.top and inner.bottom <= outer.bottom
    return rows and outer.left <= inner.left and inner.right <= outer.right


def _region(key: tuple, shape: tuple[int, ...]) -> Region:
    (top, bottom, _), (left, right, _) = (k.indices(n) for k, n in zip(key, shape, strict=False))
    return Region(top, bottom, left, right)
