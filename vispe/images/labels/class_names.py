"""Class names: from a list or a legend, with checks."""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vispe.errors import InputError, OptionError
from vispe.images.labels.json_files import load_json

Level = tuple[int, ...]
"""(grey level,) or (red, green, blue) of a label file, or (class number,) of a scribble."""

LONGEST = 200
"""Largest length of a class name in characters."""


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
