"""Backward kernels of attention on a grid: delta = dO . O, and the gradient of queries."""

import triton
import triton.language as tl

from vispe.attention.backends.triton.grid.column_tiles import (
    load_rows,
    load_tokens,
    matmul_nt,
    row_dots,
    scaled,
    store_rows,
    token_index,
    weighted_sum,
    zeros,
)
from vispe.attention.backends.triton.grid.dropout import not_dropped, random_bits
from vispe.attention.backends.triton.grid.forward import scores
from vispe.attention.backends.triton.grid.shared import (
    FEW,
    NARROW,
    bias_pointers,
    copy_is_exact,
    gate_pointers,
    head_pointer,
    load_run,
    load_sums,
    ordered_tile,
    pitch_of,
    query_gates,
    sum_pointers,
    visible_range,
)


@triton.jit(do_not_specialize=["n", "p", "heads"])
def row_sums(OUT, GRAD, DELTA, ob, oh, on, gb, gh, gn, n, p, heads, E: tl.constexpr, BE: tl.constexpr,
             BM: tl.constexpr):  # fmt: skip
    """Write delta = ``sum_e dO O`` of one tile of queries; the first `p` queries are stored at the end."""
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    b = tl.program_id(2).to(tl.int64)
    h = tl.program_id(1).to(tl.int64)
    out = load_rows(OUT + b * ob + h * oh, i, on, n, E, BE, True)
    grad = load_rows(GRAD + b * gb + h * gh, i, gn, n, E, BE, True)
    tl.store(
        DELTA + (b * heads + h) * pitch_of(n) + tl.where(i < p, i + n, i) - p,
        row_dots(out, grad),
        mask=i < n,
    )


@triton.jit
def grad_scores(x, do, v, lse, delta, c, DOT: tl.constexpr, rng=None, u=None, keys=None):
    """Return dS, the gradient of the logits, for a tile of scores (queries x keys); `rng` is for dropout."""
    # recompute the weights from the logits, since no n x n tensor is stored
    weight = tl.exp2(x * c - lse[:, None])
    dp = matmul_nt(do, v, tl.zeros_like(x), DOT)
    if rng is not None:  # noqa: SIM102 (Triton evaluates both sides of an `and`)
        if len(rng) > 0:
            dp = tl.where(not_dropped(rng, u[:, None], keys[None, :]), dp * rng[3], 0.0)
    # gradient of softmax: dS = P (dP - delta)
    return weight * (dp - delta[:, None])


@triton.jit
def step_q(acc, da, q, u, do, lse, delta, K, V, S, address, edge, gates, KEEP, rng, start, kn, vn, m, n, c,
           D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr, TAIL: tl.constexpr,
           HAS_BIAS: tl.constexpr, HAS_KEEP: tl.constexpr, DOT: tl.constexpr):  # fmt: skip
    """Return the sum of dS k, and that of dS profile for the gates, after one more tile of keys."""
    x, k, factors = scores(q, K, S, address, edge, gates, KEEP, start, kn, m, n, D, BD, BN, TAIL, HAS_BIAS, HAS_KEEP,
                           DOT)  # fmt: skip
    keys = start + tl.arange(0, BN)
    v = load_tokens(V, keys, vn, m, n, E, BE, TAIL)
    ds = grad_scores(x, do, v, lse, delta, c, DOT, rng, u, keys)
    if len(gates) > 0:
        da += tl.sum(ds * factors[0], 1)
    return weighted_sum(ds, k, acc, DOT), da


