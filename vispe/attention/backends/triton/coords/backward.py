"""The backward kernels for tokens at arbitrary coordinates: queries and slopes, keys and values, and the table."""

import triton
import triton.language as tl

from vispe.attention.backends.triton.coords.forward import (
    cells,
    distance,
    periods,
    place,
    reach,
    scores,
    steepness,
)
from vispe.attention.backends.triton.grid.backward import grad_scores, weigh_kv
from vispe.attention.backends.triton.grid.column_tiles import empty, inner, kept, mixed, rows, times, write
from vispe.attention.backends.triton.grid.shared import padding, pitch_of, program, sums_at


@triton.jit
def step_q(acc, steep, x, k, gap, V, do, lse, delta, start, vn, n, c, E: tl.constexpr, BE: tl.constexpr,
           BN: tl.constexpr, MASKED: tl.constexpr, LEARNED: tl.constexpr, DOT: tl.constexpr):  # fmt: skip
    """Return the sums of dS k and, where slopes are learned, of dS distance after one more tile of logits / scale."""
    v = rows(V, start + tl.arange(0, BN), vn, n, E, BE, MASKED)
    ds = grad_scores(x, do, v, lse, delta, c, DOT)
    if LEARNED:
        # the bias is -slope * distance, so its slope has the sum of dS distance
        steep += tl.sum(ds * gap, 1)
    return mixed(ds, k, acc, DOT), steep


@triton.jit(do_not_specialize=["n", "th", "cb", "pb"])
def grad_q_coords(Q, K, V, TABLE, CELL, PLACE, PERIOD, SLOPE, SEGMENT, KEEP, GRAD, LSE, DELTA, DQ, STEEP, qb, qh, qn,
                  kb, kh, kn, vb, vh, vn, gb, gh, gn, db, dh, dn, th, cb, pb, wb, n, c, scale, batch, heads,
                  D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
                  BN: tl.constexpr, GATHER: tl.constexpr, METRIC: tl.constexpr, AXES: tl.constexpr,
                  WRAP: tl.constexpr, PACKED: tl.constexpr, HAS_KEEP: tl.constexpr, DOT: tl.constexpr,
                  LEARNED: tl.constexpr):  # fmt: skip
    """Write dq of one tile of queries and its part of the gradient of the slope, STEEP (b, h, tiles)."""
    b, h, tile = program(batch, n, BM)
    i = tile * BM + tl.arange(0, BM)
    q = rows(Q + b * qb + h * qh, i, qn, n, D, BD, True)
    do = rows(GRAD + b * gb + h * gh, i, gn, n, E, BE, True)
    row = (b * heads + h) * pitch_of(n)
    lse, delta = sums_at(LSE + row, DELTA + row, i, n, True)
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
    # other sequences are not visited at all
    first, last, low, plain, high = reach(SEGMENT, i, n, PACKED, HAS_KEEP, BN)
    acc = empty(BM, BD)
    steep = tl.zeros((BM,), tl.float32)
    for start in range(low, plain, BN):
        x, k, gap = scores(q, K, TABLE, CELL, PLACE, KEEP, from_, si, yi, xi, zi, py, px, pz, slope, first, last,
                           start, kn, n, D, BD, BN, False, GATHER, METRIC, AXES, WRAP, PACKED, HAS_KEEP,
                           DOT)  # fmt: skip
        acc, steep = step_q(acc, steep, x, k, gap, V, do, lse, delta, start, vn, n, c, E, BE, BN, False, LEARNED,
                            DOT)  # fmt: skip
    for start in range(plain, high, BN):
        x, k, gap = scores(q, K, TABLE, CELL, PLACE, KEEP, from_, si, yi, xi, zi, py, px, pz, slope, first, last,
                           start, kn, n, D, BD, BN, True, GATHER, METRIC, AXES, WRAP, PACKED, HAS_KEEP,
                           DOT)  # fmt: skip
        acc, steep = step_q(acc, steep, x, k, gap, V, do, lse, delta, start, vn, n, c, E, BE, BN, True, LEARNED,
                            DOT)  # fmt: skip
    write(DQ + b * db + h * dh, times(acc, scale), i, i < n, dn, D, BD)
    if LEARNED:
        tl.store(STEEP + (b * heads + h) * tl.cdiv(n, BM) + tile, -tl.sum(steep * si, 0))


