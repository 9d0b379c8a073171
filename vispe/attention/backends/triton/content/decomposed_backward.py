"""Backward kernels of decomposed biases: the own tokens of a program are queries for dq, keys for dk and dv."""

import triton
import triton.language as tl

from vispe.attention.backends.triton.content.decomposed import (
    FEW,
    column_bias,
    line_offsets,
    panel_bias,
    panel_tokens,
    prefix_biases,
)
from vispe.attention.backends.triton.grid.column_tiles import (
    load_rows,
    matmul_nt,
    scaled,
    store_rows,
    weighted_sum,
    zeros,
)
from vispe.attention.backends.triton.grid.key_gradient import update_dkv
from vispe.attention.backends.triton.grid.query_gradient import grad_scores
from vispe.attention.backends.triton.grid.shared import load_sums, pitch_of


@triton.jit
def store_row_sums(
    GRAD_OWN, ds, slot, valid, row, ls, scale, accumulate, BA: tl.constexpr, R: tl.constexpr, W: tl.constexpr
):
    """Write the sums of dS over the columns of R rows, or add them to those of earlier panels."""
    where = GRAD_OWN + slot[:, None] + ((row + tl.arange(0, R)) * ls)[None, :]
    sums = tl.sum(tl.reshape(ds, (BA, R, W)), 2) * scale
    # a grid row spans all panels, and only this program writes these tokens, so no atomics are needed
    if accumulate:
        sums += tl.load(where, mask=valid[:, None], other=0.0)
    tl.store(where, sums, mask=valid[:, None])


@triton.jit
def store_column_sums(
    GRAD_OWN, ds_sum, slot, valid, line, ls, scale, BA: tl.constexpr, R: tl.constexpr, W: tl.constexpr
):
    """Write the sums of dS over all rows of W columns, followed by a barrier."""
    where = GRAD_OWN + slot[:, None] + ((line + tl.arange(0, W)) * ls)[None, :]
    tl.store(where, tl.sum(tl.reshape(ds_sum, (BA, R, W)), 1) * scale, mask=valid[:, None])
    tl.debug_barrier()


@triton.jit
def step_q(acc, q, do, lse, delta, K, V, KEEP, j, bias, kn, vn, n, c, D: tl.constexpr, BD: tl.constexpr,
           E: tl.constexpr, BE: tl.constexpr, BS: tl.constexpr, HAS_KEEP: tl.constexpr,
           DOT: tl.constexpr):  # fmt: skip
    """Return the sum of dS k after the keys `j`, and dS."""
    k = load_rows(K, j, kn, n, D, BD, False)
    x = matmul_nt(q, k, bias, DOT)
    if HAS_KEEP:
        x = tl.where((tl.load(KEEP + j) != 0)[None, :], x, float("-inf"))
    ds = grad_scores(x, do, load_rows(V, j, vn, n, E, BE, False), lse, delta, c, DOT)
    return weighted_sum(ds, k, acc, DOT), ds


