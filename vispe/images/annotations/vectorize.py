"""Objects to polygons whose corners are corners of pixels, holes included."""

from collections.abc import Iterator

import numpy as np
from skimage.measure import label

from vispe.errors import InputError, ShapeError

Polygon = tuple[np.ndarray, ...]
"""The outer ring and the holes, each (n, 2) int64 corners (x, y) in pixels from the corner of the image."""


def outlines(instances: np.ndarray) -> dict[int, list[Polygon]]:
    """Return the polygons of every object of an instance map.

    The rings run along the sides of pixels, and painting them (`vispe.images.annotations.rasterize.fill`) gives the map back
    exactly.  Pixels that touch at a corner only are parts of one object in two polygons.  No ring touches itself, so
    that programs which check this (JTS in QuPath, shapely) take the polygons as valid.

    Args:
        instances: (h, w) whole numbers, 0 = no object.

    Returns:
        By number of the object, in ascending order: its polygons. Outer rings run to the right along the top, holes
        the other way round; the last corner is not repeated.

    Raises:
        ShapeError: not of two axes.
        InputError: fractions or negative numbers.

    Example:
        >>> import numpy as np
        >>> [[ring.tolist() for ring in polygon] for polygon in outlines(np.array([[0, 7, 7]]))[7]]
        [[[[1, 0], [3, 0], [3, 1], [1, 1]]]]
    """
    checked = checked_instances(instances)
    parts = label(checked, background=0, connectivity=1)
    found: dict[int, dict[int, list[np.ndarray]]] = {int(n): {} for n in np.unique(checked) if n}
    for y, x, ring in _rings(checked):
        found[int(checked[y, x])].setdefault(int(parts[y, x]), []).append(ring)
    # of the rings of a part that hangs together, one runs round it and the others round its holes
    return {
        n: [tuple(sorted(rings, key=_area, reverse=True)) for rings in of.values()] for n, of in found.items()
    }


def checked_instances(instances: np.ndarray) -> np.ndarray:
    """Return an instance map as (h, w) int64; raises as `outlines`."""
    instances = np.asarray(instances)
    if instances.ndim != 2:
        raise ShapeError(f"an instance map has two axes (height, width), got an array of {instances.shape}.")
    if instances.dtype.kind not in "iu" or (instances.size and instances.min() < 0):
        raise InputError(
            f"an instance map holds whole numbers from 0, got {instances.dtype}"
            f"{f' with {instances.min()}' if instances.size else ''}; 0 is no object."
        )
    return instances.astype(np.int64)


def _area(ring: np.ndarray) -> int:
    """Twice the area inside a ring, negative for one that runs the other way round (shoelace formula)."""
    (x, y), (following_x, following_y) = ring.T, np.roll(ring, -1, axis=0).T
    return int((x * following_y - following_x * y).sum())


def _rings(values: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yield a pixel of an object and a ring of corners for each border of it."""
    following, pixel, direction, width = _linked(values)
    # the corner at which a side begins: sides run to the right, down, to the left, up, with the object on the right
    x = pixel % width - 1 + np.array([0, 1, 1, 0])[direction]
    y = pixel // width - 1 + np.array([0, 0, 1, 1])[direction]
    turns = direction != direction[np.argsort(following)]  # straight on: no corner
    after, corners, is_corner = (
        following.tolist(),
        list(zip(x.tolist(), y.tolist(), strict=True)),
        turns.tolist(),
    )
    seen = bytearray(len(after))
    for start in range(len(after)):
        if seen[start]:
            continue
        ring, side = [], start
        while not seen[side]:
            seen[side] = 1
            if is_corner[side]:
                ring.append(corners[side])
            side = after[side]
        row, column = divmod(int(pixel[start]), width)
        for simple in _untouching(ring):
            yield row - 1, column - 1, np.array(simple, np.int64)


def _linked(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Find the sides of pixels that part objects, and which side follows each round its object.

    Returns:
        For each side the number of the next one, its pixel and its direction (0 right, 1 down, 2 left, 3 up) in a
        map with a frame of one pixel; and the width of that map.
    """
    framed = np.pad(values, 1).ravel()
    width = values.shape[1] + 2
    ahead = np.array([1, width, -1, -width])  # to the pixel in front, by direction
    outward = np.array([-width, 1, width, -1])  # to the pixel across the side
    inside = np.flatnonzero(framed)
    sides = [inside[framed[inside + outward[d]] != framed[inside]] for d in range(4)]
    pixel, direction = np.concatenate(sides), np.repeat(np.arange(4), [len(s) for s in sides])
    own = framed[pixel]
    front, corner = pixel + ahead[direction], pixel + ahead[direction] + outward[direction]
    # where the pixel in front is of another object the border turns round its own pixel, even if the one across the
    # corner is of the same object: parts that touch at a corner stay apart
    turns, straight = framed[front] != own, framed[corner] != own
    next_pixel = np.where(turns, pixel, np.where(straight, front, corner))
    next_direction = (direction + np.where(turns, 1, np.where(straight, 0, 3))) % 4
    key = direction * len(framed) + pixel  # ascending by the way it was made
    return np.searchsorted(key, next_direction * len(framed) + next_pixel), pixel, direction, width


def _untouching(ring: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Cut a ring that comes to one corner twice into rings that do not."""
    path: list[tuple[int, int]] = []
    place: dict[tuple[int, int], int] = {}
    for corner in ring:
        if corner in place:
            first = place[corner]
            yield path[first:]
            for old in path[first:]:
                del place[old]
            del path[first:]
        place[corner] = len(path)
        path.append(corner)
    yield path
