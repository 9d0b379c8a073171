"""Biases computed for a block of heads and query rows at a time, and their gradients, for `blocked`.

A `BlockBias` returns the bias of one block, and adds the gradient of one block to the gradients of its tensors. Table
biases read windows of their strip (`vispe.attention.bias.strip`), where the queries of one grid row share one window
per column; content-dependent tables gather from the products of the block's queries (or of all keys) with the table.
Nothing of size n x n is stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor

from vispe.attention.bias.strip.layout import Layout


class BiasBlock(NamedTuple):
    """Some heads and the queries of whole grid rows `first` to `last`; prefix queries belong to the first row."""

    heads: slice
    first: int
    last: int
    tokens: slice


def blocks(heads: int, layout: Layout, limit: int) -> Iterator[BiasBlock]:
    """Yield blocks of at most `limit` scores, at least one grid row each."""
    n, heads_per_block = layout.tokens, max(1, min(heads, limit // layout.tokens**2))
    rows = layout.shape[0] if n * n <= limit else max(1, limit // n // layout.pitch)
    for head in range(0, heads, heads_per_block):
        for first in range(0, layout.shape[0], rows):
            last = min(first + rows, layout.shape[0])
            start = layout.prefix + first * layout.pitch if first else 0
            tokens = slice(start, layout.prefix + last * layout.pitch)
            yield BiasBlock(slice(head, min(head + heads_per_block, heads)), first, last, tokens)


class RowBias(Protocol):
    """A bias that is computed block by block."""

    def mask(self, block: BiasBlock, sample: int) -> Tensor:
        """Return the bias of a block, (h or 1, rows, n); its memory may be overwritten by the next call."""
        ...


class BlockBias(RowBias, Protocol):
    """A bias that is computed block by block from a few tensors, with gradients.

    Attributes:
        tensors: the tensors that the bias is differentiated with respect to.
        per_sample: whether samples differ.
    """

    tensors: tuple[Tensor, ...]
    per_sample: bool

    def replace(self, tensors: Sequence[Tensor]) -> Self:
        """Return the same bias with other tensors; with zeros it accumulates gradients."""
        ...

    def add(self, source: BlockBias, block: BiasBlock, sample: int, scores: Tensor) -> None:
        """Add the gradients of the tensors of `source`, given the gradients `scores` (h, rows, n) of its mask."""
        ...

    def dense(self) -> Tensor:
        """Return the complete bias (b or 1, h or 1, n, n), differentiable."""
        ...


class Memory:
    """Memory of masks that all blocks share: memory that was used before is faster, and less is needed."""

    def __init__(self) -> None:
        self.buffer: Tensor | None = None

    def take(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return an uninitialised tensor in the dtype of `like`, which the next call overwrites."""
        size = math.prod(shape)
        # usually the first block is the largest
        if self.buffer is None or len(self.buffer) < size or self.buffer.dtype != like.dtype:
            self.buffer = None
            self.buffer = like.new_empty(size)
        return self.buffer[:size].view(shape)


