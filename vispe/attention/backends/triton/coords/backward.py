"""Backward kernels for tokens at arbitrary coordinates: queries and slopes, keys and values, and the table."""

import triton
import triton.language as tl

from vispe.attention.backends.triton.coords.forward import (
    distance,
    key_operands,
    key_range,
    load_cells,
    load_periods,
    position_of,
    scores,
    slope_factor,
)
from vispe.attention.backends.triton.grid.column_tiles import (
    load_rows,
    masked_rows,
    matmul_nt,
    scaled,
    store_rows,
    weighted_sum,
    zeros,
)
from vispe.attention.backends.triton.grid.key_gradient import update_dkv
from vispe.attention.backends.triton.grid.query_gradient import grad_scores
from vispe.attention.backends.triton.grid.shared import key_mask, load_sums, pitch_of, program_tile


@triton.jit
def step_q(acc, slope_grad, x, k, gap, V, do, lse, delta, start, vn, m, c, E: tl.constexpr, BE: tl.constexpr,
           BN: tl.constexpr, MASKED: tl.constexpr, LEARNED: tl.constexpr, DOT: tl.constexpr):  # fmt: skip
    """Return the sums of dS k and, where slopes are learned, of dS distance after one more tile of logits / scale."""
    v = load_rows(V, start + tl.arange(0, BN), vn, m, E, BE, MASKED)
    ds = grad_scores(x, do, v, lse, delta, c, DOT)
    if LEARNED:
        # bias = -slope * distance, so the gradient of the slope is minus the sum of dS distance
        slope_grad += tl.sum(ds * gap, 1)
    return weighted_sum(ds, k, acc, DOT), slope_grad


@triton.jit(do_not_specialize=["th", "cb", "pb", "wb", "n", "m", "width", "batch", "heads"])
def grad_q_coords(Q, K, V, TABLE, CELL, COORDS, PERIOD, SLOPE, SEGMENT, KEEP, GRAD, LSE, DELTA, DQ, STEEP, qb, qh, qn,
                  kb, kh, kn, vb, vh, vn, gb, gh, gn, db, dh, dn, th, cb, pb, wb, n, m, width, c, scale, batch, heads,
                  D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
                  BN: tl.constexpr, GATHER: tl.constexpr, METRIC: tl.constexpr, AXES: tl.constexpr,
                  WRAP: tl.constexpr, PACKED: tl.constexpr, HAS_KEEP: tl.constexpr, DOT: tl.constexpr,
                  LEARNED: tl.constexpr):  # fmt: skip
    """Write dq of one tile of queries and its part of the gradient of the slope, STEEP (b, h, tiles)."""
    b, h, tile = program_tile(batch, n, BM)
    i = tile * BM + tl.arange(0, BM)
    q = load_rows(Q + b * qb + h * qh, i, qn, n, D, BD, True)
    do = load_rows(GRAD + b * gb + h * gh, i, gn, n, E, BE, True)
    row = (b * heads + h) * pitch_of(n)
    lse, delta = load_sums(LSE + row, DELTA + row, i, n, True)
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
    py, px, pz = load_periods(PERIOD + b * wb, AXES, WRAP)
    slope = slope_factor(SLOPE, h, si, scale, METRIC)
    # other packed sequences are skipped
    first, last, low, plain, high = key_range(SEGMENT, i, n, m, PACKED, HAS_KEEP, BN)
    # unmasked tiles first, then masked tiles
    acc = zeros(BM, BD)
    slope_grad = tl.zeros((BM,), tl.float32)
    for start in range(low, plain, BN):
        x, k, gap = scores(q, K, TABLE, TO, KEYS, KEEP, from_, si, yi, xi, zi, py, px, pz, slope, first, last,
                           start, kn, m, width, D, BD, BN, False, GATHER, METRIC, AXES, WRAP, PACKED, HAS_KEEP,
                           DOT)  # fmt: skip
        acc, slope_grad = step_q(acc, slope_grad, x, k, gap, V, do, lse, delta, start, vn, m, c, E, BE, BN, False,
                                 LEARNED, DOT)  # fmt: skip
    for start in range(plain, high, BN):
        x, k, gap = scores(q, K, TABLE, TO, KEYS, KEEP, from_, si, yi, xi, zi, py, px, pz, slope, first, last,
                           start, kn, m, width, D, BD, BN, True, GATHER, METRIC, AXES, WRAP, PACKED, HAS_KEEP,
                           DOT)  # fmt: skip
        acc, slope_grad = step_q(acc, slope_grad, x, k, gap, V, do, lse, delta, start, vn, m, c, E, BE, BN, True,
                                 LEARNED, DOT)  # fmt: skip
    store_rows(DQ + b * db + h * dh, scaled(acc, scale), i, i < n, dn, D, BD)
    if LEARNED:
        tl.store(STEEP + (b * heads + h) * tl.cdiv(n, BM) + tile, -tl.sum(slope_grad * si, 0))


