"""Lowering of biases to the single offset table that the fused kernels support."""

from __future__ import annotations

import torch
from torch import Tensor

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.dense import SumBias
from vispe.attention.bias.table import TableBias
from vispe.attention.precision import at_least_float32
from vispe.grid import Grid


def table_unsupported_reason(bias: Bias) -> str | None:
    """Return why `bias` cannot be expressed as one offset table on one grid, or None if it can."""
    if isinstance(bias, SumBias):
        reason = next((why for why in map(table_unsupported_reason, bias.terms) if why), None)
        # pairwise comparison: sizes may be symbolic, which are not hashable
        grids = [t.pos.grid for t in bias.terms if t.pos and t.pos.grid]
        differ = any((g.shape, g.prefix) != (grids[0].shape, grids[0].prefix) for g in grids)
        return reason or ("the terms of the bias are on different grids" if differ else None)
    if not bias.invariant and not isinstance(bias, TableBias):
        return f"{type(bias).__name__} depends on more than the offset between two tokens"
    pos = bias.pos
    if pos is None or pos.grid is None or pos.index is not None:
        return "the tokens are not a full grid in raster order"
    if not pos.static:
        return "positions with a gradient have no table"
    return None if pos.regular else "the tokens are not at the positions of their grid"


def lower_to_table(bias: Bias) -> tuple[Tensor, Tensor | None]:
    """Return the table (h or 1, 2 n_1 - 1, ...) and prefix values (h or 1, 3) or None of a bias.

    Only for biases for which `table_unsupported_reason` returns None.
    """
    if isinstance(bias, SumBias):
        # tables add up; prefix values may be missing in some terms
        (table, edge), *others = map(lower_to_table, bias.terms)
        for term_table, term_edge in others:
            table = table + term_table
            edge = term_edge if edge is None else edge if term_edge is None else edge + term_edge
        return table, edge
    if isinstance(bias, TableBias):
        return TableBias(at_least_float32(bias.values), bias.pos).table(_grid(bias)), bias.prefix
    return at_least_float32(bias.table(_grid(bias))), None


def shifted(table: Tensor, edge: Tensor | None, prefix: bool) -> tuple[Tensor, Tensor | None]:
    """Return the results of `lower_to_table` shifted to a maximum of 0, separately for patch and prefix queries.

    Softmax ignores a constant per query. Kernels add the product of queries and keys to the bias, so that a bias far
    from 0 would cost the product its last digits. The bias of prefix queries may be far below that of patches.

    Args:
        table: (h or 1, 2 n_1 - 1, ...).
        edge: (h or 1, 3), or None for zeros.
        prefix: whether there are prefix tokens.
    """
    maximum, prefix_maximum = row_maxima(table, edge, prefix)
    if prefix:
        edge = table.new_zeros(1, 3) if edge is None else edge
        edge = edge - torch.stack([prefix_maximum, maximum, prefix_maximum], 1)
    return table - maximum.reshape(-1, *[1] * (table.ndim - 1)), edge


def row_maxima(table: Tensor, edge: Tensor | None, prefix: bool) -> tuple[Tensor, Tensor]:
    """Return the constants that `shifted` subtracts from patch queries and from prefix queries, (h or 1,) each."""
    maximum = table.detach().flatten(1).amax(1)
    if not prefix:
        return _finite(maximum), torch.zeros_like(maximum)
    edge = table.new_zeros(1, 3) if edge is None else edge
    prefix_to_patch, patch_to_prefix, between = edge.detach().unbind(1)
    maximum = _finite(torch.maximum(maximum, patch_to_prefix))
    return maximum, _finite(torch.maximum(prefix_to_patch, between)).expand_as(maximum)


def _finite(maximum: Tensor) -> Tensor:
    """Return the maximum, 0 where all biases are -inf."""
    return maximum.nan_to_num(0.0, 0.0, 0.0)


def causal_unsupported_reason(bias: Bias | None) -> str | None:
    """Return why causal masking cannot be part of the table of `bias`, or None if it can."""
    if bias is None:
        return "is_causal is fused only together with a bias"
    if bias.pos is None or bias.pos.grid is None or table_unsupported_reason(bias):
        return "is_causal is fused only with a bias on one full grid"
    prefix = bias.pos.grid.prefix
    return f"is_causal is fused with at most one prefix token, got {prefix}" if prefix > 1 else None


def with_causal_mask(table: Tensor, edge: Tensor | None, grid: Grid) -> tuple[Tensor, Tensor | None]:
    """Return the results of `lower_to_table` with causal masking: -inf for keys after the query in token order.

    Patches are in raster order, so the sign of the flattened offset decides. A prefix token precedes all patches.
    """
    # flattened offset of query minus key in raster order
    steps = torch.zeros(1, dtype=torch.long, device=table.device)
    for n in grid.shape:
        steps = (steps[:, None] * (2 * n - 1) + torch.arange(1 - n, n, device=table.device)).flatten()
    table = table.masked_fill((steps < 0).view(table.shape[1:]), -torch.inf)
    if grid.prefix:
        edge = table.new_zeros(table.shape[0], 3) if edge is None else edge
        edge = edge.masked_fill(torch.tensor([True, False, False], device=edge.device), -torch.inf)
    return table, edge


def visible_offsets(table: Tensor, heads: int) -> Tensor:
    """Return the range of unmasked offsets from query to key, in tokens of raster order, (heads, 2) int32.

    Args:
        table: (h or 1, 2 n_1 - 1, 2 n_2 - 1, ...), -inf for masked offsets.
        heads: h.
    """
    shape = [(side + 1) // 2 for side in table.shape[1:]]
    step = torch.zeros(1, dtype=torch.int32, device=table.device)
    for n in shape:
        # tables are indexed by query minus key; one cell along an axis skips all tokens of the faster axes
        step = (step[:, None] * n + torch.arange(n - 1, -n, -1, device=table.device)).flatten()
    unmasked = table.detach().flatten(1) != -torch.inf
    # masked offsets count as 0, the offset of a token to itself
    lowest = torch.where(unmasked, step, 0).amin(1)
    highest = torch.where(unmasked, step, 0).amax(1)
    return torch.stack([lowest, highest], 1).to(torch.int32).expand(heads, 2).contiguous()


def _grid(bias: Bias) -> Grid:
    if bias.pos is None or bias.pos.grid is None:
        return Grid((1,))  # unreachable: `table_unsupported_reason` excludes such a bias
    return bias.pos.grid
