"""Attention with a bias of few columns: the columns are appended to q and k, no mask is made.

``-m |p_i - p_j|^2 = 2 m p_i . p_j - m |p_i|^2 - m |p_j|^2`` has rank a + 2. In half precision the columns
would lose digits, so each number of q's side is split into parts that the dtype holds exactly, against a
k's side (centred cell numbers) that it holds exactly too. In float32 the sum of the columns cancels: its error
is about 2^-24 of slope times largest squared distance, so steep slopes without a divisor lose digits (relative
error 5e-5 for slope 1 on 64 x 64 cells, where a mask has 2e-7).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from vispe.attention.backends import sdpa
from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.dense import LowRankBias
from vispe.attention.bias.distance_bias import DistanceBias
from vispe.attention.bias.distance_metrics import largest
from vispe.attention.call import Call
from vispe.attention.precision import readable
from vispe.errors import BackendUnavailable


def refuses(call: Call) -> str | None:
    """Return why this backend cannot serve `call`, or None."""
    bias = call.bias
    if isinstance(bias, LowRankBias):
        if readable(bias.row) and not bias.finite:
            return "columns that hold an infinity cannot be multiplied with others"
        half = call.dtype in (torch.float16, torch.bfloat16)
        return "columns given as tensors would be rounded in half precision" if half else sdpa.refuses(call)
    if not isinstance(bias, DistanceBias) or bias.metric != "squared" or bias.wrap:
        return "only squared distance without wrap, and LowRankBias, have few columns"
    if bias.pos is None or bias.pos.grid is None or not bias.pos.in_place or not bias.pos.static:
        return "free coordinates cannot be split exactly; only those of tokens that are where their grid has them"
    dtype = call.dtype
    if dtype == torch.float16:
        return "squared distances in cells overflow float16"
    if dtype == torch.bfloat16 and max(bias.pos.grid.shape) > 512:
        return "bfloat16 holds centred cell numbers exactly only up to 512 cells per axis"
    return sdpa.refuses(call)


def run(call: Call) -> Tensor:
    """Return attention (b, h, n, d_v) in the dtype of q."""
    q, k, v = call.transformed()
    dtype = call.dtype
    row, col = _columns(call.bias, call.factor, dtype)
    pad = -(q.shape[-1] + row.shape[-1]) % 8  # kernels want a width that is a multiple of 8
    # where the bias is all there is, its columns take the place of queries and keys
    if call.whole:
        q, k, pad = q[..., :0], k[..., :0], -row.shape[-1] % 8
    wide = Call(
        _append(q, row, pad, dtype),
        _append(k, col, pad, dtype),
        v.to(dtype),
        attn_mask=call.attn_mask,
        key_padding_mask=call.key_padding_mask,
        is_causal=call.is_causal,
        cu_seqlens=call.cu_seqlens,
        scale=call.factor,
        dropout_p=call.dropout_p,
        deterministic=call.deterministic,
    )
    return call.finish(sdpa.run(wide))


def _append(x: Tensor, columns: Tensor, pad: int, dtype: torch.dtype) -> Tensor:
    columns = F.pad(columns.to(dtype), (0, pad)).expand(x.shape[0], x.shape[1], -1, -1)
    return torch.cat([x.to(dtype), columns], -1)


def _columns(bias: Bias | None, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return row (b or 1, h or 1, n, r) and col (b or 1, h or 1, m, r) with ``factor * row . col`` the bias."""
    if isinstance(bias, LowRankBias):
        heads = max(bias.row.shape[1], bias.col.shape[1])
        return bias.row.expand(-1, heads, -1, -1) / factor, bias.col.expand(-1, heads, -1, -1)
    if not isinstance(bias, DistanceBias) or bias.pos is None:
        raise BackendUnavailable(
            f"lowrank was given {type(bias).__name__}; it serves squared distances only."
        )
    pos = bias.placed(bias.pos)
    unit = pos.cell.square() / factor  # (b or 1, a): squared length of a cell
    divisor = largest(pos.extent, pos.cell, pos.grid, *bias.rule)
    if divisor is not None:
        unit = unit / divisor[:, None]
    centre = ((pos.extent / pos.cell).round() / 2).floor()
    cells = ((pos.cells() - centre[:, None]) * pos.spatial[..., None])[:, None]  # (b or 1, 1, n, a), whole
    placed = pos.spatial[:, None, :, None].to(cells.dtype)
    slope = bias.slope(cells)[:, None, None]
    scaled = cells * unit[:, None, None] * slope  # (b or 1, h or 1, n, a)
    norm = (scaled * cells).sum(-1, keepdim=True)  # slope * |p|^2
    rows: list[Tensor] = []
    cols: list[Tensor] = []
    for axis in range(pos.axes):
        parts = _split(2 * scaled[..., axis : axis + 1], dtype)
        rows += parts
        cols += [cells[..., axis : axis + 1]] * len(parts)
    parts = _split(-norm, dtype)
    rows += parts + [placed] * len(parts)
    cols += [placed] * len(parts) + parts
    heads = norm.shape[1]
    row, col = (torch.cat([t.expand(-1, heads, -1, -1) for t in side], -1) for side in (rows, cols))
    return row, col


def _split(x: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Return parts that `dtype` holds exactly and that sum to x up to 2^-24."""
    if dtype != torch.bfloat16:
        return [x]
    parts: list[Tensor] = []
    for _ in range(3):
        part = x.to(dtype).to(x.dtype)
        parts.append(part)
        x = x - part
    return parts
