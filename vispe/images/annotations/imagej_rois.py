"""Regions of interest of ImageJ: single `.roi` files and `RoiSet.zip`, read with roifile."""

from __future__ import annotations

import logging
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from skimage.draw import ellipse

from vispe.errors import InputError, require
from vispe.images.annotations.shapes import MAX_COORDINATE, Shape, checked_points
from vispe.images.formats.decoded_image import BROKEN, damaged
from vispe.images.formats.size_limits import amount
from vispe.images.paths import check_file

if TYPE_CHECKING:
    from roifile import ImagejRoi

_LARGEST = 200_000_000  # bytes of regions in one file
# default names of ImageJ, from coordinates: 0012-0345, 0001-0012-0345-1
_AUTOMATIC = re.compile(r"\d{4,}(-\d{4,}){1,2}(-\d+)?")
_COUNTED = re.compile(r"(.*\S)\s*[-_]\d+")
_LINES = ("LINE", "FREELINE", "POLYLINE")
_UNMARKED = ("NOROI", "ANGLE", "UNKNOWN")


def read_rois(path: Path) -> list[Shape]:
    """Read a `.roi` file, or all regions in a `.zip` file.

    The class is the group of a region (Edit > Properties), if it has one, otherwise its name without a trailing number
    (``pore-12`` and ``pore_12`` belong to the class ``pore``). Default names of ImageJ are not classes. Regions
    without points become empty shapes.

    Raises:
        InputError: the file is damaged, not from ImageJ or too large, or a region defines no pixels (angle,
            text, image).
        MissingExtra: roifile is not installed.
    """
    require("roifile", "cli", f"reading {path.name} (regions of ImageJ)")
    check_file(path)
    try:
        return [_shape(f"{path}: {name}" if name else str(path), data) for name, data in _entries(path)]
    except InputError:
        raise
    except (*BROKEN, zipfile.BadZipFile, NotImplementedError) as error:
        raise damaged(path, error) from error


def _entries(path: Path) -> list[tuple[str, bytes]]:
    if not zipfile.is_zipfile(path):
        if path.stat().st_size > _LARGEST:
            raise InputError(
                f"{path} is not a region of ImageJ, got a file of {amount(path.stat().st_size)}."
            )
        return [("", path.read_bytes())]
    with zipfile.ZipFile(path) as archive:
        entries = [e for e in archive.infolist() if e.filename.lower().endswith(".roi")]
        if not entries:
            raise InputError(
                f"{path} contains no .roi file. Save the regions with ROI Manager > More > Save."
            )
        size = sum(e.file_size for e in entries)
        if size > _LARGEST:
            raise InputError(
                f"{path}: the unpacked size must be at most {amount(_LARGEST)}, got {amount(size)}."
            )
        return [(e.filename, archive.read(e)) for e in entries]


@contextmanager
def _refusing_warnings(where: str) -> Iterator[None]:
    """Raise warnings that roifile only logs, such as properties beyond the end of a damaged file.

    Raises:
        InputError: roifile logged a warning.
    """
    logged: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.append(" ".join(record.getMessage().split()))

    logger, handler = logging.getLogger("roifile"), Collect(logging.WARNING)
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
    if logged:
        raise InputError(f"{where} is damaged: {logged[0]}. Save it again with the ROI Manager.")


def _shape(where: str, data: bytes) -> Shape:
    from roifile import ROI_OPTIONS, ImagejRoi

    if not data:
        return Shape(where)
    if data[:4] != b"Iout":
        raise InputError(f"{where} is not a region of ImageJ. Save it again with the ROI Manager.")
    with _refusing_warnings(where):
        roi = ImagejRoi.frombytes(data)
    kind, subtype = roi.roitype.name, roi.subtype.name
    # ImageJ shows the file name of regions without a name
    name = roi.name or Path(where.rpartition(": ")[2]).stem
    group = int(roi.group)
    facts = {"name": None if group else roi_class(name), "group": group, **_position(roi)}
    width = float(roi.float_stroke_width or roi.stroke_width)
    if kind in _UNMARKED or subtype in ("TEXT", "IMAGE", "ARROW"):
        shown = kind if subtype == "UNDEFINED" else subtype
        raise InputError(f"{where}: regions of the kind {shown.lower()} define no pixels. Delete it.")
    if ROI_OPTIONS.SPLINE_FIT in roi.options or (
        kind == "RECT" and roi.rounded_rect_arc_size and not roi.composite
    ):
        raise InputError(
            f"{where}: rounded corners and spline fits are not supported. Convert it to a plain area in ImageJ "
            "(Edit > Selection > Create Mask, then Create Selection)."
        )
    if subtype in ("ELLIPSE", "ROTATED_RECT"):
        return Shape(where, **facts, areas=((_rotated(where, roi, subtype),),))
    if kind == "OVAL":
        return Shape(where, **facts, mask=_oval(where, *_box(roi)))
    if kind == "RECT" and not roi.composite:
        left, top, right, bottom = _box(roi)
        corners = [[left, top], [right, top], [right, bottom], [left, bottom]]
        return Shape(where, **facts, areas=((checked_points(where, corners, 4),),))
    parts = [checked_points(where, part, 1) for part in roi.coordinates(multi=True) if len(part)]
    if not parts:
        return Shape(where, **facts)
    # in ImageJ the origin is the corner of the first pixel for areas, and its centre for points and lines
    if kind == "POINT":
        return Shape(where, **facts, lines=tuple((point[None] + 0.5, 1.0) for point in parts[0]))
    if kind in _LINES:
        return Shape(where, **facts, lines=((parts[0] + 0.5, width),))
    rings = tuple(part for part in parts if len(part) > 2)
    if not rings:
        raise InputError(f"{where}: an area needs 3 points, got {len(parts[0])}. Delete it.")
    return Shape(where, **facts, areas=(rings,))


