"""Forward kernel for tokens at arbitrary coordinates, and functions shared with its backward kernels.

Each token has two integers, so that the bias of a pair is entry ``from_i - to_j`` of a table, or coordinates, so that
the bias is ``-slope * distance(i, j)``, or both, and the bounds of its packed sequence. `operands` computes them.
Query tiles of packed sequences only visit keys of their own sequences.

There are `n` queries and `m` keys. Rows of CELL and COORDS have `width` tokens: n = m, which are queries and keys, or
n + m, queries first.
"""

import triton
import triton.language as tl

from vispe.attention.backends.triton.grid.column_tiles import load_rows, matmul_nt, zeros
from vispe.attention.backends.triton.grid.forward import accumulate_values, share_pointer, store_output
from vispe.attention.backends.triton.grid.shared import key_mask, pitch_of, program_tile

EUCLIDEAN = tl.constexpr(1)
MANHATTAN = tl.constexpr(2)
CHEBYSHEV = tl.constexpr(3)
SQUARED = tl.constexpr(4)


@triton.jit
def load_cells(CELL, token, count, GATHER: tl.constexpr, MASKED: tl.constexpr):
    """Return the cell index of each of `count` tokens; tokens beyond the end are clamped to the last."""
    if not GATHER:
        return token
    # clamp instead of masking: scores of tokens beyond the end are masked later
    if MASKED:
        token = tl.minimum(token, count - 1)
    return tl.load(CELL + token)


@triton.jit
def position_of(COORDS, token, count, width, METRIC: tl.constexpr, AXES: tl.constexpr, MASKED: tl.constexpr):
    """Return for each token 1 if it has a position, else 0, and three coordinates (unused axes repeat the first)."""
    has_position = tl.zeros_like(token).to(tl.float32)
    y = has_position
    if METRIC:
        if MASKED:
            token = tl.minimum(token, count - 1)
        has_position = tl.load(COORDS + token)
        y = tl.load(COORDS + width + token)
    x = y
    z = y
    if METRIC and AXES > 1:
        x = tl.load(COORDS + 2 * width + token)
    if METRIC and AXES > 2:
        z = tl.load(COORDS + 3 * width + token)
    return has_position, y, x, z


@triton.jit
def load_periods(PERIOD, AXES: tl.constexpr, WRAP: tl.constexpr):
    """Return the period of each axis, always three (unused axes repeat the first)."""
    y = 0.0
    if WRAP:
        y = tl.load(PERIOD)
    x = y
    z = y
    if WRAP and AXES > 1:
        x = tl.load(PERIOD + 1)
    if WRAP and AXES > 2:
        z = tl.load(PERIOD + 2)
    return y, x, z


@triton.jit
def axis_distance(a, b, period, METRIC: tl.constexpr, WRAP: tl.constexpr):
    """Return the contribution of one axis to a distance, before the square root of EUCLIDEAN."""
    gap = a - b
    if WRAP:
        gap = tl.abs(gap)
        # the shorter direction on the torus
        gap = tl.minimum(gap, period - gap)
    if METRIC != MANHATTAN and METRIC != CHEBYSHEV:
        return gap * gap
    return tl.abs(gap)


@triton.jit
def combine_axes(a, b, METRIC: tl.constexpr):
    """Return the combined contribution of two axes."""
    if METRIC == CHEBYSHEV:
        return tl.maximum(a, b)
    return a + b


@triton.jit
def distance(
    ya, xa, za, yb, xb, zb, py, px, pz, METRIC: tl.constexpr, AXES: tl.constexpr, WRAP: tl.constexpr
):
    """Return the distances of tokens a and b, whose coordinates broadcast."""
    d = axis_distance(ya, yb, py, METRIC, WRAP)
    if AXES > 1:
        d = combine_axes(d, axis_distance(xa, xb, px, METRIC, WRAP), METRIC)
    if AXES > 2:
        d = combine_axes(d, axis_distance(za, zb, pz, METRIC, WRAP), METRIC)
    if METRIC == EUCLIDEAN:
        d = tl.sqrt(d)
    return d


@triton.jit
def key_range(SEGMENT, token, n, count, PACKED: tl.constexpr, HAS_KEEP: tl.constexpr, TILE: tl.constexpr):
    """Return the bounds of each token's sequence, and the start, end of unmasked tiles, and end of the range of keys.

    There are `count` keys, in packed sequences as many as tokens (n). Tiles need no masks only if all tokens are in one
    sequence and there is no key padding.
    """
    low, high, first, last = 0, count, token, token
    if PACKED:
        token = tl.minimum(token, n - 1)
        first = tl.load(SEGMENT + token)
        last = tl.load(SEGMENT + n + token)
        low = tl.min(first, 0)
        high = tl.max(last, 0)
    plain = low + (high - low) // TILE * TILE
    if HAS_KEEP:
        plain = low
    elif PACKED:
        plain = tl.where(tl.max(first, 0) == low, plain, low)
    return first, last, low, plain, high


