"""Per-token operands of the coordinate kernels, computed from a bias and the positions of its tokens.

For any subset of grid tokens in any order, the bias of a pair is one entry of the offset table, at the difference of
two integers, since its index is linear in both cells. The integers of tokens without a position lead to constant runs
after the table. A distance is computed from coordinates instead, which need not be on a grid: they are normalised and
wrapped here, so that the kernels only subtract and add.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.cross import CrossAttentionBias
from vispe.attention.bias.dense import SumBias
from vispe.attention.bias.distance_bias import DistanceBias
from vispe.attention.bias.lower_to_table import lower_to_table, row_maxima, shifted
from vispe.attention.bias.table import ProfileBias, TableBias
from vispe.attention.bias.windows import WindowMask
from vispe.attention.call import Call
from vispe.attention.score_terms import cell_numbers, extended
from vispe.errors import ShapeError
from vispe.grid import Positions
from vispe.utils.autocast import no_autocast

SEVERAL = "a sum of several distances is not fused"
METRICS = {"euclidean": 1, "manhattan": 2, "chebyshev": 3, "squared": 4}  # as in `forward`


def coords_unsupported_reason(bias: Bias) -> str | None:
    """Return why `bias` is not an offset table, a distance, or the sum of both; or None."""
    if isinstance(bias, CrossAttentionBias):
        return _cross_unsupported_reason(bias)
    pos, (distances, tables) = bias.pos, _terms(bias)
    for term in tables:
        # these depend on cells only, whatever the coordinates are
        if isinstance(term, TableBias | ProfileBias | WindowMask):
            continue
        if not term.invariant:
            return f"{type(term).__name__} depends on more than the offset between two tokens"
        if term.pos is not None and not term.pos.on_grid:
            return (
                f"the tokens are not at the positions of their grid, so {type(term).__name__} is not a table"
            )
    if pos is None:
        return "the bias is not bound to positions"
    if not pos.static:
        return "gradients of positions are not supported by the fused kernels"
    if not all(_same_positions(pos, term.pos) for term in (*distances, *tables)):
        return "the terms of the bias are bound to different positions"
    if len(distances) > 1:
        return SEVERAL
    if sum(isinstance(term, WindowMask) for term in tables) > 1:
        return "a sum of several masks of windows is not fused"
    if tables and pos.grid is None:
        return f"{type(tables[0]).__name__} needs tokens of a grid"
    return None


def _cross_unsupported_reason(bias: CrossAttentionBias) -> str | None:
    pos_q, pos_k, (distances, tables) = bias.pos_q, bias.pos_k, _terms(bias.bias)
    if not (pos_q.static and pos_k.static):
        return "gradients of positions are not supported by the fused kernels"
    if len(distances) > 1:
        return SEVERAL
    for term in tables:
        grid, name = None if term.pos is None else term.pos.grid, type(term).__name__
        if grid is None or pos_q.grid is None or pos_k.grid is None:
            return f"{name} needs tokens of a grid"
        # a table is indexed by cells, which may be those of any tokens
        if not grid.shape == pos_q.grid.shape == pos_k.grid.shape:
            return f"queries and keys are not on the grid of the {name}"
        if isinstance(term, TableBias | ProfileBias):
            continue
        on_grid = pos_q.on_grid and pos_k.on_grid
        if not (on_grid and grid.spacing == pos_q.grid.spacing == pos_k.grid.spacing):
            return f"queries and keys are not at the positions of the grid, so {name} is not a table"
    return None


def attend_coords(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Callable[[], Tensor]]:
    """Return attention (b, h, n, d_v) of a call without a bias, or with one that these kernels support.

    The other results are the row sums of `sums_of`, and a function that returns the constants that were subtracted from
    the rows of the bias, broadcastable to (b, h, n).
    """
    from vispe.attention.backends.triton.coords.launch import table_shift
    from vispe.attention.backends.triton.coords.op import attend

    bias, device, heads = call.bias, q.device, q.shape[1]
    cross = bias if isinstance(bias, CrossAttentionBias) else None
    distances, tables = ([], []) if bias is None else _terms(bias if cross is None else cross.bias)
    pos_of_rows = None if bias is None else bias.pos if cross is None else cross.pos_q
    table = cells = slopes = coords = period = segment = None
    lowered: tuple[Tensor, Tensor | None] | None = None
    metric = 0
    masks = [term for term in tables if isinstance(term, WindowMask)]
    tables = [term for term in tables if not isinstance(term, WindowMask)]
    with no_autocast(device):
        # masks of windows: one table for mask and bias together, with separate cells
        for term in masks:
            lowered = lower_to_table(SumBias(tables)) if tables else None
            bias_table = None if lowered is None else shifted(*lowered, False)[0]
            cells, table = term.cell_numbers(), term.widened(bias_table).flatten(1).to(device, torch.float32)
        for term in tables[:1] if not masks else ():
            pos = _bound(term) if cross is None else queries_then_keys(cross.pos_q, cross.pos_k)
            cells = pos.remember("cell numbers", lambda pos=pos: cell_numbers(pos))
            # all tables are summed, since they share one index
            lowered = lower_to_table(term if len(tables) == 1 else SumBias(tables))
            table = extended(*shifted(*lowered, True)).to(device, torch.float32)
        for term in distances:
            metric = METRICS[term.metric]
            # in the spacing of the bias before they are joined, since their cells may differ
            pos = _bound(term)
            if cross is not None:
                pos = queries_then_keys(term.in_spacing(cross.pos_q), term.in_spacing(cross.pos_k))
            # coordinates depend on positions only and are cached
            coords, period = pos.remember(
                ("coords", term.spacing, *term.rule), lambda term=term, pos=pos: term.coords(pos)
            )
            slopes = _slopes(term, pos).to(device)
    _check_heads(heads, table, slopes)
    for numbers in (cells, coords):
        if numbers is not None and numbers.shape[0] not in (1, q.shape[0]):
            raise ShapeError(
                f"The bias must have 1 or {q.shape[0]} samples, got {numbers.shape[0]}. Create it from the positions "
                "of this input."
            )
    # kernels read one slope per head
    if slopes is not None:
        slopes = slopes.expand(heads).contiguous()
    if call.cu_seqlens is not None:
        segment = segments(call.cu_seqlens.to(device), q.shape[2])
    out, sums = attend(
        q, k, v, table, cells, slopes, coords, period, segment, call.key_padding_mask, metric, call.factor,
        call.reproducible,
    )  # fmt: skip

    def constant() -> Tensor:
        if table is None:
            return sums.new_zeros(())
        with torch.no_grad():
            # `Operands.read` shifts the table again
            top = table_shift(table)
            if lowered is None or pos_of_rows is None:
                return top
            patches, prefix = (t.to(top)[:, None] for t in row_maxima(*lowered, not masks))
            return top + torch.where(pos_of_rows.spatial[:, None], patches, prefix)

    return out, sums, constant


def queries_then_keys(pos_q: Positions, pos_k: Positions) -> Positions:
    """Return the positions of queries followed by those of keys, on the grid and in the extent of the queries."""
    samples = max(pos_q.coords.shape[0], pos_k.coords.shape[0])
    coords, spatial, index = (
        torch.cat([t.expand(samples, *t.shape[1:]) for t in pair], 1)
        for pair in (
            (pos_q.coords, pos_k.coords.to(pos_q.coords)),
            (pos_q.spatial, pos_k.spatial),
            (pos_q.numbers(), pos_k.numbers()),
        )
    )
    return Positions(coords, spatial, pos_q.extent, cell=pos_q.cell, index=index, grid=pos_q.grid)


def segments(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Return the start and end of the packed sequence of each token, (2, n) int32.

    Args:
        cu_seqlens: cumulative lengths (s + 1,) from 0 to `tokens`; tokens after the last are a separate sequence.
        tokens: n.
    """
    cu_seqlens = cu_seqlens.to(torch.int64)
    sequence = torch.bucketize(torch.arange(tokens, device=cu_seqlens.device), cu_seqlens, right=True)
    bounds = torch.cat([cu_seqlens.new_zeros(1), cu_seqlens, cu_seqlens.new_full((1,), tokens)]).clamp(
        0, tokens
    )
    return torch.stack([bounds[sequence], bounds[sequence + 1]]).to(torch.int32)


