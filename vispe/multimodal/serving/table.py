"""The table that an engine looks rows up in: cosines and sines, and which axis each pair of channels reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vispe.errors import OptionError, ShapeError, UnsupportedCombination
from vispe.multimodal import allocation
from vispe.multimodal.rotary import tables
from vispe.multimodal.serving.table_rows import Rows

HEADS = 64  # key heads that a scheme is asked for; one axis for all heads is the same for any number of them


@dataclass(frozen=True, eq=False)
class Table:
    """Cosines and sines of every row, and the axis of each pair.

    Attributes:
        cache: (rows, 2 pairs) float32, cosines, then sines: `cos_sin_cache` of vLLM and SGLang, which cast it to the
            type of the model.
        axis_of_pair: (pairs,), the axis of ids that each pair of channels reads.
        sections: `mrope_section` by which an engine reads the axes so, or None: it needs a layer that reads
            `axis_of_pair`, such as `TableRotary`.
        interleaved: `mrope_interleaved`, beside `sections`.
    """

    cache: Tensor
    axis_of_pair: Tensor
    sections: tuple[int, int, int] | None
    interleaved: bool


def table_of(rows: Rows, frequencies: Tensor, scaling: float = 1.0) -> Table:
    """Return the table of a scheme.

    Args:
        rows: the numbering.
        frequencies: radians per step (pairs,), `inv_freq` of the model.
        scaling: what cosines and sines are multiplied by, `attention_scaling` of the model.

    Raises:
        UnsupportedCombination: heads turn by different axes, which no engine's table says.
        OptionError: sections of the scheme do not add up to the pairs.
    """
    if frequencies.ndim != 1:
        raise ShapeError(f"frequencies needs the shape (pairs,), got {tuple(frequencies.shape)}.")
    axis = rows.scheme.allocation(len(frequencies), HEADS)
    if axis.ndim == 2:
        raise UnsupportedCombination(
            f"{rows.scheme.name} turns each head by an axis of its own; engines turn all heads alike."
        )
    # a pair that does not turn has frequency 0 in the table, whichever axis it reads
    still = axis == allocation.ZERO
    turned = torch.where(still, 0.0, frequencies.float())
    one = torch.zeros_like(axis)
    cos, sin = tables(rows.values()[None, None], turned, one, scaling)
    axis = torch.where(still, 0, axis)
    sections, interleaved = _sections(axis)
    return Table(torch.cat([cos[0], sin[0]], 1), axis, sections, interleaved)


def _sections(axis: Tensor) -> tuple[tuple[int, int, int] | None, bool]:
    """Return sections that say which axis each pair reads, and whether axes take turns; None where none do."""
    if int(axis.max()) > allocation.W:
        return None, False
    time, height, width = (int((axis == a).sum()) for a in range(3))
    counts = (time, height, width)
    if torch.equal(allocation.chunked(counts), axis):
        return counts, False
    try:
        turns = torch.equal(allocation.interleaved(counts), axis)
    except OptionError:  # rows or columns have more pairs than there are turns
        return None, False
    return (counts, True) if turns else (None, False)
