"""Tables of iRPE: number of buckets, bucket of every pair of tokens, and modules with the released names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from vispe.encodings.parts.bias.buckets import Method, pair_buckets, patch_buckets
from vispe.grid import Grid, Positions
from vispe.utils.options import PositiveFloat, checked

Mode = Literal["bias", "contextual"]
PrefixBuckets = Literal[0, 1, 3]


@checked
def num_buckets(method: Method, ratio: PositiveFloat, prefix_buckets: PrefixBuckets = 1) -> int:
    """Return the number of buckets of a table; 'cross' has two tables of this size.

    Args:
        method: 'euclidean', 'quantization', 'product' or 'cross'.
        ratio: offset from which on buckets are shared, in patches.
        prefix_buckets: buckets for pairs with a prefix token: 0, 1 or 3.

    Example:
        >>> num_buckets("product", 1.9)
        50
    """
    return patch_buckets(method, ratio) + prefix_buckets


@checked
def bucket_ids(
    where: Positions | Grid | Sequence[int],
    method: Method,
    ratio: PositiveFloat,
    prefix_buckets: PrefixBuckets = 1,
) -> tuple[Tensor, ...]:
    """Return the bucket of every pair of tokens, (b or 1, n, n) int64 with queries along rows.

    One tensor, or two (rows and columns) with method 'cross'.

    Args:
        where: positions, a grid, or the shape of a grid without prefix tokens.
        method: 'euclidean', 'quantization', 'product' or 'cross'.
        ratio: offset from which on buckets are shared, in patches.
        prefix_buckets: buckets for pairs with a prefix token: 0, 1 or 3; with 0, such pairs have the number after the
            last bucket.

    Example:
        >>> bucket_ids((1, 3), "product", 1.9)[0].tolist()
        [[[24, 23, 22], [25, 24, 23], [26, 25, 24]]]
    """
    if not isinstance(where, Positions):
        where = (where if isinstance(where, Grid) else Grid(tuple(where))).positions()
    return pair_buckets(where, method, ratio, prefix_buckets)


class BucketTable(nn.Module):
    """One table, with the names of the released checkpoints."""

    def __init__(self, mode: Mode, shape: tuple[int, ...]) -> None:
        super().__init__()
        name = "lookup_table_bias" if mode == "bias" else "lookup_table_weight"
        self.register_parameter(name, nn.Parameter(torch.zeros(shape)))


class CrossTables(nn.Module):
    """The tables of rows and columns."""

    def __init__(self, mode: Mode, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.rp_rows, self.rp_cols = BucketTable(mode, shape), BucketTable(mode, shape)
