"""Content-dependent biases in evaluation, read for one sample at a time, and lookup of single entries."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vispe.attention.backends.blocks.bias import BiasBlock
from vispe.attention.backends.blocks.content import PairBuckets, ProductBias
from vispe.attention.bias.content import ContextBias
from vispe.attention.bias.dense_request import DenseRequest
from vispe.grid import Grid


class SampleBias:
    """A `RowBias` of a content-dependent table. Its products are computed when a block of another sample is read.

    Args:
        term: the table.
        request: queries and keys of all samples, and the scale.
        dtype: dtype of the masks.

    Attributes:
        skip: number of leading padding keys in the result of `padded`, whose bias is -inf.
    """

    skip = 0

    def __init__(self, term: ContextBias, request: DenseRequest, dtype: torch.dtype) -> None:
        self.term, self.request, self.dtype = term, request, dtype
        self.sample, self.products = -1, None

    def mask(self, block: BiasBlock, sample: int) -> Tensor:
        """Return the bias of a block, (h, rows, m); its memory may be overwritten by the next call."""
        return self.padded(block, sample)[..., self.skip :]

    def padded(self, block: BiasBlock, sample: int) -> Tensor:
        """Return the bias of a block, (h, rows, skip + m), likewise."""
        if sample != self.sample:
            q, k = (None if x is None else x[sample : sample + 1] for x in (self.request.q, self.request.k))
            self.products, self.sample = self._read(self.request._replace(q=q, k=k), sample), sample
        return self._rows(self.products, block)

    def _read(self, request: DenseRequest, sample: int) -> Any:
        """Return the products of the tokens of a sample with the table."""
        raise NotImplementedError

    def _rows(self, products: Any, block: BiasBlock) -> Tensor:
        """Return the bias of a block (h, rows, skip + m), given the products of its sample."""
        raise NotImplementedError


class Lookup(SampleBias):
    """Lookup of single entries in a table with arbitrary buckets; args as of `SampleBias`."""

    def _read(self, request: DenseRequest, sample: int) -> ProductBias:
        buckets = self.term.buckets
        if buckets.ndim == 3:
            buckets = buckets[sample if len(buckets) > 1 else 0]
        products = self.term.products(request, slice(sample, sample + 1)).to(self.dtype)
        return ProductBias((products,), PairBuckets(buckets), self.term.dot)

    def _rows(self, products: ProductBias, block: BiasBlock) -> Tensor:
        return products.mask(block, 0)


def on_grid(term: ContextBias) -> tuple[Tensor, Grid] | None:
    """Return buckets (n, n) and grid of a table with dot='query' and a cache key on one full grid, or None."""
    pos, buckets = term.pos, term.buckets
    if term.dot != "query" or term.cache_key is None or pos is None or pos.memo is None or not pos.static:
        return None
    # other tables have no cache key, or a pattern per sample
    same = buckets.ndim == 2 or len(buckets) == 1
    if not same or pos.grid is None or buckets.shape[-2:] != (pos.grid.tokens,) * 2:
        return None
    return buckets if buckets.ndim == 2 else buckets[0], pos.grid
