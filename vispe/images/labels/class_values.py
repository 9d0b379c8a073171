"""Mapping of grey levels and colours to class numbers, and class names."""

import json
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vispe.errors import InputError, OptionError, counted
from vispe.images.paths import check_file

Level = tuple[int, ...]
"""(grey level,) or (red, green, blue) of a label file, or (class number,) of a scribble."""

MOST = 255
"""Largest number of classes: label maps have 8 bits."""

LONGEST = 200
"""Largest length of a class name in characters."""

_JSON_BYTES = 200_000_000


@dataclass(frozen=True)
class Naming:
    """Class names and levels specified by the user.

    Attributes:
        names: class names in the order of the classes; () if unspecified.
        levels: grey level or colour of each class if specified, otherwise None: the classes are 1..K.
        notes: notes for the user.
    """

    names: tuple[str, ...] = ()
    levels: tuple[Level, ...] | None = None
    notes: tuple[str, ...] = ()


def read_names(classes: Sequence[str] | None, legend: str | Path | None) -> Naming:
    """Read class names from a list, or from a legend JSON: a list, or an object {level or '#rrggbb': name}.

    Raises:
        OptionError: both `classes` and `legend` are set.
        InputError: the legend is unreadable, names are empty, repeated or not text, or keys are not levels.
    """
    if classes is not None and legend is not None:
        raise OptionError(
            "read_names: `classes` and `legend` are mutually exclusive, got both. Omit one of them."
        )
    if classes is not None:
        return Naming(checked_names("classes", classes))
    if legend is None:
        return Naming()
    legend = Path(legend)
    content = load_json(legend)
    if isinstance(content, list):
        return Naming(checked_names(str(legend), content))
    if not isinstance(content, dict):
        raise InputError(f'{legend} must contain a list of names or an object such as {{"1": "matrix"}}.')
    entries = sorted((_level(legend, key), name) for key, name in content.items())
    names = checked_names(str(legend), [name for _, name in entries])
    levels = tuple(level for level, _ in entries)
    if len({len(level) for level in levels}) > 1:
        raise InputError(f"{legend} mixes numbers and colours as keys. Use one kind.")
    if len(set(levels)) < len(levels):
        raise InputError(f"{legend} contains a level twice. Remove one of the entries.")
    return Naming(names, levels)


def load_json(path: Path) -> object:
    """Parse a JSON file.

    Raises:
        InputError: unreadable, too large, or invalid JSON; the message includes the file and the line.
    """
    check_file(path)
    if path.stat().st_size > _JSON_BYTES:
        raise InputError(
            f"{path} must be at most {_JSON_BYTES // 1_000_000} MB for a list of names or scribbles."
        )
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as text: {error}.") from error
    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=reject_constant)
    except json.JSONDecodeError as error:
        raise InputError(f"{path} is not valid JSON: {error.msg} in line {error.lineno}.") from error
    except RecursionError as error:
        raise InputError(f"{path} is nested too deeply for a list of names or scribbles.") from error
    except ValueError as error:  # raised by the two hooks, or by an integer of thousands of digits
        raise InputError(f"{path} is not valid: {str(error).partition(';')[0]}.") from error


def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return a JSON object as a dict; raise ValueError for duplicate keys."""
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"duplicate key {next(k for k in keys if keys.count(k) > 1)!r} in an object")
    return content


def reject_constant(text: str) -> object:
    """Raise ValueError for NaN and infinity, which JSON does not allow."""
    raise ValueError(f"{text} is not a JSON number")


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


def class_number(name: str, names: Sequence[str]) -> int | None:
    """Return the number (1..K) of a class from its name or its number; names take precedence. None if unknown.

    Example:
        >>> names = ["matrix", "pore"]
        >>> class_number("pore", names), class_number("1", names), class_number("3", names)
        (2, 1, None)
    """
    if name in names:
        return list(names).index(name) + 1
    number = int(name) if name.isascii() and name.isdecimal() and len(name) < 10 else 0
    return number if 1 <= number <= len(names) else None


def describe(levels: Iterable[Level], limit: int = 8) -> str:
    """Format levels for a message: '85, 170, 255' or '#ff0000, #00ff00', truncated after `limit`."""
    shown = [_key(level) for level in levels]
    return ", ".join(shown[:limit]) + (", ..." if len(shown) > limit else "")


def _key(level: Level) -> str:
    return str(level[0]) if len(level) == 1 else "#" + "".join(f"{c:02x}" for c in level)


def _level(legend: Path, key: str) -> Level:
    if re.fullmatch(r"[0-9]{1,18}", key):
        return (int(key),)
    if re.fullmatch(r"#[0-9a-fA-F]{6}", key):
        return tuple(bytes.fromhex(key[1:]))
    raise InputError(f"{legend}: keys must be numbers or colours such as '#ff0000', got {key!r}.")


def has_controls(text: str) -> bool:
    """Return whether a text contains terminal or bidirectional control characters; joiners are allowed."""
    control_categories = ("Cc", "Cf", "Cs", "Zl", "Zp")
    return any(unicodedata.category(c) in control_categories and c not in "\u200c\u200d" for c in text)


def checked_names(where: str, names: Sequence[object]) -> tuple[str, ...]:
    """Return class names stripped of whitespace.

    Raises:
        InputError: empty, non-text or repeated names, control characters, or more than `LONGEST` characters.
    """
    if isinstance(names, str) or not all(isinstance(n, str) and n.strip() for n in names) or not names:
        raise InputError(f"{where}: class names must be non-empty texts, got {names!r}.")
    stripped = tuple(str(n).strip() for n in names)
    for name in stripped:
        if has_controls(name):
            raise InputError(f"{where}: class names must not contain control characters, got {name[:80]!a}.")
        if len(name) > LONGEST:
            raise InputError(
                f"{where}: class names must have at most {LONGEST} characters, got {len(name)}: {name[:40]!r}..."
            )
    repeated = sorted({n for n in stripped if stripped.count(n) > 1})
    if repeated:
        raise InputError(f"{where}: class names must be unique, got {repeated[0]!r} twice.")
    return stripped
