"""Rows of a content-dependent bias by lookup of single entries, for any buckets."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from vispe.attention.bias.abstract_bias import DenseRequest
from vispe.attention.bias.content import ContextBias
from vispe.grid import Grid


class Method(Protocol):
    """A method to compute rows of the bias of a table.

    Attributes:
        skip: number of leading padding keys in the result of `rows`, whose bias is -inf.
    """

    skip: int

    def read(self, request: DenseRequest, sample: int) -> Any:
        """Return the products of the tokens of a sample with the table."""

    def rows(self, read: Any, heads: slice, block: slice) -> Tensor:
        """Return the bias of some heads and queries, (h, rows, skip + m), which the caller may overwrite."""
        ...


class Lookup:
    """Lookup of single entries in a table with arbitrary buckets.

    Args:
        term: the table.
        dtype: dtype of the bias that `rows` returns.
    """

    skip = 0

    def __init__(self, term: ContextBias, dtype: torch.dtype) -> None:
        self.term, self.dtype = term, dtype

    def read(self, request: DenseRequest, sample: int) -> tuple[Tensor, Tensor]:
        """Return the products of a sample's tokens with all buckets (h, n or m, buckets), and the buckets (n, m)."""
        buckets = self.term.buckets
        if buckets.ndim == 3:
            buckets = buckets[sample if len(buckets) > 1 else 0]
        return self.term.products(request, slice(sample, sample + 1))[0].to(self.dtype), buckets

    def rows(self, read: tuple[Tensor, Tensor], heads: slice, block: slice) -> Tensor:
        """Return the bias of some heads and queries, (h, rows, m)."""
        products, buckets = read[0][heads], read[1][block]
        # buckets select from the products of the queries, or of the keys (transposed)
        if self.term.dot == "query":
            return products[:, block].gather(-1, buckets.expand(len(products), -1, -1))
        return products.gather(-1, buckets.t().expand(len(products), -1, -1)).transpose(-1, -2)


def on_grid(term: ContextBias) -> tuple[Tensor, Grid] | None:
    """Return buckets (n, n) and grid of a table with dot='query' and a cache key on one full grid, or None."""
    pos, buckets = term.pos, term.buckets
    if term.dot != "query" or term.known is None or pos is None or pos.memo is None or not pos.static:
        return None
    # other tables have no cache key, or a pattern per sample
    same = buckets.ndim == 2 or len(buckets) == 1
    if not same or pos.grid is None or buckets.shape[-2:] != (pos.grid.tokens,) * 2:
        return None
    return buckets if buckets.ndim == 2 else buckets[0], pos.grid
