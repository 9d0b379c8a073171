"""The backward kernels of decomposed biases: own tokens are queries for dq, keys for dk and dv."""

import triton
import triton.language as tl

from vispe.attention.backends.triton.content.decomposed import (
    FEW,
    biases,
    columns,
    lines_of,
    prefix_biases,
    tokens_at,
)
from vispe.attention.backends.triton.grid.backward import grad_scores, weigh_kv
from vispe.attention.backends.triton.grid.column_tiles import empty, inner, mixed, rows, times, write
from vispe.attention.backends.triton.grid.shared import pitch_of, sums_at


@triton.jit
def add_rows(
    GRAD_OWN, ds, slot, inside, row, ls, scale, again, BA: tl.constexpr, R: tl.constexpr, W: tl.constexpr
):
    """Write the sums over the columns of R rows, or add them to those of the panels before."""
    where = GRAD_OWN + slot[:, None] + ((row + tl.arange(0, R)) * ls)[None, :]
    sums = tl.sum(tl.reshape(ds, (BA, R, W)), 2) * scale
    # a row crosses all panels; one program owns the tokens, so it may add to what it wrote
    if again:
        sums += tl.load(where, mask=inside[:, None], other=0.0)
    tl.store(where, sums, mask=inside[:, None])


@triton.jit
def put_columns(
    GRAD_OWN, total, slot, inside, line, ls, scale, BA: tl.constexpr, R: tl.constexpr, W: tl.constexpr
):
    """Write the sums over all rows of W columns; all threads see what was written before."""
    where = GRAD_OWN + slot[:, None] + ((line + tl.arange(0, W)) * ls)[None, :]
    tl.store(where, tl.sum(tl.reshape(total, (BA, R, W)), 1) * scale, mask=inside[:, None])
    tl.debug_barrier()


@triton.jit
def step_q(acc, q, do, lse, delta, K, V, KEEP, j, bias, kn, vn, n, c, D: tl.constexpr, BD: tl.constexpr,
           E: tl.constexpr, BE: tl.constexpr, BS: tl.constexpr, HAS_KEEP: tl.constexpr,
           DOT: tl.constexpr):  # fmt: skip
    """Return the sum of dS k after the keys `j`, and dS."""
    k = rows(K, j, kn, n, D, BD, False)
    x = inner(q, k, bias, DOT)
    if HAS_KEEP:
        x = tl.where((tl.load(KEEP + j) != 0)[None, :], x, float("-inf"))
    ds = grad_scores(x, do, rows(V, j, vn, n, E, BE, False), lse, delta, c, DOT)
    return mixed(ds, k, acc, DOT), ds


