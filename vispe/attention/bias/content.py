"""Biases that depend on the content of the tokens."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Literal

from torch import Tensor

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.dense_request import DenseRequest
from vispe.attention.precision import check_floating, exact_product, no_infinity
from vispe.errors import ShapeError
from vispe.grid import Positions


class GatedBias(Bias):
    """``(row[b, h, i] + col[b, h, j]) * profile(i, j)``: a bias gated by queries and keys.

    Args:
        row: gates of the queries (b, h, n), or None for 0.
        col: gates of the keys (b, h, m), or None for 0.
        profile: the bias to gate.

    Raises:
        ShapeError: both gates are None, or one is not floating point.

    Example:
        >>> import torch
        >>> from vispe import Grid
        >>> from vispe.attention import DistanceBias
        >>> gate = torch.tensor([[[1.0, 2.0]]])  # of two queries
        >>> GatedBias(gate, None, DistanceBias((1.0,), Grid((1, 2)).positions())).dense()[0, 0]
        tensor([[-0., -1.],
                [-2., -0.]])
    """

    __slots__ = ("col", "profile", "row")

    def __init__(self, row: Tensor | None, col: Tensor | None, profile: Bias) -> None:
        super().__init__(profile.pos)
        if row is None and col is None and type(self) is GatedBias:
            raise ShapeError("GatedBias needs row, col or both, got neither.")
        check_floating("GatedBias", row=row, col=col)
        self.row, self.col, self.profile = row, col, profile

    @property
    def per_sample(self) -> bool:
        """Whether samples of a batch differ."""
        return True

    @property
    def finite(self) -> bool:
        """Whether it is known to contain no infinity."""
        return self.profile.finite and no_infinity(self.row, self.col)

    def gates(self, request: DenseRequest) -> tuple[Tensor | None, Tensor | None]:
        """Return the gates of queries and keys for the requested heads, None for 0."""
        row, col = (None if gate is None else request.pick(gate, 1) for gate in (self.row, self.col))
        return row, col

    def _dense(self, request: DenseRequest) -> Tensor:
        # (b, h, n) -> (b, h, n, 1) and (b, h, m) -> (b, h, 1, m)
        row, col = (None if gate is None else gate[..., None] for gate in self.gates(request))
        col = None if col is None else col.transpose(-1, -2)
        gate = col if row is None else row if col is None else row + col
        profile = self.profile._dense(request)
        return profile if gate is None else gate * profile


class OffsetBuckets:
    """Buckets that depend on the offset between two tokens of a full grid; all pairs are computed on demand.

    Args:
        table: bucket of every offset, query minus key, (2 n_1 - 1, 2 n_2 - 1, ...) int64.
        prefix: buckets of pairs from prefix token to patch, from patch to prefix token, and of two prefix tokens.
        pairs: returns the bucket of each pair, (1, n, n) int64.
    """

    __slots__ = ("pairs", "prefix", "table")

    def __init__(self, table: Tensor, prefix: tuple[int, int, int], pairs: Callable[[], Tensor]) -> None:
        self.table, self.prefix, self.pairs = table, prefix, pairs

    def transposed(self) -> OffsetBuckets:
        """Return the buckets with queries and keys exchanged."""
        pairs, (to_patch, to_prefix, between) = self.pairs, self.prefix
        flipped = self.table.flip(list(range(self.table.ndim)))
        return OffsetBuckets(flipped, (to_prefix, to_patch, between), lambda: pairs().transpose(-1, -2))


class ContextBias(Bias):
    """``q_i . w[bucket(i, j)]`` or ``k_j . w[bucket(i, j)]``: contextual relative positions.

    Args:
        weights: (h or 1, buckets, d_h).
        buckets: bucket index of each pair, (n, m) or, if samples differ, (b or 1, n, m), int64; or `OffsetBuckets` of
            the grid of `pos`, from which attention computes the buckets of a few rows at a time.
        dot: whether queries or keys are multiplied with the weights.
        scaled: whether the term is multiplied by the scale of the logits.
        pos: the positions it is bound to.
        content: vectors (b, h, n or m, d_h) used instead of the queries or keys.
        cache_key: cache key of these buckets; tensors derived from them are cached with `pos`. Not cached if None.

    Raises:
        ShapeError: shapes of `weights` or `buckets` are wrong, or a tensor is not floating point.

    Example:
        >>> import torch
        >>> weights = torch.tensor([[[1.0], [5.0]]])  # of buckets 0 and 1
        >>> bias = ContextBias(weights, torch.tensor([[0, 1], [1, 0]]), "query", scaled=False)
        >>> bias.dense(q=torch.tensor([[[[2.0], [3.0]]]]), k=torch.zeros(1, 1, 2, 1))[0, 0]
        tensor([[ 2., 10.],
                [15.,  3.]])
    """

    __slots__ = ("cache_key", "content", "dot", "pair_buckets", "scaled", "weights")

    def __init__(
        self,
        weights: Tensor,
        buckets: Tensor | OffsetBuckets,
        dot: Literal["query", "key"],
        scaled: bool,
        pos: Positions | None = None,
        content: Tensor | None = None,
        cache_key: Hashable | None = None,
    ) -> None:
        super().__init__(pos)
        if weights.ndim != 3 or (isinstance(buckets, Tensor) and buckets.ndim not in (2, 3)):
            shape = tuple(buckets.shape) if isinstance(buckets, Tensor) else "OffsetBuckets"
            raise ShapeError(
                "ContextBias needs weights (h, buckets, d_h) and buckets (n, m) or (b, n, m), got "
                f"{tuple(weights.shape)} and {shape}."
            )
        check_floating("ContextBias", weights=weights, content=content)
        self.weights, self.pair_buckets, self.dot, self.scaled = weights, buckets, dot, scaled
        self.content, self.cache_key = content, cache_key

    @property
    def buckets(self) -> Tensor:
        """The bucket index of each pair, (n, m) or (b or 1, n, m) int64."""
        buckets = self.pair_buckets
        return buckets if isinstance(buckets, Tensor) else buckets.pairs()

    @property
    def per_sample(self) -> bool:
        """Whether samples of a batch differ."""
        return True

    @property
    def finite(self) -> bool:
        """Whether it is known to contain no infinity."""
        return no_infinity(self.weights)

    def vectors(self, request: DenseRequest, samples: slice | None = None) -> Tensor:
        """Return the vectors that are multiplied with the weights, (b, h, n or m, d_h).

        Args:
            request: arguments of `dense`.
            samples: samples of `content` that `ask.q` and `ask.k` consist of; all by default.

        Raises:
            ShapeError: queries, keys or the scale are missing.
        """
        content = self.content if self.content is None or samples is None else self.content[samples]
        # `content` overrides queries or keys
        x = content if content is not None else request.q if self.dot == "query" else request.k
        if x is None or (self.scaled and request.scale is None):
            raise ShapeError(
                f"ContextBias with dot={self.dot!r} and scaled={self.scaled} needs q, k and scale. "
                "Pass them to dense()."
            )
        return request.pick(x, 1)

    def products(self, request: DenseRequest, samples: slice | None = None) -> Tensor:
        """Return the products of each query or key with all buckets, (b, h, n or m, buckets)."""
        products = exact_product(self.vectors(request, samples), request.pick(self.weights).transpose(-1, -2))
        return products * request.scale if self.scaled and request.scale is not None else products

    def _dense(self, request: DenseRequest) -> Tensor:
        # one product per bucket, then one gather per pair: no (n, m, d_h) tensor
        products = self.products(request)
        buckets = with_head_axis(self.buckets)
        # gather per query over keys, or per key over queries and transpose
        if self.dot == "query":
            return products.gather(-1, buckets.expand(*products.shape[:2], -1, -1))
        return products.gather(-1, buckets.transpose(-1, -2).expand(*products.shape[:2], -1, -1)).transpose(
            -1, -2
        )


def with_head_axis(buckets: Tensor) -> Tensor:
    """Return buckets (n, m) or (b, n, m) with a head axis, (b or 1, 1, n, m)."""
    return buckets[None, None] if buckets.ndim == 2 else buckets[:, None]
