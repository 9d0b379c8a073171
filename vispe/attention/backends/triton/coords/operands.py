"""From a bias and the positions of its tokens to the numbers that the kernels of `coords` read for each token.

On a grid of which only some tokens are there, in any order, the bias of a pair is still one entry of the table of all
offsets, at the difference of two integers: its index is linear in both cells. Tokens without a place have integers that
lead to runs of constants behind the table. A distance is computed from coordinates instead, which need not be on a
grid: they are divided by the largest distance and wrapped here, so that the kernels only subtract and add.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.dense import SumBias
from vispe.attention.bias.distance_bias import DistanceBias
from vispe.attention.bias.distance_metrics import largest
from vispe.attention.bias.lower_to_table import table_of
from vispe.attention.bias.table import ProfileBias, TableBias
from vispe.attention.bias.windows import WindowMask
from vispe.attention.call import Call
from vispe.attention.precision import no_autocast
from vispe.errors import ShapeError
from vispe.grid import Positions

METRICS = {"euclidean": 1, "manhattan": 2, "chebyshev": 3, "squared": 4}  # as in `coords`


def not_placed(bias: Bias) -> str | None:
    """Return why `bias` is not a table at offsets of cells, a distance, or the sum of both; or None."""
    pos, (distances, tables) = bias.pos, _terms(bias)
    for term in tables:
        if isinstance(term, TableBias | ProfileBias | WindowMask):  # cells decide, wherever they are
            continue
        if not term.invariant:
            return f"{type(term).__name__} depends on more than the offset between two tokens"
        if term.pos is not None and not term.pos.in_place:
            return f"the tokens are not where their grid has them, and only there {type(term).__name__} is a table"
    if pos is None:
        return "the bias is not bound to positions"
    if not pos.static:
        return "gradients of positions are not fused"
    if not all(_alike(pos, term.pos) for term in (*distances, *tables)):
        return "the terms of the bias are bound to different positions"
    if len(distances) > 1:
        return "a sum of several distances is not fused"
    if sum(isinstance(term, WindowMask) for term in tables) > 1:
        return "a sum of several masks of windows is not fused"
    if tables and pos.grid is None:
        return f"{type(tables[0]).__name__} needs tokens of a grid"
    return None


def placed_attention(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return attention (b, h, n, d_v) of a call with a bias that `not_placed` has nothing against, or with none."""
    from vispe.attention.backends.triton.coords.op import coords_attention

    bias, device, heads = call.bias, q.device, q.shape[1]
    distances, tables = ([], []) if bias is None else _terms(bias)
    table = cells = slopes = places = period = segment = None
    metric = 0
    masks = [term for term in tables if isinstance(term, WindowMask)]
    tables = [term for term in tables if not isinstance(term, WindowMask)]
    with no_autocast(device):
        for term in masks:
            made = table_of(SumBias(tables))[0] if tables else None
            cells, table = term.cell_numbers(), term.widened(made).flatten(1).to(device, torch.float32)
        for term in tables[:1] if not masks else ():
            pos = _bound(term)
            cells = pos.remember("cell numbers", lambda pos=pos: cell_numbers(pos))
            table = extended(*table_of(term if len(tables) == 1 else SumBias(tables))).to(
                device, torch.float32
            )
        for term in distances:
            pos, metric = _bound(term), METRICS[term.metric]
            places, period = pos.remember(
                ("places", term.spacing, *term.rule), lambda term=term: places_of(term)
            )
            slopes = _slopes(term, pos).to(device)
    _check(heads, table, slopes)
    for numbers in (cells, places):
        if numbers is not None and numbers.shape[0] not in (1, q.shape[0]):
            raise ShapeError(
                f"The bias describes {numbers.shape[0]} samples, but there are {q.shape[0]}; make it from the "
                "positions of this input."
            )
    if slopes is not None:
        slopes = slopes.expand(heads).contiguous()
    if call.cu_seqlens is not None:
        segment = segments(call.cu_seqlens.to(device), q.shape[2])
    steady = bool(call.deterministic) or torch.are_deterministic_algorithms_enabled()
    keep = call.key_padding_mask
    return coords_attention(
        q, k, v, table, cells, slopes, places, period, segment, keep, metric, call.factor, steady
    )[0]


