"""Grey levels and colours to class numbers, and the names of classes."""

import json
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vispe.errors import InputError, OptionError
from vispe.images.paths import check_file

Level = tuple[int, ...]
"""(grey level,) or (red, green, blue) as found in a label file, or (class number,) of a stroke."""

LONGEST = 200
"""Characters of the name of a class at most."""

_JSON_BYTES = 200_000_000


@dataclass(frozen=True)
class Naming:
    """What the user said about the classes.

    Attributes:
        names: class names in order of the classes; () when nothing was said.
        levels: the grey level or colour of each class where the user gave it, else None: the classes are
            1..K.
        notes: what was noticed.
    """

    names: tuple[str, ...] = ()
    levels: tuple[Level, ...] | None = None
    notes: tuple[str, ...] = ()


def read_names(classes: Sequence[str] | None, legend: str | Path | None) -> Naming:
    """Read class names from a list, or from a legend JSON: a list, or an object {level or '#rrggbb': name}.

    Raises:
        OptionError: both were given.
        InputError: unreadable legend, empty, repeated or non-text names, or keys that are no levels.
    """
    if classes is not None and legend is not None:
        raise OptionError("classes and legend were both given; the names must come from one of them.")
    if classes is not None:
        return Naming(checked_names("classes", classes))
    if legend is None:
        return Naming()
    legend = Path(legend)
    content = load_json(legend)
    if isinstance(content, list):
        return Naming(checked_names(str(legend), content))
    if not isinstance(content, dict):
        raise InputError(f'{legend} must hold a list of names or an object such as {{"1": "matrix"}}.')
    entries = sorted((_level(legend, key), name) for key, name in content.items())
    names = checked_names(str(legend), [name for _, name in entries])
    levels = tuple(level for level, _ in entries)
    if len({len(level) for level in levels}) > 1:
        raise InputError(f"{legend} mixes numbers and colours as keys; use one kind.")
    if len(set(levels)) < len(levels):
        raise InputError(f"{legend} gives one level twice.")
    return Naming(names, levels)


def load_json(path: Path) -> object:
    """Parse a JSON file; InputError names the file and the place of a mistake."""
    check_file(path)
    if path.stat().st_size > _JSON_BYTES:
        raise InputError(f"{path} has more than {_JSON_BYTES // 1_000_000} MB: no list of names or strokes.")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as text: {error}.") from error
    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=no_number)
    except json.JSONDecodeError as error:
        raise InputError(f"{path} is not JSON: {error.msg} in line {error.lineno}.") from error
    except RecursionError as error:
        raise InputError(f"{path} is nested too deeply to be a list of names or strokes.") from error
    except ValueError as error:  # of the two functions, or a number of thousands of digits
        raise InputError(f"{path} is not usable: {str(error).partition(';')[0]}.") from error


def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Build an object of JSON; ValueError for one that has a key twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"it has the key {next(k for k in keys if keys.count(k) > 1)!r} twice in one object")
    return found


def no_number(text: str) -> object:
    """Refuse NaN and infinity, which are no JSON, with a ValueError."""
    raise ValueError(f"it holds {text}, which is no number of JSON")


def named_classes(
    paths: Sequence[str | Path], levels: Iterable[list[Level]], naming: Naming, dense: bool, most: int
) -> tuple[dict[Level, int], tuple[str, ...], tuple[tuple[int, int, int], ...] | None, list[str]]:
    """Return what `assign` does, for the labels of several files together, to learn from.

    Args:
        paths: the files.
        levels: those of each file.
        naming: what the user said about the classes.
        dense: whether level 0 is a class.
        most: how many levels there may be.

    Raises:
        InputError: more than `most` distinct levels, or fewer than two classes.
    """
    found = sorted(set().union(*levels))
    where = str(paths[0]) if len(paths) == 1 else f"the {len(paths)} label files"
    if len(found) > most:
        raise InputError(
            f"{where}: found {len(found)} distinct classes ({describe(found)}), more than max_classes={most}; draw "
            "without smooth edges (a pencil, not a brush) or raise max_classes."
        )
    classes_of, names, colors, notes = assign(where, found, naming, dense)
    drawn = {classes_of[level] for level in found}
    if len(drawn) < 2:
        listed = ", ".join(names[c - 1] for c in sorted(drawn)) or "none"
        raise InputError(
            f"{where}: need at least 2 labelled classes, found {len(drawn)} ({listed}); draw the others."
        )
    return classes_of, names, colors, notes


