"""Table of objects: one row each, in pixels and, if the pixel size is known, in microns."""

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
"""Columns of every table; a cell is empty where undefined or if the pixel size is unknown.

If the pixel size is known, `eccentricity` and `orientation_deg` are those of the sample: pixels need not be square.
`orientation_deg` is the angle of the long axis, 0 to 180 degrees counter-clockwise from the horizontal axis.
"""

Row = dict[str, Any]


def measure(
    mask: np.ndarray, grey: np.ndarray, origin: Sequence[int], spacing: Sequence[float] | None
) -> Row:
    """Measure one object, with `skimage.measure.regionprops`.

    On non-square pixels the perimeter in microns is computed by Crofton's formula: crossings of test lines in the
    16 directions of `vispe.segment.materials.directions`.

    Args:
        mask: (h, w) or (z, h, w) bool, pixels of the object in a box.
        grey: (..., c) values of the file in the same box; channels are averaged.
        origin: position of the box in the image.
        spacing: microns per pixel along each axis; None if unknown.

    Returns:
        The columns of `COLUMNS` from the centroid on, except the nearest neighbour. Volumes have no
        perimeter, eccentricity, orientation and solidity, and a volume instead of an area.
    """
    from skimage.measure import regionprops

    properties = regionprops(mask.astype(np.uint8))[0]
    flat, count = mask.ndim == 2, int(properties.area)
    centroid = [float(c) + o for c, o in zip(properties.centroid, origin, strict=True)]
    diameter = float(properties.equivalent_diameter_area)
    values = grey[mask].astype(np.float64)
    finite = values[np.isfinite(values)]
    row: Row = dict.fromkeys(COLUMNS[4:])
    row |= {f"centroid_{a}_px": c for a, c in zip("zyx"[-mask.ndim :], centroid, strict=True)}
    row |= {"area_px" if flat else "volume_px": count, "equivalent_diameter_px": diameter}
    row["mean_grey"] = float(finite.mean()) if finite.size else None
    if flat:
        row |= {
            "perimeter_px": float(properties.perimeter),
            "eccentricity": float(properties.eccentricity),
            "orientation_deg": _from_horizontal(properties.orientation),
            "solidity": float(properties.solidity),
        }
    if spacing is None:
        return row
    pixel_area = math.prod(spacing)
    row |= {f"centroid_{a}_um": c * s for a, c, s in zip("zyx"[-mask.ndim :], centroid, spacing, strict=True)}
    row["area_um2" if flat else "volume_um3"] = count * pixel_area
    row["equivalent_diameter_um"] = diameter * pixel_area ** (1 / mask.ndim)
    if not flat:
        return row
    if math.isclose(*spacing, rel_tol=1e-6):
        row["perimeter_um"] = row["perimeter_px"] * spacing[0]
        return row
    # shape measures in microns need the anisotropic spacing
    stretched = regionprops(mask.astype(np.uint8), spacing=tuple(spacing))[0]
    row["eccentricity"] = float(stretched.eccentricity)
    row["orientation_deg"] = _from_horizontal(stretched.orientation)
    row["perimeter_um"] = _perimeter(mask, tuple(spacing))
    return row


def _from_horizontal(orientation: float) -> float:
    """Convert radians from the row axis to degrees counter-clockwise from the horizontal axis, in [0, 180)."""
    # second modulo: the sum may round to exactly 180
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
        # the margin is as wide as a step, so that rolled pixels do not wrap onto the mask
        moved = np.roll(field, (down, right), (0, 1))
        crossings.append(np.count_nonzero(field != moved))
    return math.pi / 2 * float(Directions(pixel).mean @ crossings) * math.prod(pixel)


def add_nearest_distances(rows: Sequence[Row]) -> None:
    """Add the distance from each centroid to the nearest one of the same class on its page, or in its volume."""
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
            distances = cKDTree(points).query(points, k=2)[0][:, 1]
            for row, distance in zip(group, distances, strict=True):
                row[f"nearest_{unit}"] = float(distance)
