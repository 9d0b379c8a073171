"""Which grid the table in a checkpoint is for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import count

from vispe.errors import EncodingMismatch, OptionError
from vispe.options import check_per_axis

_logger = logging.getLogger(__name__)


def trained_grid(
    name: str,
    known: tuple[int, ...] | None,
    entries: int,
    ours: tuple[int, ...],
    size: Callable[[Sequence[int]], int],
) -> tuple[int, ...]:
    """Return the grid that a table in a checkpoint is for, and log it where it is not that of the module.

    Args:
        name: of the table in the checkpoint.
        known: the grid, where the checkpoint says it.
        entries: of the table.
        ours: grid of the module that it is loaded into.
        size: number of entries of the table of a grid.

    Raises:
        EncodingMismatch: the checkpoint does not say the grid, and it is neither ours nor one of equal sides.
    """
    old = known
    if old is None and entries == size(ours):
        old = ours
    if old is None:  # as timm does, equal sides are assumed
        sides = ((n,) * len(ours) for n in count(1))
        old = next(grid for grid in sides if size(grid) >= entries)
    if size(old) != entries or len(old) != len(ours):
        raise EncodingMismatch(
            f"{name} has {entries} entries, but its model has the grid {ours}, which needs {size(ours)}. The "
            "checkpoint does not say for which grid they are, and no grid of equal sides has so many; build the model "
            "for the size of images that it was trained with, load it, and call set_input_size."
        )
    if old != ours:
        _logger.info("%s is resampled from the grid %s to %s.", name, old, ours)
    return old


def training_grid(
    reference: tuple[int, ...] | None, axes: int, used: bool, setting: str
) -> tuple[int, ...] | None:
    """Return the option `reference`, checked: one number per axis, where `setting` does not make it useless."""
    if reference is not None and not used:
        raise OptionError(f"reference={list(reference)} has no effect with {setting}; leave it out.")
    check_per_axis("reference", reference, axes)
    return reference
