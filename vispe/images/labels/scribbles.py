"""Scribbles (pen strokes and dots) of a JSON file, rasterised as label pixels."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from vispe.errors import InputError, counted, did_you_mean, is_integer
from vispe.images.labels.class_names import Level, Naming, class_number
from vispe.images.labels.json_files import load_json
from vispe.images.labels.stroke_pixels import Stroke, check_work, stroke_pixels

KEYS = ("class", "width", "points", "page")
WIDEST = 1024
"""Largest pen width in pixels."""


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
