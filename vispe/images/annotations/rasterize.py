"""Rasterisation of polygons: a pixel belongs to an area if its centre lies inside."""

from collections.abc import Sequence

import numpy as np


def fill(rings: Sequence[np.ndarray], h: int, w: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the pixels whose centres lie inside an odd number of rings (even-odd rule; inner rings are holes).

    A centre on a border belongs to the area to its right, or below, so areas with a common border neither overlap nor
    leave gaps. The cost is proportional to the length of the border plus the area.

    Args:
        rings: (n, 2) arrays of corners (x, y), in pixels from the corner of the image (the first pixel spans 0 to 1);
            rings are closed implicitly.
        h: height of the image in pixels; pixels outside are clipped.
        w: width of the image in pixels.

    Returns:
        Rows and columns (n,) int64, sorted by row.

    Example:
        >>> import numpy as np
        >>> square = np.array([[1, 0], [3, 0], [3, 2], [1, 2]])
        >>> rows, columns = fill([square], 5, 5)
        >>> rows.tolist(), columns.tolist()
        ([0, 0, 1, 1], [1, 2, 1, 2])
    """
    corners = np.concatenate([np.asarray(ring, float) for ring in rings])
    # the centre of pixel k is at k + 0.5, so the first centre >= a coordinate is that of pixel ceil(coordinate - 0.5)
    left, top = np.clip(np.ceil(corners.min(0) - 0.5), 0, (w, h)).astype(np.int64)
    right, bottom = np.clip(np.ceil(corners.max(0) - 0.5), 0, (w, h)).astype(np.int64)
    if top >= bottom or left >= right:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    crossings = np.zeros((bottom - top, right - left + 1), np.int32)
    for ring in rings:
        start = np.asarray(ring, float)
        _count(crossings, start, np.roll(start, -1, axis=0), int(top), int(left))
    # even-odd rule: a pixel is inside if an odd number of borders lies to the left of its centre
    rows, columns = np.nonzero(np.cumsum(crossings[:, :-1], axis=1) & 1)
    return rows + top, columns + left


def _count(crossings: np.ndarray, start: np.ndarray, end: np.ndarray, top: int, left: int) -> None:
    """Count the crossings of a ring with the centre line of each row, at the first pixel centre not left of them."""
    height, width = crossings.shape
    low, high = np.minimum(start[:, 1], end[:, 1]), np.maximum(start[:, 1], end[:, 1])
    first = np.clip(np.ceil(low - 0.5), top, top + height).astype(np.int64)
    count = np.clip(np.ceil(high - 0.5), top, top + height).astype(np.int64) - first
    edge = np.repeat(np.arange(len(start)), count)
    # rows of all edges concatenated: running index minus the start of the edge
    row = np.arange(len(edge)) - np.repeat(np.cumsum(count) - count, count) + first[edge]
    (xa, ya), (xb, yb) = start[edge].T, end[edge].T
    x = xa + (row + 0.5 - ya) * ((xb - xa) / (yb - ya))
    column = np.clip(np.ceil(x - 0.5), left, left + width - 1).astype(np.int64) - left
    np.add.at(crossings, (row - top, column), 1)
