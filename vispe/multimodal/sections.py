"""Sections: numbers of channel pairs for time, rows and columns."""

from __future__ import annotations

from vispe.errors import OptionError, counted
from vispe.utils.options import NonNegativeInt

Sections = tuple[NonNegativeInt, NonNegativeInt, NonNegativeInt] | None


def sections_for(pairs: int, sections: Sections, share: float) -> tuple[int, int, int]:
    """Return the numbers of pairs of time, rows and columns, `pairs` in total.

    Args:
        pairs: head_dim / 2.
        sections: sections set by the user, which must add up to `pairs`, or None.
        share: default fraction of rows, and of columns; time has the rest.

    Raises:
        OptionError: `sections` do not add up to `pairs`, or there are fewer than three pairs and no sections.
    """
    if sections is None and pairs < 3:
        raise OptionError(
            f"Time, rows and columns need at least 3 pairs of channels, got {pairs} per head. Use sections, or a "
            "scheme with one axis."
        )
    if sections is None:
        each = min(round(share * pairs), (pairs - 1) // 2)  # at least one for time
        return pairs - 2 * each, each, each
    if sum(sections) != pairs:
        raise OptionError(
            f"sections={list(sections)} add up to {sum(sections)}, but a head has {counted(pairs, 'pair')} of "
            f"channels; use for example {list(sections_for(pairs, None, share))}."
        )
    time, rows, columns = sections
    return time, rows, columns
