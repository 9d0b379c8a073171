"""The forward kernel for tokens at arbitrary coordinates, and what it shares with its backward kernels.

Every token brings its own numbers: two integers, so that the bias of a pair is the entry ``from_i - to_j`` of a table;
or its coordinates, so that it is ``-slope * distance(i, j)``; or both; and where its sequence begins and ends. What
they mean is in `places`. Query tiles of packed sequences visit no keys but those of their own sequences.
"""

import triton
import triton.language as tl

from vispe.attention.backends.triton.grid.column_tiles import empty, inner, rows
from vispe.attention.backends.triton.grid.forward import finish, shares, weigh
from vispe.attention.backends.triton.grid.shared import padding, pitch_of, program

EUCLIDEAN = tl.constexpr(1)
MANHATTAN = tl.constexpr(2)
CHEBYSHEV = tl.constexpr(3)
SQUARED = tl.constexpr(4)


@triton.jit
def cells(CELL, token, n, GATHER: tl.constexpr, MASKED: tl.constexpr):
    """Return a number of each token; those beyond the end are like the last."""
    if not GATHER:
        return token
    if MASKED:
        token = tl.minimum(token, n - 1)
    return tl.load(CELL + token)


@triton.jit
def place(PLACE, token, n, METRIC: tl.constexpr, AXES: tl.constexpr, MASKED: tl.constexpr):
    """Return of each token 1 if it has a place, else 0, and its coordinates, as three."""
    there = tl.zeros_like(token).to(tl.float32)
    y = there
    if METRIC:
        if MASKED:
            token = tl.minimum(token, n - 1)
        there = tl.load(PLACE + token)
        y = tl.load(PLACE + n + token)
    x = y
    z = y
    if METRIC and AXES > 1:
        x = tl.load(PLACE + 2 * n + token)
    if METRIC and AXES > 2:
        z = tl.load(PLACE + 3 * n + token)
    return there, y, x, z


@triton.jit
def periods(PERIOD, AXES: tl.constexpr, WRAP: tl.constexpr):
    """Return the period of each axis, as three."""
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
def along(a, b, period, METRIC: tl.constexpr, WRAP: tl.constexpr):
    """Return the part that one axis has in a distance."""
    gap = a - b
    if WRAP:
        gap = tl.abs(gap)
        # the shorter way around
        gap = tl.minimum(gap, period - gap)
    if METRIC != MANHATTAN and METRIC != CHEBYSHEV:
        return gap * gap
    return tl.abs(gap)


@triton.jit
def joined(a, b, METRIC: tl.constexpr):
    """Return the parts of two axes together."""
    if METRIC == CHEBYSHEV:
        return tl.maximum(a, b)
    return a + b


@triton.jit
def distance(
    ya, xa, za, yb, xb, zb, py, px, pz, METRIC: tl.constexpr, AXES: tl.constexpr, WRAP: tl.constexpr
):
    """Return the distances of the tokens a and b, which broadcast."""
    d = along(ya, yb, py, METRIC, WRAP)
    if AXES > 1:
        d = joined(d, along(xa, xb, px, METRIC, WRAP), METRIC)
    if AXES > 2:
        d = joined(d, along(za, zb, pz, METRIC, WRAP), METRIC)
    if METRIC == EUCLIDEAN:
        d = tl.sqrt(d)
    return d


