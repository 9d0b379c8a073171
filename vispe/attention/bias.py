"""What an encoding may add to the attention logits: the closed `Bias` vocabulary.

A bias is a description that kernels can match on; `Bias.dense` is its meaning:
``logits[b, h, i, j] = scale * q_i . k_j + dense[b, h, i, j]``. On one regular grid every translation-invariant
bias is one table ``T[h, 2 gh - 1, 2 gw - 1]`` (any number of axes) with index
``T[h, y_i - y_j + gh - 1, x_i - x_j + gw - 1]``, i the query. Rows and columns of tokens without a place are 0
unless a bias carries `prefix` values. Content-dependent members are in `vispe.attention.content`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from vispe.attention.distance import Metric, Normalize, Reference, check_rule, distances, offsets
from vispe.attention.precision import at_least_float32, exact_product, no_infinity, rounded
from vispe.errors import ShapeError, UnsupportedCombination
from vispe.grid import Grid, Positions

ALL = slice(None)


class Request(NamedTuple):
    """What `Bias.dense` was asked for; `keep`: what only depends on positions may be kept with them."""

    pos_q: Positions | None
    pos_k: Positions | None
    q: Tensor | None
    k: Tensor | None
    scale: float | None
    heads: slice
    keep: bool = True

    def pick(self, per_head: Tensor, axis: int = 0) -> Tensor:
        """Return the asked heads of a tensor with h or 1 heads on `axis`."""
        if per_head.shape[axis] == 1 or self.heads == ALL:
            return per_head
        return per_head[(ALL,) * axis + (self.heads,)]

    def where(self, own: Positions | None) -> tuple[Positions, Positions]:
        """Return the positions of queries and keys for a bias that is bound to `own`, or raise `ShapeError`."""
        pos_q = own if self.pos_q is None else self.pos_q
        pos_k = pos_q if self.pos_k is None else self.pos_k
        if pos_q is None or pos_k is None:
            raise ShapeError("This bias is not bound to positions; pass pos_q (and pos_k) to dense().")
        return pos_q, pos_k


class Bias:
    """An additive term of the attention logits, bound to the positions that it was made for."""

    __slots__ = ("pos",)

    def __init__(self, pos: Positions | None) -> None:
        self.pos = pos

    def dense(
        self,
        pos_q: Positions | None = None,
        pos_k: Positions | None = None,
        *,
        q: Tensor | None = None,
        k: Tensor | None = None,
        scale: float | None = None,
        heads: slice = ALL,
    ) -> Tensor:
        """Return the logits to add, (b or 1, h or 1, n, m), in float32 or better.

        Args:
            pos_q: positions of the queries; by default those that the bias is bound to.
            pos_k: positions of the keys; by default those of the queries.
            q: queries (b, h, n, d_h) after qk-norm and before rotation, for content-dependent biases.
            k: keys (b, h, m, d_h), likewise.
            scale: the factor of the logits, for biases that are scaled with them.
            heads: which heads to return, so that a large bias can be made group by group.
        """
        return self._dense(Request(pos_q, pos_k, q, k, scale, heads))

    def _dense(self, ask: Request) -> Tensor:
        raise NotImplementedError

    @property
    def invariant(self) -> bool:
        """Whether the bias depends on nothing but the offset between two tokens, so that `table` exists."""
        return False

    @property
    def key(self) -> Hashable | None:
        """What the bias depends on beside its positions, when that has no gradient; else None."""
        return None

    @property
    def per_head(self) -> bool:
        """Whether heads differ, so that `dense` has h heads and not 1."""
        return True

    @property
    def per_sample(self) -> bool:
        """Whether samples of a batch differ, so that `dense` has b samples and not 1."""
        return self.pos is not None and self.pos.coords.shape[0] > 1

    @property
    def finite(self) -> bool:
        """Whether no entry is -inf, so that every query has a key.

        It is derived, and False where nothing is known. The numbers that a bias was made from are looked at where that
        costs nothing: on the CPU, called and not compiled. Elsewhere a look would wait for the device or break the
        graph, so there tensors count as not known, and attention takes care of rows that may be closed.
        """
        return False

    def table(self, grid: Grid) -> Tensor:
        """Return the table T (h or 1, 2 n_1 - 1, 2 n_2 - 1, ...) of this bias on `grid`, differentiable.

        Raises:
            UnsupportedCombination: the bias is not translation invariant.
        """
        raise UnsupportedCombination(
            f"A table of {type(self).__name__} was asked, but it depends on more than the offset between two "
            "tokens; use dense()."
        )

    def mask(self, dtype: torch.dtype, heads: slice = ALL) -> Tensor:
        """Return the dense bias of fixed biases in `dtype`, kept with their positions (see `key`)."""
        key = self.key
        if key is None or self.pos is None:
            raise ShapeError(
                f"{type(self).__name__} is not fixed, so no mask of it can be kept; use dense()."
            )
        ask = Request(None, None, None, None, None, heads, keep=False)
        span = (heads.start, heads.stop)
        return self.pos.remember(("mask", key, dtype, span), lambda: rounded(self._dense(ask), dtype))


class DistanceBias(Bias):
    """``-slope[h] * distance(p_i, p_j)`` (2D ALiBi and relatives).

    Args:
        slopes: one number per head; a tuple of floats (then nothing has a gradient and masks are kept) or a
            tensor (h,).
        pos: the positions it is bound to.
        metric: 'euclidean', 'manhattan', 'chebyshev' or 'squared' (euclidean, squared).
        wrap: distances on the torus of `Positions.extent`.
        normalize: 'max' divides by the largest distance of the grid, 'reference' by that of the reference grid,
            'none' leaves units of `Grid.spacing`.
        reference: grid shape for 'reference'; `Grid.reference` by default.
        spacing: distance between neighbouring cells per axis, in place of that of the positions.

    Raises:
        OptionError: there is no such metric or normalisation.
        ShapeError: slopes are not one number per head.
    """

    __slots__ = ("metric", "normalize", "reference", "slopes", "spacing", "wrap")

    def __init__(
        self,
        slopes: tuple[float, ...] | Tensor,
        pos: Positions | None = None,
        *,
        metric: Metric = "euclidean",
        wrap: bool = False,
        normalize: Normalize = "none",
        reference: Reference = None,
        spacing: tuple[float, ...] | None = None,
    ) -> None:
        super().__init__(pos)
        check_rule(metric, normalize)
        if slopes.ndim != 1 if isinstance(slopes, Tensor) else not slopes:
            raise ShapeError(f"DistanceBias needs one slope per head, got {slopes!r}.")
        self.slopes, self.wrap, self.reference, self.spacing = slopes, wrap, reference, spacing
        self.metric: Metric = metric
        self.normalize: Normalize = normalize

    def placed(self, pos: Positions) -> Positions:
        """Return the positions in units of `spacing`."""
        return pos if self.spacing is None else pos.spaced(self.spacing)

    @property
    def rule(self) -> tuple[Metric, bool, Normalize, Reference]:
        """What the distance depends on beside the positions."""
        return self.metric, self.wrap, self.normalize, self.reference

    @property
    def invariant(self) -> bool:
        """See `Bias.invariant`."""
        return True

    @property
    def key(self) -> Hashable | None:
        """See `Bias.key`."""
        return None if isinstance(self.slopes, Tensor) else (self.slopes, self.spacing, *self.rule)

    @property
    def per_head(self) -> bool:
        """See `Bias.per_head`."""
        return isinstance(self.slopes, Tensor) or len(set(self.slopes)) > 1

    @property
    def finite(self) -> bool:
        """See `Bias.finite`."""
        if isinstance(self.slopes, Tensor):
            return no_infinity(self.slopes)
        return all(map(math.isfinite, self.slopes))

    def slope(self, like: Tensor) -> Tensor:
        """Return the slopes (h,), in the dtype of `like` or better, or (1,) when all heads share one."""
        if isinstance(self.slopes, Tensor):
            return self.slopes.to(torch.promote_types(self.slopes.dtype, like.dtype))
        return like.new_tensor(self.slopes if self.per_head else self.slopes[:1])

    def _dense(self, ask: Request) -> Tensor:
        pos_q, pos_k = (self.placed(p) for p in ask.where(self.pos))
        if ask.keep and pos_k is pos_q:  # the layers share one distance matrix
            distance = pos_q.remember(("distance", *self.rule), lambda: distances(pos_q, pos_q, *self.rule))
        else:
            distance = distances(pos_q, pos_k, *self.rule)
        return distance[:, None] * -ask.pick(self.slope(distance))[:, None, None]

    def table(self, grid: Grid) -> Tensor:
        """See `Bias.table`."""
        own = (
            self.slopes if isinstance(self.slopes, Tensor) else None if self.pos is None else self.pos.coords
        )
        spaced = grid if self.spacing is None else replace(grid, spacing=self.spacing)
        distance = offsets(spaced, *self.rule, device=None if own is None else own.device)
        return distance[None] * -self.slope(distance).reshape(-1, *[1] * grid.axes)


class LowRankBias(Bias):
    """``row_i . col_j`` with few columns, exact.

    Args:
        row: (b or 1, h or 1, n, r).
        col: (b or 1, h or 1, m, r).
    """

    __slots__ = ("col", "row")

    def __init__(self, row: Tensor, col: Tensor, pos: Positions | None = None) -> None:
        super().__init__(pos)
        if row.ndim != 4 or col.ndim != 4 or row.shape[-1] != col.shape[-1]:
            raise ShapeError(
                "LowRankBias needs row (b, h, n, r) and col (b, h, m, r), got "
                f"{tuple(row.shape)} and {tuple(col.shape)}."
            )
        self.row, self.col = row, col

    @property
    def per_head(self) -> bool:
        """See `Bias.per_head`."""
        return self.row.shape[1] > 1 or self.col.shape[1] > 1

    @property
    def per_sample(self) -> bool:
        """See `Bias.per_sample`."""
        return self.row.shape[0] > 1 or self.col.shape[0] > 1

    @property
    def finite(self) -> bool:
        """See `Bias.finite`."""
        return no_infinity(self.row, self.col)

    def _dense(self, ask: Request) -> Tensor:
        return exact_product(ask.pick(self.row, 1), ask.pick(self.col, 1).transpose(-1, -2))


class DenseBias(Bias):
    """A bias given as a tensor (b or 1, h or 1, n, m); the last resort: no kernel can see its structure."""

    __slots__ = ("values",)

    def __init__(self, values: Tensor, pos: Positions | None = None) -> None:
        super().__init__(pos)
        if values.ndim != 4:
            raise ShapeError(f"DenseBias needs a tensor (b, h, n, m), got {tuple(values.shape)}.")
        self.values = values

    @property
    def per_head(self) -> bool:
        """See `Bias.per_head`."""
        return self.values.shape[1] > 1

    @property
    def per_sample(self) -> bool:
        """See `Bias.per_sample`."""
        return self.values.shape[0] > 1

    def _dense(self, ask: Request) -> Tensor:
        return at_least_float32(ask.pick(self.values, 1))


class SumBias(Bias):
    """The sum of several biases.

    Args:
        terms: one or more biases.
    """

    __slots__ = ("terms",)

    def __init__(self, terms: Sequence[Bias]) -> None:
        if not terms:
            raise ShapeError("SumBias needs at least one term, got none.")
        super().__init__(next((t.pos for t in terms if t.pos is not None), None))
        self.terms = tuple(terms)

    @property
    def invariant(self) -> bool:
        """See `Bias.invariant`."""
        return all(t.invariant for t in self.terms)

    @property
    def key(self) -> Hashable | None:
        """See `Bias.key`."""
        keys = tuple(t.key for t in self.terms)
        bound_alike = all(t.pos is self.pos for t in self.terms)  # or else the positions were part of the key
        return keys if bound_alike and all(key is not None for key in keys) else None

    @property
    def per_head(self) -> bool:
        """See `Bias.per_head`."""
        return any(t.per_head for t in self.terms)

    @property
    def per_sample(self) -> bool:
        """See `Bias.per_sample`."""
        return any(t.per_sample for t in self.terms)

    @property
    def finite(self) -> bool:
        """See `Bias.finite`."""
        return all(t.finite for t in self.terms)

    def _dense(self, ask: Request) -> Tensor:
        total = self.terms[0]._dense(ask)
        for term in self.terms[1:]:
            total = total + term._dense(ask)
        return total

    def table(self, grid: Grid) -> Tensor:
        """See `Bias.table`."""
        total = self.terms[0].table(grid)
        for term in self.terms[1:]:
            total = total + term.table(grid)
        return total
