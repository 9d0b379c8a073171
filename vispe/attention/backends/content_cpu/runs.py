"""Buckets that a row of the grid shares: numbers that tokens read are spread a run of keys at a time.

With buckets of rows and columns, as those of `irpe(method=product)`, far rows of the grid read the same buckets. A
query then has few different runs of keys, and copying runs of one row of the grid is quicker than looking every score
up: with 6 heads of 37 x 37 patches attention takes 51 instead of 60 ms in bfloat16, 51 instead of 54 in float32 (one
thread).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vispe.attention.backends.content_cpu.lookup import on_grid
from vispe.attention.bias.abstract_bias import Request
from vispe.attention.bias.content import ContextBias
from vispe.attention.precision import narrowed
from vispe.grid import Grid

SHORTEST = 16  # keys in a run, below which copying is slower than looking up
FEWEST = 3  # runs for each different one


class Pattern(NamedTuple):
    """Which runs a table has.

    Attributes:
        buckets: of the different runs of each query, (n, runs * length) int64.
        order: which of the different runs of all queries stand for its keys one after the other, (n, rows) int64.
        length: keys in a run.
        skip: keys before the first one, which fill the run of prefix tokens: the bucket behind all others.
    """

    buckets: Tensor
    order: Tensor
    length: int
    skip: int

    def of(self, queries: slice) -> Pattern:
        """Return the runs of some of the queries."""
        if len(self.order[queries]) == len(self.order):
            return self
        many = self.buckets.shape[1] // self.length
        order = self.order[queries] - queries.start * many
        return self._replace(buckets=self.buckets[queries], order=order)


class Runs:
    """A table whose bias is copied in runs of keys.

    Args:
        term: the table.
        pattern: its runs.
        dtype: of the bias that `rows` returns.
    """

    def __init__(self, term: ContextBias, pattern: Pattern, dtype: torch.dtype) -> None:
        self.term, self.pattern, self.dtype, self.skip = term, pattern, dtype, pattern.skip
        self.prepared: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}
        self.room = torch.empty(0, dtype=dtype)

    def read(self, ask: Request, sample: int) -> Tensor:
        """Return what each query of a sample reads in each bucket, then -inf, (h, n, buckets + 1)."""
        read = narrowed(self.term.read(ask, slice(sample, sample + 1))[0], self.dtype)
        return F.pad(read, (0, 1), value=float("-inf"))

    def rows(self, read: Tensor, heads: slice, block: slice) -> Tensor:
        """Return the bias of some heads and queries, (h, rows, skip + m)."""
        own = read[heads, block]
        prepared = self.prepared.get((block.start, len(own)))
        if prepared is None:
            prepared = self.prepared[block.start, len(own)] = self._prepare(len(own), block)
        buckets, order, whole = prepared
        length = self.pattern.length
        different, runs = own.gather(-1, buckets).view(len(own), -1, length), whole.view(len(own), -1, length)
        # head by head: along the first axis a run is copied as one piece
        for of_head, made in zip(different, runs, strict=True):
            torch.index_select(of_head, 0, order, out=made)
        return whole

    def _prepare(self, heads: int, block: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Return the buckets of the different runs, the order of runs, and the memory for a block."""
        part = self.pattern.of(block)
        n, keys = len(part.order), part.order.shape[1] * part.length
        if len(self.room) < heads * n * keys:
            # all blocks write the same: memory that was used before is quicker
            self.room = self.room.new_empty(heads * n * keys)
        whole = self.room[: heads * n * keys].view(heads, n, keys)
        return part.buckets.expand(heads, -1, -1), part.order.flatten(), whole


def runs_of(term: ContextBias) -> Pattern | None:
    """Return the runs of a table that queries read on one full grid, or None where looking up is quicker."""
    found = on_grid(term)
    if found is None or term.pos is None or found[1].shape[-1] < SHORTEST:
        return None
    (table, grid), none = found, term.weights.shape[1]
    return term.pos.remember(("runs", term.known, none), lambda: _find(table, none, grid))


def _find(table: Tensor, none: int, grid: Grid) -> Pattern | None:
    tokens, length, skip = len(table), grid.shape[-1], -grid.prefix % grid.shape[-1]
    # prefix tokens end runs of their own, so that no run holds the end of one row of the grid and the beginning of
    # the next one
    rows = F.pad(table, (skip, 0), value=none).view(tokens, -1, length)
    # equal runs have equal sums with any weights; that others differ is checked at the end
    weights = torch.randint(2**40, (length,), generator=torch.Generator().manual_seed(0))
    sums, order = ((rows + 1) * weights).sum(-1).sort(-1)
    new = F.pad(sums[:, 1:] != sums[:, :-1], (1, 0))
    rank = torch.empty_like(order).scatter_(1, order, new.cumsum(1))
    many = int(rank.max()) + 1
    if many * FEWEST > rows.shape[1]:
        return None
    # of equal ones, any
    one = torch.zeros_like(rank[:, :many]).scatter_(1, rank, torch.arange(rows.shape[1]).expand_as(rank))
    different = rows.gather(1, one[..., None].expand(-1, -1, length))
    if not torch.equal(different.gather(1, rank[..., None].expand(-1, -1, length)), rows):
        return None
    return Pattern(different.flatten(1), rank + many * torch.arange(tokens)[:, None], length, skip)
