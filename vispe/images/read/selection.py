"""Selection of pages and channels by number or name."""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vispe.errors import InputError, did_you_mean
from vispe.images.formats.decoded_image import PageAxes


def pick_pages(path: Path, pages: np.ndarray, z: int | str | None) -> np.ndarray:
    """Select pages (z, ...) by a number such as 3 or a range such as 0:10; None selects all.

    Raises:
        InputError: an invalid selection, or pages that do not exist.
    """
    if z is None:
        return pages
    n, text = len(pages), str(z).strip()
    match = re.fullmatch(r"(\d*):(\d*)|(\d+)", text)
    if not match:
        raise InputError(f"z must be a page number such as 3, or a range such as 0:10, got {z!r}.")
    first, last, single = match.groups()
    start, stop = (int(single), int(single) + 1) if single else (int(first or 0), int(last) if last else n)
    if not 0 <= start < stop <= n:
        raise InputError(f"{path}: z must select pages of the image (0 to {n - 1}), got {text}.")
    return pages[start:stop]


def picked_axes(axes: PageAxes, chosen: np.ndarray) -> PageAxes:
    """Return the page axes of a range of pages: all axes, a part of the last one, or one merged axis."""
    if len(chosen) == np.prod([n for _, n in axes], dtype=np.int64):
        return axes
    if len(chosen) == 1 or not axes:
        return ()
    letter, length = axes[-1]
    one_block = chosen[0] // length == chosen[-1] // length
    return ((letter if one_block else "".join(a for a, _ in axes), len(chosen)),)


def channel_numbers(
    path: Path, requested: int | str | Sequence[int | str], n: int, names: tuple[str, ...]
) -> list[int]:
    """Return the indices of `n` channels that are selected by number or name.

    Raises:
        InputError: no channel, or one that does not exist.
    """
    if isinstance(requested, str):
        requested = requested.split(",")
    elif isinstance(requested, int | np.integer):
        requested = [requested]
    if not requested:
        raise InputError(
            f"{path}: channel must name at least one channel, got {requested!r}. Omit it to use all channels."
        )
    return [_channel(path, entry, n, names) for entry in requested]


def _channel(path: Path, entry: int | str, n: int, names: tuple[str, ...]) -> int:
    text = str(entry).strip()
    if text in names:
        return names.index(text)
    if text.isdecimal() and int(text) < n:
        return int(text)
    listing = f", named {', '.join(names)}" if names else ""
    hint = did_you_mean(text, names)
    raise InputError(f"{path}: channel must be one of {n} (0 to {n - 1}{listing}), got {text}.{hint}")
