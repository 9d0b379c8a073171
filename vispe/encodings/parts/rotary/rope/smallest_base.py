"""Diagnostic of RoPE bases (temperatures) that are too small for the side of a grid."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from vispe.errors import counted
from vispe.grid.grid_frequencies import cosine_similarity_bound, min_base

FEW = 4  # pairs of an axis: with fewer, cosines do not average out for any base


class BaseTooSmall(NamedTuple):
    """Diagnostic of a RoPE base that is too small for a grid.

    Attributes:
        name: name of the encoding.
        base: its base (temperature).
        needed: smallest suitable base of the grid, by `min_base`.
        side: patches along the axis with the largest requirement.
        pairs: pairs of channels of that axis.
    """

    name: str
    base: float
    needed: float
    side: int
    pairs: int

    @property
    def far(self) -> bool:
        """Whether it is too small by more than a factor of 2; smaller deviations have little effect."""
        return self.needed > 2 * self.base

    def __str__(self) -> str:
        return (
            f"{self.name} has temperature={self.base:g}, but a side of {counted(self.side, 'patch')} "
            f"({counted(self.pairs, 'pair')}) needs {math.ceil(self.needed)}: below this, similar patches at some "
            "distances score lower than unrelated ones"
        )


def diagnose_base(
    name: str, base: float, freqs: Sequence[Tensor], shape: Sequence[int], cells: Sequence[float]
) -> BaseTooSmall | None:
    """Return the diagnostic of the side with the largest requirement, or None if the base suffices for all.

    Sides with few pairs are ignored.

    Args:
        name: name of the encoding.
        base: its base (temperature).
        freqs: radians per unit of the coordinates, per axis (1, pairs of the axis).
        shape: number of patches per axis.
        cells: distance between neighbouring patches per axis.
    """
    sides = zip(freqs, shape, cells, strict=True)
    diagnostics = [_diagnose_side(name, base, *side) for side in sides]
    return max((one for one in diagnostics if one), key=lambda one: one.needed, default=None)


def _diagnose_side(name: str, base: float, freqs: Tensor, side: int, cell: float) -> BaseTooSmall | None:
    pairs = freqs.shape[-1]
    # radians per patch: coordinates advance by one cell per patch
    if pairs < FEW or (cosine_similarity_bound(freqs[0] * cell, side) >= 0).all():
        return None
    needed = min_base(pairs, max(round(side * cell), 1))
    return BaseTooSmall(name, base, needed, side, pairs) if needed > base else None
