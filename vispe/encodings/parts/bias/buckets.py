"""Buckets of relative offsets (iRPE, DeBERTa), fine for near and coarse for far ones."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from vispe.attention.bias.content import OffsetBuckets
from vispe.attention.bias.table import table_index
from vispe.errors import ShapeError, counted
from vispe.grid import Grid, Positions

Method = Literal["euclidean", "quantization", "product", "cross"]
RATIOS: dict[str, float] = {"euclidean": 20.0, "quantization": 33.0, "product": 1.9, "cross": 20.0}


def piecewise_index(offset: Tensor, alpha: float, beta: float, gamma: float) -> Tensor:
    """Return the bucket of each offset, int64: the rounded offset up to `alpha`, logarithmic beyond (iRPE).

    Up to alpha an offset is rounded (half to even); beyond it is
    ``sign(x) * trunc(min(beta, round(alpha + log(|x| / alpha) / log(gamma / alpha) * (beta - alpha))))``, so a
    fractional beta is never reached.

    Args:
        offset: integers or floats, of any shape; integers are converted to float32.
        alpha: offsets up to alpha have separate buckets.
        beta: the largest bucket.
        gamma: offset at which beta is reached.
    """
    real = offset if offset.is_floating_point() else offset.to(torch.float32)
    # logarithmic from alpha on; clamped so that the logarithm is defined for near offsets too, which are not read
    far = real.abs().clamp(min=alpha)
    far = (alpha + torch.log(far / alpha) / math.log(gamma / alpha) * (beta - alpha)).round().clamp(max=beta)
    near = real.abs() <= alpha
    return torch.where(near, real.round(), real.sign() * far).to(torch.int64)


def deberta_bucket(offset: Tensor, count: int, most: int) -> Tensor:
    """Return the bucket of integer offsets, int64: the offset up to count / 2, logarithmic beyond (DeBERTa).

    Args:
        offset: integers, of any shape.
        count: buckets per side.
        most: one more than the last offset with a bucket below `count`.
    """
    middle = count // 2
    # float32 and the order of operations of the reference code, for identical buckets at the edges
    far = offset.abs().clamp(min=max(middle, 1)).to(torch.float32) / middle
    edge = torch.tensor((most - 1) / middle, dtype=torch.float32, device=offset.device)
    far = (torch.log(far) / torch.log(edge) * (middle - 1)).ceil() + middle
    return torch.where(offset.abs() <= middle, offset, (offset.sign() * far).to(torch.int64))


def reach(ratio: float) -> int:
    """Return the largest bucket of one axis; the smallest is its negative."""
    return int(2 * ratio)


def bucket_of(offset: Tensor, ratio: float) -> Tensor:
    """Return the bucket of each offset, counted from 0."""
    # signed buckets, shifted so that the smallest is 0
    return piecewise_index(offset, ratio, 2 * ratio, 8 * ratio) + reach(ratio)


def patch_buckets(method: Method, ratio: float) -> int:
    """Return the number of buckets of one table, for offsets between patches."""
    side = 2 * reach(ratio) + 1
    return side * side if method == "product" else side


def offset_buckets(pos: Positions, method: Method, ratio: float) -> tuple[Tensor, ...]:
    """Return the bucket of every offset of the grid: (2 h - 1, 2 w - 1), or one line per axis for 'cross'."""
    grid = grid_of(pos)

    def make() -> tuple[Tensor, ...]:
        # query minus key, from 1 - n to n - 1
        y, x = (torch.arange(1 - n, n, device=pos.coords.device) for n in grid.shape)
        if method == "cross":
            return bucket_of(y, ratio), bucket_of(x, ratio)
        if method == "product":
            # one bucket per combination of row bucket and column bucket
            return ((2 * reach(ratio) + 1) * bucket_of(y, ratio)[:, None] + bucket_of(x, ratio),)
        squared = (y * y)[:, None] + x * x
        if method == "quantization":
            return (bucket_of(squared, ratio),)
        return (bucket_of(squared.to(torch.float32).sqrt().round(), ratio),)

    return pos.remember(("irpe offsets", method, ratio), make)


def prefix_entries(count: int, prefix_buckets: int) -> list[int]:
    """Return the buckets of prefix to patch, patch to prefix and prefix to prefix, numbered from `count`."""
    # one bucket each, or one for all three
    return [count + (i if prefix_buckets == 3 else 0) for i in range(3)]


def pair_buckets(pos: Positions, method: Method, ratio: float, prefix_buckets: int) -> tuple[Tensor, ...]:
    """Return the bucket of every pair of tokens, (b or 1, n, n); two for 'cross', rows and columns.

    Pairs with a prefix token have the last buckets, even if `prefix_buckets` is 0.
    """

    def make() -> tuple[Tensor, ...]:
        tables = offset_buckets(pos, method, ratio)
        if method == "cross":
            sides = tuple(2 * n - 1 for n in grid_of(pos).shape)
            tables = (tables[0][:, None].expand(sides), tables[1].expand(sides))
        edge = prefix_entries(patch_buckets(method, ratio), prefix_buckets)
        index = table_index(pos, pos)
        return tuple(
            # the index counts the offsets of the grid first, then the three kinds of pairs with prefix tokens
            torch.cat([t.flatten(), t.new_tensor(edge)]).index_select(0, index.flatten()).reshape(index.shape)
            for t in tables
        )

    return pos.remember(("irpe pairs", method, ratio, prefix_buckets), make)


def grid_buckets(
    pos: Positions, method: Method, ratio: float, prefix_buckets: int, transposed: bool
) -> Tensor | OffsetBuckets:
    """Return the buckets of a table, by offset on a full grid, else of every pair (b or 1, n, n).

    Args:
        pos: positions of a grid.
        method: all but 'cross'.
        ratio: offset from which on buckets are shared.
        prefix_buckets: number of buckets for pairs with a prefix token.
        transposed: exchange queries and keys.
    """

    def pairs() -> Tensor:
        return pair_buckets(pos, method, ratio, prefix_buckets)[0]

    if torch.compiler.is_compiling() or not pos.regular or not pos.static:
        return pairs().transpose(-1, -2) if transposed else pairs()
    to_patch, to_prefix, both = prefix_entries(patch_buckets(method, ratio), prefix_buckets)
    by_offset = OffsetBuckets(offset_buckets(pos, method, ratio)[0], (to_patch, to_prefix, both), pairs)
    return by_offset.transposed() if transposed else by_offset


def grid_lines(pos: Positions, ratio: float, prefix_buckets: int) -> tuple[Tensor, Tensor]:
    """Return the bucket of each token for each row (b or 1, n, h + 1) and column (..., w + 1); prefix tokens last."""
    to_patch, to_prefix, both = prefix_entries(patch_buckets("cross", ratio), prefix_buckets)
    grid = grid_of(pos)

    def make() -> tuple[Tensor, Tensor]:
        has_position = pos.spatial[..., None]
        lines: list[Tensor] = []
        for axis, n in enumerate(grid.shape):
            cell = pos.cells()[..., axis]
            buckets = bucket_of(cell[..., None] - torch.arange(n, device=cell.device), ratio)
            # the last column is for prefix keys
            reads = F.pad(torch.where(has_position, buckets, to_patch), (0, 1), value=to_prefix)
            reads[..., -1:].masked_fill_(~has_position, both)
            lines.append(reads)
        return lines[0], lines[1]

    return pos.remember(("irpe lines", ratio, prefix_buckets), make)


def grid_of(pos: Positions) -> Grid:
    """Return the 2-axis grid of the tokens, or raise `ShapeError`."""
    if pos.grid is None or pos.axes != 2:
        raise ShapeError(f"irpe needs the tokens of a 2-axis grid, got {counted(pos.axes, 'axis')} ({pos}).")
    return pos.grid