@triton.jit
def scores(q, K, TABLE, TO, COORDS, KEEP, from_, si, yi, xi, zi, py, px, pz, slope, first, last, start, stride, m,
           width, D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr, GATHER: tl.constexpr,
           METRIC: tl.constexpr, AXES: tl.constexpr, WRAP: tl.constexpr, PACKED: tl.constexpr,
           HAS_KEEP: tl.constexpr, DOT: tl.constexpr):  # fmt: skip
    """Return logits / scale of a tile of queries and the keys from `start` on, these keys, and distances.

    TO and COORDS are those of the keys. Distances are 0 for keys without a position; `slope` has one number per query.
    """
    j = start + tl.arange(0, BN)
    k = load_rows(K, j, stride, m, D, BD, MASKED)
    bias = tl.zeros((q[0].shape[0], BN), tl.float32)
    gap = bias
    if GATHER:
        # the table index of a pair is the difference of two integers
        bias = tl.load(TABLE + (from_[:, None] - load_cells(TO, j, m, GATHER, MASKED)[None, :]))
    if METRIC:
        # the flag sj sets distances to keys without a position to 0
        sj, yj, xj, zj = position_of(COORDS, j, m, width, METRIC, AXES, MASKED)
        gap = distance(yi[:, None], xi[:, None], zi[:, None], yj[None, :], xj[None, :], zj[None, :], py, px, pz,
                       METRIC, AXES, WRAP) * sj[None, :]  # fmt: skip
        # slope is negative and divided by the scale
        bias += slope[:, None] * gap
    # the matrix product accumulates onto the bias
    x = matmul_nt(q, k, bias, DOT)
    if MASKED:
        x = tl.where(key_mask(KEEP, j, m, HAS_KEEP)[None, :], x, float("-inf"))
        if PACKED:
            x = tl.where((j[None, :] >= first[:, None]) & (j[None, :] < last[:, None]), x, float("-inf"))
    return x, k, gap


@triton.jit
def key_operands(CELL, COORDS, m, width):
    """Return the pointers to the second integers and to the coordinates of keys."""
    return CELL + (width + width - m), COORDS + (width - m)


@triton.jit
def slope_factor(SLOPE, h, si, scale, METRIC: tl.constexpr):
    """Return the factor of distances for each query, in units of logits / scale; 0 without a position."""
    if METRIC:
        return si * (-tl.load(SLOPE + h) / scale)
    return si


@triton.jit(do_not_specialize=["th", "cb", "pb", "wb", "n", "m", "width", "batch", "heads"])
def forward_coords(Q, K, V, TABLE, CELL, COORDS, PERIOD, SLOPE, SEGMENT, KEEP, OUT, LSE, qb, qh, qn, kb, kh, kn, vb, vh,
                   vn, ob, oh, on, th, cb, pb, wb, n, m, width, c, scale, batch, heads, D: tl.constexpr,
                   BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                   GATHER: tl.constexpr, METRIC: tl.constexpr, AXES: tl.constexpr, WRAP: tl.constexpr,
                   PACKED: tl.constexpr, HAS_KEEP: tl.constexpr, DOT: tl.constexpr):  # fmt: skip
    """Write the output and log2-sum-exp of one tile of queries."""
    b, h, tile = program_tile(batch, n, BM)
    i = tile * BM + tl.arange(0, BM)
    q = load_rows(Q + b * qb + h * qh, i, qn, n, D, BD, True)
    K += b * kb + h * kh
    V += b * vb + h * vh
    KEEP += b * m
    TABLE += h * th
    CELL += b * cb
    COORDS += b * pb
    TO, KEYS = key_operands(CELL, COORDS, m, width)
    # per-query operands stay in registers
    from_ = load_cells(CELL, i, n, GATHER, True)
    si, yi, xi, zi = position_of(COORDS, i, n, width, METRIC, AXES, True)
    # periods are per sample
    py, px, pz = load_periods(PERIOD + b * wb, AXES, WRAP)
    slope = slope_factor(SLOPE, h, si, scale, METRIC)
    # keys of other packed sequences are skipped
    first, last, low, plain, high = key_range(SEGMENT, i, n, m, PACKED, HAS_KEEP, BN)
    row_max = tl.full((BM,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BM,), tl.float32)
    acc = zeros(BM, BE)
    for start in range(low, plain, BN):
        x, _k, _gap = scores(q, K, TABLE, TO, KEYS, KEEP, from_, si, yi, xi, zi, py, px, pz, slope, first, last,
                             start, kn, m, width, D, BD, BN, False, GATHER, METRIC, AXES, WRAP, PACKED, HAS_KEEP,
                             DOT)  # fmt: skip
        acc, row_max, row_sum = accumulate_values(
            acc, row_max, row_sum, x, V, start, vn, m, c, E, BE, BN, False, DOT
        )
    for start in range(plain, high, BN):
        x, _k, _gap = scores(q, K, TABLE, TO, KEYS, KEEP, from_, si, yi, xi, zi, py, px, pz, slope, first, last,
                             start, kn, m, width, D, BD, BN, True, GATHER, METRIC, AXES, WRAP, PACKED, HAS_KEEP,
                             DOT)  # fmt: skip
        acc, row_max, row_sum = accumulate_values(
            acc, row_max, row_sum, x, V, start, vn, m, c, E, BE, BN, True, DOT
        )
    at = (b * heads + h) * pitch_of(n)
    store_output(OUT + b * ob + h * oh, LSE + at, share_pointer(LSE, n, BM) + at, acc, row_max, row_sum, i, i, on, n, E,
                 BE)  # fmt: skip
