"""Memory layout of bias tables in which the bias of one query is a contiguous run over its keys.

For raster keys with pitch R (the product of all axes but the first, which has n cells) let y be the position of a query
on the first axis and x its index within the pitch. The strip ``S[x, r, x'] = T[2 (n - 1) - r, x - x' + ...]`` has the
bias of query (y, x) and key (y', x') at r = n - 1 - y + y', so all keys of a query are read from ``base_i + j``. Prefix
queries read a constant run after the strip; the biases of prefix keys are two numbers per head that the kernels select.
Small grids store one aligned row per query instead, which is not larger there and needs no selection.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

WORD = 8  # elements in one 16-byte load of half precision
TAIL = 256  # elements after the last row that a tile may load without using them


@dataclass(frozen=True)
class Layout:
    """Memory layout of the runs of a bias: a strip, or one row per query.

    Args:
        shape: cells of the grid per axis, 1 to 3 axes, slow to fast.
        prefix: number of leading tokens without a position.
        rows: store a row of all keys for each query instead of a strip.
    """

    shape: tuple[int, ...]
    prefix: int
    rows: bool

    @property
    def patches(self) -> int:
        """Number of tokens with a position."""
        return math.prod(self.shape)

    @property
    def tokens(self) -> int:
        """Number of all tokens, n."""
        return self.prefix + self.patches

    @property
    def pitch(self) -> int:
        """Common divisor of the starts of all runs."""
        return _round_up(self.tokens, WORD) if self.rows else math.prod(self.shape[1:])

    @property
    def selected(self) -> int:
        """Number of keys (the prefix) whose bias is one of two numbers per head instead of part of the runs."""
        return 0 if self.rows else self.prefix

    @property
    def sharers(self) -> int:
        """Largest number of queries that share an element of the runs."""
        # queries of one column share an element of the strip, prefix queries the constant run
        return 1 if self.rows else max(self.shape[0], self.prefix)

    @property
    def length(self) -> int:
        """Elements per head."""
        if self.rows:
            return self.tokens * self.pitch
        return self.prefix + self._strip + (self.patches if self.prefix else 0)

    @property
    def _strip(self) -> int:
        return self.pitch * (2 * self.shape[0] - 1) * self.pitch

    @property
    def copies(self) -> int:
        """Number of shifted copies after which every run has an aligned start."""
        return WORD // gcd_8(self.pitch)

    @property
    def copy_length(self) -> int:
        """Elements per head and copy, a multiple of 16, which Triton requires of the head stride for wide loads."""
        return _round_up(self.length + TAIL + WORD, 2 * WORD)

    @property
    def _address_dtype(self) -> torch.dtype:
        """The dtype of addresses; grids of more than 500 x 500 cells may need 64 bits."""
        if isinstance(self.copy_length, torch.SymInt):
            return torch.int32
        return torch.int32 if self.copies * self.copy_length < 1 << 31 else torch.int64

    def base(self, device: torch.device | str | None = None) -> Tensor:
        """Return the start of each query's run, at token 0, (n,) int32, or int64 if that overflows."""
        token = torch.arange(self.tokens, device=device)
        if self.rows:
            return (token * self.pitch).to(self._address_dtype)
        cell = (token - self.prefix).clamp(min=0)
        y, x = cell // self.pitch, cell % self.pitch
        # the strip of column x, at the first row of keys
        start = (x * (2 * self.shape[0] - 1) + self.shape[0] - 1 - y) * self.pitch
        return torch.where(token < self.prefix, self._strip, start).to(self._address_dtype)

    @property
    def lead(self) -> int:
        """Padding in front of the runs that aligns the first key with a position, for `pack`."""
        return -self.selected % gcd_8(self.pitch)

    def patches_first(self, device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
        """Return addresses and starts of runs for kernels that order patches first and prefix tokens last.

        Both are (n,), with queries in that order, and refer to the bias of the first patch: starts in the runs,
        addresses in the shifted copies of `pack` with `lead`, multiples of 8. In the row layout the prefix is part of
        the rows, so nothing changes.
        """
        first = self.base(device) + self.selected
        lead = first + self.lead
        shift = (-lead) % WORD
        address = lead + shift + shift // gcd_8(self.pitch) * self.copy_length
        return torch.roll(address, -self.selected), torch.roll(first, -self.selected)


def layout_of(shape: tuple[int, ...], prefix: int) -> Layout:
    """Return the layout of a grid that needs less memory: the strip or one row per query."""
    strip, rows = Layout(shape, prefix, False), Layout(shape, prefix, True)
    # an exported program must work for all sizes
    if any(isinstance(n, torch.SymInt) for n in shape):
        return strip
    return strip if strip.copies * strip.copy_length < rows.copy_length else rows


def _round_up(count: int, multiple: int) -> int:
    return (count + multiple - 1) // multiple * multiple


def gcd_8(pitch: int) -> int:
    """Return the greatest common divisor of `pitch` and 8, or 1 for a symbolic pitch."""
    if isinstance(pitch, torch.SymInt):
        return 1
    return next(divisor for divisor in (8, 4, 2, 1) if pitch % divisor == 0)
