"""Tables with a vector for every offset: queries meet the vectors of their own window, which are shifted into place.

With a vector for each of 73 x 73 offsets of 37 x 37 patches (`shaw`), a query needs 37 x 37 of them. Queries of a few
rows of the grid share most: one product with those that any of them needs, and one copy that shifts the row of each
query by its place. With 6 heads attention takes 2.1 times the time of SDPA without bias; products with the whole
table, looked up, took 9.6 times.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vispe.attention.backends.content_cpu.lookup import on_grid
from vispe.attention.bias.abstract_bias import Request
from vispe.attention.bias.content import ContextBias
from vispe.grid import Grid

TOGETHER = 76  # queries of one product
ALONG = 20  # of them in one row of the grid
EDGES = 64  # buckets of prefix tokens


class Offsets(NamedTuple):
    """Which rows of a table a grid reads.

    Attributes:
        patches: of every offset, key minus query, (2 h - 1, 2 w - 1) int64.
        edges: those of pairs with prefix tokens (e,) int64.
        rows: which of `edges` prefix queries read (p, n).
        columns: which of `edges` all queries read for prefix keys (n, p).
        grid: the grid.
    """

    patches: Tensor
    edges: Tensor
    rows: Tensor
    columns: Tensor
    grid: Grid


class Windows:
    """A table with a vector for every offset.

    Args:
        term: the table.
        offsets: which of its rows the grid reads.
        dtype: of the bias that `rows` returns.
    """

    skip = 0

    def __init__(self, term: ContextBias, offsets: Offsets, dtype: torch.dtype) -> None:
        self.term, self.offsets, self.dtype = term, offsets, dtype
        wide = torch.promote_types(term.weights.dtype, torch.promote_types(dtype, torch.float32))
        self.weights = term.weights.to(wide)
        # a few queries of a row of the grid at a time need fewer offsets than the whole row
        self.lines, width = (1, *offsets.grid.shape)[-2:]
        pieces = -(-width // ALONG)
        ends = [width * (j + 1) // pieces for j in range(pieces)]
        self.pieces = [
            (begin, end, self.weights[:, offsets.patches[:, width - end : 2 * width - 1 - begin].flatten()])
            for begin, end in zip([0, *ends], ends, strict=False)
        ]

    def read(self, ask: Request, sample: int) -> tuple[Tensor, Tensor]:
        """Return what reads the table in a sample, (h, n, d_h), and what it reads for prefix tokens, (h, n, e)."""
        x = self.term.asked(ask, slice(sample, sample + 1))[0].to(self.weights.dtype)
        x = x * ask.scale if self.term.scaled and ask.scale is not None else x
        return x, x @ self.weights[:, self.offsets.edges].transpose(-1, -2)

    def rows(self, read: tuple[Tensor, Tensor], heads: slice, block: slice) -> Tensor:
        """Return the bias of some heads and queries, (h, rows, m); blocks consist of whole rows of the grid."""
        x, edge = read[0][heads, block], read[1][heads, block]
        grid, (h, n, width) = self.offsets.grid, x.shape
        prefix = max(0, grid.prefix - block.start)  # queries of this block
        whole = x.new_empty(h, n, grid.tokens, dtype=self.dtype)
        whole[..., : grid.prefix] = edge.gather(-1, self.offsets.columns[block].expand(h, -1, -1))
        whole[:, :prefix] = edge[:, :prefix].gather(-1, self.offsets.rows[:prefix].expand(h, -1, -1))
        lines, length = self.lines, grid.shape[-1]
        patches = whole[:, prefix:, grid.prefix :].view(h, -1, length, lines, length)
        first = (block.start + prefix - grid.prefix) // length
        self._shift(x[:, prefix:].view(h, -1, length, width), patches, heads, first)
        return whole

    def _shift(self, x: Tensor, patches: Tensor, heads: slice, first: int) -> None:
        """Write the bias (h, y, x, h_k, w_k) of rows of the grid from `first` on, which read as `x` (h, y, x, d_h)."""
        lines, length = patches.shape[-2:]
        for begin, end, table in self.pieces:
            weights, along = table if len(table) == 1 else table[heads], end - begin
            wide, together = length - 1 + along, max(1, TOGETHER // along)
            for y in range(0, x.shape[1], together):
                some = x[:, y : y + together, begin:end]
                many = some.shape[1]
                # offsets of all keys to these rows of the grid; the last row has those that come first
                low = (lines - first - y - many) * wide
                near = weights[:, low : low + (lines + many - 1) * wide]
                logits = some.flatten(1, 2) @ near.transpose(-1, -2)
                # a row of the grid further down begins a row of offsets earlier, a query further right one offset
                every = logits.shape[-1]
                patches[:, y : y + many, begin:end] = logits.as_strided(
                    (len(x), many, along, lines, length),
                    (logits.stride(0), along * every - wide, every - 1, wide, 1),
                    (many - 1) * wide + along - 1,
                )


def windows_of(term: ContextBias) -> Offsets | None:
    """Return the offsets of a large table on one full grid of 1 or 2 axes, or None where looking up is quicker."""
    found = on_grid(term)
    if found is None or term.pos is None or len(found[1].shape) > 2:
        return None
    table, grid = found
    # a small table is read as a whole
    if term.weights.shape[1] < grid.tokens:
        return None
    return term.pos.remember(("windows", term.known), lambda: _find(table, grid))


def _find(table: Tensor, grid: Grid) -> Offsets | None:
    prefix, (lines, width) = grid.prefix, (1, *grid.shape)[-2:]
    pairs = table[prefix:, prefix:].reshape(lines, width, lines, width)
    # the last query has the offsets to keys before it, the first one those to keys behind it
    down, along = torch.arange(2 * lines - 1)[:, None], torch.arange(2 * width - 1)
    y, x = down.clamp(max=lines - 1), along.clamp(max=width - 1)
    patches = pairs[lines - 1 - y, width - 1 - x, down - y, along - x]
    edges: Tensor = torch.cat([table[:prefix].flatten(), table[:, :prefix].flatten()]).msort()
    edges = edges[edges != edges.roll(1)] if len(edges) and edges[0] != edges[-1] else edges[:1]
    shifted = patches.unfold(0, lines, 1).unfold(1, width, 1)
    if len(edges) > EDGES or not torch.equal(shifted, pairs.flip(0, 1)):
        return None
    rows, columns = (torch.searchsorted(edges, t.contiguous()) for t in (table[:prefix], table[:, :prefix]))
    return Offsets(patches, edges, rows, columns, grid)