@triton.jit
def step_kv(dk, dv, k, v, j, to, sj, yj, xj, zj, py, px, pz, slope, first, last, Q, GRAD, LSE, DELTA, TABLE, CELL,
            COORDS, start, qn, gn, n, width, c, D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr,
            BM: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr, GATHER: tl.constexpr, METRIC: tl.constexpr,
            AXES: tl.constexpr, WRAP: tl.constexpr, PACKED: tl.constexpr, DOT: tl.constexpr):  # fmt: skip
    """Return the sums of dS^T q and P^T dO after one more tile of queries; tiles are keys x queries."""
    i = start + tl.arange(0, BM)
    q = load_rows(Q, i, qn, n, D, BD, MASKED)
    do = load_rows(GRAD, i, gn, n, E, BE, MASKED)
    lse, delta = load_sums(LSE, DELTA, i, n, MASKED)
    # scores are transposed: keys x queries
    x = tl.zeros((BN, BM), tl.float32)
    if GATHER:
        x = tl.load(TABLE + (load_cells(CELL, i, n, GATHER, MASKED)[None, :] - to[:, None]))
    if METRIC:
        si, yi, xi, zi = position_of(COORDS, i, n, width, METRIC, AXES, MASKED)
        gap = distance(yi[None, :], xi[None, :], zi[None, :], yj[:, None], xj[:, None], zj[:, None], py, px, pz,
                       METRIC, AXES, WRAP)  # fmt: skip
        x += slope[:, None] * (gap * si[None, :])
    x = matmul_nt(k, q, x, DOT)
    if MASKED and PACKED:
        x = tl.where((i[None, :] >= first[:, None]) & (i[None, :] < last[:, None]), x, float("-inf"))
    dk, dv, _ds = update_dkv(dk, dv, x, q, v, do, lse, delta, c, DOT)
    return dk, dv


@triton.jit(do_not_specialize=["th", "cb", "pb", "wb", "n", "m", "width", "batch", "heads"])
def grad_kv_coords(Q, K, V, TABLE, CELL, COORDS, PERIOD, SLOPE, SEGMENT, KEEP, GRAD, LSE, DELTA, DK, DV, qb, qh, qn, kb,
                   kh, kn, vb, vh, vn, gb, gh, gn, db, dh, dn, eb, eh_, en, th, cb, pb, wb, n, m, width, c, scale,
                   batch, heads, D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
                   BN: tl.constexpr, GATHER: tl.constexpr, METRIC: tl.constexpr, AXES: tl.constexpr, WRAP: tl.constexpr,
                   PACKED: tl.constexpr, HAS_KEEP: tl.constexpr, DOT: tl.constexpr):  # fmt: skip
    """Write dk and dv of one tile of keys, looping over queries; 0 for padded keys."""
    b, h, tile = program_tile(batch, m, BN)
    j = tile * BN + tl.arange(0, BN)
    k = load_rows(K + b * kb + h * kh, j, kn, m, D, BD, True)
    v = load_rows(V + b * vb + h * vh, j, vn, m, E, BE, True)
    Q += b * qb + h * qh
    GRAD += b * gb + h * gh
    LSE += (b * heads + h) * pitch_of(n)
    DELTA += (b * heads + h) * pitch_of(n)
    TABLE += h * th
    CELL += b * cb
    COORDS += b * pb
    TO, KEYS = key_operands(CELL, COORDS, m, width)
    to = load_cells(TO, j, m, GATHER, True)
    sj, yj, xj, zj = position_of(KEYS, j, m, width, METRIC, AXES, True)
    py, px, pz = load_periods(PERIOD + b * wb, AXES, WRAP)
    slope = slope_factor(SLOPE, h, sj, scale, METRIC)
    # other packed sequences are skipped
    first, last, low, plain, high = key_range(SEGMENT, j, n, n, PACKED, False, BM)
    dk = zeros(BN, BD)
    dv = zeros(BN, BE)
    for start in range(low, plain, BM):
        dk, dv = step_kv(dk, dv, k, v, j, to, sj, yj, xj, zj, py, px, pz, slope, first, last, Q, GRAD, LSE, DELTA,
                         TABLE, CELL, COORDS, start, qn, gn, n, width, c, D, BD, E, BE, BM, BN, False, GATHER, METRIC,
                         AXES, WRAP, PACKED, DOT)  # fmt: skip
    for start in range(plain, high, BM):
        dk, dv = step_kv(dk, dv, k, v, j, to, sj, yj, xj, zj, py, px, pz, slope, first, last, Q, GRAD, LSE, DELTA,
                         TABLE, CELL, COORDS, start, qn, gn, n, width, c, D, BD, E, BE, BM, BN, True, GATHER, METRIC,
                         AXES, WRAP, PACKED, DOT)  # fmt: skip
    # padded keys were read unmasked, so their gradients are set to 0
    real = key_mask(KEEP + b * m, j, m, HAS_KEEP)
    store_rows(DK + b * db + h * dh, masked_rows(scaled(dk, scale), real), j, j < m, dn, D, BD)
    store_rows(DV + b * eb + h * eh_, masked_rows(dv, real), j, j < m, en, E, BE)


