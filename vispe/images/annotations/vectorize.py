"""Vectorisation of instance maps: polygons along pixel edges, with holes."""

from collections.abc import Iterator

import numpy as np
from skimage.measure import label

from vispe.errors import InputError, ShapeError

Polygon = tuple[np.ndarray, ...]
"""Outer ring and holes, each (n, 2) int64 corners (x, y) in pixels from the corner of the image."""


def vectorize(instances: np.ndarray) -> dict[int, list[Polygon]]:
    """Return the polygons of every object of an instance map.

    The rings run along pixel edges, and rasterising them (`vispe.images.annotations.rasterize.fill`) reproduces the map
    exactly. Parts of an object that touch only at a corner are separate polygons. Rings do not touch themselves, so
    the polygons are valid for JTS (QuPath) and shapely.

    Args:
        instances: (h, w) integers, 0 = no object.

    Returns:
        The polygons of each object by its number, in ascending order. Outer rings are clockwise in image coordinates,
        holes counter-clockwise; the last corner is not repeated.

    Raises:
        ShapeError: the map is not two-dimensional.
        InputError: non-integer or negative values.

    Example:
        >>> import numpy as np
        >>> [[ring.tolist() for ring in polygon] for polygon in vectorize(np.array([[0, 7, 7]]))[7]]
        [[[[1, 0], [3, 0], [3, 1], [1, 1]]]]
    """
    checked = checked_instances(instances)
    parts = label(checked, background=0, connectivity=1)
    rings_of: dict[int, dict[int, list[np.ndarray]]] = {int(n): {} for n in np.unique(checked) if n}
    for y, x, ring in _rings(checked):
        rings_of[int(checked[y, x])].setdefault(int(parts[y, x]), []).append(ring)
    # the outer ring of a connected part has the largest signed area; its other rings are holes
    return {
        n: [tuple(sorted(rings, key=_area, reverse=True)) for rings in rings_by_part.values()]
        for n, rings_by_part in rings_of.items()
    }


def checked_instances(instances: np.ndarray) -> np.ndarray:
    """Return an instance map as (h, w) int64.

    Raises:
        ShapeError: the map is not two-dimensional.
        InputError: non-integer or negative values.
    """
    instances = np.asarray(instances)
    if instances.ndim != 2:
        raise ShapeError(f"instance maps have the shape (h, w), got {instances.shape}.")
    if instances.dtype.kind not in "iu" or (instances.size and instances.min() < 0):
        raise InputError(
            f"instance maps must be integers from 0 (no object), got {instances.dtype}"
            f"{f' with minimum {instances.min()}' if instances.size else ''}."
        )
    return instances.astype(np.int64)


def _area(ring: np.ndarray) -> int:
    """Return twice the signed area of a ring (shoelace formula); negative for holes."""
    (x, y), (following_x, following_y) = ring.T, np.roll(ring, -1, axis=0).T
    return int((x * following_y - following_x * y).sum())


def _rings(values: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yield (row, column of a pixel of an object, ring of corners) for each border."""
    following, pixel, direction, width = _linked(values)
    # start corner of each edge: edges run right, down, left, up, with the object on their right
    x = pixel % width - 1 + np.array([0, 1, 1, 0])[direction]
    y = pixel // width - 1 + np.array([0, 0, 1, 1])[direction]
    changes = direction != direction[np.argsort(following)]  # a collinear point is not a corner
    after, corners, is_corner = (
        following.tolist(),
        list(zip(x.tolist(), y.tolist(), strict=True)),
        changes.tolist(),
    )
    visited = bytearray(len(after))
    for start in range(len(after)):
        if visited[start]:
            continue
        ring, side = [], start
        while not visited[side]:
            visited[side] = 1
            if is_corner[side]:
                ring.append(corners[side])
            side = after[side]
        row, column = divmod(int(pixel[start]), width)
        for simple in _untouching(ring):
            yield row - 1, column - 1, np.array(simple, np.int64)


def _linked(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Find the pixel edges between objects, and the successor of each edge along its object.

    Returns:
        For each edge the index of its successor, its pixel and its direction (0 right, 1 down, 2 left, 3 up) in a
        map padded by one pixel; and the width of that map.
    """
    framed = np.pad(values, 1).ravel()
    width = values.shape[1] + 2
    ahead = np.array([1, width, -1, -width])  # offset of the pixel in front, by direction
    outward = np.array([-width, 1, width, -1])  # offset of the pixel across the edge
    inside = np.flatnonzero(framed)
    sides = [inside[framed[inside + outward[d]] != framed[inside]] for d in range(4)]
    pixel, direction = np.concatenate(sides), np.repeat(np.arange(4), [len(s) for s in sides])
    value = framed[pixel]
    front, corner = pixel + ahead[direction], pixel + ahead[direction] + outward[direction]
    # if the pixel in front belongs to another object, the border stays at the same pixel even if the diagonal pixel
    # belongs to the object: parts that touch at a corner remain separate
    blocked, straight = framed[front] != value, framed[corner] != value
    next_pixel = np.where(blocked, pixel, np.where(straight, front, corner))
    next_direction = (direction + np.where(blocked, 1, np.where(straight, 0, 3))) % 4
    key = direction * len(framed) + pixel  # ascending by construction
    return np.searchsorted(key, next_direction * len(framed) + next_pixel), pixel, direction, width


def _untouching(ring: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Split a ring that visits a corner twice into simple rings."""
    path: list[tuple[int, int]] = []
    index_of: dict[tuple[int, int], int] = {}
    for corner in ring:
        if corner in index_of:
            first = index_of[corner]
            yield path[first:]
            for removed in path[first:]:
                del index_of[removed]
            del path[first:]
        index_of[corner] = len(path)
        path.append(corner)
    yield path
