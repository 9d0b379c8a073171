"""Rows of a content-dependent bias by shifted windows, for tables with one vector per offset.

With one vector for each of 73 x 73 offsets of 37 x 37 patches (`shaw`), a query needs 37 x 37 of them. Queries of a few
grid rows share most of these: one matrix product with all that any of them needs, and one strided copy that shifts the
row of each query by its position. With 6 heads attention takes 2.1 times as long as SDPA without bias; products with
the whole table and lookup take 9.6 times.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vispe.attention.backends.blocks.bias import BiasBlock
from vispe.attention.backends.content_cpu.lookup import SampleBias, on_grid
from vispe.attention.bias.content import ContextBias
from vispe.attention.bias.dense_request import DenseRequest
from vispe.grid import Grid

QUERIES_PER_PRODUCT = 76  # queries per matrix product
QUERIES_PER_LINE = 20  # queries per matrix product in one grid row
MAX_PREFIX_BUCKETS = 64  # maximum number of buckets of prefix tokens


class Offsets(NamedTuple):
    """The buckets of a table that a grid uses.

    Attributes:
        patches: bucket of every offset, key minus query, (2 h - 1, 2 w - 1) int64.
        edges: buckets of pairs with prefix tokens (e,) int64.
        rows: indices into `edges` for prefix queries (p, n).
        columns: indices into `edges` for prefix keys (n, p).
        grid: the grid.
    """

    patches: Tensor
    edges: Tensor
    rows: Tensor
    columns: Tensor
    grid: Grid


class WindowTable(SampleBias):
    """A table with one vector per offset. Blocks consist of whole grid rows.

    Args:
        term: the table.
        request: as of `SampleBias`.
        dtype: dtype of the masks.
        offsets: the buckets that the grid uses.
    """

    def __init__(
        self, term: ContextBias, request: DenseRequest, dtype: torch.dtype, offsets: Offsets
    ) -> None:
        super().__init__(term, request, dtype)
        self.offsets = offsets
        wide = torch.promote_types(term.weights.dtype, torch.promote_types(dtype, torch.float32))
        self.weights = term.weights.to(wide)
        # part of a grid row needs fewer offsets than the whole row
        self.lines, width = (1, *offsets.grid.shape)[-2:]
        pieces = -(-width // QUERIES_PER_LINE)
        bounds = [width * (j + 1) // pieces for j in range(pieces)]
        self.pieces = [
            (begin, end, self.weights[:, offsets.patches[:, width - end : 2 * width - 1 - begin].flatten()])
            for begin, end in zip([0, *bounds], bounds, strict=False)
        ]

    def _read(self, request: DenseRequest, sample: int) -> tuple[Tensor, Tensor]:
        # vectors that read the table (h, n, d_h), and their products with `edges` (h, n, e)
        x = self.term.vectors(request, slice(sample, sample + 1))[0].to(self.weights.dtype)
        x = x * request.scale if self.term.scaled and request.scale is not None else x
        return x, x @ self.weights[:, self.offsets.edges].transpose(-1, -2)

    def _rows(self, products: tuple[Tensor, Tensor], block: BiasBlock) -> Tensor:
        heads, tokens = block.heads, block.tokens
        x, edge = (read[heads, tokens] for read in products)
        grid, (h, n, width) = self.offsets.grid, x.shape
        prefix = max(0, grid.prefix - tokens.start)  # queries of this block
        bias = x.new_empty(h, n, grid.tokens, dtype=self.dtype)
        bias[..., : grid.prefix] = edge.gather(-1, self.offsets.columns[tokens].expand(h, -1, -1))
        bias[:, :prefix] = edge[:, :prefix].gather(-1, self.offsets.rows[:prefix].expand(h, -1, -1))
        lines, length = self.lines, grid.shape[-1]
        patches = bias[:, prefix:, grid.prefix :].view(h, -1, length, lines, length)
        self._shift(x[:, prefix:].view(h, -1, length, width), patches, heads, block.first)
        return bias

    def _shift(self, x: Tensor, patches: Tensor, heads: slice, first: int) -> None:
        """Write the bias of grid rows from `first` on, queries `x` (h, y, x, d_h), to `patches` (h, y, x, h_k, w_k)."""
        lines, length = patches.shape[-2:]
        for begin, end, table in self.pieces:
            weights, along = table if len(table) == 1 else table[heads], end - begin
            wide, together = length - 1 + along, max(1, QUERIES_PER_PRODUCT // along)
            for y in range(0, x.shape[1], together):
                queries = x[:, y : y + together, begin:end]
                count = queries.shape[1]
                # offsets of all keys to these grid rows; the last grid row has the first of them
                low = (lines - first - y - count) * wide
                table_part = weights[:, low : low + (lines + count - 1) * wide]
                logits = queries.flatten(1, 2) @ table_part.transpose(-1, -2)
                # strides: the next grid row begins one row of offsets earlier, the next query in a row one offset
                width_all = logits.shape[-1]
                patches[:, y : y + count, begin:end] = logits.as_strided(
                    (len(x), count, along, lines, length),
                    (logits.stride(0), along * width_all - wide, width_all - 1, wide, 1),
                    (count - 1) * wide + along - 1,
                )


def windows_of(term: ContextBias) -> Offsets | None:
    """Return the offsets of a large table on one full grid of 1 or 2 axes, or None if lookup is faster."""
    table_and_grid = on_grid(term)
    if table_and_grid is None or term.pos is None or len(table_and_grid[1].shape) > 2:
        return None
    table, grid = table_and_grid
    # for a small table, products with all of its buckets are faster
    if term.weights.shape[1] < grid.tokens:
        return None
    return term.pos.remember(("windows", term.cache_key), lambda: _find(table, grid))


def _find(table: Tensor, grid: Grid) -> Offsets | None:
    prefix, (lines, width) = grid.prefix, (1, *grid.shape)[-2:]
    pairs = table[prefix:, prefix:].reshape(lines, width, lines, width)
    # the last query has all offsets to earlier keys, the first query all offsets to later keys
    down, along = torch.arange(2 * lines - 1)[:, None], torch.arange(2 * width - 1)
    y, x = down.clamp(max=lines - 1), along.clamp(max=width - 1)
    patches = pairs[lines - 1 - y, width - 1 - x, down - y, along - x]
    edges: Tensor = torch.cat([table[:prefix].flatten(), table[:, :prefix].flatten()]).msort()
    edges = edges[edges != edges.roll(1)] if len(edges) and edges[0] != edges[-1] else edges[:1]
    shifted = patches.unfold(0, lines, 1).unfold(1, width, 1)
    if len(edges) > MAX_PREFIX_BUCKETS or not torch.equal(shifted, pairs.flip(0, 1)):
        return None
    rows, columns = (torch.searchsorted(edges, t.contiguous()) for t in (table[:prefix], table[:, :prefix]))
    return Offsets(patches, edges, rows, columns, grid)
