"""The kernel of the bias gradient: every tile of scores has one program, which loops over the batch.

The gradient of the bias is summed over the batch in registers and then added once to the gradient of the runs, where
up to n_1 queries share an element. In the row layout nobody shares, so it is stored. Added in fixed point (int64) the
sum does not depend on the order of the programs.
"""

import triton
import triton.language as tl

from vispe.attention.backends.triton.grid.backward import grad_scores
from vispe.attention.backends.triton.grid.column_tiles import ranked
from vispe.attention.backends.triton.grid.dropout import luck_of
from vispe.attention.backends.triton.grid.forward import scores
from vispe.attention.backends.triton.grid.shared import (
    NARROW,
    bias_of,
    of_head,
    pitch_of,
    run_of,
    sums_at,
    sums_of,
)


@triton.jit
def write_bias(acc, RUNS, ENDS, BASE, UNIT, i, j, n, patch, end, prefix, some, SHARED: tl.constexpr,
               FIXED: tl.constexpr):  # fmt: skip
    """Add the gradients of a tile of scores to the runs of a head, and write those on prefix keys to ENDS (2,).

    `patch` and `end` say which keys `j` are patches and prefix tokens, `prefix` which queries `i` are the latter;
    `some`: the tile may have prefix keys.
    """
    # prefix keys have a gradient of their own, below
    inside = (i[:, None] < n) & patch[None, :]
    where = RUNS + tl.load(BASE + i, mask=i < n, other=0)[:, None] + j[None, :]
    if not SHARED:
        tl.store(where, acc, mask=inside)
    elif FIXED:
        # whole numbers: any order of the programs gives the same sum
        tl.atomic_add(where, (acc.to(tl.float64) * tl.load(UNIT)).to(tl.int64), mask=inside, sem="relaxed")
    else:
        tl.atomic_add(where, acc, mask=inside, sem="relaxed")
    # sums over pairs with a prefix key: queries with a place, and prefix queries
    if some:
        acc = tl.where(end[None, :], acc, 0.0)
        among = tl.sum(tl.sum(tl.where(prefix[:, None], acc, 0.0), 1), 0)
        tl.store(ENDS, tl.sum(tl.sum(acc, 1), 0) - among)
        tl.store(ENDS + 1, among)


@triton.jit
def tile_bias(Q, K, V, S, ADDRESS, EDGE, KEEP, SEED, GRAD, LSE, DELTA, BASE, RUNS, ENDS, UNIT, first, start, qb, qn,
              kb, kn, vb, vn, gb, gn, m, n, c, drop, head, batch, heads, D: tl.constexpr, BD: tl.constexpr,
              E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, TAIL: tl.constexpr,
              KEYS_TAIL: tl.constexpr, HAS_KEEP: tl.constexpr, DOT: tl.constexpr, SHARED: tl.constexpr,
              FIXED: tl.constexpr, DROP: tl.constexpr):  # fmt: skip
    """Add the gradients of the scores of queries from `first` on and keys from `start` on."""
    u = first + tl.arange(0, BM)
    j = start + tl.arange(0, BN)
    address, edge = run_of(ADDRESS, EDGE, u, m, n, True)
    acc = tl.zeros((BM, BN), tl.float32)
    for sample in range(0, batch):
        # 64 bits, since samples may lie 2^31 elements apart
        b = sample + tl.zeros((), tl.int64)
        q = ranked(Q + b * qb, u, qn, m, n, D, BD, TAIL)
        x, _ = scores(q, K + b * kb, S, address, edge, KEEP + b * n, start, kn, m, n, D, BD, BN, KEYS_TAIL, True,
                      HAS_KEEP, DOT)  # fmt: skip
        v = ranked(V + b * vb, j, vn, m, n, E, BE, KEYS_TAIL)
        do = ranked(GRAD + b * gb, u, gn, m, n, E, BE, TAIL)
        at = b * heads * pitch_of(n)
        lse, delta = sums_at(LSE + at, DELTA + at, u, n, TAIL)
        # the sum over the batch stays in registers until the end
        luck = luck_of(SEED, b * heads + head, drop, DROP)
        acc += grad_scores(x, do, v, lse, delta, c, DOT, luck, u, j)
    write_bias(
        acc, RUNS, ENDS, BASE, UNIT, u, j, n, j < m, (j >= m) & (j < n), u >= m, start + BN > m, SHARED, FIXED
    )