@triton.jit(do_not_specialize=["n", "p", "gh", "gw"])
def decomposed_grad_q(Q, K, V, OWN, OTHER, KEEP, GRAD, LSE, DELTA, DQ, GRAD_OWN, qb, qh, qn, kb, kh, kn, vb, vh, vn,
                      gb, gt, gn, db, dh, dn, n, p, gh, gw, high, wide, ls, many, c, scale, heads,
                      D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BA: tl.constexpr,
                      R: tl.constexpr, W: tl.constexpr, HAS_OWN: tl.constexpr, HAS_OTHER: tl.constexpr,
                      HAS_KEEP: tl.constexpr, DOT: tl.constexpr):  # fmt: skip
    """Write dq of one tile of queries, and the gradients / scale of what these read."""
    tiles = tl.cdiv(n, BA)
    i = tl.program_id(0) % tiles * BA + tl.arange(0, BA)
    head = (tl.program_id(0) // tiles).to(tl.int64)
    b, h = head // heads, head % heads
    q = rows(Q + b * qb + h * qh, i, qn, n, D, BD, True)
    do = rows(GRAD + b * gb + h * gt, i, gn, n, E, BE, True)
    lse, delta = sums_at(LSE + head * pitch_of(n), DELTA + head * pitch_of(n), i, n, True)
    K += b * kb + h * kh
    V += b * vb + h * vh
    KEEP += b * n
    OWN += head * many * ls
    OTHER += head * many * ls
    GRAD_OWN += head * many * ls
    slot, ly, lx = lines_of(i, n, p, gw, high, wide, ls, W)
    acc = empty(BA, BD)
    for panel in range(0, wide // W):
        # numbers for columns stay in registers for the whole panel
        held = columns(OWN, slot, panel, high, ls, BA, R, W, HAS_OWN)
        total = tl.zeros((BA, R * W), tl.float32)
        for row in range(0, gh, R):
            bias = biases(held, OWN, OTHER, slot, ly, lx, row, (panel * high + row) * W, ls, BA, R, W, HAS_OWN,
                          HAS_OTHER)  # fmt: skip
            j = tokens_at(row, panel, n, p, gw, R, W)
            acc, ds = step_q(acc, q, do, lse, delta, K, V, KEEP, j, bias, kn, vn, n, c, D, BD, E, BE, R * W, HAS_KEEP,
                             DOT)  # fmt: skip
            if HAS_OWN:
                total += ds
                add_rows(GRAD_OWN, ds, slot, i < n, row, ls, scale, panel > 0, BA, R, W)
        if HAS_OWN:
            put_columns(GRAD_OWN, total, slot, i < n, high + panel * W, ls, scale, BA, R, W)
    ends = tl.zeros((BA,), tl.float32)
    # prefix tokens come last, few at a time
    for first in range(0, p, FEW):
        bias, j = prefix_biases(OWN, OTHER, slot, ly, lx, first, p, high, wide, ls, BA, HAS_OWN, HAS_OTHER)
        acc, ds = step_q(acc, q, do, lse, delta, K, V, KEEP, j, bias, kn, vn, n, c, D, BD, E, BE, FEW, HAS_KEEP,
                         DOT)  # fmt: skip
        ends += tl.sum(ds, 1)
    if HAS_OWN:
        put_ends(GRAD_OWN, ends * scale, slot, i < n, (high + wide) * ls, ls)
    write(DQ + b * db + h * dh, times(acc, scale), i, i < n, dn, D, BD)


@triton.jit
def put_ends(GRAD_OWN, ends, slot, inside, line, ls):
    """Write the sums over prefix tokens, to which both a row and a column number were added."""
    tl.store(GRAD_OWN + slot + line, ends, mask=inside)
    tl.store(GRAD_OWN + slot + line + ls, ends, mask=inside)


@triton.jit
def step_kv(dk, dv, k, v, real, Q, GRAD, LSE, DELTA, i, bias, qn, gn, n, c, D: tl.constexpr, BD: tl.constexpr,
            E: tl.constexpr, BE: tl.constexpr, BA: tl.constexpr, BS: tl.constexpr, HAS_KEEP: tl.constexpr,
            DOT: tl.constexpr):  # fmt: skip
    """Return the sums of dS^T q and P^T dO after the queries `i`, and dS^T; tiles are keys x queries."""
    q = rows(Q, i, qn, n, D, BD, False)
    do = rows(GRAD, i, gn, n, E, BE, False)
    x = inner(k, q, bias, DOT)
    if HAS_KEEP:
        x = tl.where(real[:, None], x, float("-inf"))
    return weigh_kv(dk, dv, x, q, v, do, tl.load(LSE + i), tl.load(DELTA + i), c, DOT)


@triton.jit(do_not_specialize=["n", "p", "gh", "gw"])
def decomposed_grad_kv(Q, K, V, OWN, OTHER, KEEP, GRAD, LSE, DELTA, DK, DV, GRAD_OWN, qb, qh, qn, kb, kh, kn, vb, vh,
                       vn, gb, gt, gn, db, dh, dn, eb, et, en, n, p, gh, gw, high, wide, ls, many, c, scale, heads,
                       D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BA: tl.constexpr,
                       R: tl.constexpr, W: tl.constexpr, HAS_OWN: tl.constexpr, HAS_OTHER: tl.constexpr,
                       HAS_KEEP: tl.constexpr, DOT: tl.constexpr):  # fmt: skip
    """Write dk and dv of one tile of keys, and the gradients / scale of what these read (OWN; queries read OTHER)."""
    tiles = tl.cdiv(n, BA)
    j = tl.program_id(0) % tiles * BA + tl.arange(0, BA)
    head = (tl.program_id(0) // tiles).to(tl.int64)
    b, h = head // heads, head % heads
    k = rows(K + b * kb + h * kh, j, kn, n, D, BD, True)
    v = rows(V + b * vb + h * vh, j, vn, n, E, BE, True)
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
    slot, ly, lx = lines_of(j, n, p, gw, high, wide, ls, W)
    dk = empty(BA, BD)
    dv = empty(BA, BE)
    for panel in range(0, wide // W):
        # numbers for columns stay in registers for the whole panel
        held = columns(OWN, slot, panel, high, ls, BA, R, W, HAS_OWN)
        total = tl.zeros((BA, R * W), tl.float32)
        for row in range(0, gh, R):
            bias = biases(held, OWN, OTHER, slot, ly, lx, row, (panel * high + row) * W, ls, BA, R, W, HAS_OWN,
                          HAS_OTHER)  # fmt: skip
            i = tokens_at(row, panel, n, p, gw, R, W)
            dk, dv, ds = step_kv(dk, dv, k, v, real, Q, GRAD, LSE, DELTA, i, bias, qn, gn, n, c, D, BD, E, BE, BA,
                                 R * W, HAS_KEEP, DOT)  # fmt: skip
            if HAS_OWN:
                total += ds
                add_rows(GRAD_OWN, ds, slot, j < n, row, ls, scale, panel > 0, BA, R, W)
        if HAS_OWN:
            put_columns(GRAD_OWN, total, slot, j < n, high + panel * W, ls, scale, BA, R, W)
    ends = tl.zeros((BA,), tl.float32)
    # prefix tokens come last, few at a time
    for first in range(0, p, FEW):
        bias, i = prefix_biases(OWN, OTHER, slot, ly, lx, first, p, high, wide, ls, BA, HAS_OWN, HAS_OTHER)
        dk, dv, ds = step_kv(dk, dv, k, v, real, Q, GRAD, LSE, DELTA, i, bias, qn, gn, n, c, D, BD, E, BE, BA, FEW,
                             HAS_KEEP, DOT)  # fmt: skip
        ends += tl.sum(ds, 1)
    if HAS_OWN:
        put_ends(GRAD_OWN, ends * scale, slot, j < n, (high + wide) * ls, ls)
    write(DK + b * db + h * dh, times(dk, scale), j, j < n, dn, D, BD)
    write(DV + b * eb + h * et, dv, j, j < n, en, E, BE)
