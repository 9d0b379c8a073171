"""Atomic writing of result images (PNG, TIFF); existing files are only overwritten with `force`."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vispe.errors import InputError, ShapeError, counted
from vispe.images.formats.decoded_image import PageAxes, physical
from vispe.images.formats.metadata import scale_chunk
from vispe.images.read import Micrograph
from vispe.utils.files import atomic_path

_IMAGEJ = (1 << 32) - (1 << 26)  # largest size of the pixels of an ImageJ TIFF in bytes
_LENGTHS = {"um": 1.0, "inch": 25_400.0, "cm": 1e4}  # microns
_HEADER = 33  # bytes of a PNG file up to the end of its first chunk
_LEVEL = 3  # PNG compression: half the time of zlib's default 6, files are 20 % larger


def label_suffix(n_pages: int) -> str:
    """Return the file suffix of label maps: '.png' for one page, '.tif' for several."""
    return ".png" if n_pages == 1 else ".tif"


def write_labels(
    path: str | Path, values: np.ndarray, micrograph: Micrograph | None = None, force: bool = False
) -> Path:
    """Write a label map with the pixel size of its image, and for stacks the axes, Z step and frame interval.

    Args:
        path: '.png' (one page) or '.tif' (any number of pages).
        values: (z, h, w) uint8, in the size of the image.
        micrograph: the image; its resolution tags are copied.
        force: overwrite an existing file.

    Raises:
        ShapeError: not (z, h, w), or a different size than the image.
        InputError: not uint8, several pages as PNG, an unsupported suffix, or `path` exists.
    """
    path = Path(path)
    _check_shape(path, "label maps", values, micrograph)
    if values.dtype != np.uint8:
        raise InputError(f"{path}: label maps must be uint8 (at most 255 classes), got {values.dtype}.")
    if path.suffix.lower() == ".png":
        if len(values) != 1:
            raise InputError(f"{path}: PNG files have one page, got {len(values)}. Write a .tif file.")
        return write_png(path, values[0], force, micrograph=micrograph)
    return _write_tiff(path, values, "ZYX", micrograph, force, compression="zlib")


def write_instances(
    path: str | Path, values: np.ndarray, micrograph: Micrograph | None = None, force: bool = False
) -> Path:
    """Write an instance map (z, h, w), uint16 or uint32, as TIFF with the pixel size and the axes of its image.

    ImageJ has no 32-bit integers, so uint32 maps are written as OME-TIFF.

    Raises:
        ShapeError: not (z, h, w), or a different size than the image.
        InputError: an unsupported dtype or suffix, or `path` exists.
    """
    path = Path(path)
    _check_shape(path, "instance maps", values, micrograph)
    if values.dtype not in (np.uint16, np.uint32):
        raise InputError(f"{path}: instance maps must be uint16 or uint32, got {values.dtype}.")
    return _write_tiff(path, values, "ZYX", micrograph, force, compression="zlib")


def write_probabilities(
    path: str | Path,
    prob: np.ndarray,
    micrograph: Micrograph | None = None,
    names: Sequence[str] | None = None,
    force: bool = False,
) -> Path:
    """Write class probabilities as a TIFF with one float32 page per class and image page.

    The file is an ImageJ hyperstack with the classes as channels, or OME-TIFF from 4 GB.

    Args:
        path: '.tif' file.
        prob: (z, k, h, w) float32; file pages are in this order, classes fastest.
        micrograph: the image; its resolution tags are copied.
        names: the k class names, which ImageJ displays as slice labels.
        force: overwrite an existing file.

    Raises:
        ShapeError: not (z, k, h, w).
        InputError: not float32, not k names, an unsupported suffix, or `path` exists.
    """
    path = Path(path)
    if prob.ndim != 4:
        raise ShapeError(f"{path}: probabilities must have the shape (z, k, h, w), got {prob.shape}.")
    if prob.dtype != np.float32:
        raise InputError(f"{path}: probabilities must be float32, got {prob.dtype}.")
    if names is not None and len(names) != prob.shape[1]:
        raise InputError(
            f"{path}: names must have one entry for each of {counted(prob.shape[1], 'class')}, got {len(names)}."
        )
    return _write_tiff(path, prob, "ZCYX", micrograph, force, names=names)


def write_png(
    path: str | Path, array: np.ndarray, force: bool = False, *, micrograph: Micrograph | None = None
) -> Path:
    """Write (h, w) uint8 or uint16, or (h, w, 3) uint8, as PNG, with the pixel size of `micrograph`.

    Raises:
        ShapeError: any other shape or dtype.
        InputError: `path` exists.
    """
    path = Path(path)
    is_uint8 = array.dtype == np.uint8 and (array.ndim == 2 or (array.ndim == 3 and array.shape[2] == 3))
    if not is_uint8 and not (array.dtype == np.uint16 and array.ndim == 2):
        raise ShapeError(
            f"{path}: PNG needs (h, w) uint8 or uint16 or (h, w, 3) uint8, got {array.shape} {array.dtype}."
        )
    options: dict[str, Any] = {} if (dots := _per_inch(micrograph)) is None else {"dpi": dots}
    out = io.BytesIO()
    image = Image.fromarray(np.ascontiguousarray(array))
    image.save(out, format="PNG", compress_level=_LEVEL, **options)
    with atomic_path(path, force) as temporary, temporary.open("wb") as stream:
        data = out.getbuffer()
        stream.write(data[:_HEADER])
        if micrograph is not None and micrograph.pixel_size is not None:
            # the resolution chunk overflows for pixels below 0.47 nm, and is interpreted as printing above 5 microns
            stream.write(scale_chunk(micrograph.pixel_size))
        stream.write(data[_HEADER:])
    return path


def _check_shape(path: Path, what: str, values: np.ndarray, micrograph: Micrograph | None) -> None:
    if values.ndim != 3:
        raise ShapeError(f"{path}: {what} must have the shape (z, h, w), got {values.shape}.")
    if micrograph is not None and values.shape != micrograph.pages.shape[:3]:
        size = micrograph.pages.shape[:3]
        raise ShapeError(f"{path}: {what} must have the shape of the image, {size}, got {values.shape}.")


def _write_tiff(
    path: Path,
    array: np.ndarray,
    axes: str,
    micrograph: Micrograph | None,
    force: bool,
    *,
    compression: str | None = None,
    names: Sequence[str] | None = None,
) -> Path:
    """Write pages as an ImageJ hyperstack, or as OME-TIFF if ImageJ does not support the size, dtype or axes.

    Args:
        path: the file.
        array: array with `axes`; Z stands for all pages in the order of the image.
        axes: 'ZYX' or 'ZCYX'.
        micrograph: the image, whose axes, pixel size, Z step and frame interval are written.
        force: overwrite an existing file.
        compression: compression of tifffile.
        names: names of the channels.
    """
    import tifffile

    if path.suffix.lower() not in (".tif", ".tiff"):
        raise InputError(f"{path} must end in .tif (or .png for a label map of one page).")
    x, y, unit, length = _calibration(micrograph)
    step = micrograph.z_step if micrograph is not None and length else None
    interval = micrograph.frame_interval if micrograph is not None else None
    pages = _page_axes(micrograph, len(array))
    letters = "".join(letter for letter, _ in pages)
    shaped = array.reshape(*(n for _, n in pages), *array.shape[1:])
    options: dict[str, Any] = {
        "photometric": "minisblack",
        "compression": compression,
        "resolution": (x, y),
        "resolutionunit": {"none": 1, "inch": 2, "cm": 3}[unit],
    }
    metadata: dict[str, Any] = {"axes": letters + axes[1:]}
    if letters in ("T", "Z", "TZ") and array.nbytes < _IMAGEJ and array.dtype != np.uint32:
        if length:
            metadata["unit"] = length
        if step is not None:
            metadata["spacing"] = step / _LENGTHS[length]
        if interval is not None:
            metadata |= {"finterval": interval, "tunit": "s"}
        if names is not None:
            metadata["classes"] = json.dumps(list(names))
            pages = [f"page {i}: " for i in range(len(array))] if len(array) > 1 else [""]
            metadata["Labels"] = [page + name for page in pages for name in names]
        options["imagej"] = True
    else:
        if micrograph is not None and micrograph.pixel_size is not None:
            size = micrograph.pixel_size
            metadata |= {"PhysicalSizeX": size[1], "PhysicalSizeY": size[0]}
            metadata |= {f"PhysicalSize{axis}Unit": "µm" for axis in "XY"}
            if step is not None:
                metadata |= {"PhysicalSizeZ": step, "PhysicalSizeZUnit": "µm"}
        if interval is not None:
            metadata |= {"TimeIncrement": interval, "TimeIncrementUnit": "s"}
        if names is not None:
            metadata["Channel"] = {"Name": list(names)}
        options |= {"ome": True, "bigtiff": array.nbytes >= _IMAGEJ}
    with atomic_path(path, force) as temporary:
        tifffile.imwrite(temporary, shaped, metadata=metadata, **options)
    return path


def _page_axes(micrograph: Micrograph | None, count: int) -> PageAxes:
    """Return the axes of `count` pages as T and Z; other page axes are written as Z."""
    axes = micrograph.page_axes if micrograph is not None else ()
    writable = len({letter for letter, _ in axes} | {"T", "Z"}) == 2 and len(axes) > 1
    if writable or [letter for letter, _ in axes] == ["T"]:
        return axes
    return (("Z", count),)


def _calibration(micrograph: Micrograph | None) -> tuple[float, float, str, str]:
    """Return the resolution tags of a TIFF (x, y, unit) and their unit of length, '' if unknown.

    The tags of the image are copied if they agree with its pixel size; otherwise they are pixels per micron.
    """
    x, y, unit = _resolution(micrograph)
    size = micrograph.pixel_size if micrograph is not None else None
    if size is None:
        return x, y, unit, ""
    by_tags = physical(micrograph.resolution) if micrograph is not None else None
    if by_tags is not None and np.allclose(by_tags, size, rtol=0.01):
        return x, y, unit, unit
    return 1 / size[1], 1 / size[0], "none", "um"


def _resolution(micrograph: Micrograph | None) -> tuple[float, float, str]:
    """Return the image's resolution tags; in pixels per cm if they have no unit, but the pixel size is known."""
    tags = micrograph.resolution if micrograph is not None else None
    size = micrograph.pixel_size if micrograph is not None else None
    if size is not None and (tags is None or tags[2] == "none"):
        return 1e4 / size[1], 1e4 / size[0], "cm"
    return tags if tags is not None else (1.0, 1.0, "none")


def _per_inch(micrograph: Micrograph | None) -> tuple[float, float] | None:
    x, y, unit = _resolution(micrograph)
    if unit == "none":
        return None
    factor = 1.0 if unit == "inch" else 2.54
    dots = (x * factor, y * factor)
    return dots if max(dots) / 0.0254 < 2**31 else None  # PNG stores pixels per metre in 31 bits
