"""Diagnostic of RoPE bases (temperatures) that are too small for the side of a grid."""

from __future__ import annotations

import math
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


def diagnose_side(name: str, base: float, freqs: Tensor, side: int, cell: float) -> BaseTooSmall | None:
    """Return a diagnostic if the base is too small for one side of a grid, else None; None for few pairs.

    Args:
        name: name of the encoding.
        base: its base (temperature).
        freqs: radians per unit of the coordinates, (1, pairs).
        side: number of patches.
        cell: distance between neighbouring patches.
    """
    pairs = freqs.shape[-1]
    # radians per patch: coordinates advance by one cell per patch
    if pairs < FEW or (cosine_similarity_bound(freqs[0] * cell, side) >= 0).all():
        return None
    needed = min_base(pairs, max(round(side * cell), 1))
    return BaseTooSmall(name, base, needed, side, pairs) if needed > base else None