@triton.jit
def step_kv(dk, dv, k, v, j, to, sj, yj, xj, zj, py, px, pz, slope, first, last, Q, GRAD, LSE, DELTA, TABLE, CELL,
            PLACE, start, qn, gn, n, c, D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr,
            BM: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr, GATHER: tl.constexpr, METRIC: tl.constexpr,
            AXES: tl.constexpr, WRAP: tl.constexpr, PACKED: tl.constexpr, DOT: tl.constexpr):  # fmt: skip
    """Return the sums of dS^T q and P^T dO after one more tile of queries; tiles are keys x queries."""
    i = start + tl.arange(0, BM)
    q = rows(Q, i, qn, n, D, BD, MASKED)
    do = rows(GRAD, i, gn, n, E, BE, MASKED)
    lse, delta = sums_at(LSE, DELTA, i, n, MASKED)
    x = tl.zeros((BN, BM), tl.float32)
    if GATHER:
        x = tl.load(TABLE + (cells(CELL, i, n, GATHER, MASKED)[None, :] - to[:, None]))
    if METRIC:
        si, yi, xi, zi = place(PLACE, i, n, METRIC, AXES, MASKED)
        gap = distance(yi[None, :], xi[None, :], zi[None, :], yj[:, None], xj[:, None], zj[:, None], py, px, pz,
                       METRIC, AXES, WRAP)  # fmt: skip
        x += slope[:, None] * (gap * si[None, :])
    x = inner(k, q, x, DOT)
    if MASKED and PACKED:
        x = tl.where((i[None, :] >= first[:, None]) & (i[None, :] < last[:, None]), x, float("-inf"))
    dk, dv, _ds = weigh_kv(dk, dv, x, q, v, do, lse, delta, c, DOT)
    return dk, dv


@triton.jit(do_not_specialize=["n", "th", "cb", "pb"])
def grad_kv_coords(Q, K, V, TABLE, CELL, PLACE, PERIOD, SLOPE, SEGMENT, KEEP, GRAD, LSE, DELTA, DK, DV, qb, qh, qn, kb,
                   kh, kn, vb, vh, vn, gb, gh, gn, db, dh, dn, eb, eh_, en, th, cb, pb, wb, n, c, scale, batch, heads,
                   D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
                   BN: tl.constexpr, GATHER: tl.constexpr, METRIC: tl.constexpr, AXES: tl.constexpr,
                   WRAP: tl.constexpr, PACKED: tl.constexpr, HAS_KEEP: tl.constexpr,
                   DOT: tl.constexpr):  # fmt: skip
    """Write dk and dv of one tile of keys, looping over queries; those of keys that do not exist are 0."""
    b, h, tile = program(batch, n, BN)
    j = tile * BN + tl.arange(0, BN)
    k = rows(K + b * kb + h * kh, j, kn, n, D, BD, True)
    v = rows(V + b * vb + h * vh, j, vn, n, E, BE, True)
    Q += b * qb + h * qh
    GRAD += b * gb + h * gh
    LSE += (b * heads + h) * pitch_of(n)
    DELTA += (b * heads + h) * pitch_of(n)
    TABLE += h * th
    CELL += b * cb
    PLACE += b * pb
    to = cells(CELL + n, j, n, GATHER, True)
    sj, yj, xj, zj = place(PLACE, j, n, METRIC, AXES, True)
    py, px, pz = periods(PERIOD + b * wb, AXES, WRAP)
    slope = steepness(SLOPE, h, sj, scale, METRIC)
    # other sequences are not visited at all
    first, last, low, plain, high = reach(SEGMENT, j, n, PACKED, False, BM)
    dk = empty(BN, BD)
    dv = empty(BN, BE)
    for start in range(low, plain, BM):
        dk, dv = step_kv(dk, dv, k, v, j, to, sj, yj, xj, zj, py, px, pz, slope, first, last, Q, GRAD, LSE, DELTA,
                         TABLE, CELL, PLACE, start, qn, gn, n, c, D, BD, E, BE, BM, BN, False, GATHER, METRIC, AXES,
                         WRAP, PACKED, DOT)  # fmt: skip
    for start in range(plain, high, BM):
        dk, dv = step_kv(dk, dv, k, v, j, to, sj, yj, xj, zj, py, px, pz, slope, first, last, Q, GRAD, LSE, DELTA,
                         TABLE, CELL, PLACE, start, qn, gn, n, c, D, BD, E, BE, BM, BN, True, GATHER, METRIC, AXES,
                         WRAP, PACKED, DOT)  # fmt: skip
    # padded keys were read as they are; nothing of that may leave
    real = padding(KEEP + b * n, j, n, HAS_KEEP)
    write(DK + b * db + h * dh, kept(times(dk, scale), real), j, j < n, dn, D, BD)
    write(DV + b * eb + h * eh_, kept(dv, real), j, j < n, en, E, BE)