def assign(
    where: str, found: list[Level], naming: Naming, dense: bool
) -> tuple[dict[Level, int], tuple[str, ...], tuple[tuple[int, int, int], ...] | None, list[str]]:
    """Decide which class each level is.

    Args:
        where: the file, for messages.
        found: the distinct levels, sorted; unlabelled is not among them.
        naming: what the user said about the classes.
        dense: whether level 0 is a class.

    Returns:
        The class (from 1) of each level, the K names, the K colours or None, and notes.
    """
    notes = list(naming.notes)
    colour = bool(found) and len(found[0]) == 3
    if len({len(level) for level in found}) > 1:
        raise InputError(f"{where}: some files are grey and some coloured; use one kind of labels.")
    names, levels = naming.names, naming.levels
    if levels and not dense and levels[0] in ((0,), (0, 0, 0)):
        notes.append(f"the legend's name {names[0]!r} is for unlabelled pixels and no class.")
        names, levels = names[1:], levels[1:]
    first = 0 if dense else 1
    as_numbers = tuple((i + first,) for i in range(len(names)))
    if levels is None:
        levels = as_numbers
    if set(found) <= set(levels):
        known = {level: i + 1 for i, level in enumerate(levels)}
    elif names and levels != as_numbers:
        strange = describe(sorted(set(found) - set(levels)))
        raise InputError(f"{where}: found {strange}, but the legend names {describe(levels)}.")
    elif names and len(found) != len(names):
        count = "more" if len(found) > len(names) else "fewer"
        raise InputError(
            f"{where}: found {describe(found)}, {count} than the {len(names)} class names; use the values "
            f"{first} to {first + len(names) - 1}, or a legend JSON such as "
            f'{{"{_key(found[0])}": "{names[0]}"}}.'
        )
    else:
        known = {level: i + 1 for i, level in enumerate(found)}
    if not names:
        names = tuple(f"class {known[level]}" for level in found)
    if any(level != (number - 1 + first,) for level, number in known.items()) and found:
        kind = "colours" if colour else "grey levels"
        pairs = ", ".join(f"{_key(level)} -> {known[level]}" for level in found)
        notes.append(f"{where}: {kind} were mapped to classes: {pairs}.")
    colors = None
    if colour and len(known) == len(names):
        colors = tuple(level for level, _ in sorted(known.items(), key=lambda item: item[1]))
    return known, names, colors, notes


def class_number(name: str, names: Sequence[str]) -> int | None:
    """Return the number (1..K) of a class by its name, or by the number itself where no class has it as a name.

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
    """Write levels for a message: '85, 170, 255' or '#ff0000, #00ff00'; shortened after `limit`."""
    shown = [_key(level) for level in levels]
    return ", ".join(shown[:limit]) + (", ..." if len(shown) > limit else "")


def _key(level: Level) -> str:
    return str(level[0]) if len(level) == 1 else "#" + "".join(f"{c:02x}" for c in level)


def _level(legend: Path, key: str) -> Level:
    if re.fullmatch(r"[0-9]{1,18}", key):
        return (int(key),)
    if re.fullmatch(r"#[0-9a-fA-F]{6}", key):
        return tuple(bytes.fromhex(key[1:]))
    raise InputError(f"{legend}: the key {key!r} is neither a number nor a colour such as '#ff0000'.")


def has_controls(text: str) -> bool:
    """Tell whether a text holds characters that steer a terminal or turn the direction of writing; joiners may be."""
    steering = ("Cc", "Cf", "Cs", "Zl", "Zp")
    return any(unicodedata.category(c) in steering and c not in "\u200c\u200d" for c in text)


def checked_names(where: str, names: Sequence[object]) -> tuple[str, ...]:
    """Return names of classes without spaces around them; InputError for what cannot be one, or is there twice."""
    if isinstance(names, str) or not all(isinstance(n, str) and n.strip() for n in names) or not names:
        raise InputError(f"{where} must hold class names, each a text that is not empty; found {names!r}.")
    stripped = tuple(str(n).strip() for n in names)
    for name in stripped:
        if has_controls(name):
            raise InputError(
                f"{where} has the class name {name[:80]!a} with control characters; use letters, digits and signs."
            )
        if len(name) > LONGEST:
            raise InputError(
                f"{where} has a class name of {len(name)} characters, {name[:40]!r}...; use up to {LONGEST}."
            )
    twice = sorted({n for n in stripped if stripped.count(n) > 1})
    if twice:
        raise InputError(f"{where} gives the class name {twice[0]!r} twice; names must differ.")
    return stripped
