"""Content-dependent biases computed for a block of heads and query rows at a time, see `blocks.bias`.

Each block gathers from the products of its queries, or of all keys, with the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from vispe.attention.backends.blocks.bias import BiasBlock, BlockBias, Memory, StripBias
from vispe.attention.bias.content import ContextBias, OffsetBuckets
from vispe.attention.bias.strip.layout import Layout
from vispe.attention.bias.strip.runs import build
from vispe.attention.call import Call

# bytes of the products of all queries with a table; those of larger tables are recomputed
MAX_PRODUCTS = 1 << 26


def block_content(term: ContextBias, call: Call, layout: Layout) -> BlockBias:
    """Return the bias of a content-dependent table for blocks of `layout`."""
    (b, h, n), request = call.q.shape[:3], call.request()
    # weights (h or 1, buckets, d): one vector per bucket
    weights, buckets = term.weights, _rows_of(term, layout)
    # keys are read by every block, so their products are computed once
    if term.dot == "key" or 4 * b * h * n * weights.shape[1] <= MAX_PRODUCTS:
        products = term.products(request).expand(b, h, -1, -1)
        return ProductBias((products,), buckets, term.dot)
    vectors = term.vectors(request)
    dtype = torch.promote_types(torch.promote_types(vectors.dtype, weights.dtype), torch.float32)
    vectors = vectors.to(dtype).expand(b, h, -1, -1)
    vectors = vectors * call.factor if term.scaled else vectors
    return VectorBias((vectors, weights.to(dtype)), buckets, term.dot)


class PairBuckets:
    """Buckets of the pairs of a block, of all samples or of each.

    Args:
        pairs: bucket of each pair, (n, n) or (b or 1, n, n) int64.
    """

    def __init__(self, pairs: Tensor) -> None:
        self.pairs = pairs[None] if pairs.ndim == 2 else pairs

    def rows(self, block: BiasBlock, sample: int) -> Tensor:
        """Return the buckets of the rows of a block, (rows, n)."""
        return self.pairs[sample if len(self.pairs) > 1 else 0, block.tokens]

    def dense(self) -> Tensor:
        """Return the buckets of all pairs, (b or 1, n, n)."""
        return self.pairs


class _StripBuckets:
    """Buckets of the pairs of a block, read from a strip like the bias of a table.

    Args:
        buckets: bucket of every offset.
        layout: of the strip.
    """

    def __init__(self, buckets: OffsetBuckets, layout: Layout) -> None:
        edge = buckets.table.new_tensor([buckets.prefix])
        self.strip, self.pairs = StripBias(build(buckets.table[None], edge, layout), layout), buckets.pairs

    def rows(self, block: BiasBlock, sample: int) -> Tensor:
        """Return the buckets of the rows of a block, (rows, n)."""
        return self.strip.mask(block._replace(heads=slice(0, 1)), sample)[0]

    def dense(self) -> Tensor:
        """Return the buckets of all pairs, (1, n, n)."""
        return self.pairs()


def _rows_of(term: ContextBias, layout: Layout) -> PairBuckets | _StripBuckets:
    by_offset, pos = term.pair_buckets, term.pos
    if isinstance(by_offset, Tensor) or pos is None or pos.grid is None:
        return PairBuckets(term.buckets)
    # blocks of another layout do not consist of grid rows
    if (pos.grid.shape, pos.grid.prefix) != (layout.shape, layout.prefix):
        return PairBuckets(term.buckets)
    return _StripBuckets(by_offset, layout)


class ProductBias:
    """A content-dependent table, given as the products of queries or keys with all buckets.

    Args:
        tensors: products (b, h, n, buckets).
        buckets: the buckets of pairs.
        dot: 'query' or 'key', the side of the products.
    """

    per_sample = True

    def __init__(self, tensors: Sequence[Tensor], buckets: PairBuckets | _StripBuckets, dot: str) -> None:
        self.tensors, self.buckets, self.dot = tuple(tensors), buckets, dot
        self.memory = Memory()

    def replace(self, tensors: Sequence[Tensor]) -> Self:
        """Return the same bias with other tensors."""
        return type(self)(tensors, self.buckets, self.dot)

    def mask(self, block: BiasBlock, sample: int) -> Tensor:
        """Return the bias of a block, (h, rows, n)."""
        products, buckets = self.tensors[0][sample, block.heads], self.buckets.rows(block, sample)
        if self.dot == "query":
            return self._gather(products[:, block.tokens], buckets)
        # along the axis of buckets, so that the result has contiguous rows
        out = self.memory.take((len(products), *buckets.shape), products)
        return torch.gather(products.transpose(-1, -2), 1, buckets.expand(len(products), -1, -1), out=out)

    def add(self, source: BlockBias, block: BiasBlock, sample: int, scores: Tensor) -> None:
        """Add the gradient of the products, given that of the mask of a block (h, rows, n)."""
        del source
        total, buckets = self.tensors[0][sample, block.heads], self.buckets.rows(block, sample)
        if self.dot == "query":
            total[:, block.tokens].scatter_add_(-1, buckets.expand_as(scores), scores)
        else:
            total.transpose(-1, -2).scatter_add_(1, buckets.expand_as(scores), scores)

    def dense(self) -> Tensor:
        """Return the complete bias (b, h, n, n), differentiable."""
        products, buckets = self.tensors[0], self.buckets.dense()[:, None]
        if self.dot == "query":
            return products.gather(-1, buckets.expand(*products.shape[:2], -1, -1))
        # (b or 1, 1, keys, queries): products of keys are gathered along their rows
        index = buckets.transpose(-1, -2).expand(*products.shape[:2], -1, -1)
        return products.gather(-1, index).transpose(-1, -2)

    def _gather(self, products: Tensor, buckets: Tensor) -> Tensor:
        """Return the entries (h, rows, n) of products (h, rows, buckets)."""
        out = self.memory.take((len(products), *buckets.shape), products)
        return torch.gather(products, -1, buckets.expand(len(products), -1, -1), out=out)


class VectorBias(ProductBias):
    """A content-dependent table of the queries whose products are computed for one block at a time.

    Args:
        tensors: vectors (b, h, n, d), and weights (h or 1, buckets, d).
        buckets: the buckets of pairs.
        dot: 'query'.
    """

    def mask(self, block: BiasBlock, sample: int) -> Tensor:
        """Return the bias of a block, (h, rows, n)."""
        vectors, weights = self.tensors
        x = vectors[sample, block.heads, block.tokens]
        products = x @ _pick(weights, block.heads).transpose(-1, -2)
        return self._gather(products, self.buckets.rows(block, sample))

    def add(self, source: BlockBias, block: BiasBlock, sample: int, scores: Tensor) -> None:
        """Add the gradients of vectors and weights, given that of the mask of a block (h, rows, n)."""
        vectors, weights = source.tensors
        x = vectors[sample, block.heads, block.tokens]
        # gradient of the products (h, rows, buckets): the sum over the pairs of a bucket
        grad = scores.new_zeros(*scores.shape[:2], weights.shape[1])
        grad.scatter_add_(-1, self.buckets.rows(block, sample).expand_as(scores), scores)
        self.tensors[0][sample, block.heads, block.tokens] += grad @ _pick(weights, block.heads)
        _add_heads(self.tensors[1], block.heads, grad.transpose(-1, -2) @ x)

    def dense(self) -> Tensor:
        """Return the complete bias (b, h, n, n), differentiable."""
        vectors, weights = self.tensors
        return ProductBias((vectors @ weights.transpose(-1, -2),), self.buckets, self.dot).dense()


def _pick(x: Tensor, heads: slice) -> Tensor:
    """Return the heads of a tensor with h or 1 heads on axis 0."""
    return x[heads] if len(x) > 1 else x


def _add_heads(total: Tensor, heads: slice, part: Tensor) -> None:
    """Add `part` (h, ...) to some heads of `total`, or its sum to the only head."""
    if len(total) == 1:
        total += part.sum(0, keepdim=True)
    else:
        total[heads] += part
