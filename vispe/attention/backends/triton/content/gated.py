"""Kernels of gated biases, ``(row_i + col_j) * profile(i, j)``: a strip, and one gate per query and per key."""

import triton
import triton.language as tl

from vispe.attention.backends.triton.grid.backward import grad_scores, update_dkv
from vispe.attention.backends.triton.grid.bias_gradient import write_bias
from vispe.attention.backends.triton.grid.column_tiles import (
    load_rows,
    matmul_nt,
    scaled,
    store_rows,
    weighted_sum,
    zeros,
)
from vispe.attention.backends.triton.grid.forward import accumulate_values, share_pointer, store_output
from vispe.attention.backends.triton.grid.shared import (
    key_mask,
    load_sums,
    pitch_of,
    prefix_bias,
    program_tile,
)


@triton.jit
def tile_ranges(n, p, BN: tl.constexpr, HAS_KEEP: tl.constexpr):
    """Return the number of masked tiles at the front, the end of the unmasked tiles, and the number of masked tiles."""
    tiles = tl.cdiv(n, BN)
    # tiles with prefix keys are first, the partial tile is last
    front = tl.minimum(tl.cdiv(p, BN), tiles)
    if HAS_KEEP:
        front = tiles
    end = tl.maximum(front, n // BN)
    return front, end, front + tiles - end


@triton.jit
def gated_scores(q, a, K, COL, S, address, edge, KEEP, start, kn, n, p, D: tl.constexpr, BD: tl.constexpr,
                 BN: tl.constexpr, MASKED: tl.constexpr, HAS_KEEP: tl.constexpr, DOT: tl.constexpr):  # fmt: skip
    """Return logits / scale of a tile of queries and the keys from `start` on, these keys, profile and gate."""
    j = start + tl.arange(0, BN)
    k = load_rows(K, j, kn, n, D, BD, MASKED)
    # the profile of a query is contiguous: its address plus the key index
    profile = tl.load(S + address[:, None] + j[None, :])
    if MASKED:
        profile = tl.where(j[None, :] < p, edge[:, None], profile)
        # gates of query and key are added, then multiplied with the profile
        gate = a[:, None] + tl.load(COL + j, mask=j < n, other=0.0)[None, :]
    else:
        gate = a[:, None] + tl.load(COL + j)[None, :]
    x = matmul_nt(q, k, profile * gate, DOT)
    if MASKED:
        x = tl.where(key_mask(KEEP, j, n, HAS_KEEP)[None, :], x, float("-inf"))
    return x, k, profile, gate


@triton.jit(do_not_specialize=["eh", "n", "p", "batch", "heads"])
def gated_forward(Q, K, V, S, ADDRESS, EDGE, ROW, COL, KEEP, OUT, LSE, qb, qh, qn, kb, kh, kn, vb, vh, vn, ob, oh, on,
                  sh, eh, n, p, c, batch, heads, D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr,
                  BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, HAS_KEEP: tl.constexpr,
                  DOT: tl.constexpr):  # fmt: skip
    """Write the output and log2-sum-exp of one tile of queries."""
    b, h, tile = program_tile(batch, n, BM)
    i = tile * BM + tl.arange(0, BM)
    q = load_rows(Q + b * qb + h * qh, i, qn, n, D, BD, True)
    K += b * kb + h * kh
    V += b * vb + h * vh
    KEEP += b * n
    S += h * sh
    COL += (b * heads + h) * n
    address = tl.multiple_of(tl.load(ADDRESS + i, mask=i < n, other=0), 8)
    edge = prefix_bias(EDGE + h * eh, i < p, True)
    a = tl.load(ROW + (b * heads + h) * n + i, mask=i < n, other=0.0)
    row_max = tl.full((BM,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BM,), tl.float32)
    acc = zeros(BM, BE)
    # masked tiles first, then the others in a loop without masks
    front, end, masked = tile_ranges(n, p, BN, HAS_KEEP)
    for t in range(0, masked):
        start = tl.where(t < front, t, end + t - front) * BN
        x, _, _, _ = gated_scores(q, a, K, COL, S, address, edge, KEEP, start, kn, n, p, D, BD, BN, True, HAS_KEEP,
                                  DOT)  # fmt: skip
        acc, row_max, row_sum = accumulate_values(
            acc, row_max, row_sum, x, V, start, vn, n, c, E, BE, BN, True, DOT
        )
    for t in range(front, end):
        x, _, _, _ = gated_scores(q, a, K, COL, S, address, edge, KEEP, t * BN, kn, n, p, D, BD, BN, False, HAS_KEEP,
                                  DOT)  # fmt: skip
        acc, row_max, row_sum = accumulate_values(
            acc, row_max, row_sum, x, V, t * BN, vn, n, c, E, BE, BN, False, DOT
        )
    at = (b * heads + h) * pitch_of(n)
    store_output(
        OUT + b * ob + h * oh,
        LSE + at,
        share_pointer(LSE, n, BM) + at,
        acc,
        row_max,
        row_sum,
        i,
        i,
        on,
        n,
        E,
        BE,
    )


@triton.jit
def gated_step_q(acc, da, q, a, do, lse, delta, K, V, COL, S, address, edge, KEEP, start, kn, vn, n, p, c,
                 D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr,
                 MASKED: tl.constexpr, HAS_KEEP: tl.constexpr, DOT: tl.constexpr):  # fmt: skip
    """Return the sums of dS k and dS profile after one more tile of keys."""
    x, k, profile, _ = gated_scores(q, a, K, COL, S, address, edge, KEEP, start, kn, n, p, D, BD, BN, MASKED,
                                    HAS_KEEP, DOT)  # fmt: skip
    v = load_rows(V, start + tl.arange(0, BN), vn, n, E, BE, MASKED)
    ds = grad_scores(x, do, v, lse, delta, c, DOT)
    return weighted_sum(ds, k, acc, DOT), da + tl.sum(ds * profile, 1)


@triton.jit(do_not_specialize=["eh", "n", "p", "batch", "heads"])
def gated_grad_q(Q, K, V, S, ADDRESS, EDGE, ROW, COL, KEEP, GRAD, LSE, DELTA, DQ, DROW, qb, qh, qn, kb, kh, kn, vb, vh,
                 vn, gb, gh, gn, db, dh, dn, sh, eh, n, p, c, scale, batch, heads, D: tl.constexpr, BD: tl.constexpr,
                 E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, HAS_KEEP: tl.constexpr,
                 DOT: tl.constexpr):  # fmt: skip
    """Write dq and the gradient of the row gates of one tile of queries, looping over keys."""
    b, h, tile = program_tile(batch, n, BM)
    i = tile * BM + tl.arange(0, BM)
    gate_row = (b * heads + h) * n
    q = load_rows(Q + b * qb + h * qh, i, qn, n, D, BD, True)
    do = load_rows(GRAD + b * gb + h * gh, i, gn, n, E, BE, True)
    at = (b * heads + h) * pitch_of(n)
    lse, delta = load_sums(LSE + at, DELTA + at, i, n, True)
    K += b * kb + h * kh
    V += b * vb + h * vh
    KEEP += b * n
    S += h * sh
    COL += gate_row
    address = tl.multiple_of(tl.load(ADDRESS + i, mask=i < n, other=0), 8)
    edge = prefix_bias(EDGE + h * eh, i < p, True)
    a = tl.load(ROW + gate_row + i, mask=i < n, other=0.0)
    acc = zeros(BM, BD)
    da = tl.zeros((BM,), tl.float32)
    # masked tiles first, then the others in a loop without masks
    front, end, masked = tile_ranges(n, p, BN, HAS_KEEP)
    for t in range(0, masked):
        start = tl.where(t < front, t, end + t - front) * BN
        acc, da = gated_step_q(acc, da, q, a, do, lse, delta, K, V, COL, S, address, edge, KEEP, start, kn, vn, n, p,
                               c, D, BD, E, BE, BN, True, HAS_KEEP, DOT)  # fmt: skip
    for t in range(front, end):
        acc, da = gated_step_q(acc, da, q, a, do, lse, delta, K, V, COL, S, address, edge, KEEP, t * BN, kn, vn, n, p,
                               c, D, BD, E, BE, BN, False, HAS_KEEP, DOT)  # fmt: skip
    store_rows(DQ + b * db + h * dh, scaled(acc, scale), i, i < n, dn, D, BD)
    tl.store(DROW + gate_row + i, da * scale, mask=i < n)


@triton.jit
def gated_step_kv(dk, dv, dc, k, v, g, j, real, Q, GRAD, LSE, DELTA, ROW, S, ADDRESS, EDGE, start, qn, gn, n, p, c,
                  D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
                  BN: tl.constexpr, MASKED: tl.constexpr, DOT: tl.constexpr):  # fmt: skip
    """Return the sums of dS^T q, P^T dO and dS^T profile after one more tile of queries; tiles are keys x queries."""
    i = start + tl.arange(0, BM)
    q = load_rows(Q, i, qn, n, D, BD, MASKED)
    do = load_rows(GRAD, i, gn, n, E, BE, MASKED)
    lse, delta = load_sums(LSE, DELTA, i, n, MASKED)
    address = tl.load(ADDRESS + i, mask=i < n, other=0) if MASKED else tl.load(ADDRESS + i)
    address = tl.multiple_of(address, 8)
    # the profile of a query is contiguous: its address plus the key index
    profile = tl.load(S + address[None, :] + j[:, None])
    if MASKED:
        profile = tl.where(j[:, None] < p, prefix_bias(EDGE, i < p, True)[None, :], profile)
    a = tl.load(ROW + i, mask=i < n, other=0.0) if MASKED else tl.load(ROW + i)
    gate = g[:, None] + a[None, :]
    x = matmul_nt(k, q, profile * gate, DOT)
    if MASKED:
        x = tl.where(real[:, None], x, float("-inf"))
    # the gradient of a gate is dS times the profile, summed over the other axis
    dk, dv, ds = update_dkv(dk, dv, x, q, v, do, lse, delta, c, DOT)
    return dk, dv, dc + tl.sum(ds * profile, 1)


@triton.jit(do_not_specialize=["eh", "n", "p", "batch", "heads"])
def gated_grad_kv(Q, K, V, S, ADDRESS, EDGE, ROW, COL, KEEP, GRAD, LSE, DELTA, DK, DV, DCOL, qb, qh, qn, kb, kh, kn,
                  vb, vh, vn, gb, gh, gn, db, dh, dn, eb, et, en, sh, eh, n, p, c, scale, batch, heads,
                  D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
                  BN: tl.constexpr, HAS_KEEP: tl.constexpr, DOT: tl.constexpr):  # fmt: skip
    """Write dk, dv and the gradient of the column gates of one tile of keys, looping over queries."""
    b, h, tile = program_tile(batch, n, BN)
    first = tile * BN
    j = first + tl.arange(0, BN)
    gate_row = (b * heads + h) * n
    k = load_rows(K + b * kb + h * kh, j, kn, n, D, BD, True)
    v = load_rows(V + b * vb + h * vh, j, vn, n, E, BE, True)
    g = tl.load(COL + gate_row + j, mask=j < n, other=0.0)
    real = key_mask(KEEP + b * n, j, n, HAS_KEEP)
    Q += b * qb + h * qh
    GRAD += b * gb + h * gh
    LSE += (b * heads + h) * pitch_of(n)
    DELTA += (b * heads + h) * pitch_of(n)
    ROW += gate_row
    S += h * sh
    EDGE += h * eh
    dk = zeros(BN, BD)
    dv = zeros(BN, BE)
    dc = tl.zeros((BN,), tl.float32)
    # only the partial last tile of queries needs masks
    plain = n // BM
    # a tile of keys that needs masks needs them for all queries
    if HAS_KEEP:
        plain = 0
    plain = tl.where((first < p) | (first + BN > n), 0, plain)
    for t in range(0, plain):
        dk, dv, dc = gated_step_kv(dk, dv, dc, k, v, g, j, real, Q, GRAD, LSE, DELTA, ROW, S, ADDRESS, EDGE, t * BM,
                                   qn, gn, n, p, c, D, BD, E, BE, BM, BN, False, DOT)  # fmt: skip
    for t in range(plain, tl.cdiv(n, BM)):
        dk, dv, dc = gated_step_kv(dk, dv, dc, k, v, g, j, real, Q, GRAD, LSE, DELTA, ROW, S, ADDRESS, EDGE, t * BM,
                                   qn, gn, n, p, c, D, BD, E, BE, BM, BN, True, DOT)  # fmt: skip
    store_rows(DK + b * db + h * dh, scaled(dk, scale), j, j < n, dn, D, BD)
    store_rows(DV + b * eb + h * et, dv, j, j < n, en, E, BE)
    tl.store(DCOL + gate_row + j, dc * scale, mask=j < n)


@triton.jit(do_not_specialize=["eh", "rh", "n", "p", "batch", "heads"])
def gated_grad_profile(Q, K, V, S, ADDRESS, EDGE, ROW, COL, KEEP, GRAD, LSE, DELTA, BASE, RUNS, ENDS, UNIT, qb, qh,
                       qn, kb, kh, kn, vb, vh, vn, gb, gh, gn, sh, eh, rh, n, p, c, batch, heads, D: tl.constexpr,
                       BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                       HAS_KEEP: tl.constexpr, DOT: tl.constexpr, SHARED: tl.constexpr,
                       FIXED: tl.constexpr):  # fmt: skip
    """Add the gradients of the profile, as `grad_bias` does for a bias."""
    pid = tl.program_id(0)
    across, down = tl.cdiv(n, BN), tl.cdiv(n, BM)
    h = (pid // (across * down)).to(tl.int64)
    row, column = pid // across % down, pid % across
    i = row * BM + tl.arange(0, BM)
    j = column * BN + tl.arange(0, BN)
    S += h * sh
    address = tl.multiple_of(tl.load(ADDRESS + i, mask=i < n, other=0), 8)
    edge = prefix_bias(EDGE + h * eh, i < p, True)
    acc = tl.zeros((BM, BN), tl.float32)
    for sample in range(0, batch):
        # 64 bits, since sample offsets may exceed 2^31 elements
        b = sample + tl.zeros((), tl.int64)
        gate_row = (b * heads + h) * n
        q = load_rows(Q + b * qb + h * qh, i, qn, n, D, BD, True)
        a = tl.load(ROW + gate_row + i, mask=i < n, other=0.0)
        x, _, _, gate = gated_scores(q, a, K + b * kb + h * kh, COL + gate_row, S, address, edge, KEEP + b * n,
                                     column * BN, kn, n, p, D, BD, BN, True, HAS_KEEP, DOT)  # fmt: skip
        v = load_rows(V + b * vb + h * vh, j, vn, n, E, BE, True)
        do = load_rows(GRAD + b * gb + h * gh, i, gn, n, E, BE, True)
        at = (b * heads + h) * pitch_of(n)
        lse, delta = load_sums(LSE + at, DELTA + at, i, n, True)
        acc += grad_scores(x, do, v, lse, delta, c, DOT) * gate
    ends = ENDS + (h * down * across + row * across + column) * 2
    write_bias(acc, RUNS + h * rh, ends, BASE, UNIT, i, j, n, (j >= p) & (j < n), j < p, i < p, column * BN < p,
               SHARED, FIXED)  # fmt: skip