@triton.jit(do_not_specialize=["n", "th", "cb", "pb"])
def grad_table(Q, K, V, TABLE, CELL, PLACE, PERIOD, SLOPE, SEGMENT, KEEP, GRAD, LSE, DELTA, DTABLE, UNIT, qb, qh, qn,
               kb, kh, kn, vb, vh, vn, gb, gh, gn, th, cb, pb, wb, length, n, c, scale, batch, heads, together,
               D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
               BN: tl.constexpr, GATHER: tl.constexpr, METRIC: tl.constexpr, AXES: tl.constexpr, WRAP: tl.constexpr,
               PACKED: tl.constexpr, HAS_KEEP: tl.constexpr, DOT: tl.constexpr, FIXED: tl.constexpr):  # fmt: skip
    """Add the gradients of one tile of scores to DTABLE (h, length), after those of `together` samples are summed."""
    pid = tl.program_id(0)
    across, down = tl.cdiv(n, BN), tl.cdiv(n, BM)
    group = (pid // (across * down * heads)).to(tl.int64) * together
    h = (pid // (across * down) % heads).to(tl.int64)
    i = pid // across % down * BM + tl.arange(0, BM)
    start = pid % across * BN
    j = start + tl.arange(0, BN)
    TABLE += h * th
    CELL += group * cb
    from_ = cells(CELL, i, n, GATHER, True)
    first, last, low, _plain, high = reach(SEGMENT, i, n, PACKED, HAS_KEEP, BN)
    # tiles between two sequences have no pair
    touched = (start < high) & (start + BN > low)
    acc = tl.zeros((BM, BN), tl.float32)
    for sample in range(0, tl.where(touched, together, 0)):
        b = group + sample
        q = rows(Q + b * qb + h * qh, i, qn, n, D, BD, True)
        si, yi, xi, zi = place(PLACE + b * pb, i, n, METRIC, AXES, True)
        py, px, pz = periods(PERIOD + b * wb, AXES, WRAP)
        slope = steepness(SLOPE, h, si, scale, METRIC)
        x, _k, _gap = scores(q, K + b * kb + h * kh, TABLE, CELL, PLACE + b * pb, KEEP + b * n, from_, si, yi, xi, zi,
                             py, px, pz, slope, first, last, start, kn, n, D, BD, BN, True, GATHER, METRIC, AXES,
                             WRAP, PACKED, HAS_KEEP, DOT)  # fmt: skip
        v = rows(V + b * vb + h * vh, j, vn, n, E, BE, True)
        do = rows(GRAD + b * gb + h * gh, i, gn, n, E, BE, True)
        at = (b * heads + h) * pitch_of(n)
        lse, delta = sums_at(LSE + at, DELTA + at, i, n, True)
        acc += grad_scores(x, do, v, lse, delta, c, DOT)
    # entries are shared by many pairs, hence atomic additions
    where = DTABLE + h * length + (from_[:, None] - cells(CELL + n, j, n, GATHER, True)[None, :])
    inside = (i[:, None] < n) & (j[None, :] < n)
    if PACKED:
        inside = inside & (j[None, :] >= first[:, None]) & (j[None, :] < last[:, None])
    if FIXED:
        # whole numbers: any order of the programs gives the same sum
        tl.atomic_add(where, (acc.to(tl.float64) * tl.load(UNIT)).to(tl.int64), mask=inside, sem="relaxed")
    else:
        tl.atomic_add(where, acc, mask=inside, sem="relaxed")
