"""Polygons to pixels: a pixel belongs to an area when its centre lies inside."""

from collections.abc import Sequence

import numpy as np


def fill(rings: Sequence[np.ndarray], h: int, w: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the pixels whose centres lie inside an odd number of rings, so that a ring inside another is a hole.

    A centre that lies on a border belongs to the area on its right, or below: areas that share a border share no
    pixel and leave none out.  The time goes with the length of the border and the area, not with their product.

    Args:
        rings: (n, 2) arrays of corners (x, y), in pixels from the corner of the image, so that the first pixel
            reaches from 0 to 1; the last corner is joined to the first.
        h: height of the image in pixels; what lies outside is left away.
        w: width of the image.

    Returns:
        Rows and columns, in the order of the rows.

    Example:
        >>> import numpy as np
        >>> square = np.array([[1, 0], [3, 0], [3, 2], [1, 2]])
        >>> rows, columns = fill([square], 5, 5)
        >>> rows.tolist(), columns.tolist()
        ([0, 0, 1, 1], [1, 2, 1, 2])
    """
    corners = np.concatenate([np.asarray(ring, float) for ring in rings])
    # the centre of pixel k is at k + 0.5: the first one at or behind a coordinate is ceil(coordinate - 0.5)
    left, top = np.clip(np.ceil(corners.min(0) - 0.5), 0, (w, h)).astype(np.int64)
    right, bottom = np.clip(np.ceil(corners.max(0) - 0.5), 0, (w, h)).astype(np.int64)
    if top >= bottom or left >= right:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    crossings = np.zeros((bottom - top, right - left + 1), np.int32)
    for ring in rings:
        start = np.asarray(ring, float)
        _count(crossings, start, np.roll(start, -1, axis=0), int(top), int(left))
    # a pixel is inside when an odd number of borders lies to the left of its centre
    rows, columns = np.nonzero(np.cumsum(crossings[:, :-1], axis=1) & 1)
    return rows + top, columns + left


def _count(crossings: np.ndarray, start: np.ndarray, end: np.ndarray, top: int, left: int) -> None:
    """Add each place where a ring crosses the middle of a row, at the first pixel whose centre is not left of it."""
    height, width = crossings.shape
    low, high = np.minimum(start[:, 1], end[:, 1]), np.maximum(start[:, 1], end[:, 1])
    first = np.clip(np.ceil(low - 0.5), top, top + height).astype(np.int64)
    count = np.clip(np.ceil(high - 0.5), top, top + height).astype(np.int64) - first
    edge = np.repeat(np.arange(len(start)), count)
    # rows of each edge one after the other: a running number less where the edge began
    row = np.arange(len(edge)) - np.repeat(np.cumsum(count) - count, count) + first[edge]
    (xa, ya), (xb, yb) = start[edge].T, end[edge].T
    x = xa + (row + 0.5 - ya) * ((xb - xa) / (yb - ya))
    column = np.clip(np.ceil(x - 0.5), left, left + width - 1).astype(np.int64) - left
    np.add.at(crossings, (row - top, column), 1)
