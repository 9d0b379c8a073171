"""Strokes and points from a JSON file, drawn as label pixels."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np
from skimage.draw import disk, line

from vispe.errors import InputError, did_you_mean, is_whole
from vispe.images.labels.levels import Level, Naming, class_number, load_json

KEYS = ("class", "width", "points", "page")
WIDEST = 1024
"""Pixels across the widest pen."""

_RUN = 256  # pixels of a line whose surroundings are drawn at once with a wide pen


@dataclass(frozen=True)
class Stroke:
    """One pen stroke.

    Attributes:
        level: the class, as a level (a number, or a colour of the legend).
        width: pixels.
        points: (n, 2) float64, (x, y), pixel centres at whole numbers.
        page: from 0.
    """

    level: Level
    width: int
    points: np.ndarray
    page: int


def read_strokes(path: Path, naming: Naming, default_page: int | None) -> list[Stroke]:
    """Read ``[{"class": 1, "width": 3, "points": [[x, y], ...], "page": 0}, ...]``; width is 1 when left out.

    Args:
        path: the JSON file.
        naming: class names, so that ``"class"`` may be one of them.
        default_page: the page of strokes that name none; None makes that an error.

    Raises:
        InputError: not such a list; the stroke (counted from 0) and what is wrong with it are named.
    """
    content = load_json(path)
    if not isinstance(content, list):
        raise InputError(f'{path} must hold a list of strokes such as [{{"class": 1, "points": [[5, 9]]}}].')
    return [_stroke(f"{path}: stroke {i}", entry, naming, default_page) for i, entry in enumerate(content)]


def draw_strokes(
    path: Path, strokes: list[Stroke], shape: tuple[int, int, int], hint: str = ""
) -> tuple[np.ndarray, list[Level], list[str]]:
    """Draw strokes in their order, later ones over earlier ones; `hint` is a clause about the image for messages.

    Returns:
        (z, h, w) indices into the sorted list of levels, from 1, 0 where nothing is drawn; that list; and
        notes.

    Raises:
        InputError: a point outside the image or a page that it does not have.
    """
    levels = sorted({s.level for s in strokes})
    index = np.zeros(shape, np.int64)
    covered = np.zeros(shape, bool)
    for stroke, rows, columns in placed(path, strokes, shape, hint):
        page, value = index[stroke.page], levels.index(stroke.level) + 1
        before = page[rows, columns]
        covered[stroke.page][rows, columns] |= (before > 0) & (before != value)
        page[rows, columns] = value
    return index, levels, overdrawn(path, int(covered.sum()))


def placed(
    path: Path, strokes: list[Stroke], shape: tuple[int, int, int], hint: str = ""
) -> Iterator[tuple[Stroke, np.ndarray, np.ndarray]]:
    """Yield each stroke with the rows and columns of its pixels; raises as `draw_strokes`."""
    z, h, w = shape
    for number, stroke in enumerate(strokes):
        if stroke.page >= z:
            raise InputError(
                f"{path}: stroke {number} is on page {stroke.page}, but the image has {z} (0 to {z - 1})."
            )
        outside = ((stroke.points < -0.5) | (stroke.points >= (w - 0.5, h - 0.5))).any(1)
        if outside.any():
            x, y = stroke.points[outside][0]
            raise InputError(
                f"{path}: stroke {number} has the point ({x:g}, {y:g}) outside the image of {w} x {h} pixels (x, y)"
                f"{hint}."
            )
        yield stroke, *stroke_pixels(stroke, h, w)


def overdrawn(path: Path, pixels: int) -> list[str]:
    """Say how many pixels lie under strokes of two classes, where there are any."""
    note = f"{pixels} pixels of {path.name} lie under strokes of two classes; the later counts."
    return [note] if pixels else []


def stroke_pixels(stroke: Stroke, h: int, w: int) -> tuple[np.ndarray, np.ndarray]:
    """Return rows and columns of the pixels of a stroke that lie in an image of h x w; some may come twice."""
    ends = np.floor(stroke.points + 0.5).astype(int)
    if len(ends) == 1:
        ends = np.repeat(ends, 2, axis=0)
    parts = [line(y0, x0, y1, x1) for (x0, y0), (x1, y1) in pairwise(ends)]
    rows, columns = (np.concatenate(p) for p in zip(*parts, strict=True))
    tip = _tip(stroke.width)
    if stroke.width <= 16:
        rows, columns = (rows[:, None] + tip[0]).ravel(), (columns[:, None] + tip[1]).ravel()
    else:
        runs = [slice(i, i + _RUN) for i in range(0, len(rows), _RUN)]
        pieces = [_swept(rows[run], columns[run], *tip) for run in runs]
        rows, columns = (np.concatenate(p) for p in zip(*pieces, strict=True))
    inside = (rows >= 0) & (rows < h) & (columns >= 0) & (columns < w)
    return rows[inside], columns[inside]


@lru_cache(maxsize=4)
def _tip(width: int) -> tuple[np.ndarray, np.ndarray]:
    middle = 0.0 if width % 2 else 0.5  # an even pen is centred between pixels
    return disk((middle, middle), width / 2)


def _swept(
    rows: np.ndarray, columns: np.ndarray, tip_rows: np.ndarray, tip_columns: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Draw a wide tip at every pixel of a short line: the ends of the runs in its rows are counted and summed up."""
    steps, first = np.unique(tip_rows, return_index=True)  # the tip lists its pixels row by row
    left = tip_columns[first]
    right = tip_columns[np.append(first[1:], len(tip_rows)) - 1]
    top, start = rows.min() + steps[0], columns.min() + left.min()
    shape = rows.max() + steps[-1] - top + 1, columns.max() + right.max() - start + 2
    count = np.zeros(shape, np.int32)
    y = rows[:, None] + steps - top
    np.add.at(count, (y, columns[:, None] + left - start), 1)
    np.add.at(count, (y, columns[:, None] + right + 1 - start), -1)
    y, x = np.nonzero(np.cumsum(count, axis=1))
    return y + top, x + start


