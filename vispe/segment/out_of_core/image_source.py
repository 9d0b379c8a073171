"""Out-of-core images, read region by region: OME-Zarr 0.1 to 0.5, plain Zarr arrays, and TIFF."""

import math
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from vispe.errors import InputError, counted, require
from vispe.images.formats.decoded_image import BROKEN, check_pixels, checked_axes, damaged, times, to_pages
from vispe.images.formats.size_limits import amount, check_size
from vispe.images.formats.units import micron_factor, seconds
from vispe.images.orientation import AS_STORED, Frame, known_tag
from vispe.images.read import channel_numbers, pick_pages
from vispe.images.remote import StoreURL, is_url, options_of, read_errors, unreadable
from vispe.segment.features.tiles import Region
from vispe.segment.out_of_core import is_store

MOST_PAGES, MOST_CHANNELS = 1_000_000, 10_000
LARGEST_CHUNK = 1 << 29  # bytes
LARGEST = 1 << 37
"""Upper bound of the pixels of a page."""


@dataclass(frozen=True)
class PageAxis:
    """An axis of pages, as described by OME-Zarr."""

    name: str
    kind: str | None
    unit: str | None
    scale: float
    length: int


_MIXED = PageAxis("z", "space", None, 1.0, 0)  # a selection of pages across several axes


