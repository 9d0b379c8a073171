"""Low-rank backend: the columns of a low-rank bias are appended to q and k instead of computing a mask.

``-m |p_i - p_j|^2 = 2 m p_i . p_j - m |p_i|^2 - m |p_j|^2`` has rank a + 2 for a axes. Since half precision would
round the columns, each number on the side of q is split into parts that the dtype represents exactly, and the side of k
(centred cell indices) is exact as well. In float32 the sum of the columns cancels: its error is about 2^-24 of slope
times largest squared distance, so steep slopes without normalisation lose precision (relative error 5e-5 for slope 1 on
64 x 64 cells, where a mask has 2e-7).
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
from vispe.errors import BackendUnavailable, OptionError, UnsupportedCombination


def unsupported_reason(call: Call) -> str | None:
    """Return why this backend does not support `call`, or None."""
    bias = call.bias
    if isinstance(bias, LowRankBias):
        if readable(bias.row) and not bias.finite:
            return "columns that contain an infinity cannot be multiplied with others"
        half = call.dtype in (torch.float16, torch.bfloat16)
        return (
            "columns that are tensors would be rounded in half precision"
            if half
            else sdpa.unsupported_reason(call)
        )
    if not isinstance(bias, DistanceBias) or bias.metric != "squared" or bias.wrap:
        return "only squared distance without wrap and LowRankBias have low rank"
    if bias.pos is None or bias.pos.grid is None or not bias.pos.on_grid or not bias.pos.static:
        return "free coordinates cannot be split exactly, only positions on a regular grid can"
    dtype = call.dtype
    if dtype == torch.float16:
        return "squared distances in cells overflow float16"
    if dtype == torch.bfloat16 and max(bias.pos.grid.shape) > 512:
        return "bfloat16 represents centred cell indices exactly only up to 512 cells per axis"
    return sdpa.unsupported_reason(call)


def run(call: Call) -> Tensor:
    """Return attention (b, h, n, d_v) in the dtype of q."""
    q, k, v = call.transformed()
    dtype = call.dtype
    row, col = _columns(call.bias, call.factor, dtype)
    pad = -(q.shape[-1] + row.shape[-1]) % 8  # SDPA kernels need a head_dim that is a multiple of 8
    # if the bias replaces the product, its columns replace queries and keys
    if call.replaces_product:
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


def low_rank_approximation(bias: Bias, tolerance: float) -> LowRankBias:
    """Return the bias of the smallest rank whose error is at most `tolerance`, from its singular value decomposition.

    Constants per row, which softmax ignores, are subtracted first. The decomposition takes O(n^3) time and O(n^2)
    memory, so it is for biases that do not change, as in evaluation. The result has no gradient.

    Args:
        bias: a bias bound to positions that does not depend on queries or keys.
        tolerance: largest absolute error of an entry, up to a constant per row.

    Raises:
        OptionError: `tolerance` is not positive.
        UnsupportedCombination: an entry is not finite.

    Example:
        >>> import torch
        >>> from vispe import Grid
        >>> bias = DistanceBias((0.1,), Grid((4, 4)).positions(), metric="squared")
        >>> low_rank_approximation(bias, 1e-4).row.shape  # rank 3 after constants per row are subtracted
        torch.Size([1, 1, 16, 3])
    """
    if not tolerance > 0:
        raise OptionError(f"low_rank_approximation: tolerance must be positive, got {tolerance}.")
    with torch.no_grad():
        dense = bias.dense().double()
        if not bool(dense.isfinite().all()):
            raise UnsupportedCombination(
                f"{type(bias).__name__} contains infinities, so it has no singular value decomposition. Use the bias "
                "itself."
            )
        dense = dense - dense.mean(-1, keepdim=True)
        left, values, right = _singular_values(dense)
        low, high = 0, values.shape[-1]
        while low < high:  # the smallest sufficient rank of all heads
            rank = (low + high) // 2
            product = (left[..., :rank] * values[..., None, :rank]) @ right[..., :rank, :]
            low, high = (
                (low, rank) if float((product - dense).abs().amax()) <= tolerance else (rank + 1, high)
            )
        root = values[..., None, :low].sqrt()
        row, col = left[..., :low] * root, right[..., :low, :].transpose(-1, -2) * root
        return LowRankBias(row.float(), col.float(), bias.pos)


def _singular_values(dense: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.linalg.svd(dense, full_matrices=False)  # pyright: ignore


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
            f"lowrank supports LowRankBias and squared distances only, got {type(bias).__name__}. Use backend='auto'."
        )
    pos = bias.in_spacing(bias.pos)
    unit = pos.cell.square() / factor  # (b or 1, a): squared length of a cell
    divisor = largest(pos.extent, pos.cell, pos.grid, *bias.rule)
    if divisor is not None:
        unit = unit / divisor[:, None]
    # centred cell indices halve the largest integer that has to be exact
    centre = ((pos.extent / pos.cell).round() / 2).floor()
    cells = ((pos.cells() - centre[:, None]) * pos.spatial[..., None])[:, None]  # (b or 1, 1, n, a), integers
    has_position = pos.spatial[:, None, :, None].to(cells.dtype)
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
    rows += parts + [has_position] * len(parts)
    cols += [has_position] * len(parts) + parts
    heads = norm.shape[1]
    row, col = (torch.cat([t.expand(-1, heads, -1, -1) for t in side], -1) for side in (rows, cols))
    return row, col


def _split(x: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Return parts that `dtype` represents exactly and that sum to x up to a relative error of 2^-24."""
    if dtype != torch.bfloat16:
        return [x]
    # bfloat16 has 8 significant bits, so three parts cover the 24 of float32
    parts: list[Tensor] = []
    for _ in range(3):
        part = x.to(dtype).to(x.dtype)
        parts.append(part)
        x = x - part
    return parts
