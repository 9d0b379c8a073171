"""Validation of class names and scribbles that the window sends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vispe.errors import InputError, OptionError, counted, is_integer
from vispe.images.labels.class_names import LONGEST, has_controls
from vispe.images.labels.scribbles import WIDEST
from vispe.images.labels.stroke_pixels import Stroke, check_work
from vispe.segment.live.labelled_pages import MAX_CLASSES

_POINTS = 200_000  # upper bound of the points of all scribbles of an image


def checked_names(names: Any) -> list[str]:
    """Validate class names.

    Raises:
        OptionError: not a list of 2 to `MAX_CLASSES` distinct names, or a name that model files do not allow.
    """
    is_list = isinstance(names, Sequence) and not isinstance(names, str)
    if not is_list or not all(isinstance(n, str) and n.strip() for n in names):
        raise OptionError(f"names={str(names)[:80]} must be a list of names.")
    stripped = [n.strip() for n in names]
    for name in stripped:
        if len(name) > LONGEST or has_controls(name):
            raise OptionError(
                f"names={name[:40]!a}... must have up to {LONGEST} characters without control characters, got "
                f"{len(name)}. Rename the class."
            )
    if not 2 <= len(stripped) <= MAX_CLASSES or len(set(stripped)) < len(stripped):
        raise OptionError(
            f"names={', '.join(stripped)} must be 2 to {MAX_CLASSES} distinct names. Use other names."
        )
    return stripped


def checked_strokes(content: Any, count: int, page: int, shape: tuple[int, int]) -> list[Stroke]:
    """Validate the scribbles sent by the window.

    Raises:
        InputError: not a list of scribbles, a class that does not exist, or a point outside the image.
    """
    if not isinstance(content, list):
        raise InputError("strokes must be a list.")
    scribbles, total = [], 0
    for number, entry in enumerate(content):
        entry = entry if isinstance(entry, dict) else {}
        level, width = entry.get("class"), entry.get("width")
        if (
            not is_integer(level)
            or not 1 <= level <= count
            or not is_integer(width)
            or not 1 <= width <= WIDEST
        ):
            raise InputError(f"scribble {number} has class={level!r} and width={width!r}. Paint it again.")
        try:
            points = np.array(entry.get("points"), np.float64)
        except (TypeError, ValueError) as error:
            raise InputError(f"scribble {number} has non-numeric points. Paint it again.") from error
        if points.ndim != 2 or points.shape[1] != 2 or not len(points) or not np.isfinite(points).all():
            raise InputError(f"scribble {number} has points that are not [x, y] pairs. Paint it again.")
        # use the rounded points of the saved file
        points = points.round(2)
        if ((points < -0.5) | (points >= (shape[1] - 0.5, shape[0] - 0.5))).any():
            raise InputError(f"scribble {number} has points outside the image. Paint it again.")
        total += len(points)
        scribbles.append(Stroke((int(level),), int(width), points, page))
    if total > _POINTS:
        raise InputError(f"the scribbles have {counted(total, 'point')}, more than {_POINTS}. Undo some.")
    check_work("the window", scribbles, *shape)
    return scribbles