@triton.jit(
    do_not_specialize=["th", "cb", "pb", "wb", "length", "n", "m", "width", "batch", "heads", "together"]
)
def grad_table(Q, K, V, TABLE, CELL, COORDS, PERIOD, SLOPE, SEGMENT, KEEP, GRAD, LSE, DELTA, DTABLE, UNIT, qb, qh, qn,
               kb, kh, kn, vb, vh, vn, gb, gh, gn, th, cb, pb, wb, length, n, m, width, c, scale, batch, heads,
               together, D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
               BN: tl.constexpr, GATHER: tl.constexpr, METRIC: tl.constexpr, AXES: tl.constexpr, WRAP: tl.constexpr,
               PACKED: tl.constexpr, HAS_KEEP: tl.constexpr, DOT: tl.constexpr, FIXED: tl.constexpr):  # fmt: skip
    """Add the gradients of one tile of scores, summed over `together` samples, to DTABLE (h, length)."""
    pid = tl.program_id(0)
    across, down = tl.cdiv(m, BN), tl.cdiv(n, BM)
    group = (pid // (across * down * heads)).to(tl.int64) * together
    h = (pid // (across * down) % heads).to(tl.int64)
    i = pid // across % down * BM + tl.arange(0, BM)
    start = pid % across * BN
    j = start + tl.arange(0, BN)
    TABLE += h * th
    CELL += group * cb
    TO, KEYS = key_operands(CELL, COORDS, m, width)
    from_ = load_cells(CELL, i, n, GATHER, True)
    first, last, low, _plain, high = key_range(SEGMENT, i, n, m, PACKED, HAS_KEEP, BN)
    # tiles between two packed sequences have no visible pair
    has_pairs = (start < high) & (start + BN > low)
    acc = tl.zeros((BM, BN), tl.float32)
    for sample in range(0, tl.where(has_pairs, together, 0)):
        b = group + sample
        q = load_rows(Q + b * qb + h * qh, i, qn, n, D, BD, True)
        si, yi, xi, zi = position_of(COORDS + b * pb, i, n, width, METRIC, AXES, True)
        py, px, pz = load_periods(PERIOD + b * wb, AXES, WRAP)
        slope = slope_factor(SLOPE, h, si, scale, METRIC)
        x, _k, _gap = scores(q, K + b * kb + h * kh, TABLE, TO, KEYS + b * pb, KEEP + b * m, from_, si, yi, xi, zi,
                             py, px, pz, slope, first, last, start, kn, m, width, D, BD, BN, True, GATHER, METRIC, AXES,
                             WRAP, PACKED, HAS_KEEP, DOT)  # fmt: skip
        v = load_rows(V + b * vb + h * vh, j, vn, m, E, BE, True)
        do = load_rows(GRAD + b * gb + h * gh, i, gn, n, E, BE, True)
        at = (b * heads + h) * pitch_of(n)
        lse, delta = load_sums(LSE + at, DELTA + at, i, n, True)
        acc += grad_scores(x, do, v, lse, delta, c, DOT)
    # many pairs share an entry, hence atomic additions
    where = DTABLE + h * length + (from_[:, None] - load_cells(TO, j, m, GATHER, True)[None, :])
    valid = (i[:, None] < n) & (j[None, :] < m)
    if PACKED:
        valid = valid & (j[None, :] >= first[:, None]) & (j[None, :] < last[:, None])
    if FIXED:
        # integer additions: the sum does not depend on the order of programs
        tl.atomic_add(where, (acc.to(tl.float64) * tl.load(UNIT)).to(tl.int64), mask=valid, sem="relaxed")
    else:
        tl.atomic_add(where, acc, mask=valid, sem="relaxed")
