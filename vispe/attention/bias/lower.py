"""From a description of a bias to the one table that the kernels know."""

from __future__ import annotations

from torch import Tensor

from vispe.attention.bias.base import Bias
from vispe.attention.bias.dense import SumBias
from vispe.attention.bias.table import TableBias
from vispe.attention.precision import at_least_float32
from vispe.grid import Grid


def not_a_table(bias: Bias) -> str | None:
    """Return why `bias` is not one table on one grid, or None."""
    if isinstance(bias, SumBias):
        reason = next((why for why in map(not_a_table, bias.terms) if why), None)
        fields = {(t.pos.grid.shape, t.pos.grid.prefix) for t in bias.terms if t.pos and t.pos.grid}
        return reason or ("the terms of the bias are on different grids" if len(fields) > 1 else None)
    if not bias.invariant and not isinstance(bias, TableBias):
        return f"{type(bias).__name__} depends on more than the offset between two tokens"
    pos = bias.pos
    if pos is None or pos.grid is None or pos.index is not None:
        return "the tokens are not a full grid in order"
    if not pos.static:
        return "positions with a gradient have no table"
    return None if pos.regular else "the tokens are not where their grid has them"


def table_of(bias: Bias) -> tuple[Tensor, Tensor | None]:
    """Return table (h or 1, 2 n_1 - 1, ...) and edge (h or 1, 3) of a bias that `not_a_table` has nothing against."""
    if isinstance(bias, SumBias):
        (table, edge), *others = map(table_of, bias.terms)
        for more, ends in others:
            table = table + more
            edge = ends if edge is None else edge if ends is None else edge + ends
        return table, edge
    if isinstance(bias, TableBias):
        return TableBias(at_least_float32(bias.values), bias.pos).table(_grid(bias)), bias.prefix
    return at_least_float32(bias.table(_grid(bias))), None


def _grid(bias: Bias) -> Grid:
    if bias.pos is None or bias.pos.grid is None:
        return Grid((1,))  # not reached: such a bias is refused
    return bias.pos.grid
