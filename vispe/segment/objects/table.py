"""The table of objects: one row for each, in pixels and, where the pixel size is known, in microns."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

COLUMNS = (
    *("image", "page", "object", "class"),
    *("centroid_z_px", "centroid_y_px", "centroid_x_px", "area_px", "volume_px", "equivalent_diameter_px"),
    *("perimeter_px", "eccentricity", "orientation_deg", "solidity", "mean_grey", "nearest_px"),
    *("centroid_z_um", "centroid_y_um", "centroid_x_um", "area_um2", "volume_um3", "equivalent_diameter_um"),
    *("perimeter_um", "nearest_um"),
)
"""Columns of every table; a cell is empty where it has no meaning or the pixel size is not known.

`eccentricity` and `orientation_deg` are those on the sample where the pixel size is known: pixels need not be square.
`orientation_deg` is the angle of the long axis, 0 to 180 degrees counter-clockwise from the horizontal axis.
"""

Row = dict[str, Any]


def measure(
    mask: np.ndarray, grey: np.ndarray, origin: Sequence[int], spacing: Sequence[float] | None
) -> Row:
    """Measure one object, with `skimage.measure.regionprops`.

    On pixels that are not square the perimeter in microns is that of Crofton's formula: crossings of test lines in the
    16 directions of `vispe.segment.materials.directions`.

    Args:
        mask: (h, w) or (z, h, w) bool, its pixels in a box.
        grey: (..., c) values of the file in the same box; channels are averaged.
        origin: place of the box in the image.
        spacing: microns per pixel along each axis; None where the file does not say.

    Returns:
        The columns of `COLUMNS` from the centroid on, but for the nearest neighbour. In volumes there are no
        perimeter, eccentricity, orientation and solidity, and the volume stands in place of the area.
    """
    from skimage.measure import regionprops

    found = regionprops(mask.astype(np.uint8))[0]
    flat, count = mask.ndim == 2, int(found.area)
    place = [float(c) + o for c, o in zip(found.centroid, origin, strict=True)]
    diameter = float(found.equivalent_diameter_area)
    values = grey[mask].astype(np.float64)
    known = values[np.isfinite(values)]
    row: Row = dict.fromkeys(COLUMNS[4:])
    row |= {f"centroid_{a}_px": c for a, c in zip("zyx"[-mask.ndim :], place, strict=True)}
    row |= {"area_px" if flat else "volume_px": count, "equivalent_diameter_px": diameter}
    row["mean_grey"] = float(known.mean()) if known.size else None
    if flat:
        row |= {
            "perimeter_px": float(found.perimeter),
            "eccentricity": float(found.eccentricity),
            "orientation_deg": _from_horizontal(found.orientation),
            "solidity": float(found.solidity),
        }
    if spacing is None:
        return row
    one = math.prod(spacing)
    row |= {f"centroid_{a}_um": c * s for a, c, s in zip("zyx"[-mask.ndim :], place, spacing, strict=True)}
    row["area_um2" if flat else "volume_um3"] = count * one
    row["equivalent_diameter_um"] = diameter * one ** (1 / mask.ndim)
    if not flat:
        return row
    if math.isclose(*spacing, rel_tol=1e-6):
        row["perimeter_um"] = row["perimeter_px"] * spacing[0]
        return row
    stretched = regionprops(mask.astype(np.uint8), spacing=tuple(spacing))[0]
    row["eccentricity"] = float(stretched.eccentricity)
    row["orientation_deg"] = _from_horizontal(stretched.orientation)
    row["perimeter_um"] = _perimeter(mask, tuple(spacing))
    return row


def _from_horizontal(orientation: float) -> float:
    """Return degrees counter-clockwise from the horizontal axis, 0 to 180, of radians from the axis of rows."""
    # adding 180 may round up to it
    return (math.degrees(orientation) + 90) % 180 % 180


def _perimeter(mask: np.ndarray, pixel: tuple[float, float]) -> float:
    """Return the perimeter (holes included) of a mask (h, w) on pixels of size (y, x) by Crofton's formula.

    L = pi / 2 * mean over angles of (crossings per length of test line) * area of the field
    """
    from vispe.segment.materials.directions import STEPS, Directions

    reach = max(abs(n) for step in STEPS for n in step)
    field = np.pad(mask, reach)
    crossings = []
    for down, right in STEPS:
        moved = np.roll(
            field, (down, right), (0, 1)
        )  # the margin is as wide as a step: nothing wraps onto the mask
        crossings.append(np.count_nonzero(field != moved))
    return math.pi / 2 * float(Directions(pixel).mean @ crossings) * math.prod(pixel)


def neighbours(rows: Sequence[Row]) -> None:
    """Fill in the distance from each centroid to the nearest one of its class on its page, or in its volume."""
    from scipy.spatial import cKDTree

    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["page"], row["class"]), []).append(row)
    for group in groups.values():
        if len(group) < 2:
            continue
        for unit in ("px", "um"):
            names = [f"centroid_{a}_{unit}" for a in "zyx"]
            points = np.array([[row[n] for n in names if row[n] is not None] for row in group], float)
            if not points.size:
                continue
            near = cKDTree(points).query(points, k=2)[0][:, 1]
            for row, distance in zip(group, near, strict=True):
                row[f"nearest_{unit}"] = float(distance)
