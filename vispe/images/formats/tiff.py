"""TIFF decoder based on tifffile: OME and ImageJ stacks, planar colour, any bit depth and byte order."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import tifffile
from PIL import Image, TiffImagePlugin  # noqa: F401 - registers the TIFF format with Image.open

from vispe.errors import InputError, counted
from vispe.images.formats.decoded_image import (
    BROKEN,
    Decoded,
    check_pixels,
    count_axes,
    damaged,
    no_size_limit,
    to_pages,
)
from vispe.images.formats.metadata import check_metadata, check_page_list
from vispe.images.formats.size_limits import check_size
from vispe.images.formats.tiff_metadata import (
    COLOUR_SPACES,
    has_alpha,
    largest_series,
    lut_note,
    quiet,
    separate_colours,
    series_notes,
    tag_value,
    tiff_channel_names,
    tiff_frame_interval,
    tiff_pixel_size,
    tiff_resolution,
    tiff_z_step,
)
from vispe.images.orientation import as_stored, known_tag

LOSSY = {"OJPEG", "JPEG", "JPEG_LOSSY", "JPEGXR", "JPEG_2000_LOSSY", "JPEG2000", "WEBP", "APERIO_JP2000_YCBC"}
_UNCONVERTED = {"NONE", "LZW", "ADOBE_DEFLATE", "DEFLATE", "PACKBITS", "ZSTD", "LZMA"}


def decode_tiff(path: Path, axes: str | None, size: tuple[int, int] | None = None) -> Decoded:
    """Read the largest image series of a TIFF file.

    Raises:
        InputError: damaged, truncated, missing planes, no pixels, or an unsupported compression.
    """
    try:
        notes = check_page_list(path)
        with quiet() as messages, tifffile.TiffFile(path) as tif:
            check_metadata(path, tif.pages.first.description)
            decoded = _read(path, tif, axes, messages, size)
        return replace(decoded, notes=(*notes, *decoded.notes)) if notes else decoded
    except InputError:
        raise
    except BROKEN as error:
        raise damaged(path, error) from error


def _read(
    path: Path, tif: tifffile.TiffFile, axes: str | None, messages: list[str], size: tuple[int, int] | None
) -> Decoded:
    series = tif.series
    if not series:
        raise InputError(
            f"{path} is truncated or has no pixels: it contains no image. Copy or export it again."
        )
    number = largest_series(series)
    first = series[number]
    notes = series_notes(path, series)
    check_pixels(path, first.shape)
    if len(first.levels) > 1:
        notes.append(
            f"{path.name} contains {counted(len(first.levels), 'pyramid level')}; only the largest is used."
        )
    _check_complete(path, tif, first, messages)
    page = first.keyframe
    _check_claim(path, first, size)
    orientation = known_tag(tag_value(page, "Orientation", 1))
    min_is_white = page.bitspersample if page.photometric == tifffile.PHOTOMETRIC.MINISWHITE else 0
    try:
        if space := _other_colours(path, page):
            raise _NeedsPillow(space)
        array, letters = first.asarray(), first.axes
    except (ValueError, ImportError, _NeedsPillow) as error:
        if isinstance(error, ValueError) and "imagecodecs" not in str(error):
            raise
        array, letters = _through_pillow(path, first, error, orientation)
        if isinstance(error, _NeedsPillow):
            notes.append(f"{error} colours were converted to RGB.")
    # reported by check_page_list
    messages = [text for text in messages if "invalid value offset" not in text]
    if messages:
        problems = "; ".join(dict.fromkeys(text.rstrip("')") for text in messages[:5]))
        notes.append(f"{path.name} is damaged or unusual: {problems}.")
    pages = to_pages(path, array, letters, axes)
    planes = separate_colours(tif, first)
    if planes and axes is None:
        alpha = " with alpha" if has_alpha(page) else ""
        stack = letters.replace("S", "Z").replace("Q", "T")
        notes.append(
            f"{path.name}: its {counted(planes, 'plane')} are read as one colour image{alpha}; if they are slices of "
            f"a stack, set `axes={stack}`."
        )
    page_axes = count_axes(letters, axes, array.shape)
    if len(page_axes) > 1 and axes is None:
        sizes = " x ".join(f"{a}={n}" for a, n in page_axes)
        notes.append(
            f"{path.name}: the axes {sizes} are read as {counted(np.prod([n for _, n in page_axes]), 'page')}."
        )
    palette = _palette(page)
    if palette is not None and (lut := lut_note(path, tif)):
        palette, notes = None, [*notes, lut]
    resolution = tiff_resolution(page)
    return Decoded(
        pages=pages,
        format="TIFF",
        palette=palette,
        alpha=has_alpha(page) and axes is None and "C" not in letters,
        min_is_white=min_is_white,
        lossy=getattr(page.compression, "name", "") in LOSSY,
        pixel_size=tiff_pixel_size(tif, resolution, number),
        resolution=resolution,
        channel_names=tiff_channel_names(tif, number),
        notes=tuple(notes),
        page_axes=page_axes,
        z_step=tiff_z_step(tif, number),
        orientation=orientation,
        planes=planes if axes is None else 0,
        frame_interval=tiff_frame_interval(tif, number),
    ).with_axes(letters, axes)


class _NeedsPillow(Exception):
    """Raised for a colour space that tifffile does not convert."""


def _other_colours(path: Path, page: tifffile.TiffPage) -> str | None:
    """Return the colour space that Pillow converts to RGB; None if tifffile returns grey levels, indices or RGB.

    Raises:
        InputError: colours that Pillow does not convert either.
    """
    space = COLOUR_SPACES.get(page.photometric)
    # decoders of JPEG convert its YCbCr
    if space is None or (space == "YCbCr" and getattr(page.compression, "name", "") not in _UNCONVERTED):
        return None
    colours = None
    if page.is_subsampled:
        colours = f"subsampled {space} colours"
    elif space == "Lab":
        colours = "Lab colours"
    elif page.bitspersample != 8:
        colours = f"{space} colours of {page.bitspersample} bits"
    if colours is not None:
        raise InputError(f"{path} has {colours}, which are not supported. Save it as RGB.")
    return space


def _check_complete(
    path: Path, tif: tifffile.TiffFile, series: tifffile.TiffPageSeries, messages: list[str]
) -> None:
    size = tif.filehandle.size
    if any("invalid page offset" in text or "corrupted" in text for text in messages):
        raise InputError(f"{path} is truncated: its page list is incomplete. Copy or export it again.")
    pages = list(series.pages)
    missing = sum(p is None for p in pages)
    if missing:
        raise InputError(
            f"{path}: {missing} of {counted(len(pages), 'plane')} of the OME metadata are missing. Copy the other "
            "files of a multi-file dataset into the same folder, or export a single file."
        )
    if series.dataoffset is not None:
        end = series.dataoffset + series.nbytes
    else:
        own_pages = [p for p in pages if getattr(p.parent, "filehandle", None) is tif.filehandle]
        ends = [o + n for p in own_pages for o, n in zip(p.dataoffsets, p.databytecounts, strict=False)]
        end = max(ends, default=0)
    keyframe = series.keyframe
    if len(keyframe.dataoffsets) < np.prod(keyframe.chunked, dtype=np.int64):
        raise InputError(f"{path} is damaged: too few strips or tiles for its size. Copy it again.")
    if end > size:
        raise InputError(f"{path} is truncated: expected {end} bytes, got {size}. Copy it again.")


def _check_claim(path: Path, series: tifffile.TiffPageSeries, size: tuple[int, int] | None) -> None:
    files = {p.parent.filehandle.path: p.parent.filehandle.size for p in series.pages if p is not None}
    page = series.keyframe
    shape = tuple(series.shape)
    if np.prod(page.chunks, dtype=object) > np.prod(shape, dtype=object):  # a tile larger than the image
        shape = tuple(page.chunks)
    bits = page.bitspersample if page.bitspersample < 8 else 8 * series.dtype.itemsize
    plane = (page.imagelength, page.imagewidth)
    check_size(path, shape, bits, stored=sum(files.values()), trusted=size == plane and shape == series.shape)


def _through_pillow(
    path: Path, series: tifffile.TiffPageSeries, reason: Exception, orientation: int
) -> tuple[np.ndarray, str]:
    """Decode with Pillow (libtiff) compressions that need imagecodecs in tifffile.

    Raises:
        InputError: Pillow would truncate the bit depth.
    """
    page = series.keyframe
    # for other formats Pillow truncates the depth, or ignores byte order, sign or inversion (measured with Pillow 13)
    deep = page.bitspersample == 16 and page.samplesperpixel == 1
    exact = page.bitspersample <= 8 or (deep and page.photometric == tifffile.PHOTOMETRIC.MINISBLACK)
    if not exact or page.dtype is None or page.dtype.kind not in "bu":
        raise InputError(
            f"{path} stores {page.samplesperpixel} x {page.bitspersample}-bit {page.dtype} samples with "
            f"{page.compression.name} compression, which needs imagecodecs; run: pip install imagecodecs"
        ) from reason
    planes = []
    with no_size_limit(), Image.open(path, formats=("TIFF",)) as image:
        for each in series.pages:
            index = each.index[0] if isinstance(each.index, tuple) else each.index
            image.seek(index)
            converted = image.convert("RGB") if image.mode in ("CMYK", "YCbCr") else image
            planes.append(np.array(converted))
    # Pillow applies the orientation tag
    planes = [as_stored(plane[None], orientation)[0] for plane in planes]
    planes = [_original_greys(plane, page) for plane in planes]
    lead = [(a, n) for a, n in zip(series.axes, series.shape, strict=True) if a not in "YXS"]
    plane = planes[0].shape
    array = np.stack(planes).reshape(*(n for _, n in lead), *plane)
    return array, "".join(a for a, _ in lead) + "YXS"[: len(plane)]


def _original_greys(plane: np.ndarray, page: tifffile.TiffPage) -> np.ndarray:
    """Invert Pillow's conversion of grey levels: 2 and 4 bits are scaled to 0..255, and MinIsWhite is inverted."""
    grey = page.photometric in (tifffile.PHOTOMETRIC.MINISWHITE, tifffile.PHOTOMETRIC.MINISBLACK)
    if grey and page.bitspersample in (2, 4):
        plane = plane // np.uint8(255 // ((1 << page.bitspersample) - 1))
    if page.photometric != tifffile.PHOTOMETRIC.MINISWHITE:
        return plane
    return ~plane if plane.dtype == bool else np.uint8((1 << page.bitspersample) - 1) - plane


def _palette(page: tifffile.TiffPage) -> np.ndarray | None:
    if page.photometric != tifffile.PHOTOMETRIC.PALETTE or page.colormap is None:
        return None
    colours = np.asarray(page.colormap).T
    low, high = colours & 255, colours >> 8
    if (low == high).all() or (low == 0).all():
        return high.astype(np.uint8)
    if (high == 0).all():  # some writers store 8-bit values unscaled
        return low.astype(np.uint8)
    return colours.astype(np.uint16)
