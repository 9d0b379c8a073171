"""Kernel of the bias gradient: one program per tile of scores, which loops over the batch.

The gradient of the bias is summed over the batch in registers and then added once to the gradient of the runs, where up
to n_1 queries share an element. In the row layout no elements are shared, so it is stored directly. In fixed point
(int64) the sum does not depend on the order of the programs.
"""

import triton
import triton.language as tl

from vispe.attention.backends.triton.grid.column_tiles import load_tokens
from vispe.attention.backends.triton.grid.dropout import random_bits
from vispe.attention.backends.triton.grid.forward import scores
from vispe.attention.backends.triton.grid.query_gradient import grad_scores
from vispe.attention.backends.triton.grid.shared import (
    NARROW,
    bias_pointers,
    gate_pointers,
    head_pointer,
    load_run,
    load_sums,
    pitch_of,
    query_gates,
    sum_pointers,
)


@triton.jit
def write_bias(acc, RUNS, ENDS, BASE, UNIT, u, j, end, m, n, SHARED: tl.constexpr, FIXED: tl.constexpr):
    """Add the gradients of queries `u` and keys `j`, up to `end`, to the runs of a head, prefix keys to ENDS (2,)."""
    # gradients of prefix keys are separate, below
    valid = (u[:, None] < n) & (j < m)[None, :]
    where = RUNS + tl.load(BASE + u, mask=u < n, other=0)[:, None] + j[None, :]
    if not SHARED:
        tl.store(where, acc, mask=valid)
    elif FIXED:
        # integer additions: the sum does not depend on the order of programs
        tl.atomic_add(where, (acc.to(tl.float64) * tl.load(UNIT)).to(tl.int64), mask=valid, sem="relaxed")
    else:
        tl.atomic_add(where, acc, mask=valid, sem="relaxed")
    # sums over pairs with a prefix key, separately for patch queries and prefix queries
    if end > m:
        acc = tl.where(((j >= m) & (j < n))[None, :], acc, 0.0)
        prefix_pairs = tl.sum(tl.sum(tl.where((u >= m)[:, None], acc, 0.0), 1), 0)
        tl.store(ENDS, tl.sum(tl.sum(acc, 1), 0) - prefix_pairs)
        tl.store(ENDS + 1, prefix_pairs)


@triton.jit
def tile_bias(Q, K, V, S, ADDRESS, EDGE, ROW, COL, KEEP, SEED, GRAD, LSE, DELTA, BASE, RUNS, ENDS, UNIT, first, start,
              qb, qn, kb, kn, vb, vn, gb, gn, m, n, c, drop, head, batch, heads, D: tl.constexpr, BD: tl.constexpr,
              E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, TAIL: tl.constexpr,
              KEYS_TAIL: tl.constexpr, GATED: tl.constexpr, HAS_KEEP: tl.constexpr, DOT: tl.constexpr,
              SHARED: tl.constexpr, FIXED: tl.constexpr, DROP: tl.constexpr):  # fmt: skip
    """Add the gradients of the scores of queries from `first` on and keys from `start` on."""
    u = first + tl.arange(0, BM)
    j = start + tl.arange(0, BN)
    address, edge = load_run(ADDRESS, EDGE, u, m, n, True)
    acc = tl.zeros((BM, BN), tl.float32)
    for sample in range(0, batch):
        # 64 bits, since sample offsets may exceed 2^31 elements
        b = sample + tl.zeros((), tl.int64)
        q = load_tokens(Q + b * qb, u, qn, m, n, D, BD, TAIL)
        gates = query_gates(gate_pointers(ROW, COL, b * heads + head, n, n - m, GATED), u, m, n)
        x, _, factors = scores(q, K + b * kb, S, address, edge, gates, KEEP + b * n, start, kn, m, n, D, BD, BN,
                               KEYS_TAIL, True, HAS_KEEP, DOT)  # fmt: skip
        v = load_tokens(V + b * vb, j, vn, m, n, E, BE, KEYS_TAIL)
        do = load_tokens(GRAD + b * gb, u, gn, m, n, E, BE, TAIL)
        at = b * heads * pitch_of(n)
        lse, delta = load_sums(LSE + at, DELTA + at, u, n, TAIL)
        # accumulate over the batch in registers
        rng = random_bits(SEED, b * heads + head, drop, DROP)
        ds = grad_scores(x, do, v, lse, delta, c, DOT, rng, u, j)
        if len(factors) > 0:
            ds *= factors[1]
        acc += ds
    write_bias(acc, RUNS, ENDS, BASE, UNIT, u, j, start + BN, m, n, SHARED, FIXED)