def _terms(bias: Bias) -> tuple[list[DistanceBias], list[Bias]]:
    """Return the distance terms of a bias and its other terms."""
    if isinstance(bias, DistanceBias):
        return [bias], []
    if not isinstance(bias, SumBias):
        return [], [bias]
    parts = [_terms(term) for term in bias.terms]
    return [d for group, _ in parts for d in group], [t for _, group in parts for t in group]


def _bound(bias: Bias) -> Positions:
    if bias.pos is None:
        raise ShapeError(
            "The triton backend needs a bias with positions, got pos=None. Bind it to positions."
        )
    return bias.pos


def _same_positions(a: Positions, b: Positions | None) -> bool:
    """Whether two positions are equal, by identity of their tensors."""
    return a is b or (
        b is not None
        and a.coords is b.coords
        and a.spatial is b.spatial
        and a.index is b.index
        and a.grid == b.grid
    )


def _slopes(bias: DistanceBias, pos: Positions) -> Tensor:
    """Return the slopes (h or 1,) float32; fixed slopes are cached with the positions."""
    if isinstance(bias.slopes, Tensor):
        return bias.slope(pos.coords).float()
    return pos.remember(("slopes", bias.slopes), lambda: bias.slope(pos.coords).float())


def _check_heads(heads: int, *tensors: Tensor | None) -> None:
    for tensor in tensors:
        if tensor is not None and tensor.shape[0] not in (1, heads):
            raise ShapeError(f"The bias must have 1 or {heads} heads, got {tensor.shape[0]}.")
