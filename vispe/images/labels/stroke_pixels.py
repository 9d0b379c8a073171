"""Pixels under a pen that is moved along a path, and the cost of drawing them."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from skimage.draw import disk

from vispe.errors import InputError
from vispe.images.labels.class_names import Level

MOST_WORK = 500_000_000
"""Upper bound of the drawing cost of a file: pixels covered by the pen, summed over the path of all strokes."""

_NARROW = 16  # pixels; wider pens are drawn as row intervals
_RUN = 4096  # path pixels per chunk for wide pens


@dataclass(frozen=True)
class Stroke:
    """One pen stroke.

    Attributes:
        level: class as a level (a number, or a colour of the legend).
        width: pen width in pixels.
        points: (n, 2) float64, (x, y); pixel centres are at integers.
        page: page from 0.
    """

    level: Level
    width: int
    points: np.ndarray
    page: int


def check_work(where: str, strokes: Iterable[Stroke], h: int, w: int) -> None:
    """Check the drawing cost of strokes before any is drawn.

    Args:
        where: owner of the strokes, for the message.
        strokes: strokes in an image of h x w pixels.
        h: height in pixels.
        w: width in pixels.

    Raises:
        InputError: the cost exceeds `MOST_WORK` pixels.
    """
    work = 0
    for stroke in strokes:
        points = np.clip(stroke.points, -stroke.width, np.array([w, h]) + stroke.width)
        length = np.abs(np.diff(points, axis=0)).max(1).sum() + 1
        work += int(length) * min(stroke.width, h) * (min(stroke.width, w) if stroke.width <= _NARROW else 1)
    if work > MOST_WORK:
        raise InputError(
            f"{where}: strokes must cover at most {MOST_WORK / 1e9:g} billion pixels in total, got {work / 1e9:.1f}. "
            "Use fewer strokes, or a narrower pen."
        )


def stroke_pixels(stroke: Stroke, h: int, w: int) -> tuple[np.ndarray, np.ndarray]:
    """Return rows and columns of the pixels of a stroke within an image (h, w); may contain duplicates."""
    vertices = np.floor(stroke.points + 0.5).astype(int)
    if len(vertices) == 1:
        vertices = np.repeat(vertices, 2, axis=0)
    reach = stroke.width // 2 + 1  # lines farther outside the image than this do not mark any pixel
    parts = [_line(a, b, (-reach, h + reach), (-reach, w + reach)) for a, b in pairwise(vertices)]
    rows, columns = (np.concatenate(p) for p in zip(*parts, strict=True))
    tip = _tip(stroke.width)
    if stroke.width > _NARROW:
        return _swept(rows, columns, *tip, h, w)
    rows, columns = (rows[:, None] + tip[0]).ravel(), (columns[:, None] + tip[1]).ravel()
    inside = (rows >= 0) & (rows < h) & (columns >= 0) & (columns < w)
    return rows[inside], columns[inside]


def _line(
    start: np.ndarray, end: np.ndarray, row_range: tuple[int, int], column_range: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return rows and columns of a line, as `skimage.draw.line`, clipped to the ranges.

    The cost is proportional to the part of the line within the ranges, so that distant end points are cheap.
    """
    (x0, y0), (x1, y1) = start.tolist(), end.tolist()
    steep = abs(y1 - y0) > abs(x1 - x0)
    a0, a1, b0, b1 = (y0, y1, x0, x1) if steep else (x0, x1, y0, y1)
    low, high = row_range if steep else column_range
    length, rise = abs(a1 - a0), abs(b1 - b0)
    sign = 1 if a1 >= a0 else -1
    # steps along the major axis within the range
    first, last = sorted((sign * (low - a0), sign * (high - 1 - a0)))
    step = np.arange(max(first, 0), min(last, length) + 1)
    a = a0 + sign * step
    b = b0 + (1 if b1 >= b0 else -1) * ((2 * rise * step + length) // max(2 * length, 1))
    rows, columns = (a, b) if steep else (b, a)
    inside = (rows >= row_range[0]) & (rows < row_range[1])
    inside &= (columns >= column_range[0]) & (columns < column_range[1])
    return rows[inside], columns[inside]


@lru_cache(maxsize=4)
def _tip(width: int) -> tuple[np.ndarray, np.ndarray]:
    middle = 0.0 if width % 2 else 0.5  # pens of even width are centred between pixels
    return disk((middle, middle), width / 2)


def _swept(
    rows: np.ndarray, columns: np.ndarray, tip_rows: np.ndarray, tip_columns: np.ndarray, h: int, w: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the pixels of an image (h, w) under a wide tip moved along a path.

    Each row of the tip is an interval of columns. Accumulating interval starts and ends, followed by a cumulative sum
    along the row, costs the number of tip rows per path pixel, not the area of the tip.
    """
    steps, first = np.unique(tip_rows, return_index=True)  # tip pixels are sorted by row
    left = tip_columns[first]
    right = tip_columns[np.append(first[1:], len(tip_rows)) - 1] + 1
    if not len(rows):
        return rows, columns
    rows, columns = np.unique(np.stack([rows, columns]), axis=1)  # every path pixel counts once
    top, bottom = max(rows.min() + steps[0], 0), min(rows.max() + steps[-1] + 1, h)
    start, end = max(columns.min() + left.min(), 0), min(columns.max() + right.max(), w)
    if top >= bottom or start >= end:
        return rows[:0], columns[:0]
    count = np.zeros((bottom - top, end - start + 1), np.int32)
    for run in range(0, len(rows), _RUN):
        y = rows[run : run + _RUN, None] + steps
        x = columns[run : run + _RUN, None]
        inside = (y >= top) & (y < bottom)
        y = y[inside] - top
        for edge, change in ((left, 1), (right, -1)):
            np.add.at(count, (y, np.clip((x + edge)[inside], start, end) - start), change)
    y, x = np.nonzero(np.cumsum(count[:, :-1], axis=1))
    return y + top, x + start
