"""Measurements from which objects are classified, and whether those of an image resemble the examples."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from vispe.segment.objects.table import Row

Unit = Literal["px", "um"]

_FAR = 0.25  # distance from the examples, as a fraction of their largest mean grey, that needs a note


def measurements(rows: Sequence[Row], unit: Unit, volumes: bool) -> np.ndarray:
    """Return the features of objects (n, f) float32; NaN where a cell of the table is empty.

    On pages: logarithm of the area and of the perimeter, eccentricity, solidity, circularity (4 pi area / perimeter^2)
    and mean grey. In volumes: logarithm of the volume, and mean grey.
    """

    def column(name: str) -> np.ndarray:
        return np.array([row[name] for row in rows], np.float64)

    with np.errstate(divide="ignore", invalid="ignore"):
        if volumes:
            columns = [np.log(column("volume_px" if unit == "px" else "volume_um3"))]
        else:
            area = column("area_px" if unit == "px" else "area_um2")
            # the perimeter of a single pixel is 0
            perimeter = np.maximum(column(f"perimeter_{unit}"), np.sqrt(area))
            circularity = 4 * np.pi * area / perimeter**2
            columns = [
                np.log(area),
                np.log(perimeter),
                column("eccentricity"),
                column("solidity"),
                circularity,
            ]
    return np.stack([*columns, column("mean_grey")], 1).astype(np.float32)


def grey_limits(rows: Sequence[Row]) -> list[float]:
    """Return the smallest and the largest mean grey of objects."""
    greys = [row["mean_grey"] for row in rows]
    return [min(greys), max(greys)]


def grey_notes(name: str, rows: Sequence[Row], limits: Sequence[float] | None) -> list[str]:
    """Return a note if the objects of an image are much brighter or darker than the examples, such as 16-bit images.

    Args:
        name: name of the image.
        rows: its objects.
        limits: smallest and largest mean grey of the examples; None if unknown.
    """
    greys = [row["mean_grey"] for row in rows if row["mean_grey"] is not None]
    if limits is None or not greys:
        return []
    (lower, upper), median = limits, float(np.median(greys))
    margin = max(upper - lower, _FAR * max(abs(lower), abs(upper)))
    if lower - margin <= median <= upper + margin:
        return []
    return [
        f"the median grey level of the objects of {name} is {median:.4g}, but the examples of object classes have "
        f"{lower:.4g} to {upper:.4g}, so the classes may be wrong. Use images of equal exposure and bit depth."
    ]
