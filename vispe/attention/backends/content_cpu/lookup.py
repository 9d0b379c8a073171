"""Rows of a bias whose numbers are looked up one by one."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from vispe.attention.bias.abstract_bias import Request
from vispe.attention.bias.content import ContextBias
from vispe.attention.precision import narrowed
from vispe.grid import Grid


class Way(Protocol):
    """How rows of a bias are made from a table.

    Attributes:
        skip: keys before the first one in what `rows` returns, whose bias is -inf.
    """

    skip: int

    def read(self, ask: Request, sample: int) -> Any:
        """Return what the tokens of a sample read in the table."""

    def rows(self, read: Any, heads: slice, block: slice) -> Tensor:
        """Return the bias of some heads and queries, (h, rows, skip + m), which may be written over."""
        ...


class Lookup:
    """A table that is read as a whole, with any buckets.

    Args:
        term: the table.
        dtype: of the bias that `rows` returns.
    """

    skip = 0

    def __init__(self, term: ContextBias, dtype: torch.dtype) -> None:
        self.term, self.dtype = term, dtype

    def read(self, ask: Request, sample: int) -> tuple[Tensor, Tensor]:
        """Return what each token of a sample reads in each bucket (h, n or m, buckets), and the buckets (n, m)."""
        buckets = self.term.buckets
        if buckets.ndim == 3:
            buckets = buckets[sample if len(buckets) > 1 else 0]
        return narrowed(self.term.read(ask, slice(sample, sample + 1))[0], self.dtype), buckets

    def rows(self, read: tuple[Tensor, Tensor], heads: slice, block: slice) -> Tensor:
        """Return the bias of some heads and queries, (h, rows, m)."""
        own, buckets = read[0][heads], read[1][block]
        if self.term.dot == "query":
            return own[:, block].gather(-1, buckets.expand(len(own), -1, -1))
        return own.gather(-1, buckets.t().expand(len(own), -1, -1)).transpose(-1, -2)


def on_grid(term: ContextBias) -> tuple[Tensor, Grid] | None:
    """Return the buckets (n, n) and the grid of a named table that queries read on one full grid, or None."""
    pos, buckets = term.pos, term.buckets
    if term.dot != "query" or term.known is None or pos is None or pos.memo is None or not pos.static:
        return None
    same = buckets.ndim == 2 or len(buckets) == 1
    if not same or pos.grid is None or buckets.shape[-2:] != (pos.grid.tokens,) * 2:
        return None
    return buckets if buckets.ndim == 2 else buckets[0], pos.grid
