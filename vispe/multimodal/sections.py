"""Checks of options that many schemes have, and the sections that they have by default."""

from __future__ import annotations

from typing import Any, cast

from vispe.errors import OptionError, is_positive, is_whole

Sections = tuple[int, ...] | None


def check_sections(sections: Any) -> None:
    """Raise `OptionError` unless `sections` is None or three whole numbers from 0 on."""
    given = cast("tuple[Any, ...]", sections) if isinstance(sections, tuple) else ()
    fine = len(given) == 3 and all(is_whole(s) and s >= 0 for s in given)
    if sections is not None and not fine:
        raise OptionError(f"sections needs three whole numbers (time, rows, columns), got {sections!r}.")


def check_positive(**values: Any) -> None:
    """Raise `OptionError` unless all values are finite numbers above 0."""
    for name, value in values.items():
        if not is_positive(value):
            raise OptionError(f"{name} needs a number above 0, got {value!r}.")


def check_option(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Raise `OptionError` unless the value is one of the choices."""
    if value not in choices:
        raise OptionError(f"{name} must be one of {', '.join(map(str, choices))}, got {value!r}.")


def sections_for(pairs: int, sections: Sections, share: float) -> tuple[int, int, int]:
    """Return how many of `pairs` pairs time, rows and columns have.

    Args:
        pairs: half the width of a head.
        sections: as the user gave them; must add up to `pairs`.
        share: of rows, and of columns, where the user gave none; time has the rest.

    Raises:
        OptionError: they do not add up.
    """
    if sections is None:
        each = min(round(share * pairs), (pairs - 1) // 2)  # time has one at least
        return pairs - 2 * each, each, each
    if sum(sections) != pairs:
        raise OptionError(
            f"sections={list(sections)} add up to {sum(sections)}, but a head has {pairs} pairs of channels; "
            f"for example {list(sections_for(pairs, None, share))} would do."
        )
    time, rows, columns = sections
    return time, rows, columns
