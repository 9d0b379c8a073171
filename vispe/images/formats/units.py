"""Lengths and times in file metadata: conversion to microns and seconds, and the dimensions they belong to."""

import unicodedata
from collections.abc import Mapping

import numpy as np

_METRES = {
    "pico": 1e-6,
    "nano": 1e-3,
    "micro": 1.0,
    "milli": 1e3,
    "centi": 1e4,
    "deci": 1e5,
    "": 1e6,
    "kilo": 1e9,
}
_LETTERS = {
    "p": "pico",
    "n": "nano",
    "u": "micro",
    "μ": "micro",
    "m": "milli",
    "c": "centi",
    "d": "deci",
    "": "",
}
MICRONS = {
    **{f"{prefix}m": _METRES[name] for prefix, name in _LETTERS.items()},
    **{f"{name}met{end}": factor for name, factor in _METRES.items() for end in ("er", "re")},
    **{"micron": 1.0, "mikron": 1.0, "km": 1e9, "a": 1e-4, "å": 1e-4, "angstrom": 1e-4, "angström": 1e-4},
    **{
        "ångström": 1e-4,
        "ångstrom": 1e-4,
        "inch": 25_400.0,
        "inche": 25_400.0,
        "in": 25_400.0,
        '"': 25_400.0,
    },
    # the other units of length of OME that are not of astronomy
    **{
        "thou": 25.4,
        "mil": 25.4,
        "li": 25_400.0 / 12,
        "pt": 25_400.0 / 72,
        "ft": 304_800.0,
        "yd": 914_400.0,
        "mi": 1.609344e9,
    },
    **{"fm": 1e-9, "am": 1e-12, "dam": 1e7, "hm": 1e8},
}
"""Microns per unit of length; keys are lower-case singular names with the Greek letter mu (U+03BC)."""

SECONDS = {
    **dict.fromkeys(("s", "sec", "second"), 1.0),
    **dict.fromkeys(("ms", "msec", "millisec", "millisecond"), 1e-3),
    **dict.fromkeys(("us", "μs", "usec", "microsec", "microsecond"), 1e-6),
    **dict.fromkeys(("ns", "nsec", "nanosecond"), 1e-9),
    **dict.fromkeys(("m", "min", "minute"), 60.0),
    **dict.fromkeys(("h", "hr", "hour"), 3600.0),
    **dict.fromkeys(("d", "day"), 86_400.0),
}
"""Seconds per unit of time; keys are lower-case singular names."""

# the micro sign as escaped by ImageJ, and as UTF-8 that was decoded as Latin-1
_SPELLINGS = {"\\u00b5": "μ", "\\u03bc": "μ", "âμ": "μ", "î¼": "μ"}


def microns(value: object, unit: object) -> float | None:
    """Return a length in microns; None unless it is a positive number with a unit of length.

    Example:
        >>> microns("5", "nm"), microns(2, "1/nm"), microns(0, "m")
        (0.005, None, None)
    """
    return _scaled(value, unit, MICRONS)


def seconds(value: object, unit: object) -> float | None:
    """Return a time in seconds; None unless it is a positive number with a unit of time.

    Example:
        >>> seconds("250", "ms"), seconds(2, "um")
        (0.25, None)
    """
    return _scaled(value, unit, SECONDS)


def micron_factor(unit: object) -> float | None:
    """Return the microns per unit of length; None if the unit is unknown."""
    return _factor(unit, MICRONS)


def size_sources(letters: str | None, axes: str | None) -> dict[str, str | None]:
    """Return the axis of the metadata that has the size of Y, X and Z if the user names the stored dimensions `axes`.

    The size of a dimension does not depend on its name. Z along a dimension without a length, such as pages of unknown
    kind, has the step of the metadata.

    Example:
        >>> size_sources("ZYX", "YZX")
        {'Y': 'Z', 'X': 'X', 'Z': 'Y'}
    """
    if axes is None or not letters or len(letters) != len(axes):
        return {letter: letter for letter in "YXZ"}
    stored = dict(zip(axes.upper(), letters, strict=True))
    of_length = {letter: stored[letter] for letter in "YXZ" if stored.get(letter, "?") in "YXZ"}
    return {letter: of_length.get(letter, "Z" if letter == "Z" else None) for letter in "YXZ"}


def lost_pixel_size(axes: str) -> str:
    """Return the note that Y or X, as named by the user, is a dimension without a size."""
    return f"the pixel size is unknown: Y or X of `axes={axes}` is a dimension without one."


def _scaled(value: object, unit: object, table: Mapping[str, float]) -> float | None:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    factor = _factor(unit, table)
    return number * factor if factor and np.isfinite(number) and number > 0 else None


def _factor(unit: object, table: Mapping[str, float]) -> float | None:
    # NFKC composes accents and maps the micro sign to mu and the angstrom sign to a letter
    text = unicodedata.normalize("NFKC", str(unit).strip()).lower().rstrip(". ")
    for spelling, plain in _SPELLINGS.items():
        text = text.replace(spelling, plain)
    return table.get(text) or (table.get(text.removesuffix("s")) if len(text) > 2 else None)