@triton.jit
def reach(SEGMENT, token, n, PACKED: tl.constexpr, HAS_KEEP: tl.constexpr, TILE: tl.constexpr):
    """Return where the sequences of these tokens begin and end, the first of them, where plain tiles end, and the last.

    Without care can only go tiles that lie within the one sequence of all these tokens.
    """
    low, high, first, last = 0, n, token, token
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
def scores(q, K, TABLE, CELL, PLACE, KEEP, from_, si, yi, xi, zi, py, px, pz, slope, first, last, start, stride, n,
           D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr, GATHER: tl.constexpr,
           METRIC: tl.constexpr, AXES: tl.constexpr, WRAP: tl.constexpr, PACKED: tl.constexpr,
           HAS_KEEP: tl.constexpr, DOT: tl.constexpr):  # fmt: skip
    """Return logits / scale of a tile of queries and the keys from `start` on, these keys, and distances.

    Distances are 0 on keys without a place; `slope` has a number for each query.
    """
    j = start + tl.arange(0, BN)
    k = rows(K, j, stride, n, D, BD, MASKED)
    bias = tl.zeros((q[0].shape[0], BN), tl.float32)
    gap = bias
    if GATHER:
        # one subtraction of whole numbers finds the entry of a pair
        bias = tl.load(TABLE + (from_[:, None] - cells(CELL + n, j, n, GATHER, MASKED)[None, :]))
    if METRIC:
        sj, yj, xj, zj = place(PLACE, j, n, METRIC, AXES, MASKED)
        gap = distance(yi[:, None], xi[:, None], zi[:, None], yj[None, :], xj[None, :], zj[None, :], py, px, pz,
                       METRIC, AXES, WRAP) * sj[None, :]  # fmt: skip
        bias += slope[:, None] * gap
    # the matrix product starts from the bias: no addition afterwards
    x = inner(q, k, bias, DOT)
    if MASKED:
        x = tl.where(padding(KEEP, j, n, HAS_KEEP)[None, :], x, float("-inf"))
        if PACKED:
            x = tl.where((j[None, :] >= first[:, None]) & (j[None, :] < last[:, None]), x, float("-inf"))
    return x, k, gap


@triton.jit
def steepness(SLOPE, h, si, scale, METRIC: tl.constexpr):
    """Return what distances are multiplied with for each query, in units of logits / scale."""
    if METRIC:
        return si * (-tl.load(SLOPE + h) / scale)
    return si


@triton.jit(do_not_specialize=["n", "th", "cb", "pb"])
def forward_coords(Q, K, V, TABLE, CELL, PLACE, PERIOD, SLOPE, SEGMENT, KEEP, OUT, LSE, qb, qh, qn, kb, kh, kn, vb,
                   vh, vn, ob, oh, on, th, cb, pb, wb, n, c, scale, batch, heads, D: tl.constexpr, BD: tl.constexpr,
                   E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, GATHER: tl.constexpr,
                   METRIC: tl.constexpr, AXES: tl.constexpr, WRAP: tl.constexpr, PACKED: tl.constexpr,
                   HAS_KEEP: tl.constexpr, DOT: tl.constexpr):  # fmt: skip
    """Write the output and log2 of the row sums for one tile of queries."""
    b, h, tile = program(batch, n, BM)
    i = tile * BM + tl.arange(0, BM)
    q = rows(Q + b * qb + h * qh, i, qn, n, D, BD, True)
    K += b * kb + h * kh
    V += b * vb + h * vh
    KEEP += b * n
    TABLE += h * th
    CELL += b * cb
    PLACE += b * pb
    from_ = cells(CELL, i, n, GATHER, True)
    si, yi, xi, zi = place(PLACE, i, n, METRIC, AXES, True)
    py, px, pz = periods(PERIOD + b * wb, AXES, WRAP)
    slope = steepness(SLOPE, h, si, scale, METRIC)
    # keys of other sequences are not visited at all
    first, last, low, plain, high = reach(SEGMENT, i, n, PACKED, HAS_KEEP, BN)
    top = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = empty(BM, BE)
    for start in range(low, plain, BN):
        x, _k, _gap = scores(q, K, TABLE, CELL, PLACE, KEEP, from_, si, yi, xi, zi, py, px, pz, slope, first, last,
                             start, kn, n, D, BD, BN, False, GATHER, METRIC, AXES, WRAP, PACKED, HAS_KEEP,
                             DOT)  # fmt: skip
        acc, top, total = weigh(acc, top, total, x, V, start, vn, n, c, E, BE, BN, False, DOT)
    for start in range(plain, high, BN):
        x, _k, _gap = scores(q, K, TABLE, CELL, PLACE, KEEP, from_, si, yi, xi, zi, py, px, pz, slope, first, last,
                             start, kn, n, D, BD, BN, True, GATHER, METRIC, AXES, WRAP, PACKED, HAS_KEEP,
                             DOT)  # fmt: skip
        acc, top, total = weigh(acc, top, total, x, V, start, vn, n, c, E, BE, BN, True, DOT)
    at = (b * heads + h) * pitch_of(n)
    finish(OUT + b * ob + h * oh, LSE + at, shares(LSE, n, BM) + at, acc, top, total, i, i, on, n, E, BE)
