"""Biases that read a table of offsets: the form that every translation-invariant bias on a grid can take."""

from __future__ import annotations

import torch
from torch import Tensor

from vispe.attention.bias.abstract_bias import Bias, Request
from vispe.attention.bias.dense import SumBias
from vispe.attention.precision import at_least_float32, no_infinity
from vispe.errors import ShapeError
from vispe.grid import Grid, Positions


class TableBias(Bias):
    """A bias read from a table of offsets (Swin, BEiT, or any other bias made a table).

    Args:
        values: (h or 1, 2 n_1 - 1, 2 n_2 - 1, ...) for the grid that the positions come from.
        pos: the positions it is bound to.
        prefix: (h or 1, 3) values for prefix-to-patch, patch-to-prefix, prefix-to-prefix; zeros by default.
        one_grid: whether the values would differ on another grid; False where offsets alone decide, so that one
            table serves samples of several grids.
        hides: whether so many values are -inf that whole blocks of the logits are; kernels pass over these.

    Example:
        >>> import torch
        >>> from vispe import Grid
        >>> table = torch.tensor([[[10.0, 20.0, 30.0]]])  # offsets -1, 0, 1 along a row of two tokens
        >>> TableBias(table, Grid((1, 2)).positions()).dense()[0, 0]
        tensor([[20., 10.],
                [30., 20.]])
    """

    __slots__ = ("_hides", "one_grid", "prefix", "values")

    def __init__(
        self,
        values: Tensor,
        pos: Positions | None = None,
        prefix: Tensor | None = None,
        *,
        one_grid: bool = True,
        hides: bool = False,
    ) -> None:
        super().__init__(pos)
        if prefix is not None and (prefix.ndim != 2 or prefix.shape[1] != 3):
            raise ShapeError(f"TableBias needs prefix values (heads or 1, 3), got {tuple(prefix.shape)}.")
        self.values, self.prefix, self.one_grid, self._hides = values, prefix, one_grid, hides

    @property
    def hides(self) -> bool:
        """Whether it was made as one that hides many pairs."""
        return self._hides

    @property
    def invariant(self) -> bool:
        """Whether there are no prefix values, which have no place in a table."""
        return self.prefix is None

    @property
    def per_head(self) -> bool:
        """Whether heads differ."""
        return self.values.shape[0] > 1 or (self.prefix is not None and self.prefix.shape[0] > 1)

    @property
    def finite(self) -> bool:
        """Whether it is known to hold no infinity."""
        return not self.hides and no_infinity(self.values, self.prefix)

    def _dense(self, ask: Request) -> Tensor:
        pos_q, pos_k = ask.where(self.pos)
        if pos_q.grid is None or pos_k.grid is None or pos_q.grid.shape != pos_k.grid.shape:
            raise ShapeError(
                f"A bias table needs queries and keys of one grid, got {pos_q.grid} and {pos_k.grid}; "
                "use a DistanceBias for free coordinates."
            )
        _check_table(self.values, pos_q.grid)
        flat = at_least_float32(ask.pick(self.values)).flatten(1)
        extra = flat.new_zeros(1, 3) if self.prefix is None else at_least_float32(ask.pick(self.prefix))
        heads = max(flat.shape[0], extra.shape[0])
        flat = torch.cat([flat.expand(heads, -1), extra.expand(heads, -1)], 1)
        index = table_index(pos_q, pos_k)
        chosen = flat.index_select(1, index.flatten())
        return chosen.reshape(-1, *index.shape).transpose(0, 1)

    def table(self, grid: Grid) -> Tensor:
        """Return its table (h or 1, 2 n_1 - 1, 2 n_2 - 1, ...) on a grid."""
        _check_table(self.values, grid)
        return self.values if self.prefix is None else super().table(grid)


class ProfileBias(Bias):
    """``slope[h] * profile(offset)``: one shared table, one factor per head.

    Args:
        slopes: (h,).
        profile: (1, 2 n_1 - 1, ...).
        pos: the positions it is bound to.

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
        self.slopes, self.profile = slopes, TableBias(profile, pos)

    @property
    def invariant(self) -> bool:
        """Whether it depends on nothing but the offset between two tokens."""
        return True

    @property
    def finite(self) -> bool:
        """Whether it is known to hold no infinity."""
        return no_infinity(self.slopes, self.profile.values)

    def _dense(self, ask: Request) -> Tensor:
        shared = self.profile.dense(ask.pos_q, ask.pos_k)
        return shared * ask.pick(self.slopes)[:, None, None]

    def table(self, grid: Grid) -> Tensor:
        """Return its table (h or 1, 2 n_1 - 1, 2 n_2 - 1, ...) on a grid."""
        return at_least_float32(self.profile.table(grid)) * self.slopes.reshape(-1, *[1] * grid.axes)


def has_grid_table(bias: Bias | None) -> bool:
    """Whether there is a table in a bias, or in one of its terms, that was made for one grid."""
    if isinstance(bias, SumBias):
        return any(has_grid_table(term) for term in bias.terms)
    return isinstance(bias, TableBias) and bias.one_grid


def _check_table(values: Tensor, grid: Grid) -> None:
    wanted = tuple(2 * n - 1 for n in grid.shape)
    if tuple(values.shape[1:]) != wanted:
        raise ShapeError(
            f"A bias table of shape {tuple(values.shape)} was given for tokens of {grid}, which need "
            f"(heads, {', '.join(map(str, wanted))})."
        )


def table_index(pos_q: Positions, pos_k: Positions) -> Tensor:
    """Return which entry of the flat table (with 3 prefix values behind it) each pair reads, (b or 1, n, m)."""

    def make() -> Tensor:
        size = 1
        from_, to = torch.zeros_like(pos_q.cells()[..., 0]), torch.zeros_like(pos_k.cells()[..., 0])
        for axis, n in enumerate(pos_q.grid.shape if pos_q.grid else ()):  # the index is linear in both cells
            size = size * (2 * n - 1)
            from_ = from_ * (2 * n - 1) + pos_q.cells()[..., axis]
            to = to * (2 * n - 1) + pos_k.cells()[..., axis]
        index = from_[:, :, None] - to[:, None] + size // 2
        from_patch, to_patch = pos_q.spatial[:, :, None], pos_k.spatial[:, None]
        index = torch.where(from_patch & to_patch, index, size + 2)
        index = torch.where(to_patch & ~from_patch, size, index)
        return torch.where(from_patch & ~to_patch, size + 1, index)

    return pos_q.remember("table index", make) if pos_k is pos_q else make()
