"""Metadata of TIFF files: their images, size of a pixel, distance of pages and names of channels."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import tifffile

from vispe.errors import counted
from vispe.images.formats.decoded_image import Resolution, physical, times
from vispe.images.formats.metadata import check_metadata, check_page_list
from vispe.images.formats.units import microns, seconds

COLOUR_SPACES = {5: "CMYK", 6: "YCbCr", 8: "Lab", 9: "Lab", 10: "Lab"}
"""Colour spaces by photometric interpretation, other than grey levels, palettes and RGB."""

UNITS = {1: "none", 2: "inch", 3: "cm"}


def has_alpha(page: tifffile.TiffPage) -> bool:
    """Return whether the last sample of a page is alpha."""
    return page.samplesperpixel in (2, 4) and page.extrasamples[-1:] in ((1,), (2,))


def tiff_resolution(page: tifffile.TiffPage) -> Resolution | None:
    """Return the resolution tags (x, y, unit) of a page; None if there are none."""
    x, y = (tag_value(page, name, None) for name in ("XResolution", "YResolution"))
    if x is None or y is None or 0 in (*x, *y):
        return None
    unit = UNITS.get(int(tag_value(page, "ResolutionUnit", 2)), "none")
    return x[0] / x[1], y[0] / y[1], unit


def largest_series(series: Sequence[tifffile.TiffPageSeries]) -> int:
    """Return the index of the first series with the most pixels; others are thumbnails and previews."""
    pixels = [
        np.prod([n for a, n in zip(s.axes, s.shape, strict=True) if a not in "CS"], dtype=object)
        for s in series
    ]
    return pixels.index(max(pixels))


def series_notes(path: Path, series: Sequence[tifffile.TiffPageSeries]) -> list[str]:
    """Return the note that a file contains further images, or none."""
    if len(series) < 2:
        return []
    number = largest_series(series)
    shapes = ", ".join(times(s.shape) for s in series)
    chosen = "first" if number == 0 else f"largest ({times(series[number].shape)})"
    return [
        f"{path.name} contains {counted(len(series), 'separate image')} ({shapes}); only the {chosen} is used."
    ]


def lut_note(path: Path, tif: tifffile.TiffFile) -> str | None:
    """Return the note that the palette of an ImageJ file is a lookup table, which colours the display only."""
    if not tif.is_imagej:
        return None
    return f"{path.name} has a lookup table of ImageJ, which is not applied: grey levels are read as stored."


def separate_colours(tif: tifffile.TiffFile, series: tifffile.TiffPageSeries) -> int:
    """Return the number of colour planes, 3 or 4, of a series that may also be a stack; otherwise 0.

    tifffile writes arrays of 3 or 4 slices without metadata as one image with that many separate colour planes.
    """
    axes, shape = series.axes, series.shape
    declared = tif.is_ome or tif.is_imagej or "S" not in axes or not axes.endswith("SYX")
    return 0 if declared or shape[axes.index("S")] not in (3, 4) else shape[axes.index("S")]


def tiff_pixel_size(
    tif: tifffile.TiffFile, resolution: Resolution | None, number: int = 0
) -> tuple[float, float] | None:
    """Return microns per pixel (y, x) of a series, from the most specific metadata of the file; None if unknown."""
    if tif.is_ome:
        metadata = _ome_pixels(tif, number)
        y, x = (_ome_size(metadata, axis) for axis in "YX")
        return (y or x, x or y) if y or x else None
    if tif.is_imagej:
        metadata = tif.imagej_metadata or {}
        if resolution is None or "unit" not in metadata:
            return physical(resolution)  # as ImageJ does for files of other programs
        # ImageJ stores units of y and z only if they differ from that of x
        units = (metadata.get("yunit", metadata.get("unit", "")), metadata.get("unit", ""))
        sizes = [
            microns(1 / r if r else None, unit)
            for r, unit in zip((resolution[1], resolution[0]), units, strict=True)
        ]
        return (sizes[0], sizes[1]) if all(sizes) else None
    if tif.is_fei:
        scan = (tif.fei_metadata or {}).get("Scan", {})
        sizes = [microns(scan.get(f"Pixel{name}"), "m") for name in ("Height", "Width")]
        return (sizes[0], sizes[1]) if all(sizes) else None
    if tif.is_sem:
        entry = (tif.sem_metadata or {}).get("ap_image_pixel_size", (None, None, ""))
        size = microns(entry[1], entry[2])
        return (size, size) if size else None
    return physical(resolution)


def tiff_z_step(tif: tifffile.TiffFile, number: int = 0) -> float | None:
    """Return microns between pages along Z from OME or ImageJ metadata; None if unknown."""
    if tif.is_ome:
        return _ome_size(_ome_pixels(tif, number), "Z")
    if tif.is_imagej:
        metadata = tif.imagej_metadata or {}
        return microns(metadata.get("spacing"), metadata.get("zunit", metadata.get("unit", "")))
    return None


def tiff_frame_interval(tif: tifffile.TiffFile, number: int = 0) -> float | None:
    """Return seconds between pages along T from OME or ImageJ metadata; None if unknown."""
    if tif.is_ome:
        pixels = _ome_pixels(tif, number)
        return seconds(pixels.get("TimeIncrement"), pixels.get("TimeIncrementUnit", "s"))
    if tif.is_imagej:
        metadata = tif.imagej_metadata or {}
        return seconds(metadata.get("finterval"), metadata.get("tunit", "s"))
    return None


def _ome_pixels(tif: tifffile.TiffFile, number: int) -> ElementTree.Element:
    """Return the Pixels element of a series, or the first one if there are fewer elements than series."""
    root = ElementTree.fromstring(tif.ome_metadata or "<OME/>")
    elements = [e for e in root.iter() if _tag(e) == "Pixels"]
    return elements[number] if number < len(elements) else (elements or [ElementTree.Element("Pixels")])[0]


def _ome_size(pixels: ElementTree.Element, axis: str) -> float | None:
    return microns(pixels.get(f"PhysicalSize{axis}"), pixels.get(f"PhysicalSize{axis}Unit", "µm"))


def _tag(element: ElementTree.Element) -> str:
    """Return the name of an element without its namespace."""
    return element.tag.rpartition("}")[2]


def tiff_channel_names(tif: tifffile.TiffFile, number: int = 0) -> tuple[str, ...]:
    """Return the channel names of OME metadata; () unless every channel has a name."""
    if not tif.is_ome:
        return ()
    names = tuple(e.get("Name", "") for e in _ome_pixels(tif, number) if _tag(e) == "Channel")
    return names if names and all(names) else ()


def tag_value(page: tifffile.TiffPage, name: str, default: object) -> object:
    """Return the value of a tag of a page."""
    tag = page.tags.get(name)
    return default if tag is None else tag.value


@contextmanager
def checked_tiff(path: Path) -> Iterator[tifffile.TiffFile]:
    """Open a TIFF file for its header, without log messages of tifffile.

    Raises:
        InputError: page list or metadata that would hang or exhaust memory as soon as tifffile parses its series.
    """
    check_page_list(path)
    with quiet(), tifffile.TiffFile(path) as tif:
        check_metadata(path, tif.pages.first.description)
        yield tif


@contextmanager
def quiet() -> Iterator[list[str]]:
    """Collect the log messages of tifffile, which reports some damage only in the log."""
    messages: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage().rpartition("> ")[2])

    logger, handler = logging.getLogger("tifffile"), Collector(logging.WARNING)
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
