"""Void levels of label images: 255 (or the maximum of another integer type) and white as "unlabelled".

Masks of Cityscapes, PASCAL VOC and others number classes from 0 or 1 and mark ignored pixels by 255; drawings on a
white background are white where unlabelled. Without this rule, such a level would become a class that covers
most of the image.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from vispe.errors import InputError, counted
from vispe.images.labels.class_names import Level, Naming

_MARKERS = {255, 65_535, (1 << 31) - 1, (1 << 32) - 1}
_WHITE = (255, 255, 255)
_MOST = 0.5  # fraction of pixels above which a level is not plausible as a class
_FEW = 0.01  # fraction of pixels up to which 0 or black is not plausible as the unlabelled level


def void_level(levels: Sequence[Level]) -> Level | None:
    """Return the level that may be void: the largest one if it is the maximum of an integer type or white."""
    last = max(levels, default=None)
    return last if last == _WHITE or (last is not None and len(last) == 1 and last[0] in _MARKERS) else None


def counts_up(levels: Sequence[Level]) -> bool:
    """Return whether grey levels are two or more consecutive class numbers from 0 or 1."""
    numbers = sorted(level[0] for level in levels if len(level) == 1)
    if len(numbers) < len(levels) or len(numbers) < 2:
        return False
    return numbers[0] in (0, 1) and numbers[-1] - numbers[0] == len(numbers) - 1


def find_void(
    where: str, pixels: Mapping[Level, int], unlabelled: int, naming: Naming, dense: bool
) -> tuple[Level | None, list[str]]:
    """Decide whether one of the levels of label images is void (unlabelled).

    It is void if the specified class names do not include it, or if the other levels are consecutive class numbers from
    0 or 1. In masks of 0 and 255, and for grey levels such as 85, 170 and 255, the largest level is a class.

    Args:
        where: the files, for messages.
        pixels: number of pixels of each level.
        unlabelled: number of pixels that are 0, black or transparent.
        naming: class names and levels specified by the user.
        dense: whether every pixel is labelled.

    Returns:
        The level, or None; and notes.

    Raises:
        InputError: a possible void level covers most of the pixels, and could also be a class.
    """
    void = void_level(list(pixels))
    other_levels = [level for level in pixels if level != void]
    if void is None or not other_levels:
        return None, []
    level_text = "white" if void == _WHITE else str(void[0])
    total = max(sum(pixels.values()) + unlabelled, 1)
    fraction = pixels[void] / total
    notes = [f"{where}: {level_text} ({100 * fraction:.3g} % of the pixels) is treated as unlabelled."]
    if naming.levels is not None:
        named = set(naming.levels)
        is_void = (
            void not in named and (counts_up(other_levels) or fraction > _MOST) and set(other_levels) <= named
        )
        return (void, notes) if is_void else (None, [])
    if naming.names:
        if len(pixels) == len(naming.names):
            return None, []  # the class names include the level
        if len(other_levels) == len(naming.names):
            return void, notes
    numbered = len(void) == 1 and counts_up(other_levels) and void[0] > max(other_levels)[0] + 1
    covering = fraction > _MOST and not dense
    if numbered and not (covering and unlabelled):
        return void, notes
    if covering and (numbered or unlabelled <= _FEW * total):
        empty = "black or transparent" if len(void) == 3 else "0"
        end = "if 0 is a class" if numbered else "if it is a class"
        raise InputError(
            f"{where}: {level_text} covers {100 * fraction:.3g} % of the pixels and would be a class. If it means "
            f"unlabelled, save it as {empty}; {end}, set `dense=True`."
        )
    return None, []


def find_void_jointly(
    paths: Sequence[Path], parts: Sequence[tuple[dict[Level, int], int]], naming: Naming, dense: bool
) -> tuple[Level | None, list[str]]:
    """Apply `find_void` to the levels and unlabelled pixels of several files jointly.

    Raises:
        InputError: as `find_void`.
    """
    pixels: dict[Level, int] = {}
    for counts, _ in parts:
        for level, count in counts.items():
            pixels[level] = pixels.get(level, 0) + count
    where = str(paths[0]) if len(paths) == 1 else f"the {counted(len(paths), 'label file')}"
    return find_void(where, pixels, sum(empty for _, empty in parts), naming, dense)
