"""Pages of out-of-core images: array-like views that read regions on demand."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vispe.images.normalize import unit_range
from vispe.segment.features.tiles import Region
from vispe.segment.out_of_core.intensity_limits import Limits
from vispe.segment.out_of_core.source.image import OutOfCoreImage, valid_pixels

_ROWS = 64  # rows scaled per step


class PageWindow:
    """Reader of normalised grey levels of one page, with a cache of one region.

    Args:
        image: the image.
        page: number of the page.
        limits: grey levels that are mapped to 0 and 1; None maps everything to 0.
    """

    def __init__(self, image: OutOfCoreImage, page: int, limits: Limits) -> None:
        self.image, self.page, self.limits = image, page, limits
        self._held: tuple[Region, np.ndarray, np.ndarray] | None = None

    def load(self, region: Region) -> None:
        """Read a region into the cache, replacing the last one."""
        self._held = None
        self._held = (region, *self._read(region))

    def cut(self, region: Region) -> tuple[np.ndarray, np.ndarray]:
        """Return grey levels (rows, columns, c) float32, 0 without data, and the mask of data (rows, columns)."""
        cached = self._held
        if cached is None or not _contains(cached[0], region):
            return self._read(region)
        top, left = region.top - cached[0].top, region.left - cached[0].left
        index = slice(top, top + region.shape[0]), slice(left, left + region.shape[1])
        return cached[1][index], cached[2][index]

    def _read(self, region: Region) -> tuple[np.ndarray, np.ndarray]:
        """Read and scale, aligned with stored chunks, so that each is decoded once and the memory is bounded."""
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
    """Array-like view (h, w, c) of a page for indexing by regions.

    `page[rows, columns]` returns (rows, columns, c) float32 and `page[..., c]` one channel with the same indexing.
    """

    window: PageWindow
    value: float = 0.0

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and number of channels of the complete page."""
        return (*self.window.image.shape, self.window.image.channels)

    ndim = 3

    def filled(self, value: float) -> "LazyPage":
        """Return the same page with another fill value for pixels without data."""
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
        """Height and width of the complete page."""
        return self.page.shape[:2]

    def __getitem__(self, key: tuple) -> np.ndarray:
        return self.page[key][..., self.channel]


@dataclass(frozen=True)
class LazyValid:
    """Array-like view (h, w) of the mask of pixels with data."""

    window: PageWindow

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width of the complete page."""
        return self.window.image.shape

    def __getitem__(self, key: tuple) -> np.ndarray:
        return self.window.cut(_region(key, self.shape))[1]


@dataclass(frozen=True)
class StorePages:
    """Normalised pages of an out-of-core image, read on demand.

    Attributes:
        image: the image.
        limits: grey limits of each page.
    """

    image: OutOfCoreImage
    limits: Sequence[Limits]

    stack = None
    exclusions = ()

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width."""
        return self.image.shape

    def page(self, number: int) -> tuple[LazyPage, LazyValid]:
        """Return views of grey levels (h, w, c) and of the mask (h, w) of pixels with data."""
        window = PageWindow(self.image, number, self.limits[number])
        return LazyPage(window), LazyValid(window)

    def have_data(self, number: int, indices: np.ndarray) -> np.ndarray:
        """Return which pixels y * w + x (n,) have data, as (n,) bool, reading only chunks that contain them."""
        if self.image.dtype.kind != "f":
            return np.ones(len(indices), bool)
        valid, (height, width), chunk = self.page(number)[1], self.shape, self.image.chunk
        y, x = np.divmod(indices, width)
        chunk_ids = y // chunk[0] * (-(-width // chunk[1])) + x // chunk[1]
        out = np.empty(len(indices), bool)
        for chunk_id in np.unique(chunk_ids):
            in_chunk = np.flatnonzero(chunk_ids == chunk_id)
            top, left = int(y[in_chunk[0]]) // chunk[0] * chunk[0], int(x[in_chunk[0]]) // chunk[1] * chunk[1]
            region = Region(top, min(top + chunk[0], height), left, min(left + chunk[1], width))
            out[in_chunk] = valid[region.slices][y[in_chunk] - top, x[in_chunk] - left]
        return out


def _contains(outer: Region, inner: Region) -> bool:
    rows = outer.top <= inner.top and inner.bottom <= outer.bottom
    return rows and outer.left <= inner.left and inner.right <= outer.right


def _region(key: tuple, shape: tuple[int, ...]) -> Region:
    (top, bottom, _), (left, right, _) = (k.indices(n) for k, n in zip(key, shape, strict=False))
    return Region(top, bottom, left, right)
