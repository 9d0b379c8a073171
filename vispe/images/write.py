"""Results to files: complete or not there at all, and never over an existing file unless asked."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vispe.errors import InputError, ShapeError
from vispe.files import atomic_path
from vispe.images.formats.decoded_image import PageAxes, physical
from vispe.images.formats.metadata import scale_chunk
from vispe.images.read import Micrograph

_IMAGEJ = (1 << 32) - (1 << 26)  # bytes of pixels that an ImageJ TIFF has room for
_LENGTHS = {"um": 1.0, "inch": 25_400.0, "cm": 1e4}  # microns
_HEADER = 33  # bytes of a PNG file up to the end of its first chunk
_LEVEL = 3  # of PNG compression: half the time of zlib's 6, for files a fifth larger


def label_suffix(n_pages: int) -> str:
    """File name ending for label maps: '.png' for one page, '.tif' for several."""
    return ".png" if n_pages == 1 else ".tif"


def write_labels(
    path: str | Path, values: np.ndarray, micrograph: Micrograph | None = None, force: bool = False
) -> Path:
    """Write a label map with the pixel size of its image, and a stack with its axes, Z step and frame interval.

    Args:
        path: '.png' (one page) or '.tif' (any number of pages).
        values: (z, h, w) uint8, the size of the image.
        micrograph: the image; its resolution tags are copied.
        force: overwrite.

    Raises:
        ShapeError: not (z, h, w), or another size than the image.
        InputError: not uint8, several pages as PNG, another ending, or `path` exists.
    """
    path = Path(path)
    if values.ndim != 3:
        raise ShapeError(f"label maps have the shape (z, h, w), got {values.shape}.")
    if micrograph is not None and values.shape != micrograph.pages.shape[:3]:
        raise ShapeError(f"the label map is {values.shape}, but the image is {micrograph.pages.shape[:3]}.")
    if values.dtype != np.uint8:
        raise InputError(f"label maps are written as uint8 (at most 255 classes), got {values.dtype}.")
    if path.suffix.lower() == ".png":
        if len(values) != 1:
            raise InputError(f"{path}: a PNG holds one page, but there are {len(values)}; write a .tif file.")
        return write_png(path, values[0], force, micrograph=micrograph)
    _check_tiff(path)
    with atomic_path(path, force) as temporary:
        _write_tiff(temporary, values, "ZYX", micrograph, compression="zlib")
    return path


def write_instances(
    path: str | Path, values: np.ndarray, micrograph: Micrograph | None = None, force: bool = False
) -> Path:
    """Write a map of objects (z, h, w), uint16 or uint32, as TIFF with the pixel size and the axes of its image.

    ImageJ has no whole numbers of 32 bits: such a map is an OME-TIFF.

    Raises:
        ShapeError: not (z, h, w), or another size than the image.
        InputError: another number type or ending, or `path` exists.
    """
    path = Path(path)
    if values.ndim != 3 or (micrograph is not None and values.shape != micrograph.pages.shape[:3]):
        raise ShapeError(f"maps of objects have the shape (z, h, w) of the image, got {values.shape}.")
    if values.dtype not in (np.uint16, np.uint32):
        raise InputError(f"maps of objects are written as uint16 or uint32, got {values.dtype}.")
    _check_tiff(path)
    with atomic_path(path, force) as temporary:
        _write_tiff(temporary, values, "ZYX", micrograph, compression="zlib")
    return path


def write_probabilities(
    path: str | Path,
    prob: np.ndarray,
    micrograph: Micrograph | None = None,
    names: Sequence[str] | None = None,
    force: bool = False,
) -> Path:
    """Write class probabilities as a TIFF with one float32 page for each class (of each image page).

    It is an ImageJ hyperstack with the classes as channels; OME-TIFF from 4 GB on.

    Args:
        path: '.tif' file.
        prob: (z, k, h, w) float32; file pages are in this order, classes fastest.
        micrograph: the image; its resolution tags are copied.
        names: the k class names, which ImageJ shows above each page.
        force: overwrite.

    Raises:
        ShapeError: not (z, k, h, w).
        InputError: not float32, not k names, another ending, or `path` exists.
    """
    path = Path(path)
    if prob.ndim != 4:
        raise ShapeError(f"probabilities have the shape (z, k, h, w), got {prob.shape}.")
    if prob.dtype != np.float32:
        raise InputError(f"probabilities are written as float32, got {prob.dtype}.")
    if names is not None and len(names) != prob.shape[1]:
        raise InputError(f"{len(names)} names were given for {prob.shape[1]} classes; give one for each.")
    _check_tiff(path)
    with atomic_path(path, force) as temporary:
        _write_tiff(temporary, prob, "ZCYX", micrograph, names=names)
    return path


def write_png(
    path: str | Path, array: np.ndarray, force: bool = False, *, micrograph: Micrograph | None = None
) -> Path:
    """Write (h, w) uint8 or uint16, or (h, w, 3) uint8, as PNG, with the pixel size of `micrograph`."""
    path = Path(path)
    fits = array.dtype == np.uint8 and (array.ndim == 2 or (array.ndim == 3 and array.shape[2] == 3))
    if not fits and not (array.dtype == np.uint16 and array.ndim == 2):
        raise ShapeError(
            f"a PNG needs (h, w) uint8 or uint16 or (h, w, 3) uint8, got {array.shape} {array.dtype}."
        )
    known: dict[str, Any] = {} if (dots := _per_inch(micrograph)) is None else {"dpi": dots}
    out = io.BytesIO()
    image = Image.fromarray(np.ascontiguousarray(array))
    image.save(out, format="PNG", compress_level=_LEVEL, **known)
    with atomic_path(path, force) as temporary, temporary.open("wb") as stream:
        data = out.getbuffer()
        stream.write(data[:_HEADER])
        if micrograph is not None and micrograph.pixel_size is not None:
            # resolutions have no room for pixels below 0.47 nm, and are taken for those of printers above 5 microns
            stream.write(scale_chunk(micrograph.pixel_size))
        stream.write(data[_HEADER:])
    return path


def _check_tiff(path: Path) -> None:
    if path.suffix.lower() not in (".tif", ".tiff"):
        raise InputError(f"{path} must end in .tif (or .png for a label map of one page).")


def _write_tiff(
    path: Path,
    array: np.ndarray,
    axes: str,
    micrograph: Micrograph | None,
    *,
    compression: str | None = None,
    names: Sequence[str] | None = None,
) -> None:
    """Write pages as an ImageJ hyperstack; as OME-TIFF where that format has no room or no such order of axes.

    Args:
        path: the file.
        array: `axes` 'ZYX' or 'ZCYX', Z being all pages in the order of the image.
        axes: of `array`.
        micrograph: the image, whose axes, pixel size, step along Z and frame interval are written.
        compression: of tifffile.
        names: of the channels.
    """
    import tifffile

    x, y, unit, length = _calibration(micrograph)
    step = micrograph.z_step if micrograph is not None and length else None
    interval = micrograph.frame_interval if micrograph is not None else None
    pages = _page_axes(micrograph, len(array))
    letters = "".join(letter for letter, _ in pages)
    shaped = array.reshape(*(n for _, n in pages), *array.shape[1:])
    common: dict[str, Any] = {
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
        tifffile.imwrite(path, shaped, imagej=True, metadata=metadata, **common)
        return
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
    tifffile.imwrite(path, shaped, ome=True, bigtiff=array.nbytes >= _IMAGEJ, metadata=metadata, **common)


def _page_axes(micrograph: Micrograph | None, count: int) -> PageAxes:
    """Give the axes of `count` pages as T and Z; pages of another meaning count as Z."""
    axes = micrograph.page_axes if micrograph is not None else ()
    known = len({letter for letter, _ in axes} | {"T", "Z"}) == 2 and len(axes) > 1
    if known or [letter for letter, _ in axes] == ["T"]:
        return axes
    return (("Z", count),)


def _calibration(micrograph: Micrograph | None) -> tuple[float, float, str, str]:
    """Resolution tags of a TIFF (x, y, unit) and the unit of length that they stand for, '' where unknown.

    The tags of the image are copied where they say what its pixel size is; else they count pixels per micron.
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
    """Resolution tags of the image; pixels per cm where these have no unit but the pixel size is known."""
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
