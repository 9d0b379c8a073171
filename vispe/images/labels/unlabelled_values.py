"""Levels of label images that mean "not labelled" although they are not 0: 255 and its like, and white.

Masks of Cityscapes, PASCAL VOC and others number their classes from 0 or 1 and mark pixels that do not count with 255;
drawings on paper are white where nothing was drawn.  In both cases the level would be a class that covers the image.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from vispe.errors import InputError
from vispe.images.labels.class_values import Level, Naming

_MARKERS = {255, 65_535, (1 << 31) - 1, (1 << 32) - 1}
_WHITE = (255, 255, 255)
_MOST = 0.5  # share of the pixels above which a level is not taken for a drawn class
_FEW = 0.01  # share of unlabelled pixels up to which 0 or black is not what means "not labelled"


def void_level(levels: Sequence[Level]) -> Level | None:
    """Return the level that may mean "not labelled": the largest where it ends a number type, or white."""
    last = max(levels, default=None)
    return last if last == _WHITE or (last is not None and len(last) == 1 and last[0] in _MARKERS) else None


def counts_up(levels: Sequence[Level]) -> bool:
    """Tell whether grey levels are class numbers from 0 or 1 on without a gap, at least two."""
    numbers = sorted(level[0] for level in levels if len(level) == 1)
    if len(numbers) < len(levels) or len(numbers) < 2:
        return False
    return numbers[0] in (0, 1) and numbers[-1] - numbers[0] == len(numbers) - 1


def find_void(
    where: str, pixels: Mapping[Level, int], unlabelled: int, naming: Naming, dense: bool
) -> tuple[Level | None, list[str]]:
    """Decide whether one of the levels of label images means "not labelled".

    It does where the given names do not count it, and together with class numbers that count up from 0 or 1 without a
    gap. A mask of 0 and 255 alone, and grey levels such as 85, 170 and 255, stay classes.

    Args:
        where: the files, for messages.
        pixels: how many pixels each level covers.
        unlabelled: pixels that are 0, black or transparent.
        naming: what the user said about the classes.
        dense: whether every pixel is labelled.

    Returns:
        The level, or None; and notes.

    Raises:
        InputError: a level that covers most of the pixels, where nothing decides.
    """
    void = void_level(list(pixels))
    others = [level for level in pixels if level != void]
    if void is None or not others:
        return None, []
    shown = "white" if void == _WHITE else str(void[0])
    total = max(sum(pixels.values()) + unlabelled, 1)
    share = pixels[void] / total
    noted = [f"{where}: {shown} ({100 * share:.3g} % of the pixels) is treated as unlabelled."]
    if naming.levels is not None:
        named = set(naming.levels)
        left_out = void not in named and (counts_up(others) or share > _MOST) and set(others) <= named
        return (void, noted) if left_out else (None, [])
    if naming.names:
        if len(pixels) == len(naming.names):
            return None, []  # the names count it
        if len(others) == len(naming.names):
            return void, noted
    numbered = len(void) == 1 and counts_up(others) and void[0] > max(others)[0] + 1
    covering = share > _MOST and not dense
    if numbered and not (covering and unlabelled):
        return void, noted
    if covering and (numbered or unlabelled <= _FEW * total):
        empty = "black or transparent" if len(void) == 3 else "0"
        end = "if 0 is a class" if numbered else "if it is a class"
        raise InputError(
            f"{where}: {shown} covers {100 * share:.3g} % of the pixels and would be a class. If it means unlabelled, "
            f"save it as {empty}; {end}, use --dense."
        )
    return None, []


def void_of(
    paths: Sequence[Path], parts: Sequence[tuple[dict[Level, int], int]], naming: Naming, dense: bool
) -> tuple[Level | None, list[str]]:
    """Return what `find_void` does, for the levels and the unlabelled pixels of several files together."""
    pixels: dict[Level, int] = {}
    for counted, _ in parts:
        for level, count in counted.items():
            pixels[level] = pixels.get(level, 0) + count
    where = str(paths[0]) if len(paths) == 1 else f"the {len(paths)} label files"
    return find_void(where, pixels, sum(empty for _, empty in parts), naming, dense)