class StripBias:
    """Runs and biases of prefix keys, accessed as windows of one grid row of queries.

    Args:
        tensors: runs (h or 1, `Layout.length`) and biases of prefix keys (h or 1, 2), see `runs.build`.
        layout: the memory layout, a strip.
    """

    per_sample = False

    def __init__(self, tensors: Sequence[Tensor], layout: Layout) -> None:
        self.tensors, self.layout = tuple(tensors), layout
        self.runs, self.prefix_biases = tensors
        self.memory = Memory()

    def replace(self, tensors: Sequence[Tensor]) -> Self:
        """Return the same bias with other tensors."""
        return type(self)(tensors, self.layout)

    def pick(self, heads: slice) -> slice:
        """Return the heads of the runs that belong to some heads of the queries."""
        return heads if len(self.runs) > 1 else slice(None)

    def rows(self, block: BiasBlock) -> Tensor:
        """Return the windows of a block, last grid row first, (h or 1, pitch, grid rows, patches)."""
        layout = self.layout
        length = layout.pitch * (2 * layout.shape[0] - 1) * layout.pitch
        runs = self.runs[:, layout.prefix : layout.prefix + length].view(len(self.runs), layout.pitch, -1)
        # the window of the last grid row comes first in memory
        windows = runs[self.pick(block.heads), :, (layout.shape[0] - block.last) * layout.pitch :]
        return windows.unfold(2, layout.patches, layout.pitch)[:, :, : block.last - block.first]

    def patches(self, block: BiasBlock, scores: Tensor) -> Tensor:
        """Return the patch part of scores (h or 1, rows, n) as a view (h or 1, grid rows, pitch, patches)."""
        count, pitch = block.last - block.first, self.layout.pitch
        return scores[:, -count * pitch :, self.layout.prefix :].view(len(scores), count, pitch, -1)

    def mask(self, block: BiasBlock, sample: int) -> Tensor:
        """Return the bias of a block, (h or 1, rows, n)."""
        del sample
        prefix, heads = self.layout.prefix, self.pick(block.heads)
        prefix_biases = self.prefix_biases[heads]
        size = len(prefix_biases), block.tokens.stop - block.tokens.start, self.layout.tokens
        mask = self.memory.take(size, self.runs)
        # the windows are in reverse order of grid rows
        for window, part in zip(
            self.rows(block).unbind(2)[::-1], self.patches(block, mask).unbind(1), strict=True
        ):
            part.copy_(window)
        if not prefix:
            return mask
        mask[:, :, :prefix] = prefix_biases[:, None, :1]
        if not block.first:
            mask[:, :prefix, :prefix] = prefix_biases[:, None, 1:]
            mask[:, :prefix, prefix:] = self.runs[heads, -1:, None]
        return mask

    def add(self, source: BlockBias, block: BiasBlock, sample: int, scores: Tensor) -> None:
        """Add the gradients of runs and prefix biases, given those of the mask of a block (h, rows, n)."""
        del source, sample
        prefix, heads = self.layout.prefix, self.pick(block.heads)
        # heads that share one bias share its gradient
        if len(self.runs) == 1:
            scores = scores.sum(0, keepdim=True)
        windows, parts = self.rows(block).unbind(2), self.patches(block, scores).unbind(1)
        # windows overlap, so they are added one at a time
        for window, part in zip(windows[::-1], parts, strict=True):
            window.add_(part)
        if not prefix:
            return
        prefix_queries = prefix if not block.first else 0  # prefix queries of this block
        self.prefix_biases[heads, 0] += scores[:, prefix_queries:, :prefix].sum((1, 2))
        if prefix_queries:
            self.prefix_biases[heads, 1] += scores[:, :prefix_queries, :prefix].sum((1, 2))
            self.runs[heads, -self.layout.patches :] += scores[:, :prefix_queries, prefix:].sum(1)

    def dense(self) -> Tensor:
        """Return the complete bias (1, h or 1, n, n), differentiable."""
        layout, token = self.layout, torch.arange(self.layout.tokens)
        prefix = token < layout.prefix
        bias = self.runs[:, (layout.base()[:, None] + token).clamp(max=self.runs.shape[1] - 1)]
        return torch.where(prefix, self.prefix_biases[:, prefix.long()][:, :, None], bias)[None]


def sum_of_masks(terms: Sequence[RowBias], block: BiasBlock, sample: int) -> Tensor:
    """Return the sum of the biases of a block, (h or 1, rows, n), in memory of the first if its shape fits."""
    total = terms[0].mask(block, sample)
    for term in terms[1:]:
        mask = term.mask(block, sample)
        fits = total.shape == mask.shape and total.dtype == mask.dtype
        total = total.add_(mask) if fits else total + mask
    return total


class SumOfBlocks:
    """The sum of several biases.

    Args:
        terms: one or more biases.
    """

    def __init__(self, terms: Sequence[BlockBias]) -> None:
        self.terms = tuple(terms)
        self.tensors = tuple(t for term in self.terms for t in term.tensors)
        self.per_sample = any(term.per_sample for term in self.terms)

    def replace(self, tensors: Sequence[Tensor]) -> Self:
        """Return the same bias with other tensors."""
        terms: list[BlockBias] = []
        start = 0
        for term in self.terms:
            stop = start + len(term.tensors)
            terms.append(term.replace(tensors[start:stop]))
            start = stop
        return type(self)(terms)

    def mask(self, block: BiasBlock, sample: int) -> Tensor:
        """Return the bias of a block, (h or 1, rows, n)."""
        return sum_of_masks(self.terms, block, sample)

    def add(self, source: Self, block: BiasBlock, sample: int, scores: Tensor) -> None:
        """Add the gradients of the tensors of all terms, given that of the mask of a block (h, rows, n)."""
        for term, other in zip(self.terms, source.terms, strict=True):
            if any(t.requires_grad for t in other.tensors):
                term.add(other, block, sample, scores)

    def dense(self) -> Tensor:
        """Return the complete bias (b or 1, h or 1, n, n), differentiable."""
        total = self.terms[0].dense()
        for term in self.terms[1:]:
            total = total + term.dense()
        return total
