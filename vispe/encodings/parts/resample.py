"""Inference of the training grid of tables in checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import count

from vispe.errors import EncodingMismatch, OptionError, counted
from vispe.utils.options import check_per_axis

_logger = logging.getLogger(__name__)


def trained_grid(
    name: str,
    known: tuple[int, ...] | None,
    entries: int,
    new: tuple[int, ...],
    size: Callable[[Sequence[int]], int],
) -> tuple[int, ...]:
    """Return the grid of a table in a checkpoint, and log it if it differs from that of the module.

    Args:
        name: name of the table in the checkpoint.
        known: grid recorded in the checkpoint, or None.
        entries: number of entries of the table.
        new: grid of the module that it is loaded into.
        size: function from a grid to the number of entries of its table.

    Raises:
        EncodingMismatch: the grid is not recorded, and the table fits neither `new` nor a grid with equal sides.
    """
    old = known
    if old is None and entries == size(new):
        old = new
    if old is None:  # as timm does, equal sides are assumed
        sides = ((n,) * len(new) for n in count(1))
        old = next(grid for grid in sides if size(grid) >= entries)
    if size(old) != entries or len(old) != len(new):
        raise EncodingMismatch(
            f"{name} has {counted(entries, 'entry')}, but its model has the grid {new}, which needs {size(new)}. The "
            "checkpoint does not record its grid, and no grid of equal sides has this many entries. Build the model "
            "for the image size that it was trained with, load the checkpoint, and call set_input_size."
        )
    if old != new:
        _logger.info("%s is resampled from the grid %s to %s.", name, old, new)
    return old


def training_grid(
    reference: tuple[int, ...] | None, axes: int, used: bool, setting: str
) -> tuple[int, ...] | None:
    """Return the checked option `reference`: one number per axis, and only if `used`."""
    if reference is not None and not used:
        raise OptionError(f"reference={list(reference)} has no effect with {setting}. Omit it.")
    check_per_axis("reference", reference, axes)
    return reference