@triton.jit
def accumulate_dq(Q, K, V, S, ADDRESS, EDGE, VISIBLE, gates, KEEP, GRAD, LSE, DELTA, DQ, DROW, rng, first, qn, kn, vn,
                  gn, dn, m, n, c, scale, D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr,
                  BM: tl.constexpr, BN: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_KEEP: tl.constexpr, DOT: tl.constexpr,
                  SKIP: tl.constexpr):  # fmt: skip
    """Write dq and the gradients of the gates of the queries from `first` on."""
    LESS: tl.constexpr = BN if BN < NARROW else NARROW
    u = first + tl.arange(0, BM)
    q = load_tokens(Q, u, qn, m, n, D, BD, True)
    do = load_tokens(GRAD, u, gn, m, n, E, BE, True)
    # lse and delta of rows beyond n give weights of 0
    lse, delta = load_sums(LSE, DELTA, u, n, True)
    address, edge = load_run(ADDRESS, EDGE, u, m, n, HAS_BIAS)
    gates = query_gates(gates, u, m, n)
    acc = zeros(BM, BD)
    da = tl.zeros((BM,), tl.float32)
    low, high, tail = visible_range(VISIBLE, first, m, n, BM, BN, LESS, False, SKIP)
    # narrow tiles with masks first, then whole tiles in a loop without masks
    for start in range(tail, n, LESS):
        acc, da = step_q(acc, da, q, u, do, lse, delta, K, V, S, address, edge, gates, KEEP, rng, start, kn, vn, m, n,
                         c, D, BD, E, BE, LESS, True, HAS_BIAS, HAS_KEEP, DOT)  # fmt: skip
    for t in range(low, high):
        acc, da = step_q(acc, da, q, u, do, lse, delta, K, V, S, address, edge, gates, KEEP, rng, t * BN, kn, vn, m,
                         n, c, D, BD, E, BE, BN, False, HAS_BIAS, HAS_KEEP, DOT)  # fmt: skip
    store_rows(DQ, scaled(acc, scale), token_index(u, m, n), u < n, dn, D, BD)
    if len(gates) > 0:
        tl.store(DROW + token_index(u, m, n), da * scale, mask=u < n)


@triton.jit(do_not_specialize=["eh", "n", "p", "batch", "heads"], do_not_specialize_on_alignment=["groups"])
def grad_q(Q, K, V, S, COPY, ADDRESS, EDGE, VISIBLE, ROW, COL, KEEP, SEED, GRAD, LSE, DELTA, DQ, DROW, qb, qh, qn, kb,
           kh, kn, vb, vh, vn, gb, gh, gn, db, dh, dn, sh, eh, n, p, c, drop, scale, batch, heads, groups,
           D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
           HAS_BIAS: tl.constexpr, HAS_COPY: tl.constexpr, GATED: tl.constexpr, HAS_KEEP: tl.constexpr,
           DOT: tl.constexpr, SKIP: tl.constexpr, DROP: tl.constexpr):  # fmt: skip
    """Write dq and the gradients of the query gates of one tile of queries, looping over keys."""
    LESS: tl.constexpr = BM if BM < FEW else FEW
    m = n - p
    # whole tiles may read the float16 copy, narrow tiles handle prefix and padding
    b, h, whole, t = ordered_tile(tl.program_id(0), batch, m, n, BM, LESS, True)
    Q = head_pointer(Q, b, h, qb, qh, qn, p)
    K = head_pointer(K, b, h // groups, kb, kh, kn, p)
    V = head_pointer(V, b, h // groups, vb, vh, vn, p)
    GRAD = head_pointer(GRAD, b, h, gb, gh, gn, p)
    DQ = head_pointer(DQ, b, h, db, dh, dn, p)
    KEEP += b * n + p
    S, EDGE, VISIBLE = bias_pointers(S, EDGE, VISIBLE, h, sh, eh)
    LSE, DELTA = sum_pointers(LSE, DELTA, b * heads + h, n)
    gates = gate_pointers(ROW, COL, b * heads + h, n, p, GATED)
    DROW += (b * heads + h) * n + p
    rng = random_bits(SEED, b * heads + h, drop, DROP)
    half = False
    if HAS_COPY:
        COPY += h * sh
        half = (t < whole) & copy_is_exact(EDGE, eh, 1)
    if half:
        accumulate_dq(Q, K, V, COPY, ADDRESS, EDGE, VISIBLE, gates, KEEP, GRAD, LSE, DELTA, DQ, DROW, rng, t * BM, qn,
                      kn, vn, gn, dn, m, n, c, scale, D, BD, E, BE, BM, BN, HAS_BIAS, HAS_KEEP, DOT, SKIP)  # fmt: skip
    elif t < whole:
        accumulate_dq(Q, K, V, S, ADDRESS, EDGE, VISIBLE, gates, KEEP, GRAD, LSE, DELTA, DQ, DROW, rng, t * BM, qn, kn,
                      vn, gn, dn, m, n, c, scale, D, BD, E, BE, BM, BN, HAS_BIAS, HAS_KEEP, DOT, SKIP)  # fmt: skip
    else:
        first = whole * BM + (t - whole) * LESS
        accumulate_dq(Q, K, V, S, ADDRESS, EDGE, VISIBLE, gates, KEEP, GRAD, LSE, DELTA, DQ, DROW, rng, first, qn, kn,
                      vn, gn, dn, m, n, c, scale, D, BD, E, BE, LESS, BN, HAS_BIAS, HAS_KEEP, DOT, SKIP)  # fmt: skip
