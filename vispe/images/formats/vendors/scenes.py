"""One scene of a microscope file as read by a vendor library, with axes and pixel sizes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vispe.errors import InputError, counted, did_you_mean


@dataclass(frozen=True)
class Planes:
    """Scene read by a vendor library.

    Attributes:
        array: pixel values.
        letters: axis of each dimension.
        pixel_size: microns per pixel (y, x), or None.
        z_step: microns between slices, or None.
        channel_names: one name per channel, or ().
        notes: notes for the user.
    """

    array: np.ndarray
    letters: str
    pixel_size: tuple[float, float] | None = None
    z_step: float | None = None
    channel_names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def choose_scene(path: Path, names: Sequence[str], requested: str | None) -> int:
    """Return the index of the scene with the name or number `requested`, or of the only scene.

    Raises:
        InputError: several scenes and `requested` is None, or the scene does not exist.
    """
    if not names:
        raise InputError(f"{path} contains no image. Export it again.")
    listing = ", ".join(f"{i} {name!r}" for i, name in enumerate(names[:12])) + (
        ", ..." if len(names) > 12 else ""
    )
    if requested is None and len(names) > 1:
        raise InputError(f"{path} contains {counted(len(names), 'scene')}. Set `scene` to one of {listing}.")
    if requested is None:
        return 0
    if names.count(requested) == 1:
        return names.index(requested)
    if requested.isdecimal() and int(requested) < len(names):
        return int(requested)
    raise InputError(
        f"{path}: scene must be one of {listing}, got {requested!r}.{did_you_mean(requested, names)}"
    )


def both(y: float | None, x: float | None) -> tuple[float, float] | None:
    """Return the pixel size (y, x) if both are known, otherwise None."""
    return (y, x) if y and x else None