@triton.jit(
    do_not_specialize=["eh", "rh", "n", "p", "batch", "heads"], do_not_specialize_on_alignment=["groups"]
)
def grad_bias(Q, K, V, S, ADDRESS, EDGE, ROW, COL, KEEP, SEED, GRAD, LSE, DELTA, BASE, RUNS, ENDS, UNIT, qb, qh, qn,
              kb, kh, kn, vb, vh, vn, gb, gh, gn, sh, eh, rh, n, p, c, drop, batch, heads, groups, D: tl.constexpr,
              BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
              HAS_BIAS: tl.constexpr, GATED: tl.constexpr, HAS_KEEP: tl.constexpr, DOT: tl.constexpr,
              SHARED: tl.constexpr, FIXED: tl.constexpr, DROP: tl.constexpr):  # fmt: skip
    """Add the gradients of one tile of scores to RUNS (h, length), and those of prefix keys to ENDS (h, tiles, 2)."""
    LOW: tl.constexpr = BM if BM < NARROW else NARROW
    LESS: tl.constexpr = BN if BN < NARROW else NARROW
    m = n - p
    # tiles of the score matrix: whole ones, narrow ones of keys (right), narrow ones of queries (bottom) x all keys
    down, across = m // BM, m // BN
    right, bottom = tl.cdiv(n - across * BN, LESS), tl.cdiv(n - down * BM, LOW)
    tiles_per_head = down * (across + right) + bottom * tl.cdiv(n, BN)
    pid = tl.program_id(0)
    h = (pid // tiles_per_head).to(tl.int64)
    t = pid % tiles_per_head
    Q = head_pointer(Q, 0, h, qb, qh, qn, p)
    K = head_pointer(K, 0, h // groups, kb, kh, kn, p)
    V = head_pointer(V, 0, h // groups, vb, vh, vn, p)
    GRAD = head_pointer(GRAD, 0, h, gb, gh, gn, p)
    KEEP += p
    S, EDGE, _ = bias_pointers(S, EDGE, EDGE, h, sh, eh)
    LSE, DELTA = sum_pointers(LSE, DELTA, h, n)
    RUNS += h * rh
    ENDS += (h * tiles_per_head + t) * 2
    if t < down * across:
        tile_bias(Q, K, V, S, ADDRESS, EDGE, ROW, COL, KEEP, SEED, GRAD, LSE, DELTA, BASE, RUNS, ENDS, UNIT,
                  t // across * BM, t % across * BN, qb, qn, kb, kn, vb, vn, gb, gn, m, n, c, drop, h, batch, heads, D,
                  BD, E, BE, BM, BN, False, False, GATED, HAS_KEEP, DOT, SHARED, FIXED, DROP)  # fmt: skip
    elif t < down * (across + right):
        t -= down * across
        tile_bias(Q, K, V, S, ADDRESS, EDGE, ROW, COL, KEEP, SEED, GRAD, LSE, DELTA, BASE, RUNS, ENDS, UNIT,
                  t // right * BM, across * BN + t % right * LESS, qb, qn, kb, kn, vb, vn, gb, gn, m, n, c, drop, h,
                  batch, heads, D, BD, E, BE, BM, LESS, False, True, GATED, HAS_KEEP, DOT, SHARED, FIXED,
                  DROP)  # fmt: skip
    else:
        t -= down * (across + right)
        columns = tl.cdiv(n, BN)
        tile_bias(Q, K, V, S, ADDRESS, EDGE, ROW, COL, KEEP, SEED, GRAD, LSE, DELTA, BASE, RUNS, ENDS, UNIT,
                  down * BM + t // columns * LOW, t % columns * BN, qb, qn, kb, kn, vb, vn, gb, gn, m, n, c, drop, h,
                  batch, heads, D, BD, E, BE, LOW, BN, True, True, GATED, HAS_KEEP, DOT, SHARED, FIXED,
                  DROP)  # fmt: skip
