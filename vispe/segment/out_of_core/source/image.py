"""Out-of-core images, read region by region."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from vispe.images.formats.decoded_image import to_pages
from vispe.images.formats.units import microns, seconds
from vispe.images.orientation import AS_STORED, Frame
from vispe.images.remote import is_url, read_errors, unreadable
from vispe.segment.features.tiles import Region


@dataclass(frozen=True)
class PageAxis:
    """An axis of pages, as described by OME-Zarr."""

    name: str
    kind: str | None
    unit: str | None
    scale: float
    length: int


@dataclass(frozen=True, eq=False)
class OutOfCoreImage:
    """An image whose regions are read on demand.

    Attributes:
        path: the store or file.
        array: the stored array, of any number of dimensions.
        axes: one letter per dimension, such as 'TCZYX'.
        page_axes: the axes of pages; of selected pages, the single axis they are along, or 'page' for several.
        page_indices: selected pages, by their number in the store.
        channel_indices: selected channels.
        version: version of OME-Zarr, also used for the result.
        scale: size of a pixel (y, x) in `unit`.
        unit: unit of length; None if unknown.
        channel_names: name of each selected channel, or ().
        notes: messages for the user.
        frame: the orientation tag of the file, which is never applied.
    """

    path: Path
    array: Any
    axes: str
    page_axes: tuple[PageAxis, ...]
    page_indices: tuple[int, ...]
    channel_indices: tuple[int, ...]
    version: str
    scale: tuple[float, float] = (1.0, 1.0)
    unit: str | None = None
    channel_names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    frame: Frame = AS_STORED

    sample = None  # no pixel is excluded
    resolution = None  # tags are not read

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.array.shape[self.axes.index("Y")], self.array.shape[self.axes.index("X")]

    @property
    def n_pages(self) -> int:
        """Number of pages."""
        return len(self.page_indices)

    @property
    def channels(self) -> int:
        """Number of channels."""
        return len(self.channel_indices)

    @property
    def axis_lengths(self) -> dict[str, int]:
        """Lengths of the axes with more than one page."""
        return {axis.name.upper(): axis.length for axis in self.page_axes if axis.length > 1}

    @cached_property
    def dtype(self) -> np.dtype:
        """Dtype of the result of `read`."""
        stored = np.dtype(self.array.dtype)
        return np.dtype(np.uint8) if stored.kind == "b" else stored.newbyteorder("=")

    @property
    def pixel_size(self) -> tuple[float, float] | None:
        """Microns per pixel (y, x); None if unknown."""
        y, x = (microns(one, self.unit) for one in self.scale)
        return (y, x) if y and x else None

    @property
    def z_step(self) -> float | None:
        """Microns between pages along Z; None if unknown."""
        return next((microns(a.scale, a.unit) for a in self.page_axes if a.name.lower() == "z"), None)

    @property
    def frame_interval(self) -> float | None:
        """Seconds between pages along T; None if unknown."""
        intervals = [seconds(a.scale, a.unit) for a in self.page_axes if a.name.lower() == "t" and a.unit]
        return intervals[0] if intervals else None

    @cached_property
    def chunk(self) -> tuple[int, int]:
        """Height and width of the stored chunks."""
        chunks = getattr(self.array, "shards", None) or self.array.chunks
        return tuple(min(chunks[self.axes.index(a)], self.shape[i]) for i, a in enumerate("YX"))

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one stored chunk."""
        return int(np.prod(self.array.chunks, dtype=np.int64)) * np.dtype(self.array.dtype).itemsize

    def read(self, page: int, region: Region) -> np.ndarray:
        """Return a region (rows, columns, c) of a page, in the dtype of the file; bool becomes 0 and 255."""
        lengths = [self.array.shape[i] for i, letter in enumerate(self.axes) if letter not in "YXCS"]
        page_index = iter(np.unravel_index(self.page_indices[page], lengths) if lengths else ())
        index: list[Any] = []
        for letter in self.axes:
            if letter in "YX":
                index.append(region.slices["YX".index(letter)])
            else:
                index.append(slice(None) if letter in "CS" else int(next(page_index)))
        remaining_axes = "".join(letter for letter in self.axes if letter in "YXCS")
        pixels = to_pages(self.path, self._stored(tuple(index)), remaining_axes, None)[0]
        if pixels.shape[2] != len(self.channel_indices) or self.channel_indices != tuple(
            range(len(self.channel_indices))
        ):
            pixels = np.ascontiguousarray(pixels[..., list(self.channel_indices)])
        return pixels.astype(np.uint8) * np.uint8(255) if pixels.dtype == bool else pixels

    def _stored(self, index: tuple[Any, ...]) -> np.ndarray:
        """Return a part of the stored array.

        Raises:
            InputError: a URL that cannot be read.
        """
        try:
            return np.asarray(self.array[index])
        except read_errors() as error:
            if not is_url(self.path):
                raise
            raise unreadable(self.path, error) from error

    def strips(self, page: int, rows: int) -> Iterator[np.ndarray]:
        """Yield a page in pieces of about `rows` x `rows` pixels from top to bottom, aligned with stored chunks."""
        height, width = self.shape
        down = max(rows // self.chunk[0], 1) * self.chunk[0]
        across = max(rows // self.chunk[1], 1) * self.chunk[1]
        for top in range(0, height, down):
            for left in range(0, width, across):
                yield self.read(page, Region(top, min(top + down, height), left, min(left + across, width)))


def valid_pixels(values: np.ndarray) -> np.ndarray:
    """Return the mask (rows, columns) of pixels (rows, columns, c) that are finite in every channel."""
    if values.dtype.kind != "f":
        return np.ones(values.shape[:2], bool)
    return np.isfinite(values).all(-1)