@dataclass(frozen=True, eq=False)
class OutOfCoreImage:
    """An image whose regions are read on demand.

    Attributes:
        path: the store or file.
        array: the stored array, of any number of dimensions.
        axes: one letter per dimension, such as 'TCZYX'.
        page_axes: the axes of pages; the single axis 'z' if pages were selected.
        chosen: selected pages, by their number in the store.
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
        factor = micron_factor(self.unit)
        return None if factor is None else (self.scale[0] * factor, self.scale[1] * factor)

    @property
    def z_step(self) -> float | None:
        """Microns between pages along Z; None if unknown."""
        steps = [
            (axis.scale, micron_factor(axis.unit)) for axis in self.page_axes if axis.name.lower() == "z"
        ]
        return steps[0][0] * steps[0][1] if steps and steps[0][1] is not None else None

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


def open_image(
    path: str | Path, *, channel: str | None = None, z: str | None = None, axes: str | None = None
) -> OutOfCoreImage:
    """Open a store, or a TIFF file, without reading its pixels.

    Args:
        path: OME-Zarr image or Zarr array, also as a URL, or TIFF.
        channel: channels to use, as in `vispe.images.read.read_image`.
        z: pages to use, as in `vispe.images.read.read_image`.
        axes: axes of the stored array, if the file's metadata are wrong or missing.

    Raises:
        InputError: no image, several images, a plate, unknown axes, no pixels, or complex numbers.
        MissingExtra: zarr, or the package for a URL, is not installed.
    """
    path = StoreURL(path) if is_url(path) else Path(path)
    require("zarr", "big", f"reading {path.name} region by region")
    array, facts, notes = _open_store(path) if is_store(path) else _open_tiff(path)
    array_axes = checked_axes(path, axes, array.shape) if axes is not None else facts.get("axes")
    if array_axes is None or len(array_axes) != array.ndim:
        shape = times(array.shape)
        raise InputError(f"the axes of {path} ({shape}) are unknown. Specify axes, such as ZYX.")
    check_pixels(path, array.shape)
    height, width = (array.shape[array_axes.index(a)] for a in "YX")
    if height * width > LARGEST:
        raise InputError(
            f"{path} has {height} x {width} pixels per page, more than {LARGEST / 1e9:.0f} Gpixel: "
            "its list of tiles would be too long. Split it."
        )
    if np.dtype(array.dtype).kind not in "buif":
        raise InputError(f"{path} has dtype {array.dtype}. Export real numbers, such as the magnitude.")
    axis_details = facts.get("details", {}) if axes is None else {}
    page_axes = tuple(
        PageAxis(*axis_details.get(i, (letter.lower(), None, None, 1.0)), array.shape[i])
        for i, letter in enumerate(array_axes)
        if letter not in "YXCS"
    )
    count = math.prod(axis.length for axis in page_axes)
    channels = math.prod(n for n, letter in zip(array.shape, array_axes, strict=True) if letter in "CS")
    _check_counts(path, array, array_axes, count, channels)
    chosen = tuple(int(i) for i in pick_pages(path, np.arange(count), z))
    if len(chosen) != count:
        single_axis = len(page_axes) == 1
        page_axes = (replace(page_axes[0] if single_axis else _MIXED, length=len(chosen)),)
    names = tuple(facts.get("names", ()))
    names = names if len(names) == channels else ()
    channel_indices = tuple(
        range(channels) if channel is None else channel_numbers(path, channel, channels, names)
    )
    y, x = (axis_details.get(array_axes.index(a), (None, None, None, 1.0)) for a in "YX")
    pixel = ((y[3], x[3]), y[2] if y[2] == x[2] else None)
    used_names = tuple(names[i] for i in channel_indices) if names else ()
    frame = Frame(facts.get("tag", 1))
    notes += [note] if (note := frame.note(path.name)) else []
    return OutOfCoreImage(
        path,
        array,
        array_axes,
        page_axes,
        chosen,
        channel_indices,
        facts["version"],
        *pixel,
        used_names,
        tuple(notes),
        frame,
    )


def _check_counts(path: Path, array: Any, axes: str, pages: int, channels: int) -> None:
    """Validate the numbers of pages and channels and the chunk size; a small metadata file can declare huge ones.

    Raises:
        InputError: a number or the chunk size is implausibly large.
    """
    if pages > MOST_PAGES or channels > MOST_CHANNELS:
        raise InputError(
            f"{path} declares {counted(pages, 'page')} of {counted(channels, 'channel')}, but at most {MOST_PAGES} "
            f"and {MOST_CHANNELS} are supported. Split it."
        )
    itemsize = np.dtype(array.dtype).itemsize
    size = math.prod(min(n, c) for n, c in zip(array.shape, array.chunks, strict=True)) * itemsize
    if path.is_file():
        check_size(path, tuple(map(min, array.shape, array.chunks)), 8 * itemsize)
    elif size > LARGEST_CHUNK:
        raise InputError(
            f"{path} has chunks of {amount(size)}, each of which is decoded completely. Store it again in chunks of at "
            f"most {amount(LARGEST_CHUNK)}."
        )


def _open_store(path: Path) -> tuple[Any, dict[str, Any], list[str]]:
    import zarr

    remote = {"storage_options": options_of(path)} if is_url(path) else {}
    try:
        node = zarr.open(str(path), mode="r", **remote)
        if isinstance(node, zarr.Array):
            names = getattr(node.metadata, "dimension_names", None) or node.attrs.get("_ARRAY_DIMENSIONS")
            version = "0.5" if node.metadata.zarr_format == 3 else "0.4"
            return node, {"version": version, "axes": _letters(names, node.ndim)}, []
        image = _image_of(path, node, _ome(node))
        return _multiscale(path, image, _ome(image))
    except InputError:
        raise
    except (*read_errors(), AttributeError) as error:
        if is_url(path):
            raise unreadable(path, error) from error
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{path} is not a readable OME-Zarr image ({reason}). Export it again.") from error


def _ome(node: Any) -> Mapping[str, Any]:
    """Return the OME metadata of a group or array: in a separate entry from version 0.5 on."""
    attributes = dict(node.attrs)
    return attributes.get("ome", attributes)


def _image_of(path: Path, group: Any, ome: Mapping[str, Any]) -> Any:
    """Return the group of an image: this one, or its only series."""
    if "multiscales" in ome:
        return group
    if "plate" in ome or "well" in ome:
        kind = "plate" if "plate" in ome else "well"
        raise InputError(f"{path} is a {kind} of many images. Pass one of them, such as {path}/A/1/0.")
    series = sorted(key for key in group if "multiscales" in _ome(group[key]))
    if not series:
        raise InputError(
            f"{path} contains no image (no multiscales in its metadata). Pass the path of the array inside, with axes."
        )
    if len(series) > 1:
        listed = f"{counted(len(series), 'image')} ({', '.join(series[:5])})"
        raise InputError(f"{path} contains {listed}. Pass one of them, such as {path}/{series[0]}.")
    return group[series[0]]


def _multiscale(path: Path, group: Any, ome: Mapping[str, Any]) -> tuple[Any, dict[str, Any], list[str]]:
    multiscale = ome["multiscales"][0]
    levels = [(group[entry["path"]], entry) for entry in multiscale["datasets"]]
    array, entry = max(levels, key=lambda level: np.prod(level[0].shape[-2:], dtype=np.int64))
    listed = multiscale.get("axes") or ["t", "c", "z", "y", "x"][-array.ndim :]
    axes = [{"name": axis} if isinstance(axis, str) else axis for axis in listed]
    scale = np.ones(array.ndim)
    for transform in (
        *entry.get("coordinateTransformations", ()),
        *multiscale.get("coordinateTransformations", ()),
    ):
        if transform.get("type") == "scale":
            scale = scale * np.asarray(transform["scale"], float)
    details = {i: (a["name"], a.get("type"), a.get("unit"), float(scale[i])) for i, a in enumerate(axes)}
    names = [str(c.get("label", "")) for c in (ome.get("omero") or {}).get("channels", ())]
    version = "0.5" if array.metadata.zarr_format == 3 else "0.4"
    notes = []
    if len(ome["multiscales"]) > 1:
        notes.append(
            f"{path.name} contains {counted(len(ome['multiscales']), 'multiscale image')}; the first is used."
        )
    letters = _letters([axis["name"] for axis in axes], array.ndim, axes)
    facts = {"version": version, "axes": letters, "details": details, "names": names if all(names) else ()}
    return array, facts, notes


def _letters(names: Any, ndim: int, axes: list[Mapping[str, Any]] | None = None) -> str | None:
    """Convert axis names to one letter each; axes other than T, C, Z, Y and X count pages."""
    if not names:
        return "YX" if ndim == 2 else None
    spare = iter("IQRHEAMPV")
    out = ""
    for i, name in enumerate(names):
        letter = str(name).upper()
        kind = axes[i].get("type") if axes is not None else None
        if letter not in set("TCZYXS") or letter in out:
            letter = "C" if kind == "channel" and "C" not in out else next(spare)
        out += letter
    return out if {"Y", "X"} <= set(out) else None


def _open_tiff(path: Path) -> tuple[Any, dict[str, Any], list[str]]:
    import zarr
    from tifffile import TiffFile, imread

    from vispe.images.formats.metadata import check_metadata, check_page_list
    from vispe.images.formats.tiff import (
        has_alpha,
        largest_series,
        separate_colours,
        tag_value,
        tiff_channel_names,
        tiff_frame_interval,
        tiff_pixel_size,
        tiff_resolution,
        tiff_z_step,
    )

    check_page_list(path)
    try:
        with TiffFile(path) as tif:
            check_metadata(path, tif.pages.first.description)
            number = largest_series(tif.series)
            page, series = tif.series[number].keyframe, tif.series[number]
            unsupported = {
                "a palette": tag_value(page, "ColorMap", None) is not None,
                "white as 0": page.photometric == 0,
                "an alpha channel": has_alpha(page),
                "JPEG colours": page.photometric == 6,
            }
            if any(unsupported.values()):
                first = next(name for name, present in unsupported.items() if present)
                raise InputError(
                    f"{path} has {first}, which is not supported when reading in blocks. Omit memory and scheduler, "
                    "or convert it to OME-Zarr."
                )
            size = tiff_pixel_size(tif, tiff_resolution(page), number)
            names, axes = tiff_channel_names(tif, number), series.axes
            tag = known_tag(tag_value(page, "Orientation", 1))
            steps = {"Z": tiff_z_step(tif, number), "T": tiff_frame_interval(tif, number)}
            planes = separate_colours(tif, series)
        opened = imread(path, aszarr=True, series=number, level=0)
        array = zarr.open(opened, mode="r")
        weakref.finalize(array, opened.close)
    except InputError:
        raise
    except BROKEN as error:
        raise damaged(path, error) from error
    sizes = zip("YX", size or (), strict=False)
    details = {axes.index(a): (a.lower(), "space", "micrometer", one) for a, one in sizes}
    if steps["Z"] and "Z" in axes:
        details[axes.index("Z")] = ("z", "space", "micrometer", steps["Z"])
    if steps["T"] and "T" in axes:
        details[axes.index("T")] = ("t", "time", "second", steps["T"])
    notes = []
    if planes:
        stack = axes.replace("S", "Z").replace("Q", "T")
        notes.append(
            f"{path.name}: its {counted(planes, 'plane')} are read as one colour image; if they are slices of a "
            f"stack, use axes={stack}."
        )
    return array, {"version": "0.5", "axes": axes, "details": details, "names": names, "tag": tag}, notes
