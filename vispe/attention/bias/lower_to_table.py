"""From a description of a bias to the one table that the kernels know."""

from __future__ import annotations

import torch
from torch import Tensor

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.dense import SumBias
from vispe.attention.bias.table import TableBias
from vispe.attention.precision import at_least_float32
from vispe.grid import Grid


def not_a_table(bias: Bias) -> str | None:
    """Return why `bias` is not one table on one grid, or None."""
    if isinstance(bias, SumBias):
        reason = next((why for why in map(not_a_table, bias.terms) if why), None)
        # compared in pairs: sizes may be symbols, which have no hash
        grids = [t.pos.grid for t in bias.terms if t.pos and t.pos.grid]
        differ = any((g.shape, g.prefix) != (grids[0].shape, grids[0].prefix) for g in grids)
        return reason or ("the terms of the bias are on different grids" if differ else None)
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


def not_causal(bias: Bias | None) -> str | None:
    """Return why tokens that see none behind them are not a table with `bias`, or None."""
    if bias is None:
        return "is_causal is fused with a bias only"
    if bias.pos is None or bias.pos.grid is None or not_a_table(bias):
        return "is_causal is fused with a bias on one full grid only"
    prefix = bias.pos.grid.prefix
    return f"is_causal is fused with one prefix token at most, and there are {prefix}" if prefix > 1 else None


def behind(table: Tensor, edge: Tensor | None, grid: Grid) -> tuple[Tensor, Tensor | None]:
    """Return what `table_of` returned with -inf for keys behind the query, in the order of the tokens.

    Of two patches the one with the larger row comes later, and in a row the one with the larger column: the offset
    decides. A prefix token comes before all patches.
    """
    steps = torch.zeros(1, dtype=torch.long, device=table.device)
    for n in grid.shape:
        steps = (steps[:, None] * (2 * n - 1) + torch.arange(1 - n, n, device=table.device)).flatten()
    table = table.masked_fill((steps < 0).view(table.shape[1:]), -torch.inf)
    if grid.prefix:
        edge = table.new_zeros(table.shape[0], 3) if edge is None else edge
        edge = edge.masked_fill(torch.tensor([True, False, False], device=edge.device), -torch.inf)
    return table, edge


def _grid(bias: Bias) -> Grid:
    if bias.pos is None or bias.pos.grid is None:
        return Grid((1,))  # not reached: such a bias is refused
    return bias.pos.grid
