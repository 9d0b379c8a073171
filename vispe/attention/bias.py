"""What an encoding may add to the attention logits: the closed `Bias` vocabulary.

A bias is a description that kernels can match on; `Bias.dense` is its meaning:
``logits[b, h, i, j] = scale * q_i . k_j + dense[b, h, i, j]``. On one regular grid every translation-invariant
bias is one table ``T[h, 2 gh - 1, 2 gw - 1]`` (any number of axes) with index
``T[h, y_i - y_j + gh - 1, x_i - x_j + gw - 1]``, i the query. Rows and columns of tokens without a place are 0
unless a bias carries `prefix` values. Content-dependent members are in `vispe.attention.content`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vispe.attention.distance import Metric, Normalize, Reference, distances, offsets
from vispe.errors import ShapeError, UnsupportedCombination
from vispe.grid import Grid, Positions

ALL = slice(None)


class Request(NamedTuple):
    """What `Bias.dense` was asked for; positions are resolved."""

    pos_q: Positions | None
    pos_k: Positions | None
    q: Tensor | None
    k: Tensor | None
    scale: float | None
    heads: slice

    def pick(self, per_head: Tensor, axis: int = 0) -> Tensor:
        """Return the asked heads of a tensor with h or 1 heads on `axis`."""
        if per_head.shape[axis] == 1 or self.heads == ALL:
            return per_head
        return per_head[(ALL,) * axis + (self.heads,)]

    def where(self) -> tuple[Positions, Positions]:
        """Return the positions of queries and keys, or raise `ShapeError`."""
        if self.pos_q is None or self.pos_k is None:
            raise ShapeError("This bias is not bound to positions; pass pos_q (and pos_k) to dense().")
        return self.pos_q, self.pos_k


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
        pos_q = pos_q or self.pos
        return self._dense(Request(pos_q, pos_k or pos_q, q, k, scale, heads))

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
        span = (heads.start, heads.stop)
        return self.pos.remember(("mask", key, dtype, span), lambda: self.dense(heads=heads).to(dtype))


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
    """

    __slots__ = ("metric", "normalize", "reference", "slopes", "wrap")

    def __init__(
        self,
        slopes: tuple[float, ...] | Tensor,
        pos: Positions | None = None,
        *,
        metric: Metric = "euclidean",
        wrap: bool = False,
        normalize: Normalize = "none",
        reference: Reference = None,
    ) -> None:
        super().__init__(pos)
        self.slopes, self.metric, self.wrap = slopes, metric, wrap
        self.normalize, self.reference = normalize, reference

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
        return None if isinstance(self.slopes, Tensor) else (self.slopes, *self.rule)

    @property
    def per_head(self) -> bool:
        """See `Bias.per_head`."""
        return isinstance(self.slopes, Tensor) or len(set(self.slopes)) > 1

    def slope(self, like: Tensor) -> Tensor:
        """Return the slopes (h,) in the dtype of `like`, or (1,) when all heads share one fixed slope."""
        if isinstance(self.slopes, Tensor):
            return self.slopes.to(like.dtype)
        return like.new_tensor(self.slopes if self.per_head else self.slopes[:1])

    def _dense(self, ask: Request) -> Tensor:
        pos_q, pos_k = ask.where()
        if self.key is None and pos_k is pos_q:  # learned slopes share one distance matrix over the layers
            distance = pos_q.remember(("distance", *self.rule), lambda: distances(pos_q, pos_q, *self.rule))
        else:
            distance = distances(pos_q, pos_k, *self.rule)
        return distance[:, None] * -ask.pick(self.slope(distance))[:, None, None]

    def table(self, grid: Grid) -> Tensor:
        """See `Bias.table`."""
        device = self.slopes.device if isinstance(self.slopes, Tensor) else None
        distance = offsets(grid, *self.rule, device=device)
        return distance[None] * -self.slope(distance).reshape(-1, *[1] * grid.axes)


