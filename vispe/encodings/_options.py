"""Checks of options that many encodings have."""

from __future__ import annotations

from typing import Any, cast

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


def training_grid(reference: object, axes: int, used: bool, setting: str) -> tuple[int, ...] | None:
    """Return the option `reference` as whole numbers, one per axis, checked; `setting` is what may make it useless."""
    if reference is None:
        return None
    if not used:
        raise OptionError(f"reference={reference!r} has no effect with {setting}; leave it out.")
    given = cast("list[Any]", list(reference)) if isinstance(reference, list | tuple) else []  # pyright: ignore[reportUnknownArgumentType]
    numbers = [int(n) for n in given if is_whole(n) and n > 0]
    if len(numbers) != axes or len(given) != axes:
        raise OptionError(
            f"reference needs one whole number above 0 for each of {axes} axes, got reference={reference!r}."
        )
    return tuple(numbers)
