"""Sections: how many pairs of channels time, rows and columns have."""

from __future__ import annotations

from vispe.errors import OptionError
from vispe.options import Count

Sections = tuple[Count, Count, Count] | None


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
