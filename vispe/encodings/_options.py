"""Checks of options that many encodings have."""

from __future__ import annotations

from vispe.errors import OptionError


def is_whole(value: object) -> bool:
    """Whether `value` is a whole number and no truth value."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_positive(value: object) -> bool:
    """Whether `value` is a finite number above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


def check_flag(option: str, value: object) -> None:
    """Raise `OptionError` unless `value` is true or false."""
    if not isinstance(value, bool):
        raise OptionError(f"{option} is true or false, got {option}={value!r}.")


def check_choice(option: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise `OptionError` unless the value is one of the choices."""
    if value not in choices:
        raise OptionError(f"{option} must be one of {', '.join(choices)}, got {value!r}.")
