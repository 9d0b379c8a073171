"""Lookup table of serving engines: cosines and sines, and the axis of each pair of channels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vispe.errors import OptionError, ShapeError, UnsupportedCombination
from vispe.multimodal import allocation
from vispe.multimodal.rotary.angles import tables
from vispe.multimodal.serving.table_rows import TableRows

HEADS = 64  # number of key heads passed to `allocation`; irrelevant for allocations shared by heads


@dataclass(frozen=True, eq=False)
class RotaryTable:
    """Cosines and sines of every row, and the axis of each pair.

    Attributes:
        cache: (rows, 2 pairs) float32, cosines, then sines: `cos_sin_cache` of vLLM and SGLang, which cast it to the
            type of the model.
        axis_of_pair: (pairs,), axis of ids of each pair of channels.
        sections: value of `mrope_section` that gives this allocation in an engine. None if there is no such
            value; the engine then needs a layer that uses `axis_of_pair`, such as `TableRotary`.
        interleaved: `mrope_interleaved`, to be set with `sections`.
    """

    cache: Tensor
    axis_of_pair: Tensor
    sections: tuple[int, int, int] | None
    interleaved: bool


def table_of(rows: TableRows, frequencies: Tensor, scaling: float = 1.0) -> RotaryTable:
    """Return the table of a scheme.

    Args:
        rows: the numbering.
        frequencies: radians per step (pairs,), `inv_freq` of the model.
        scaling: factor of cosines and sines, `attention_scaling` of the model.

    Raises:
        UnsupportedCombination: axes differ between heads, which engines do not support.
        OptionError: sections of the scheme do not add up to the pairs.
    """
    if frequencies.ndim != 1:
        raise ShapeError(f"frequencies needs the shape (pairs,), got {tuple(frequencies.shape)}.")
    axis = rows.scheme.allocation(len(frequencies), HEADS)
    if axis.ndim == 2:
        raise UnsupportedCombination(
            f"Engines need the same axes in all heads, got {rows.scheme.name} with axes per head."
        )
    if len(axis) != len(frequencies):
        raise UnsupportedCombination(
            f"Engines need one axis for the two channels of a pair, got {rows.scheme}. Use layout='paired'."
        )
    # pairs without rotation have frequency 0, for any axis
    no_rotation = axis == allocation.ZERO
    rotated_frequencies = torch.where(no_rotation, 0.0, frequencies.float())
    one = torch.zeros_like(axis)
    cos, sin = tables(rows.values()[None, None], rotated_frequencies, one, scaling)
    axis = torch.where(no_rotation, 0, axis)
    sections, interleaved = _sections(axis)
    return RotaryTable(torch.cat([cos[0], sin[0]], 1), axis, sections, interleaved)


def _sections(axis: Tensor) -> tuple[tuple[int, int, int] | None, bool]:
    """Return the sections that give the allocation, and whether axes are interleaved; None if there are none."""
    if int(axis.max()) > allocation.W:
        return None, False
    time, height, width = (int((axis == a).sum()) for a in range(3))
    counts = (time, height, width)
    if torch.equal(allocation.chunked(counts), axis):
        return counts, False
    try:
        turns = torch.equal(allocation.interleaved(counts), axis)
    except OptionError:  # rows or columns have more pairs than the interleaved pattern has repetitions
        return None, False
    return (counts, True) if turns else (None, False)
