"""Opening of out-of-core images: OME-Zarr 0.1 to 0.5, plain Zarr arrays, and TIFF."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from vispe.errors import InputError, counted, require
from vispe.images.formats.decoded_image import check_pixels, checked_axes, times
from vispe.images.formats.size_limits import amount, check_size
from vispe.images.formats.units import lost_pixel_size, micron_factor, microns, size_sources
from vispe.images.orientation import Frame
from vispe.images.read import channel_numbers, pick_pages
from vispe.images.remote import StoreURL, is_url
from vispe.segment.out_of_core import is_store
from vispe.segment.out_of_core.source.image import OutOfCoreImage, PageAxis
from vispe.segment.out_of_core.source.stored_array import open_store, open_tiff

MOST_PAGES, MOST_CHANNELS = 1_000_000, 10_000
LARGEST_CHUNK = 1 << 29  # bytes
LARGEST = 1 << 37
"""Upper bound of the pixels of a page."""

_MIXED = PageAxis("page", None, None, 1.0, 0)  # a selection of pages across several axes


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
    array, facts, notes = open_store(path) if is_store(path) else open_tiff(path)
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
    axis_details = _details(facts, array_axes, axes)
    page_axes = tuple(
        PageAxis(*axis_details.get(i, (letter.lower(), None, None, 1.0)), array.shape[i])
        for i, letter in enumerate(array_axes)
        if letter not in "YXCS"
    )
    count = math.prod(axis.length for axis in page_axes)
    channels = math.prod(n for n, letter in zip(array.shape, array_axes, strict=True) if letter in "CS")
    _check_counts(path, array, array_axes, count, channels)
    chosen = tuple(int(i) for i in pick_pages(path, np.arange(count), z))
    lengths = [(axis.name.upper(), axis.length) for axis in page_axes if axis.length > 1]
    if len(chosen) != count:
        page_axes = (_selected_axis(page_axes, chosen),)
    names = tuple(facts.get("names", ()))
    names = names if len(names) == channels else ()
    channel_indices = tuple(
        range(channels) if channel is None else channel_numbers(path, channel, channels, names)
    )
    y, x = (axis_details.get(array_axes.index(a), (None, None, None, 1.0)) for a in "YX")
    pixel = ((y[3], x[3]), y[2])
    if y[2] != x[2]:
        factors = micron_factor(y[2]), micron_factor(x[2])
        pixel = ((y[3] * factors[0], x[3] * factors[1]), "micrometer") if all(factors) else (pixel[0], None)
    if axes is not None and _has_pixel_size(facts) and not (microns(y[3], y[2]) and microns(x[3], x[2])):
        notes.append(lost_pixel_size(axes))
    used_names = tuple(names[i] for i in channel_indices) if names else ()
    frame = Frame(facts.get("tag", 1)).with_pages(lengths, chosen)
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


def _details(facts: Mapping[str, Any], letters: str, axes: str | None) -> dict[int, tuple]:
    """Return name, kind, unit and scale of the stored dimensions `letters`, which the user may have named `axes`."""
    details, stored = facts.get("details", {}), facts.get("axes") or ""
    if axes is None or len(stored) != len(letters):
        return details if axes is None else {}
    known = facts.get("unused", {}) | {stored[i]: detail for i, detail in details.items()}
    sources = size_sources(stored, letters)
    out = {}
    for i, letter in enumerate(letters):
        source = sources.get(letter, letter if letter in ("T", stored[i]) else None)
        if source in known:
            out[i] = (letter.lower(), *known[source][1:])
    return out


def _has_pixel_size(facts: Mapping[str, Any]) -> bool:
    """Return whether Y and X of the metadata have a size."""
    stored, details = facts.get("axes") or "", facts.get("details", {})
    known = facts.get("unused", {}) | {stored[i]: detail for i, detail in details.items() if i < len(stored)}
    return all(letter in known and microns(known[letter][3], known[letter][2]) for letter in "YX")


def _selected_axis(axes: Sequence[PageAxis], chosen: Sequence[int]) -> PageAxis:
    """Return the axis of a range of pages: a part of the last axis with several pages, or a mixed one."""
    last = next((axis for axis in reversed(axes) if axis.length > 1), axes[-1])
    one_block = chosen[0] // last.length == chosen[-1] // last.length
    return replace(last if one_block else _MIXED, length=len(chosen))


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
