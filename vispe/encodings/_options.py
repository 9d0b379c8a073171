"""Checks of options that many encodings have."""

from __future__ import annotations

from typing import Any, cast

from vispe.errors import OptionError, is_whole


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
