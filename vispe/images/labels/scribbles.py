"""Scribbles (pen strokes and dots) of a JSON file, rasterised as label pixels."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np
from skimage.draw import disk

from vispe.errors import InputError, counted, did_you_mean, is_integer
from vispe.images.labels.class_values import Level, Naming, class_number, load_json

KEYS = ("class", "width", "points", "page")
WIDEST = 1024
"""Largest pen width in pixels."""

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


def read_strokes(path: Path, naming: Naming, default_page: int | None) -> list[Stroke]:
    """Read ``[{"class": 1, "width": 3, "points": [[x, y], ...], "page": 0}, ...]``; the default width is 1.

    Args:
        path: the JSON file.
        naming: class names, which are valid values of ``"class"``.
        default_page: page of strokes without a page; None makes such strokes an error.

    Raises:
        InputError: invalid list; the message includes the index of the stroke (from 0).
    """
    content = load_json(path)
    if not isinstance(content, list):
        raise InputError(
            f'{path} must contain a list of strokes such as [{{"class": 1, "points": [[5, 9]]}}].'
        )
    return [_stroke(f"{path}: stroke {i}", entry, naming, default_page) for i, entry in enumerate(content)]


def draw_strokes(
    path: Path, strokes: list[Stroke], shape: tuple[int, int, int], hint: str = ""
) -> tuple[np.ndarray, list[Level], list[str]]:
    """Draw strokes in order, later ones over earlier ones; `hint` is a clause about the image for messages.

    Returns:
        (z, h, w) indices from 1 into the sorted list of levels, 0 = unlabelled; that list; and notes.

    Raises:
        InputError: a point outside the image or a page that does not exist.
    """
    levels = sorted({s.level for s in strokes})
    index = np.zeros(shape, np.int64)
    covered = np.zeros(shape, bool)
    for stroke, rows, columns in rasterized(path, strokes, shape, hint):
        page, value = index[stroke.page], levels.index(stroke.level) + 1
        before = page[rows, columns]
        covered[stroke.page][rows, columns] |= (before > 0) & (before != value)
        page[rows, columns] = value
    return index, levels, overlap_note(path, int(covered.sum()))


def rasterized(
    path: Path, strokes: list[Stroke], shape: tuple[int, int, int], hint: str = ""
) -> Iterator[tuple[Stroke, np.ndarray, np.ndarray]]:
    """Yield each stroke with the rows and columns of its pixels.

    Raises:
        InputError: a point outside the image or a page that does not exist.
    """
    z, h, w = shape
    check_work(str(path), strokes, h, w)
    for number, stroke in enumerate(strokes):
        if stroke.page >= z:
            raise InputError(f"{path}: stroke {number}: the page must be 0 to {z - 1}, got {stroke.page}.")
        outside = ((stroke.points < -0.5) | (stroke.points >= (w - 0.5, h - 0.5))).any(1)
        if outside.any():
            x, y = stroke.points[outside][0]
            raise InputError(
                f"{path}: stroke {number}: points must be inside the image of {w} x {h} pixels (x, y){hint}, got "
                f"({x:g}, {y:g})."
            )
        yield stroke, *stroke_pixels(stroke, h, w)


def overlap_note(path: Path, pixels: int) -> list[str]:
    """Return a note on the number of pixels under strokes of different classes; [] if there are none."""
    if not pixels:
        return []
    verb = "is" if pixels == 1 else "are"
    return [
        f"{counted(pixels, 'pixel')} of {path.name} {verb} covered by strokes of different classes; the later stroke "
        "wins."
    ]


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


def _stroke(where: str, entry: object, naming: Naming, default_page: int | None) -> Stroke:
    if not isinstance(entry, dict):
        raise InputError(f"{where}: strokes must be objects with 'class' and 'points', got {entry!r}.")
    for key in entry:
        if key not in KEYS:
            hint = did_you_mean(str(key), KEYS)
            raise InputError(f"{where}: keys must be {', '.join(KEYS)}, got the unknown key {key!r}.{hint}")
    for key in ("class", "points"):
        if key not in entry:
            raise InputError(f"{where} has no {key!r}. Strokes need 'class' and 'points'.")
    width = entry.get("width", 1)
    if not is_integer(width) or not 1 <= width <= WIDEST:
        raise InputError(f"{where}: width must be an integer from 1 to {WIDEST} px, got width={width!r}.")
    page = entry.get("page", default_page)
    if page is None:
        raise InputError(f'{where} has no page, but the image has several. Add "page" or set `label_page`.')
    if not is_integer(page) or page < 0:
        raise InputError(f"{where}: page must be an integer from 0, got page={page!r}.")
    level, points = _class(where, entry["class"], naming), _points(where, entry["points"])
    return Stroke(level, int(width), points, int(page))


def _class(where: str, value: object, naming: Naming) -> Level:
    if isinstance(value, str):
        if not naming.names and value.isascii() and value.isdecimal():
            return _class(where, int(value[:18]), naming)
        if not naming.names:
            raise InputError(
                f"{where}: class names need `classes` or `legend`, got {value!r}. Set one of them."
            )
        number = class_number(value, naming.names)
        if number is None:
            hint = did_you_mean(value, naming.names)
            raise InputError(
                f"{where}: the class must be one of {', '.join(naming.names)}, got {value!r}.{hint}"
            )
        return naming.levels[number - 1] if naming.levels else (number,)
    if not is_integer(value) or value < 1:
        raise InputError(f"{where}: class must be an integer from 1 or a name, got class={value!r}.")
    return (int(value),)


def _points(where: str, value: object) -> np.ndarray:
    message = (
        f"{where}: points must be a non-empty list of [x, y] pairs of numbers, got points={str(value)[:60]}."
    )
    try:
        points = np.array(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(message) from error
    if points.dtype.kind not in "iuf":  # excludes texts and booleans
        raise InputError(message)
    points = points.astype(np.float64)
    if points.ndim != 2 or points.shape[1] != 2 or not len(points) or not np.isfinite(points).all():
        raise InputError(message)
    return points
