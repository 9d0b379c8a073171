"""Memory layout of the row and column terms of decomposed biases, in the order in which kernels loop over tokens.

Panels of W grid columns follow each other, each with all grid rows, followed by the prefix tokens. A tile of the loop
consists of some rows of a panel, so all its rows have the same columns. The terms are stored as lines x slots: one line
per grid row, per grid column and two for prefix tokens, one slot per token, -inf for padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vispe.utils.constants import constant

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


def lay_out(
    rows: Tensor, cols: Tensor, slots: Slots, scale: float, index: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Return the terms (b, h, lines, slots), float32, divided by the scale of the logits; differentiable.

    Args:
        rows: (b, h, n, rows + 1), the last for prefix tokens.
        cols: (b, h, n, columns + 1), likewise.
        slots: layout.
        scale: the factor of the logits, which kernels apply to the bias as well.
        index: `slot_index` of the layout, which is computed if None.
    """
    source, back = slot_index(slots, rows.device) if index is None else index
    padding = constant((float("-inf"),), rows.dtype, rows.device).expand(*rows.shape[:-1], 1)
    values = torch.cat([rows, cols, padding], -1).float() / scale
    return _Gather.apply(values.flatten(-2), source, back).unflatten(-1, (slots.lines, slots.size))


def slot_index(slots: Slots, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """Return the entry of each element of the layout, (lines x slots,) int32, and the element of each entry.

    The entries of a token are its terms of rows, of columns, and padding; the second index is (n x entries,), in which
    padding has any element.
    """
    (gh, gw), p = slots.shape, slots.prefix
    n, width = p + gh * gw, gh + gw + 3
    # token of each slot, n for padding: panels of W columns with all rows each, then prefix tokens
    row, col = (torch.arange(count, device=device) for count in (slots.high, slots.wide))
    token = torch.where((row[:, None] < gh) & (col < gw), p + row[:, None] * gw + col, n)
    token = token.view(slots.high, -1, slots.width).movedim(1, 0).flatten()
    rest = torch.arange(slots.size - len(token), device=device)
    token = torch.cat([token, torch.where(rest < p, rest, n)])
    # entry of each line
    last = constant((gh, width - 2), torch.int64, device)
    line = torch.cat(
        [torch.where(row < gh, row, width - 1), torch.where(col < gw, gh + 1 + col, width - 1), last]
    )
    real = (token < n) & (line < width - 1)[:, None]
    source = torch.where(real, token * width + line[:, None], width - 1).flatten()
    back = torch.zeros(n * width, dtype=torch.int64, device=device)
    back.scatter_(0, source, torch.arange(len(source), device=device))
    return source.int(), back.int()


class _Gather(torch.autograd.Function):
    """Elements of the last axis, each of which but padding is read once: the gradient is a gather as well."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, source: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return values.index_select(-1, source)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0].index_select(-1, ctx.saved_tensors[0]), None, None


def _round_up(count: int, multiple: int) -> int:
    return (count + multiple - 1) // multiple * multiple