def _stroke(where: str, entry: object, naming: Naming, default_page: int | None) -> Stroke:
    if not isinstance(entry, dict):
        raise InputError(f"{where} is {entry!r}; each stroke is an object with 'class' and 'points'.")
    for key in entry:
        if key not in KEYS:
            hint = did_you_mean(str(key), KEYS)
            raise InputError(f"{where} has the unknown key {key!r}; known are {', '.join(KEYS)}.{hint}")
    for key in ("class", "points"):
        if key not in entry:
            raise InputError(f"{where} has no {key!r}; each stroke needs 'class' and 'points'.")
    width = entry.get("width", 1)
    if not is_whole(width) or not 1 <= width <= WIDEST:
        raise InputError(f"{where} has width={width!r}; the width is a whole number from 1 to {WIDEST} px.")
    page = entry.get("page", default_page)
    if page is None:
        raise InputError(f'{where} names no page, but the image has several; add "page" or give label_page.')
    if not is_whole(page) or page < 0:
        raise InputError(f"{where} has page={page!r}; pages are whole numbers from 0.")
    level, points = _class(where, entry["class"], naming), _points(where, entry["points"])
    return Stroke(level, int(width), points, int(page))


def _class(where: str, value: object, naming: Naming) -> Level:
    if isinstance(value, str):
        if not naming.names and value.isascii() and value.isdecimal():
            return _class(where, int(value[:18]), naming)
        if not naming.names:
            raise InputError(
                f"{where} names the class {value!r}, but no class names were given; give classes or legend."
            )
        number = class_number(value, naming.names)
        if number is None:
            hint = did_you_mean(value, naming.names)
            raise InputError(f"{where} names the class {value!r}; known are {', '.join(naming.names)}.{hint}")
        return naming.levels[number - 1] if naming.levels else (number,)
    if not is_whole(value) or value < 1:
        raise InputError(f"{where} has class={value!r}; classes are whole numbers from 1, or names.")
    return (int(value),)


def _points(where: str, value: object) -> np.ndarray:
    message = (
        f"{where} has points={str(value)[:60]}; points are a list of [x, y] pairs of numbers, at least one."
    )
    try:
        points = np.array(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(message) from error
    if points.dtype.kind not in "iuf":  # texts and true are no numbers
        raise InputError(message)
    points = points.astype(np.float64)
    if points.ndim != 2 or points.shape[1] != 2 or not len(points) or not np.isfinite(points).all():
        raise InputError(message)
    return points
