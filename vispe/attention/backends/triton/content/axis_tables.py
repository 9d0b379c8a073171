"""Memory layout of the row and column terms of decomposed biases, in the order in which kernels loop over tokens.

Panels of W grid columns follow each other, each with all grid rows, followed by the prefix tokens. A tile of the loop
consists of some rows of a panel, so all its rows have the same columns. The terms are stored as lines x slots: one line
per grid row, per grid column and two for prefix tokens, one slot per token, -inf for padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

WIDTHS = (64, 32, 16, 8)  # columns of a panel; matrix instructions process 8 neighbours
FEW = 16  # prefix tokens per tile
SLACK = 1.125  # factor by which taller tiles may increase the padded number of rows


@dataclass(frozen=True)
class Slots:
    """Layout of the slots of all tokens.

    Args:
        shape: rows and columns of the grid.
        prefix: number of leading tokens without a position.
        width: columns of a panel, W.
        high: rows of all panels, including padding.
    """

    shape: tuple[int, int]
    prefix: int
    width: int
    high: int

    @property
    def wide(self) -> int:
        """Columns of all panels, including padding."""
        return _round_up(self.shape[1], self.width)

    @property
    def size(self) -> int:
        """Number of slots."""
        return self.high * self.wide + _round_up(self.prefix, FEW)

    @property
    def lines(self) -> int:
        """Number of lines."""
        return self.high + self.wide + 2


def slots_of(shape: tuple[int, int], prefix: int, sizes: tuple[int, ...]) -> Slots:
    """Return the layout with the least padding.

    Args:
        shape: rows and columns of the grid.
        prefix: number of tokens without a position.
        sizes: number of slots in the tiles of the kernels.
    """
    best = width = 0
    for panel in WIDTHS:
        if panel <= min(sizes):
            count = _round_up(shape[1], panel) * _round_up(shape[0], rows_of(shape[0], panel, min(sizes)))
            # ties: the widest panel
            if not width or count < best:
                best, width = count, panel
    tallest = max([rows_of(shape[0], width, size) for size in sizes])
    return Slots(shape, prefix, width, _round_up(shape[0], tallest))


def rows_of(high: int, width: int, size: int) -> int:
    """Return the number of rows of a tile of at most `size` slots, a power of 2, on a grid of `high` rows."""
    rows = size // width
    while rows > 1 and rows * width > FEW and _round_up(high, rows) > SLACK * _round_up(high, rows // 2):
        rows //= 2
    return rows


def lay_out(rows: Tensor, cols: Tensor, slots: Slots, scale: float) -> Tensor:
    """Return the terms (b, h, lines, slots), float32, divided by the scale of the logits; differentiable.

    Args:
        rows: (b, h, n, rows + 1), the last for prefix tokens.
        cols: (b, h, n, columns + 1), likewise.
        slots: layout.
        scale: the factor of the logits, which kernels apply to the bias as well.
    """
    (gh, gw), p, padding = slots.shape, slots.prefix, float("-inf")
    terms = torch.cat(
        [
            F.pad(rows[..., :gh], (0, slots.high - gh), value=padding),
            F.pad(cols[..., :gw], (0, slots.wide - gw), value=padding),
            rows[..., gh:],
            cols[..., gw:],
        ],
        -1,
    )
    terms = (terms.float() / scale).transpose(-1, -2)
    # (b, h, lines, n) -> panels of W columns with all rows each
    patches = terms[..., p:].reshape(*terms.shape[:-1], gh, gw)
    patches = F.pad(patches, (0, slots.wide - gw, 0, slots.high - gh), value=padding)
    panels = patches.reshape(*patches.shape[:-1], -1, slots.width).movedim(-2, -3).flatten(-3)
    prefix = F.pad(terms[..., :p], (0, _round_up(p, FEW) - p), value=padding)
    return torch.cat([panels, prefix], -1)


def _round_up(count: int, multiple: int) -> int:
    return (count + multiple - 1) // multiple * multiple
