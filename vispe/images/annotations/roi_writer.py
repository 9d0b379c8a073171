"""Regions of interest of ImageJ, written as RoiSet.zip with roifile."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from vispe.errors import require
from vispe.images.annotations.shapes import Color
from vispe.images.annotations.vectorize import Polygon

if TYPE_CHECKING:
    from roifile import ImagejRoi


def roiset_bytes(
    polygons: Mapping[int, Sequence[Polygon]],
    class_of: Mapping[int, int],
    names: Sequence[str],
    colors: Sequence[Color],
    plane: tuple[int, int] | None = None,
    hyperstack: bool = True,
) -> bytes:
    """Return objects as a RoiSet.zip of ImageJ, named by class and number as in ``pore-12``; see `geojson_text`.

    Simply connected objects are written as traced regions, all others as composites. Characters above U+FFFF
    are replaced by `_` in names, since roifile truncates such names. ImageJ reads slice and time in hyperstacks only,
    and the number of the page (position) in other stacks only.

    Raises:
        MissingExtra: roifile is not installed.
    """
    require("roifile", "cli", "writing regions of ImageJ")
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for number, parts in polygons.items():
            k = class_of[number] - 1
            name = re.sub("[^\0-\uffff]", "_", f"{names[k]}-{number}")
            roi = _roi(parts, name, colors[k])
            if plane is not None and hyperstack:
                roi.z_position, roi.t_position = plane[0] + 1, plane[1] + 1
            elif plane is not None:
                roi.position = max(plane) + 1
            data = roi.tobytes()
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
        # frompoints adds the extent of the last pixel, but these are pixel corners already
        roi.right, roi.bottom = roi.right - 1, roi.bottom - 1
    else:
        roi = ImagejRoi()
        roi.name, roi.roitype = name, ROI_TYPE.RECT
        (roi.left, roi.top), (roi.right, roi.bottom) = corners.min(0).tolist(), corners.max(0).tolist()
        # path segments: move (0), line (1), close (4)
        steps = [np.column_stack([np.r_[0, np.ones(len(r) - 1)], r]).ravel() for r in rings]
        roi.multi_coordinates = np.concatenate([part for s in steps for part in (s, [4.0])]).astype(
            np.float32
        )
        roi.shape_roi_size = len(roi.multi_coordinates)
    roi.stroke_color = bytes([255, *(int(c) for c in np.asarray(color))])
    return roi