@triton.jit(do_not_specialize=["rh", "n", "p"])
def grad_bias(Q, K, V, S, ADDRESS, EDGE, KEEP, SEED, GRAD, LSE, DELTA, BASE, RUNS, ENDS, UNIT, qb, qh, qn, kb, kh, kn,
              vb, vh, vn, gb, gh, gn, sh, eh, rh, n, p, c, drop, batch, heads, groups, D: tl.constexpr,
              BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
              HAS_BIAS: tl.constexpr, HAS_KEEP: tl.constexpr, DOT: tl.constexpr, SHARED: tl.constexpr,
              FIXED: tl.constexpr, DROP: tl.constexpr):  # fmt: skip
    """Add the gradients of one tile of scores to RUNS (h, length), and those on prefix keys to ENDS (h, tiles, 2)."""
    LOW: tl.constexpr = BM if BM < NARROW else NARROW
    LESS: tl.constexpr = BN if BN < NARROW else NARROW
    m = n - p
    # whole tiles, narrow ones of keys beside them, and narrow ones of queries below all keys
    down, across = m // BM, m // BN
    beside, below = tl.cdiv(n - across * BN, LESS), tl.cdiv(n - down * BM, LOW)
    every = down * (across + beside) + below * tl.cdiv(n, BN)
    pid = tl.program_id(0)
    h = (pid // every).to(tl.int64)
    t = pid % every
    Q = of_head(Q, 0, h, qb, qh, qn, p)
    K = of_head(K, 0, h // groups, kb, kh, kn, p)
    V = of_head(V, 0, h // groups, vb, vh, vn, p)
    GRAD = of_head(GRAD, 0, h, gb, gh, gn, p)
    KEEP += p
    S, EDGE, _ = bias_of(S, EDGE, EDGE, h, sh, eh)
    LSE, DELTA = sums_of(LSE, DELTA, h, n)
    RUNS += h * rh
    ENDS += (h * every + t) * 2
    if t < down * across:
        tile_bias(Q, K, V, S, ADDRESS, EDGE, KEEP, SEED, GRAD, LSE, DELTA, BASE, RUNS, ENDS, UNIT, t // across * BM, t
                  % across * BN, qb, qn, kb, kn, vb, vn, gb, gn, m, n, c, drop, h, batch, heads, D, BD, E, BE, BM, BN,
                  False, False, HAS_KEEP, DOT, SHARED, FIXED, DROP)  # fmt: skip
    elif t < down * (across + beside):
        t -= down * across
        tile_bias(Q, K, V, S, ADDRESS, EDGE, KEEP, SEED, GRAD, LSE, DELTA, BASE, RUNS, ENDS, UNIT, t // beside * BM,
                  across * BN + t % beside * LESS, qb, qn, kb, kn, vb, vn, gb, gn, m, n, c, drop, h, batch, heads, D,
                  BD, E, BE, BM, LESS, False, True, HAS_KEEP, DOT, SHARED, FIXED, DROP)  # fmt: skip
    else:
        t -= down * (across + beside)
        columns = tl.cdiv(n, BN)
        tile_bias(Q, K, V, S, ADDRESS, EDGE, KEEP, SEED, GRAD, LSE, DELTA, BASE, RUNS, ENDS, UNIT, down * BM + t //
                  columns * LOW, t % columns * BN, qb, qn, kb, kn, vb, vn, gb, gn, m, n, c, drop, h, batch, heads, D,
                  BD, E, BE, LOW, BN, True, True, HAS_KEEP, DOT, SHARED, FIXED, DROP)  # fmt: skip
