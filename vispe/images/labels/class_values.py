"""Mapping of grey levels and colours to class numbers."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from vispe.errors import InputError, counted
from vispe.images.labels.class_names import Level, Naming

MOST = 255
"""Largest number of classes: label maps have 8 bits."""


def named_classes(
    paths: Sequence[str | Path], levels: Iterable[list[Level]], naming: Naming, dense: bool, most: int
) -> tuple[dict[Level, int], tuple[str, ...], tuple[tuple[int, int, int], ...] | None, list[str]]:
    """Assign the levels of several files to classes jointly, for training; see `assign`.

    Args:
        paths: the files.
        levels: levels of each file.
        naming: class names and levels specified by the user.
        dense: whether level 0 is a class.
        most: largest number of levels.

    Raises:
        InputError: more than `most` distinct levels, more than `MOST` classes, or fewer than two classes.
    """
    distinct = sorted(set().union(*levels))
    where = str(paths[0]) if len(paths) == 1 else f"the {counted(len(paths), 'label file')}"
    if len(distinct) > most:
        raise InputError(
            f"{where}: max_classes={most}, got {counted(len(distinct), 'distinct value')} ({describe(distinct)}). "
            "Draw without anti-aliasing (a pencil, not a brush) or increase `max_classes`."
        )
    classes_of, names, colors, notes = assign(where, distinct, naming, dense)
    if len(names) > MOST:
        raise InputError(
            f"{where}: labels must have at most {MOST} classes, got {len(names)}. Merge classes."
        )
    present = {classes_of[level] for level in distinct}
    if len(present) < 2:
        listed = ", ".join(names[c - 1] for c in sorted(present)) or "none"
        raise InputError(
            f"{where}: needs at least 2 labelled classes, got {len(present)} ({listed}). Label the other classes."
        )
    return classes_of, names, colors, notes


def assign(
    where: str, present: list[Level], naming: Naming, dense: bool
) -> tuple[dict[Level, int], tuple[str, ...], tuple[tuple[int, int, int], ...] | None, list[str]]:
    """Assign a class to each level.

    Args:
        where: the file, for messages.
        present: the distinct levels, sorted, without the unlabelled level.
        naming: class names and levels specified by the user.
        dense: whether level 0 is a class.

    Returns:
        The class (from 1) of each level, the K names, the K colours or None, and notes.

    Raises:
        InputError: grey levels mixed with colours, or levels that do not match the names.
    """
    notes = list(naming.notes)
    colour = bool(present) and len(present[0]) == 3
    if len({len(level) for level in present}) > 1:
        raise InputError(f"{where}: mixes grey and colour labels. Use one kind.")
    names, levels = naming.names, naming.levels
    if levels and not dense and levels[0] in ((0,), (0, 0, 0)):
        notes.append(f"the name {names[0]!r} of the legend denotes unlabelled pixels, not a class.")
        names, levels = names[1:], levels[1:]
    first = 0 if dense else 1
    as_numbers = tuple((i + first,) for i in range(len(names)))
    if levels is None:
        levels = as_numbers
    if set(present) <= set(levels):
        class_of = {level: i + 1 for i, level in enumerate(levels)}
    elif names and levels != as_numbers:
        unnamed = describe(sorted(set(present) - set(levels)))
        raise InputError(f"{where}: levels must be in the legend ({describe(levels)}), got {unnamed}.")
    elif names and len(present) != len(names):
        count = "more" if len(present) > len(names) else "fewer"
        raise InputError(
            f"{where}: got {describe(present)}, {count} than the {len(names)} class names. Use the values "
            f"{first} to {first + len(names) - 1}, or a legend JSON such as "
            f'{{"{_key(present[0])}": "{names[0]}"}}.'
        )
    else:
        class_of = {level: i + 1 for i, level in enumerate(present)}
    if not names:
        names = tuple(f"class {class_of[level]}" for level in present)
    if any(level != (number - 1 + first,) for level, number in class_of.items()) and present:
        kind = "colours" if colour else "grey levels"
        pairs = ", ".join(f"{_key(level)} -> {class_of[level]}" for level in present)
        notes.append(f"{where}: {kind} were mapped to classes: {pairs}.")
    colors = None
    if colour and len(class_of) == len(names):
        colors = tuple(level for level, _ in sorted(class_of.items(), key=lambda item: item[1]))
    return class_of, names, colors, notes


def describe(levels: Iterable[Level], limit: int = 8) -> str:
    """Format levels for a message: '85, 170, 255' or '#ff0000, #00ff00', truncated after `limit`."""
    shown = [_key(level) for level in levels]
    return ", ".join(shown[:limit]) + (", ..." if len(shown) > limit else "")


def _key(level: Level) -> str:
    return str(level[0]) if len(level) == 1 else "#" + "".join(f"{c:02x}" for c in level)
