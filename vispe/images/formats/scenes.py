"""What libraries of others give of a file: one scene of it, with its axes and sizes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vispe.errors import InputError, did_you_mean


@dataclass(frozen=True)
class Planes:
    """What a library gives of one scene.

    Attributes:
        array: the values.
        letters: what each dimension means.
        pixel_size: microns per pixel (y, x), or None.
        z_step: microns from slice to slice, or None.
        channel_names: one for each channel, or ().
        notes: what was noticed.
    """

    array: np.ndarray
    letters: str
    pixel_size: tuple[float, float] | None = None
    z_step: float | None = None
    channel_names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def choose_scene(path: Path, names: Sequence[str], asked: str | None) -> int:
    """Return the number of the scene that is asked for, or of the only one.

    Raises:
        InputError: none is asked for among several, or one that is not there; the scenes are named.
    """
    if not names:
        raise InputError(f"{path} holds no image; export it again.")
    shown = ", ".join(f"{i} {name!r}" for i, name in enumerate(names[:12])) + (
        ", ..." if len(names) > 12 else ""
    )
    if asked is None and len(names) > 1:
        raise InputError(f"{path} holds {len(names)} scenes; say with scene (--scene) which one: {shown}.")
    if asked is None:
        return 0
    if names.count(asked) == 1:
        return names.index(asked)
    if asked.isdecimal() and int(asked) < len(names):
        return int(asked)
    raise InputError(f"scene={asked!r} is not in {path}; it has {shown}.{did_you_mean(asked, names)}")


def both(y: float | None, x: float | None) -> tuple[float, float] | None:
    """Return a size of pixels (y, x) where both are known."""
    return (y, x) if y and x else None
