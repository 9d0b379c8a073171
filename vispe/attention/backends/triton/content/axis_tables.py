"""What tokens read for the rows and columns of a grid, laid out in the order in which kernels loop over tokens.

Panels of W columns follow each other, each with all rows, and then the prefix tokens. A tile of the loop is some rows
of a panel, so that all its rows have the same columns. The numbers of a token are a column of the memory: lines (rows
of the grid, its columns, two for prefix tokens) x slots, -inf where there is no such row, column or token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

WIDTHS = (64, 32, 16, 8)  # columns of a panel; matrix instructions hold 8 neighbours
FEW = 16  # prefix tokens in one tile
SLACK = 1.125  # by how much taller tiles may cover more rows


@dataclass(frozen=True)
class Slots:
    """Where each token lies.

    Args:
        shape: rows and columns of the grid.
        prefix: tokens without a place, in front.
        width: columns of a panel, W.
        high: rows of all panels, those that are missing included.
    """

    shape: tuple[int, int]
    prefix: int
    width: int
    high: int

    @property
    def wide(self) -> int:
        """Columns of all panels, those that are missing included."""
        return _up(self.shape[1], self.width)

    @property
    def size(self) -> int:
        """Number of slots."""
        return self.high * self.wide + _up(self.prefix, FEW)

    @property
    def lines(self) -> int:
        """Number of lines."""
        return self.high + self.wide + 2


def slots_of(shape: tuple[int, int], prefix: int, sizes: tuple[int, ...]) -> Slots:
    """Return the slots that waste the fewest places.

    Args:
        shape: rows and columns of the grid.
        prefix: tokens without a place.
        sizes: how many slots the tiles of the kernels have.
    """
    best = width = 0
    for panel in WIDTHS:
        if panel <= min(sizes):
            places = _up(shape[1], panel) * _up(shape[0], rows_of(shape[0], panel, min(sizes)))
            if not width or places < best:  # the widest of equals
                best, width = places, panel
    tallest = max([rows_of(shape[0], width, size) for size in sizes])
    return Slots(shape, prefix, width, _up(shape[0], tallest))


def rows_of(high: int, width: int, size: int) -> int:
    """Return the rows of a tile of at most `size` slots, a power of 2, on a grid `high` rows tall."""
    rows = size // width
    while rows > 1 and rows * width > FEW and _up(high, rows) > SLACK * _up(high, rows // 2):
        rows //= 2
    return rows


def lay_out(rows: Tensor, cols: Tensor, slots: Slots, scale: float) -> Tensor:
    """Return what tokens read (b, h, lines, slots), float32, divided by the scale of the logits; differentiable.

    Args:
        rows: (b, h, n, rows + 1), the last for prefix tokens.
        cols: (b, h, n, columns + 1).
        slots: where to put them.
        scale: the factor of the logits, which kernels apply to the bias too.
    """
    (gh, gw), p, none = slots.shape, slots.prefix, float("-inf")
    reads = torch.cat(
        [
            F.pad(rows[..., :gh], (0, slots.high - gh), value=none),
            F.pad(cols[..., :gw], (0, slots.wide - gw), value=none),
            rows[..., gh:],
            cols[..., gw:],
        ],
        -1,
    )
    reads = (reads.float() / scale).transpose(-1, -2)
    patches = reads[..., p:].reshape(*reads.shape[:-1], gh, gw)
    patches = F.pad(patches, (0, slots.wide - gw, 0, slots.high - gh), value=none)
    panels = patches.reshape(*patches.shape[:-1], -1, slots.width).movedim(-2, -3).flatten(-3)
    prefix = F.pad(reads[..., :p], (0, _up(p, FEW) - p), value=none)
    return torch.cat([panels, prefix], -1)


def _up(count: int, multiple: int) -> int:
    return (count + multiple - 1) // multiple * multiple