@triton.jit(do_not_specialize=["n", "p", "gh", "gw", "high", "wide", "many", "heads"])
def decomposed_grad_q(Q, K, V, OWN, OTHER, KEEP, GRAD, LSE, DELTA, DQ, GRAD_OWN, qb, qh, qn, kb, kh, kn, vb, vh, vn,
                      gb, gt, gn, db, dh, dn, n, p, gh, gw, high, wide, ls, many, c, scale, heads,
                      D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BA: tl.constexpr,
                      R: tl.constexpr, W: tl.constexpr, HAS_OWN: tl.constexpr, HAS_OTHER: tl.constexpr,
                      HAS_KEEP: tl.constexpr, DOT: tl.constexpr):  # fmt: skip
    """Write dq of one tile of queries, and the gradients / scale of their terms."""
    tiles = tl.cdiv(n, BA)
    i = tl.program_id(0) % tiles * BA + tl.arange(0, BA)
    head = (tl.program_id(0) // tiles).to(tl.int64)
    b, h = head // heads, head % heads
    q = load_rows(Q + b * qb + h * qh, i, qn, n, D, BD, True)
    do = load_rows(GRAD + b * gb + h * gt, i, gn, n, E, BE, True)
    lse, delta = load_sums(LSE + head * pitch_of(n), DELTA + head * pitch_of(n), i, n, True)
    K += b * kb + h * kh
    V += b * vb + h * vh
    KEEP += b * n
    OWN += head * many * ls
    OTHER += head * many * ls
    GRAD_OWN += head * many * ls
    slot, ly, lx = line_offsets(i, n, p, gw, high, wide, ls, W)
    # panels of W columns, R rows at a time, then the prefix
    acc = zeros(BA, BD)
    for panel in range(0, wide // W):
        # column terms stay in registers for the whole panel
        column_terms = column_bias(OWN, slot, panel, high, ls, BA, R, W, HAS_OWN)
        ds_sum = tl.zeros((BA, R * W), tl.float32)
        for row in range(0, gh, R):
            bias = panel_bias(column_terms, OWN, OTHER, slot, ly, lx, row, (panel * high + row) * W, ls, BA, R, W,
                              HAS_OWN, HAS_OTHER)  # fmt: skip
            j = panel_tokens(row, panel, n, p, gw, R, W)
            acc, ds = step_q(acc, q, do, lse, delta, K, V, KEEP, j, bias, kn, vn, n, c, D, BD, E, BE, R * W, HAS_KEEP,
                             DOT)  # fmt: skip
            if HAS_OWN:
                ds_sum += ds
                store_row_sums(GRAD_OWN, ds, slot, i < n, row, ls, scale, panel > 0, BA, R, W)
        if HAS_OWN:
            store_column_sums(GRAD_OWN, ds_sum, slot, i < n, high + panel * W, ls, scale, BA, R, W)
    prefix_sums = tl.zeros((BA,), tl.float32)
    # prefix tokens are last, in small tiles
    for first in range(0, p, FEW):
        bias, j = prefix_biases(OWN, OTHER, slot, ly, lx, first, p, high, wide, ls, BA, HAS_OWN, HAS_OTHER)
        acc, ds = step_q(acc, q, do, lse, delta, K, V, KEEP, j, bias, kn, vn, n, c, D, BD, E, BE, FEW, HAS_KEEP,
                         DOT)  # fmt: skip
        prefix_sums += tl.sum(ds, 1)
    if HAS_OWN:
        store_prefix_sums(GRAD_OWN, prefix_sums * scale, slot, i < n, (high + wide) * ls, ls)
    store_rows(DQ + b * db + h * dh, scaled(acc, scale), i, i < n, dn, D, BD)


@triton.jit
def store_prefix_sums(GRAD_OWN, sums, slot, valid, line, ls):
    """Write the sums over prefix tokens, for both their row term and their column term."""
    tl.store(GRAD_OWN + slot + line, sums, mask=valid)
    tl.store(GRAD_OWN + slot + line + ls, sums, mask=valid)


@triton.jit
def step_kv(dk, dv, k, v, real, Q, GRAD, LSE, DELTA, i, bias, qn, gn, n, c, D: tl.constexpr, BD: tl.constexpr,
            E: tl.constexpr, BE: tl.constexpr, BA: tl.constexpr, BS: tl.constexpr, HAS_KEEP: tl.constexpr,
            DOT: tl.constexpr):  # fmt: skip
    """Return the sums of dS^T q and P^T dO after the queries `i`, and dS^T; tiles are keys x queries."""
    q = load_rows(Q, i, qn, n, D, BD, False)
    do = load_rows(GRAD, i, gn, n, E, BE, False)
    x = matmul_nt(k, q, bias, DOT)
    if HAS_KEEP:
        x = tl.where(real[:, None], x, float("-inf"))
    return update_dkv(dk, dv, x, q, v, do, tl.load(LSE + i), tl.load(DELTA + i), c, DOT)


@triton.jit(do_not_specialize=["n", "p", "gh", "gw", "high", "wide", "many", "heads"])
def decomposed_grad_kv(Q, K, V, OWN, OTHER, KEEP, GRAD, LSE, DELTA, DK, DV, GRAD_OWN, qb, qh, qn, kb, kh, kn, vb, vh,
                       vn, gb, gt, gn, db, dh, dn, eb, et, en, n, p, gh, gw, high, wide, ls, many, c, scale, heads,
                       D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BA: tl.constexpr,
                       R: tl.constexpr, W: tl.constexpr, HAS_OWN: tl.constexpr, HAS_OTHER: tl.constexpr,
                       HAS_KEEP: tl.constexpr, DOT: tl.constexpr):  # fmt: skip
    """Write dk and dv of one tile of keys, and the gradients / scale of their terms (OWN; OTHER is of queries)."""
    tiles = tl.cdiv(n, BA)
    j = tl.program_id(0) % tiles * BA + tl.arange(0, BA)
    head = (tl.program_id(0) // tiles).to(tl.int64)
    b, h = head // heads, head % heads
    k = load_rows(K + b * kb + h * kh, j, kn, n, D, BD, True)
    v = load_rows(V + b * vb + h * vh, j, vn, n, E, BE, True)
    # padded keys of the own tile
    real = j < n
    if HAS_KEEP:
        real = real & (tl.load(KEEP + b * n + j, mask=real, other=0) != 0)
    Q += b * qb + h * qh
    GRAD += b * gb + h * gt
    LSE += head * pitch_of(n)
    DELTA += head * pitch_of(n)
    OWN += head * many * ls
    OTHER += head * many * ls
    GRAD_OWN += head * many * ls
    slot, ly, lx = line_offsets(j, n, p, gw, high, wide, ls, W)
    # panels of W columns, R rows at a time, then the prefix
    dk = zeros(BA, BD)
    dv = zeros(BA, BE)
    for panel in range(0, wide // W):
        # column terms stay in registers for the whole panel
        column_terms = column_bias(OWN, slot, panel, high, ls, BA, R, W, HAS_OWN)
        ds_sum = tl.zeros((BA, R * W), tl.float32)
        for row in range(0, gh, R):
            bias = panel_bias(column_terms, OWN, OTHER, slot, ly, lx, row, (panel * high + row) * W, ls, BA, R, W,
                              HAS_OWN, HAS_OTHER)  # fmt: skip
            i = panel_tokens(row, panel, n, p, gw, R, W)
            dk, dv, ds = step_kv(dk, dv, k, v, real, Q, GRAD, LSE, DELTA, i, bias, qn, gn, n, c, D, BD, E, BE, BA,
                                 R * W, HAS_KEEP, DOT)  # fmt: skip
            if HAS_OWN:
                ds_sum += ds
                store_row_sums(GRAD_OWN, ds, slot, j < n, row, ls, scale, panel > 0, BA, R, W)
        if HAS_OWN:
            store_column_sums(GRAD_OWN, ds_sum, slot, j < n, high + panel * W, ls, scale, BA, R, W)
    prefix_sums = tl.zeros((BA,), tl.float32)
    # prefix tokens are last, in small tiles
    for first in range(0, p, FEW):
        bias, i = prefix_biases(OWN, OTHER, slot, ly, lx, first, p, high, wide, ls, BA, HAS_OWN, HAS_OTHER)
        dk, dv, ds = step_kv(dk, dv, k, v, real, Q, GRAD, LSE, DELTA, i, bias, qn, gn, n, c, D, BD, E, BE, BA, FEW,
                             HAS_KEEP, DOT)  # fmt: skip
        prefix_sums += tl.sum(ds, 1)
    if HAS_OWN:
        store_prefix_sums(GRAD_OWN, prefix_sums * scale, slot, j < n, (high + wide) * ls, ls)
    store_rows(DK + b * db + h * dh, scaled(dk, scale), j, j < n, dn, D, BD)
    store_rows(DV + b * eb + h * et, dv, j, j < n, en, E, BE)