def cell_numbers(pos: Positions) -> Tensor:
    """Return two numbers per token, (b or 1, 2, n) int32: pairs read entry ``[0, i] - [1, j]`` of `extended`."""
    cells, size = pos.cells(), 1
    place = torch.zeros_like(cells[..., 0])
    for axis, n in enumerate(pos.grid.shape if pos.grid else ()):
        size = size * (2 * n - 1)
        place = place * (2 * n - 1) + cells[..., axis]
    middle = size // 2
    from_ = torch.where(pos.spatial, place + middle, 4 * middle + 2)
    to = torch.where(pos.spatial, place, -middle - 1)
    return torch.stack([from_, to], 1).to(torch.int32)


def extended(table: Tensor, edge: Tensor | None) -> Tensor:
    """Return the flat table with runs behind it of what pairs of prefix tokens read, (h or 1, length).

    Args:
        table: (h or 1, 2 n_1 - 1, ...).
        edge: (h or 1, 3) biases from prefix to patch, patch to prefix, prefix to prefix; zeros if None.
    """
    flat = table.flatten(1)
    run = flat.shape[1] // 2 + 1
    ends = flat.new_zeros(1, 3) if edge is None else edge.to(flat.dtype)
    heads = max(flat.shape[0], ends.shape[0])
    to_patch, to_prefix, between = (end[:, None].expand(heads, run) for end in ends.unbind(1))
    return torch.cat([flat.expand(heads, -1), to_prefix, to_patch, between], 1)


def places_of(bias: DistanceBias) -> tuple[Tensor, Tensor | None]:
    """Return whether tokens have a place and where, (b or 1, 1 + axes, n), and the periods (b or 1, axes), float32."""
    pos = bias.placed(_bound(bias))
    coords, extent, away = pos.coords.double(), pos.extent.double(), ~pos.spatial[..., None]
    if bias.wrap:
        coords = coords.remainder(extent[:, None])
    else:  # what all have in common costs precision
        coords = coords - coords.masked_fill(away, float("inf")).amin(1, keepdim=True)
    divisor = largest(pos.extent, pos.cell, pos.grid, *bias.rule)
    if divisor is not None:
        unit = divisor.double().sqrt() if bias.metric == "squared" else divisor.double()
        coords, extent = coords / unit[:, None, None], extent / unit[:, None]
    coords = coords.masked_fill(away, 0.0)
    there = pos.spatial[..., None].expand(coords.shape[0], -1, 1).to(coords.dtype)
    places = torch.cat([there, coords], -1).transpose(1, 2).float().contiguous()
    return places, extent.float().contiguous() if bias.wrap else None


def segments(ends: Tensor, tokens: int) -> Tensor:
    """Return where the sequence of each token begins and ends, (2, n) int32.

    Args:
        ends: (s + 1,) from 0 to `tokens`; what is beyond the last is a sequence of its own.
        tokens: n.
    """
    ends = ends.to(torch.int64)
    which = torch.bucketize(torch.arange(tokens, device=ends.device), ends, right=True)
    marks = torch.cat([ends.new_zeros(1), ends, ends.new_full((1,), tokens)]).clamp(0, tokens)
    return torch.stack([marks[which], marks[which + 1]]).to(torch.int32)


def _terms(bias: Bias) -> tuple[list[DistanceBias], list[Bias]]:
    """Return the distances in a bias and its other terms."""
    if isinstance(bias, DistanceBias):
        return [bias], []
    if not isinstance(bias, SumBias):
        return [], [bias]
    parts = [_terms(term) for term in bias.terms]
    return [d for some, _ in parts for d in some], [t for _, some in parts for t in some]


def _bound(bias: Bias) -> Positions:
    if bias.pos is None:
        raise ShapeError("A bias without positions was given to the kernels; bind it to positions.")
    return bias.pos


def _alike(a: Positions, b: Positions | None) -> bool:
    """Whether two objects say the same of where tokens are, so that one may stand for the other."""
    return a is b or (
        b is not None
        and a.coords is b.coords
        and a.spatial is b.spatial
        and a.index is b.index
        and a.grid == b.grid
    )


def _slopes(bias: DistanceBias, pos: Positions) -> Tensor:
    """Return the slopes (h or 1,) float32; those that are fixed are kept with the positions."""
    if isinstance(bias.slopes, Tensor):
        return bias.slope(pos.coords).float()
    return pos.remember(("slopes", bias.slopes), lambda: bias.slope(pos.coords).float())


def _check(heads: int, *tensors: Tensor | None) -> None:
    for tensor in tensors:
        if tensor is not None and tensor.shape[0] not in (1, heads):
            raise ShapeError(
                f"The bias has {tensor.shape[0]} heads, but there are {heads}; give 1 or {heads}."
            )
