"""Regions of interest of ImageJ: single `.roi` files and `RoiSet.zip`, read and written with roifile."""

from __future__ import annotations

import io
import logging
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from skimage.draw import ellipse

from vispe.errors import InputError, require
from vispe.images.annotations.shapes import FARTHEST, Color, Shape, checked_points
from vispe.images.annotations.vectorize import Polygon
from vispe.images.formats.decoded_image import BROKEN, damaged
from vispe.images.formats.size_limits import amount
from vispe.images.paths import check_file

if TYPE_CHECKING:
    from roifile import ImagejRoi

_LARGEST = 200_000_000  # bytes of regions in one file
_AUTOMATIC = re.compile(
    r"\d{4,}(-\d{4,}){1,2}(-\d+)?"
)  # ImageJ's own names, of places: 0012-0345, 0001-0012-0345-1
_COUNTED = re.compile(r"(.*\S)\s*[-_]\d+")
_LINES = ("LINE", "FREELINE", "POLYLINE")
_UNMARKED = ("NOROI", "ANGLE", "UNKNOWN")


def read_rois(path: Path) -> list[Shape]:
    """Read a `.roi` file, or all of them in a `.zip` file.

    The class is the group of a region (Edit > Properties), if it has one, else its name without a number at the end
    (``pore-12`` and ``pore_12`` are of the class ``pore``).  Names that ImageJ gives by itself are none.
    Regions without points give shapes that are empty.

    Raises:
        InputError: damaged, not of ImageJ, too large, or a region that marks no pixels (angle, text, picture).
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
            raise InputError(f"{path} has {amount(path.stat().st_size)}: no region of ImageJ.")
        return [("", path.read_bytes())]
    with zipfile.ZipFile(path) as archive:
        entries = [e for e in archive.infolist() if e.filename.lower().endswith(".roi")]
        if not entries:
            raise InputError(f"{path} holds no .roi file; save the regions with ROI Manager > More > Save.")
        size = sum(e.file_size for e in entries)
        if size > _LARGEST:
            raise InputError(
                f"{path} was refused: it unpacks to {amount(size)}, more than {amount(_LARGEST)}."
            )
        return [(e.filename, archive.read(e)) for e in entries]


@contextmanager
def _refusing_warnings(where: str) -> Iterator[None]:
    """Raise what roifile only logs, such as properties that end beyond the file: the file is damaged.

    Raises:
        InputError: something was logged.
    """
    logged: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.append(" ".join(record.getMessage().split()))

    logger, handler = logging.getLogger("roifile"), Collect(logging.WARNING)
    passed_on, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = passed_on
    if logged:
        raise InputError(f"{where} is damaged: {logged[0]}. Save it again with the ROI Manager.")


def _shape(where: str, data: bytes) -> Shape:
    from roifile import ROI_OPTIONS, ImagejRoi

    if not data:
        return Shape(where)
    if data[:4] != b"Iout":
        raise InputError(f"{where} is no region of ImageJ; save it again with the ROI Manager.")
    with _refusing_warnings(where):
        roi = ImagejRoi.frombytes(data)
    kind, subtype = roi.roitype.name, roi.subtype.name
    # the file's name is what ImageJ shows where the region has none inside
    name = roi.name or Path(where.rpartition(": ")[2]).stem
    group = int(roi.group)
    facts = {"name": None if group else roi_class(name), "group": group, "page": _page(where, roi)}
    width = float(roi.float_stroke_width or roi.stroke_width)
    if kind in _UNMARKED or subtype in ("TEXT", "IMAGE", "ARROW"):
        shown = kind if subtype == "UNDEFINED" else subtype
        raise InputError(
            f"{where} is a region of the kind {shown.lower()}, which marks no pixels; delete it."
        )
    if ROI_OPTIONS.SPLINE_FIT in roi.options or (
        kind == "RECT" and roi.rounded_rect_arc_size and not roi.composite
    ):
        raise InputError(
            f"{where} has rounded corners or is fitted by a spline, which the file does not spell out; make it a "
            "plain area in ImageJ (Edit > Selection > Create Mask, then Create Selection)."
        )
    if subtype in ("ELLIPSE", "ROTATED_RECT"):
        return Shape(where, **facts, areas=((_turned(where, roi, subtype),),))
    if kind == "OVAL":
        return Shape(where, **facts, mask=_oval(where, *_box(roi)))
    if kind == "RECT" and not roi.composite:
        left, top, right, bottom = _box(roi)
        corners = [[left, top], [right, top], [right, bottom], [left, bottom]]
        return Shape(where, **facts, areas=((checked_points(where, corners, 4),),))
    parts = [checked_points(where, part, 1) for part in roi.coordinates(multi=True) if len(part)]
    if not parts:
        return Shape(where, **facts)
    # ImageJ counts corners of areas from the corner of a pixel, points and lines from its centre
    if kind == "POINT":
        return Shape(where, **facts, lines=tuple((point[None] + 0.5, 1.0) for point in parts[0]))
    if kind in _LINES:
        return Shape(where, **facts, lines=((parts[0] + 0.5, width),))
    rings = tuple(part for part in parts if len(part) > 2)
    if not rings:
        raise InputError(f"{where} has {len(parts[0])} points, too few for an area; delete it.")
    return Shape(where, **facts, areas=(rings,))


def roi_class(name: str) -> str | None:
    """Return the class that a name of a region stands for, None for a name that ImageJ gives by itself.

    Example:
        >>> roi_class("pore-12"), roi_class("grain boundary"), roi_class("0012-0345")
        ('pore', 'grain boundary', None)
    """
    name = name.strip()
    if not name or _AUTOMATIC.fullmatch(name):
        return None
    counted = _COUNTED.fullmatch(name)
    return counted[1] if counted else name


def _page(where: str, roi: ImagejRoi) -> int | None:
    """Return the page, from 0, of a position that ImageJ counts from 1; 0 there is no position."""
    z, t = max(roi.z_position, 0), max(roi.t_position, 0)
    if z > 1 and t > 1:
        raise InputError(f"{where} is in slice {z} of frame {t}; pages are counted along one axis only.")
    position = max(z, t) or max(roi.position, 0)
    return position - 1 if position else None


def _box(roi: ImagejRoi) -> tuple[float, float, float, float]:
    if roi.subpixelrect:
        return roi.xd, roi.yd, roi.xd + roi.widthd, roi.yd + roi.heightd
    return roi.left, roi.top, roi.right, roi.bottom


def _oval(where: str, left: float, top: float, right: float, bottom: float) -> tuple[int, int, np.ndarray]:
    """Return first row, first column and mask of the pixels whose centres lie inside an ellipse in a box."""
    checked_points(where, [[left, top], [right, bottom]], 2)
    row, column = int(np.floor(top)), int(np.floor(left))
    shape = int(np.ceil(bottom)) - row, int(np.ceil(right)) - column
    if min(shape) < 1 or shape[0] * shape[1] > 50 * FARTHEST:
        raise InputError(f"{where} is an oval of {right - left:g} x {bottom - top:g} pixels; delete it.")
    mask = np.zeros(shape, bool)
    # the frame of draw.ellipse has the centre of the first pixel at 0
    middle = (top + bottom) / 2 - row - 0.5, (left + right) / 2 - column - 0.5
    mask[ellipse(*middle, (bottom - top) / 2, (right - left) / 2, shape=shape)] = True
    return row, column, mask


def _turned(where: str, roi: ImagejRoi, subtype: str) -> np.ndarray:
    """Return corners (n, 2) of an ellipse by the ends of its long axis, or of a rectangle by the ends of its middle.

    The file holds these two points and, where other shapes keep an arrow, a 32-bit number: the short axis by the long
    one, or the width of the rectangle.
    """
    ends = checked_points(where, [[roi.x1, roi.y1], [roi.x2, roi.y2]], 2)
    raw = bytes([roi.arrow_style_or_aspect_ratio, roi.arrow_head_size]) + roi.rounded_rect_arc_size.to_bytes(
        2, "big", signed=True
    )
    value = float(np.frombuffer(raw, ">f4")[0])
    along = (ends[1] - ends[0]) / 2
    if not np.isfinite(value) or value <= 0 or not along.any():
        raise InputError(f"{where} is a turned {subtype.lower()} without a size; delete it.")
    across = np.array([-along[1], along[0]])
    if subtype == "ROTATED_RECT":
        across *= value / 2 / np.hypot(*along)
        return ends[[0, 1, 1, 0]] + np.stack([across, across, -across, -across])
    angle = np.linspace(0, 2 * np.pi, 721)[:-1, None]
    return ends.mean(0) + np.cos(angle) * along + np.sin(angle) * across * value


def roiset_bytes(
    polygons: Mapping[int, Sequence[Polygon]],
    class_of: Mapping[int, int],
    names: Sequence[str],
    colors: Sequence[Color],
) -> bytes:
    """Write objects as a RoiSet.zip of ImageJ, named by class and number as in ``pore-12``; arguments: `geojson_text`.

    An object in one piece without holes is a traced region, any other one a composite.  Characters beyond U+FFFF
    become `_` in names, since roifile cuts such names.
    """
    require("roifile", "cli", "writing regions of ImageJ")
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for number, parts in polygons.items():
            k = class_of[number] - 1
            name = re.sub("[^\0-\uffff]", "_", f"{names[k]}-{number}")
            data = _roi(parts, name, colors[k]).tobytes()
            entry = zipfile.ZipInfo(re.sub(r'[\\/:*?"<>|]', "_", name) + ".roi", (1980, 1, 1, 0, 0, 0))
            archive.writestr(entry, data, zipfile.ZIP_DEFLATED)
    return out.getvalue()


def _roi(parts: Sequence[Polygon], name: str, color: Color) -> ImagejRoi:
    from roifile import ROI_TYPE, ImagejRoi

    rings = [ring for polygon in parts for ring in polygon]
    corners = np.concatenate(rings)
    if len(rings) == 1 and len(corners) < 1 << 16 and corners.max() < 32768:
        roi = ImagejRoi.frompoints(rings[0].astype(np.int32), name=name)
        roi.roitype = ROI_TYPE.TRACED
        # frompoints leaves room for the last pixel, but these are corners of pixels already
        roi.right, roi.bottom = roi.right - 1, roi.bottom - 1
    else:
        roi = ImagejRoi()
        roi.name, roi.roitype = name, ROI_TYPE.RECT
        (roi.left, roi.top), (roi.right, roi.bottom) = corners.min(0).tolist(), corners.max(0).tolist()
        # a path of move (0), line (1) and close (4)
        steps = [np.column_stack([np.r_[0, np.ones(len(r) - 1)], r]).ravel() for r in rings]
        roi.multi_coordinates = np.concatenate([part for s in steps for part in (s, [4.0])]).astype(
            np.float32
        )
        roi.shape_roi_size = len(roi.multi_coordinates)
    roi.stroke_color = bytes([255, *(int(c) for c in np.asarray(color))])
    return roi