class TableBias(Bias):
    """A bias read from a table of offsets (Swin, BEiT, or any other bias made a table).

    Args:
        values: (h or 1, 2 n_1 - 1, 2 n_2 - 1, ...) for the grid that the positions come from.
        pos: the positions it is bound to.
        prefix: (h or 1, 3) values for prefix-to-patch, patch-to-prefix, prefix-to-prefix; zeros by default.
    """

    __slots__ = ("prefix", "values")

    def __init__(self, values: Tensor, pos: Positions | None = None, prefix: Tensor | None = None) -> None:
        super().__init__(pos)
        self.values, self.prefix = values, prefix

    @property
    def invariant(self) -> bool:
        """See `Bias.invariant`; prefix values have no place in a table."""
        return self.prefix is None

    def _dense(self, ask: Request) -> Tensor:
        pos_q, pos_k = ask.where()
        if pos_q.grid is None or pos_k.grid is None or pos_q.grid.shape != pos_k.grid.shape:
            raise ShapeError(
                f"A bias table needs queries and keys of one grid, got {pos_q.grid} and {pos_k.grid}; "
                "use a DistanceBias for free coordinates."
            )
        _check_table(self.values, pos_q.grid)
        flat = ask.pick(self.values).flatten(1)
        flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
        extra = flat.new_zeros(1, 3) if self.prefix is None else ask.pick(self.prefix).to(flat.dtype)
        heads = max(flat.shape[0], extra.shape[0])
        flat = torch.cat([flat.expand(heads, -1), extra.expand(heads, -1)], 1)
        index = _table_index(pos_q, pos_k)
        return flat.index_select(1, index.flatten()).unflatten(1, index.shape).transpose(0, 1)

    def table(self, grid: Grid) -> Tensor:
        """See `Bias.table`."""
        _check_table(self.values, grid)
        return self.values if self.prefix is None else super().table(grid)


class ProfileBias(Bias):
    """``slope[h] * profile(offset)``: one shared table, one factor per head.

    Args:
        slopes: (h,).
        profile: (1, 2 n_1 - 1, ...).
        pos: the positions it is bound to.
    """

    __slots__ = ("profile", "slopes")

    def __init__(self, slopes: Tensor, profile: Tensor, pos: Positions | None = None) -> None:
        super().__init__(pos)
        self.slopes, self.profile = slopes, TableBias(profile, pos)

    @property
    def invariant(self) -> bool:
        """See `Bias.invariant`."""
        return True

    def _dense(self, ask: Request) -> Tensor:
        shared = self.profile.dense(ask.pos_q, ask.pos_k)
        return shared * ask.pick(self.slopes).to(shared.dtype)[:, None, None]

    def table(self, grid: Grid) -> Tensor:
        """See `Bias.table`."""
        shared = self.profile.table(grid)
        return shared * self.slopes.reshape(-1, *[1] * grid.axes).to(shared.dtype)


class LowRankBias(Bias):
    """``row_i . col_j`` with few columns, exact.

    Args:
        row: (b or 1, h or 1, n, r).
        col: (b or 1, h or 1, m, r).
    """

    __slots__ = ("col", "row")

    def __init__(self, row: Tensor, col: Tensor, pos: Positions | None = None) -> None:
        super().__init__(pos)
        self.row, self.col = row, col

    def _dense(self, ask: Request) -> Tensor:
        return ask.pick(self.row, 1) @ ask.pick(self.col, 1).transpose(-1, -2)


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
        return ask.pick(self.values, 1)


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
        return None if None in keys else keys

    @property
    def per_head(self) -> bool:
        """See `Bias.per_head`."""
        return any(t.per_head for t in self.terms)

    @property
    def per_sample(self) -> bool:
        """See `Bias.per_sample`."""
        return any(t.per_sample for t in self.terms)

    def _dense(self, ask: Request) -> Tensor:
        total = self.terms[0].dense(*ask[:2], q=ask.q, k=ask.k, scale=ask.scale, heads=ask.heads)
        for term in self.terms[1:]:
            total = total + term.dense(*ask[:2], q=ask.q, k=ask.k, scale=ask.scale, heads=ask.heads)
        return total

    def table(self, grid: Grid) -> Tensor:
        """See `Bias.table`."""
        total = self.terms[0].table(grid)
        for term in self.terms[1:]:
            total = total + term.table(grid)
        return total


def _check_table(values: Tensor, grid: Grid) -> None:
    wanted = tuple(2 * n - 1 for n in grid.shape)
    if tuple(values.shape[1:]) != wanted:
        raise ShapeError(
            f"A bias table of shape {tuple(values.shape)} was given for tokens of {grid}, which need "
            f"(heads, {', '.join(map(str, wanted))})."
        )


def _table_index(pos_q: Positions, pos_k: Positions) -> Tensor:
    """Return which entry of the flat table (with 3 prefix values behind it) each pair reads, (b or 1, n, m)."""

    def make() -> Tensor:
        shape = [2 * n - 1 for n in pos_q.grid.shape] if pos_q.grid else []
        offset = pos_q.cells()[:, :, None] - pos_k.cells()[:, None]
        index = torch.zeros_like(offset[..., 0])
        for axis, span in enumerate(shape):
            index = index * span + offset[..., axis] + span // 2
        size = 1
        for span in shape:
            size = size * span
        from_patch, to_patch = pos_q.spatial[:, :, None], pos_k.spatial[:, None]
        index = torch.where(from_patch & to_patch, index, size + 2)
        index = torch.where(to_patch & ~from_patch, size, index)
        return torch.where(from_patch & ~to_patch, size + 1, index)

    return pos_q.remember("table index", make) if pos_k is pos_q else make()