def roi_class(name: str) -> str | None:
    """Return the class that a region name denotes, None for default names of ImageJ.

    Example:
        >>> roi_class("pore-12"), roi_class("grain boundary"), roi_class("0012-0345")
        ('pore', 'grain boundary', None)
    """
    name = name.strip()
    if not name or _AUTOMATIC.fullmatch(name):
        return None
    counted = _COUNTED.fullmatch(name)
    return counted[1] if counted else name


def _position(roi: ImagejRoi) -> dict[str, Any]:
    """Return slice and time, or the page, of a region; ImageJ numbers them from 1, and 0 means none."""
    z, t, page = (n - 1 if n > 0 else None for n in (roi.z_position, roi.t_position, roi.position))
    return {"page": page} if z is None and t is None else {"plane": (z, t)}


def _box(roi: ImagejRoi) -> tuple[float, float, float, float]:
    if roi.subpixelrect:
        return roi.xd, roi.yd, roi.xd + roi.widthd, roi.yd + roi.heightd
    return roi.left, roi.top, roi.right, roi.bottom


def _oval(where: str, left: float, top: float, right: float, bottom: float) -> tuple[int, int, np.ndarray]:
    """Return first row, first column and mask of the pixels whose centres lie inside an ellipse in a box."""
    checked_points(where, [[left, top], [right, bottom]], 2)
    row, column = int(np.floor(top)), int(np.floor(left))
    shape = int(np.ceil(bottom)) - row, int(np.ceil(right)) - column
    if min(shape) < 1 or shape[0] * shape[1] > 50 * MAX_COORDINATE:
        raise InputError(f"{where}: invalid oval of {right - left:g} x {bottom - top:g} pixels. Delete it.")
    mask = np.zeros(shape, bool)
    # in skimage.draw.ellipse the centre of the first pixel is at 0
    middle = (top + bottom) / 2 - row - 0.5, (left + right) / 2 - column - 0.5
    mask[ellipse(*middle, (bottom - top) / 2, (right - left) / 2, shape=shape)] = True
    return row, column, mask


def _rotated(where: str, roi: ImagejRoi, subtype: str) -> np.ndarray:
    """Return the corners (n, 2) of a rotated ellipse or rectangle.

    The file contains the end points of the long axis (ellipse) or of the centre line (rectangle) and, in the bytes
    of the arrow style, a float32: the aspect ratio of the ellipse, or the width of the rectangle.
    """
    ends = checked_points(where, [[roi.x1, roi.y1], [roi.x2, roi.y2]], 2)
    raw = bytes([roi.arrow_style_or_aspect_ratio, roi.arrow_head_size]) + roi.rounded_rect_arc_size.to_bytes(
        2, "big", signed=True
    )
    value = float(np.frombuffer(raw, ">f4")[0])
    along = (ends[1] - ends[0]) / 2
    if not np.isfinite(value) or value <= 0 or not along.any():
        raise InputError(f"{where}: rotated {subtype.lower()} without a size. Delete it.")
    across = np.array([-along[1], along[0]])
    if subtype == "ROTATED_RECT":
        across *= value / 2 / np.hypot(*along)
        return ends[[0, 1, 1, 0]] + np.stack([across, across, -across, -across])
    angle = np.linspace(0, 2 * np.pi, 721)[:-1, None]
    return ends.mean(0) + np.cos(angle) * along + np.sin(angle) * across * value
