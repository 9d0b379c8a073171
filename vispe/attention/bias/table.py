"""Biases read from an offset table, the general form of translation-invariant biases on a grid."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.dense import SumBias
from vispe.attention.bias.dense_request import DenseRequest
from vispe.attention.precision import at_least_float32, check_floating, no_infinity
from vispe.attention.score_terms import ScoreTerm, cell_numbers, extended, lookup_term
from vispe.errors import ShapeError
from vispe.grid import Grid, Positions


class TableBias(Bias):
    """A bias read from an offset table (relative position bias of Swin and BEiT, and any other bias on a grid).

    Args:
        values: (h or 1, 2 n_1 - 1, 2 n_2 - 1, ...) for the grid of the positions.
        pos: the positions it is bound to.
        prefix: (h or 1, 3) values for prefix-to-patch, patch-to-prefix, prefix-to-prefix; zeros by default.
        one_grid: whether the values are specific to this grid; False if they depend only on offsets, so that one
            table fits samples of several grids.
        is_sparse: whether so many values are -inf that kernels should skip fully masked blocks.
        depends_on: options and tensors that determine `values` and `prefix`, if these are computed in each call; in
            evaluation, masks and strips are cached while both are equal.

    Raises:
        ShapeError: a tensor is not floating point, `prefix` does not have 3 columns, or on use, `values` do not fit
            the grid.

    Example:
        >>> import torch
        >>> from vispe import Grid
        >>> table = torch.tensor([[[10.0, 20.0, 30.0]]])  # offsets -1, 0, 1 along a row of two tokens
        >>> TableBias(table, Grid((1, 2)).positions()).dense()[0, 0]
        tensor([[20., 10.],
                [30., 20.]])
    """

    __slots__ = ("_is_sparse", "depends_on", "one_grid", "prefix", "values")

    def __init__(
        self,
        values: Tensor,
        pos: Positions | None = None,
        prefix: Tensor | None = None,
        *,
        one_grid: bool = True,
        is_sparse: bool = False,
        depends_on: tuple[Hashable, tuple[Tensor, ...]] | None = None,
    ) -> None:
        super().__init__(pos)
        if prefix is not None and (prefix.ndim != 2 or prefix.shape[1] != 3):
            raise ShapeError(f"TableBias needs prefix values (heads or 1, 3), got {tuple(prefix.shape)}.")
        check_floating("TableBias", values=values, prefix=prefix)
        self.values, self.prefix, self.one_grid, self._is_sparse = values, prefix, one_grid, is_sparse
        self.depends_on = depends_on

    @property
    def is_sparse(self) -> bool:
        """Whether many pairs are masked, as declared at construction."""
        return self._is_sparse

    @property
    def invariant(self) -> bool:
        """Whether there are no prefix values, which are not part of an offset table."""
        return self.prefix is None

    @property
    def between_positions(self) -> bool:
        """True: also with prefix values."""
        return True

    @property
    def per_head(self) -> bool:
        """Whether heads differ."""
        return self.values.shape[0] > 1 or (self.prefix is not None and self.prefix.shape[0] > 1)

    @property
    def finite(self) -> bool:
        """Whether it is known to contain no infinity."""
        return not self.is_sparse and no_infinity(self.values, self.prefix)

    def _score_terms(self) -> list[ScoreTerm]:
        pos = self._bound("score_mod")
        if pos.grid is None:
            return super()._score_terms()
        _check_table(self.values, pos.grid)
        return [lookup_term(extended(at_least_float32(self.values), self.prefix), cell_numbers(pos))]

    def _dense(self, request: DenseRequest) -> Tensor:
        pos_q, pos_k = request.positions(self.pos)
        if pos_q.grid is None or pos_k.grid is None or pos_q.grid.shape != pos_k.grid.shape:
            raise ShapeError(
                f"A bias table needs queries and keys of one grid, got {pos_q.grid} and {pos_k.grid}. "
                "Use a DistanceBias for free coordinates."
            )
        # (h, table) + (h, 3) -> one flat table per head, indexed by `table_index`
        _check_table(self.values, pos_q.grid)
        flat = at_least_float32(request.pick(self.values)).flatten(1)
        extra = flat.new_zeros(1, 3) if self.prefix is None else at_least_float32(request.pick(self.prefix))
        heads = max(flat.shape[0], extra.shape[0])
        # (h, table entries + 3): the prefix values follow the table
        flat = torch.cat([flat.expand(heads, -1), extra.expand(heads, -1)], 1)
        index = table_index(pos_q, pos_k)
        chosen = flat.index_select(1, index.flatten())
        return chosen.reshape(-1, *index.shape).transpose(0, 1)

    def table(self, grid: Grid) -> Tensor:
        """Return the offset table (h or 1, 2 n_1 - 1, 2 n_2 - 1, ...) on a grid."""
        _check_table(self.values, grid)
        return self.values if self.prefix is None else super().table(grid)


class ProfileBias(Bias):
    """``slope[h] * profile(offset)``: one table shared by all heads, with one factor per head.

    Args:
        slopes: factors of the heads (h,).
        profile: offset table (1, 2 n_1 - 1, ...).
        pos: the positions it is bound to.

    Raises:
        ShapeError: a tensor is not floating point.

    Example:
        >>> import torch
        >>> from vispe import Grid
        >>> profile = torch.tensor([[[1.0, 0.0, 1.0]]])
        >>> ProfileBias(torch.tensor([1.0, -2.0]), profile, Grid((1, 2)).positions()).dense()[0, 1]
        tensor([[-0., -2.],
                [-2., -0.]])
    """

    __slots__ = ("profile", "slopes")

    def __init__(self, slopes: Tensor, profile: Tensor, pos: Positions | None = None) -> None:
        super().__init__(pos)
        check_floating("ProfileBias", slopes=slopes, profile=profile)
        self.slopes, self.profile = slopes, TableBias(profile, pos)

    @property
    def invariant(self) -> bool:
        """Whether it depends only on the offset between two tokens."""
        return True

    @property
    def finite(self) -> bool:
        """Whether it is known to contain no infinity."""
        return no_infinity(self.slopes, self.profile.values)

    def _score_terms(self) -> list[ScoreTerm]:
        pos = self._bound("score_mod")
        if pos.grid is None:
            return super()._score_terms()
        table = at_least_float32(self.profile.values) * self.slopes.reshape(-1, *[1] * pos.grid.axes)
        return [lookup_term(extended(table, None), cell_numbers(pos))]

    def _dense(self, request: DenseRequest) -> Tensor:
        shared = self.profile.dense(request.pos_q, request.pos_k)
        return shared * request.pick(self.slopes)[:, None, None]

    def table(self, grid: Grid) -> Tensor:
        """Return the offset table (h or 1, 2 n_1 - 1, 2 n_2 - 1, ...) on a grid."""
        return at_least_float32(self.profile.table(grid)) * self.slopes.reshape(-1, *[1] * grid.axes)


def has_grid_table(bias: Bias | None) -> bool:
    """Whether a bias, or one of its terms, has a table that is specific to one grid."""
    if isinstance(bias, SumBias):
        return any(has_grid_table(term) for term in bias.terms)
    return isinstance(bias, TableBias) and bias.one_grid


def _check_table(values: Tensor, grid: Grid) -> None:
    expected = tuple(2 * n - 1 for n in grid.shape)
    if tuple(values.shape[1:]) != expected:
        raise ShapeError(
            f"A bias table for tokens of {grid} needs shape (heads, {', '.join(map(str, expected))}), "
            f"got {tuple(values.shape)}."
        )


def table_index(pos_q: Positions, pos_k: Positions) -> Tensor:
    """Return the index of each pair in the flat table followed by 3 prefix values, (b or 1, n, m) int64."""

    def compute() -> Tensor:
        size = 1
        from_, to = torch.zeros_like(pos_q.cells()[..., 0]), torch.zeros_like(pos_k.cells()[..., 0])
        # the index is linear in both cells, so it is the difference of one number per query and one per key
        for axis, n in enumerate(pos_q.grid.shape if pos_q.grid else ()):
            size = size * (2 * n - 1)
            from_ = from_ * (2 * n - 1) + pos_q.cells()[..., axis]
            to = to * (2 * n - 1) + pos_k.cells()[..., axis]
        index = from_[:, :, None] - to[:, None] + size // 2
        # pairs with prefix tokens read one of the 3 values after the table
        from_patch, to_patch = pos_q.spatial[:, :, None], pos_k.spatial[:, None]
        index = torch.where(from_patch & to_patch, index, size + 2)
        index = torch.where(to_patch & ~from_patch, size, index)
        return torch.where(from_patch & ~to_patch, size + 1, index)

    return pos_q.remember("table index", compute) if pos_k is pos_q else compute()
