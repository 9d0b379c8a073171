"""The kernel of the bias gradient: every tile of scores has one program, which loops over the batch.

The gradient of the bias is summed over the batch in registers and then added once to the gradient of the runs, where
up to n_1 queries share an element. In the row layout nobody shares, so it is stored. Added in fixed point (int64) the
sum does not depend on the order of the programs.
"""

import triton
import triton.language as tl

from vispe.attention.backends.triton.grid.backward import grad_scores
from vispe.attention.backends.triton.grid.forward import edges, pitch_of, rows, scores, sums_at


@triton.jit
def write_bias(acc, RUNS, ENDS, BASE, UNIT, i, j, first, n, p, SHARED: tl.constexpr, FIXED: tl.constexpr):
    """Add the gradients of a tile of scores to the runs of a head, and write those on prefix keys to ENDS (2,)."""
    # prefix keys have a gradient of their own, below
    inside = (i[:, None] < n) & (j[None, :] < n) & (j[None, :] >= p)
    where = RUNS + tl.load(BASE + i, mask=i < n, other=0)[:, None] + j[None, :]
    if not SHARED:
        tl.store(where, acc, mask=inside)
    elif FIXED:
        # whole numbers: any order of the programs gives the same sum
        tl.atomic_add(where, (acc.to(tl.float64) * tl.load(UNIT)).to(tl.int64), mask=inside, sem="relaxed")
    else:
        tl.atomic_add(where, acc, mask=inside, sem="relaxed")
    # sums over pairs with a prefix key: queries with a place, and prefix queries
    if first < p:
        acc = tl.where(j[None, :] < p, acc, 0.0)
        among = tl.sum(tl.sum(tl.where(i[:, None] < p, acc, 0.0), 1), 0)
        tl.store(ENDS, tl.sum(tl.sum(acc, 1), 0) - among)
        tl.store(ENDS + 1, among)


@triton.jit(do_not_specialize=["rh", "n", "p"])
def grad_bias(Q, K, V, S, ADDRESS, EDGE, KEEP, GRAD, LSE, DELTA, BASE, RUNS, ENDS, UNIT, qb, qh, qn, kb, kh, kn, vb, vh,
              vn, gb, gh, gn, sh, eh, rh, n, p, c, batch, heads, D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr,
              BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_KEEP: tl.constexpr,
              UPCAST: tl.constexpr, SHARED: tl.constexpr, FIXED: tl.constexpr):  # fmt: skip
    """Add the gradients of one tile of scores to RUNS (h, length), and those on prefix keys to ENDS (h, tiles, 2)."""
    pid = tl.program_id(0)
    across, down = tl.cdiv(n, BN), tl.cdiv(n, BM)
    h = (pid // (across * down)).to(tl.int64)
    row, column = pid // across % down, pid % across
    i = row * BM + tl.arange(0, BM)
    j = column * BN + tl.arange(0, BN)
    S += h * sh
    EDGE += h * eh
    address = tl.multiple_of(tl.load(ADDRESS + i, mask=i < n, other=0), 8)
    edge = edges(EDGE, i, p, True)
    acc = tl.zeros((BM, BN), tl.float32)
    for sample in range(0, batch):
        # 64 bits, since samples may lie 2^31 elements apart
        b = sample + tl.zeros((), tl.int64)
        q = rows(Q + b * qb + h * qh, i, qn, n, D, BD, True)
        x, _ = scores(q, K + b * kb + h * kh, S, address, edge, KEEP + b * n, column * BN, kn, n, p, D, BD, BN, True,
                      True, HAS_KEEP, UPCAST)  # fmt: skip
        v = rows(V + b * vb + h * vh, j, vn, n, E, BE, True)
        do = rows(GRAD + b * gb + h * gh, i, gn, n, E, BE, True)
        at = (b * heads + h) * pitch_of(n)
        lse, delta = sums_at(LSE + at, DELTA + at, i, n, True)
        # the sum over the batch stays in registers until the end
        acc += grad_scores(x, do, v, lse, delta, c, BN, UPCAST)
    ends = ENDS + (h * down * across + row * across + column) * 2
    write_bias(acc, RUNS + h * rh, ends, BASE, UNIT, i, j, column * BN, n, p, SHARED, FIXED)
