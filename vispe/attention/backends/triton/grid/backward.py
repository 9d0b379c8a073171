"""The backward kernels: rows of dO . O, the gradient of queries, and those of keys and values."""

import triton
import triton.language as tl

from vispe.attention.backends.triton.grid.column_tiles import (
    add,
    dots,
    empty,
    inner,
    mixed,
    ranked,
    rows,
    times,
    token,
    write,
)
from vispe.attention.backends.triton.grid.dropout import luck_of, survive
from vispe.attention.backends.triton.grid.forward import scores
from vispe.attention.backends.triton.grid.shared import (
    FEW,
    NARROW,
    bias_of,
    copied,
    edges,
    of_head,
    pitch_of,
    place,
    run_of,
    seen,
    sight,
    sums_at,
    sums_of,
)


@triton.jit(do_not_specialize=["n", "p"])
def row_sums(OUT, GRAD, DELTA, ob, oh, on, gb, gh, gn, n, p, heads, E: tl.constexpr, BE: tl.constexpr,
             BM: tl.constexpr):  # fmt: skip
    """Write ``sum_e dO O`` of one tile of queries, the first `p` of which go to the end."""
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    b = tl.program_id(2).to(tl.int64)
    h = tl.program_id(1).to(tl.int64)
    out = rows(OUT + b * ob + h * oh, i, on, n, E, BE, True)
    grad = rows(GRAD + b * gb + h * gh, i, gn, n, E, BE, True)
    tl.store(
        DELTA + (b * heads + h) * pitch_of(n) + tl.where(i < p, i + n, i) - p,
        dots(out, grad),
        mask=i < n,
    )


@triton.jit
def grad_scores(x, do, v, lse, delta, c, DOT: tl.constexpr, luck=None, u=None, keys=None):
    """Return the gradient of the logits for a tile of scores (queries x keys); `luck` of queries `u` and `keys`."""
    # weights again from logits: nothing n x n was kept
    weight = tl.exp2(x * c - lse[:, None])
    dp = inner(do, v, tl.zeros_like(x), DOT)
    if luck is not None:  # noqa: SIM102 (Triton evaluates both sides of an `and`)
        if len(luck) > 0:
            dp = tl.where(survive(luck, u[:, None], keys[None, :]), dp * luck[3], 0.0)
    # softmax: what all weights of a row have in common goes
    return weight * (dp - delta[:, None])


@triton.jit
def step_q(acc, q, u, do, lse, delta, K, V, S, address, edge, KEEP, luck, start, kn, vn, m, n, c, D: tl.constexpr,
           BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr, TAIL: tl.constexpr,
           HAS_BIAS: tl.constexpr, HAS_KEEP: tl.constexpr, DOT: tl.constexpr):  # fmt: skip
    """Return the sum of dS k after one more tile of keys."""
    x, k = scores(q, K, S, address, edge, KEEP, start, kn, m, n, D, BD, BN, TAIL, HAS_BIAS, HAS_KEEP, DOT)
    keys = start + tl.arange(0, BN)
    v = ranked(V, keys, vn, m, n, E, BE, TAIL)
    ds = grad_scores(x, do, v, lse, delta, c, DOT, luck, u, keys)
    return mixed(ds, k, acc, DOT)


@triton.jit
def descend_q(Q, K, V, S, ADDRESS, EDGE, SIGHT, KEEP, GRAD, LSE, DELTA, DQ, luck, first, qn, kn, vn, gn, dn, m, n, c,
              scale, D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
              BN: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_KEEP: tl.constexpr, DOT: tl.constexpr,
              SKIP: tl.constexpr):  # fmt: skip
    """Write dq of the queries from `first` on."""
    LESS: tl.constexpr = BN if BN < NARROW else NARROW
    u = first + tl.arange(0, BM)
    q = ranked(Q, u, qn, m, n, D, BD, True)
    do = ranked(GRAD, u, gn, m, n, E, BE, True)
    lse, delta = sums_at(LSE, DELTA, u, n, True)
    address, edge = run_of(ADDRESS, EDGE, u, m, n, HAS_BIAS)
    acc = empty(BM, BD)
    low, high, tail = sight(SIGHT, first, m, n, BM, BN, LESS, False, SKIP)
    # narrow tiles behind the grid first, then the whole ones in a loop without masks
    for start in range(tail, n, LESS):
        acc = step_q(acc, q, u, do, lse, delta, K, V, S, address, edge, KEEP, luck, start, kn, vn, m, n, c, D, BD, E,
                     BE, LESS, True, HAS_BIAS, HAS_KEEP, DOT)  # fmt: skip
    for t in range(low, high):
        acc = step_q(acc, q, u, do, lse, delta, K, V, S, address, edge, KEEP, luck, t * BN, kn, vn, m, n, c, D, BD, E,
                     BE, BN, False, HAS_BIAS, HAS_KEEP, DOT)  # fmt: skip
    write(DQ, times(acc, scale), token(u, m, n), u < n, dn, D, BD)


@triton.jit(do_not_specialize=["n", "p"])
def grad_q(Q, K, V, S, COPY, ADDRESS, EDGE, SIGHT, KEEP, SEED, GRAD, LSE, DELTA, DQ, qb, qh, qn, kb, kh, kn, vb, vh,
           vn, gb, gh, gn, db, dh, dn, sh, eh, n, p, c, drop, scale, batch, heads, groups, D: tl.constexpr,
           BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
           HAS_BIAS: tl.constexpr, HAS_COPY: tl.constexpr, HAS_KEEP: tl.constexpr, DOT: tl.constexpr,
           SKIP: tl.constexpr, DROP: tl.constexpr):  # fmt: skip
    """Write dq of one tile of queries, looping over keys."""
    LESS: tl.constexpr = BM if BM < FEW else FEW
    m = n - p
    b, h, whole, t = place(tl.program_id(0), batch, m, n, BM, LESS, True)
    Q = of_head(Q, b, h, qb, qh, qn, p)
    K = of_head(K, b, h // groups, kb, kh, kn, p)
    V = of_head(V, b, h // groups, vb, vh, vn, p)
    GRAD = of_head(GRAD, b, h, gb, gh, gn, p)
    DQ = of_head(DQ, b, h, db, dh, dn, p)
    KEEP += b * n + p
    S, EDGE, SIGHT = bias_of(S, EDGE, SIGHT, h, sh, eh)
    LSE, DELTA = sums_of(LSE, DELTA, b * heads + h, n)
    luck = luck_of(SEED, b * heads + h, drop, DROP)
    half = False
    if HAS_COPY:
        COPY += h * sh
        half = (t < whole) & copied(EDGE, eh, 1)
    if half:
        descend_q(Q, K, V, COPY, ADDRESS, EDGE, SIGHT, KEEP, GRAD, LSE, DELTA, DQ, luck, t * BM, qn, kn, vn, gn, dn,
                  m, n, c, scale, D, BD, E, BE, BM, BN, HAS_BIAS, HAS_KEEP, DOT, SKIP)  # fmt: skip
    elif t < whole:
        descend_q(Q, K, V, S, ADDRESS, EDGE, SIGHT, KEEP, GRAD, LSE, DELTA, DQ, luck, t * BM, qn, kn, vn, gn, dn, m,
                  n, c, scale, D, BD, E, BE, BM, BN, HAS_BIAS, HAS_KEEP, DOT, SKIP)  # fmt: skip
    else:
        first = whole * BM + (t - whole) * LESS
        descend_q(Q, K, V, S, ADDRESS, EDGE, SIGHT, KEEP, GRAD, LSE, DELTA, DQ, luck, first, qn, kn, vn, gn, dn, m, n,
                  c, scale, D, BD, E, BE, LESS, BN, HAS_BIAS, HAS_KEEP, DOT, SKIP)  # fmt: skip


@triton.jit
def weigh_kv(dk, dv, x, q, v, do, lse, delta, c, DOT: tl.constexpr, luck=None, u=None, keys=None):
    """Return the sums of dS^T q and P^T dO after one more tile of logits / scale (keys x queries), and dS^T.

    With `luck` of queries `u` and `keys`, dv still lacks what survivors are multiplied by.
    """
    # weights again from logits, keys x queries, so that no tile is transposed
    weight = tl.exp2(x * c - lse[None, :])
    dp = inner(v, do, tl.zeros_like(x), DOT)
    left = weight
    if luck is not None:  # noqa: SIM102 (Triton evaluates both sides of an `and`)
        if len(luck) > 0:
            there = survive(luck, u[None, :], keys[:, None])
            dp = tl.where(there, dp * luck[3], 0.0)
            left = tl.where(there, weight, 0.0)
    dv = mixed(left, do, dv, DOT)
    ds = weight * (dp - delta[None, :])
    return mixed(ds, q, dk, DOT), dv, ds


@triton.jit
def step_kv(dk, dv, k, v, j, real, luck, Q, GRAD, LSE, DELTA, S, ADDRESS, EDGE, SUM, start, qn, gn, un, m, n, c,
            D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
            KEYS_TAIL: tl.constexpr, TAIL: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_KEEP: tl.constexpr,
            DOT: tl.constexpr, ONCE: tl.constexpr):  # fmt: skip
    """Return the sums of dS^T q and P^T dO after one more tile of queries; tiles are keys x queries.

    ONCE: add dS k to the rows of these queries in SUM.
    """
    u = start + tl.arange(0, BM)
    q = ranked(Q, u, qn, m, n, D, BD, TAIL)
    do = ranked(GRAD, u, gn, m, n, E, BE, TAIL)
    lse, delta = sums_at(LSE, DELTA, u, n, TAIL)
    x = tl.zeros((BN, BM), tl.float32)
    if HAS_BIAS:
        address = tl.load(ADDRESS + u, mask=u < n, other=0) if TAIL else tl.load(ADDRESS + u)
        # the strip of each query, read across keys
        where = S + tl.multiple_of(address, 8)[None, :] + j[:, None]
        if KEYS_TAIL:
            patch = j[:, None] < m
            x = tl.where(patch, tl.load(where, mask=patch, other=0.0).to(tl.float32),
                         edges(EDGE, u >= m, True)[None, :])  # fmt: skip
        else:
            x = tl.load(where).to(tl.float32)
    x = inner(k, q, x, DOT)
    if KEYS_TAIL or HAS_KEEP:
        x = tl.where(real[:, None], x, float("-inf"))
    dk, dv, ds = weigh_kv(dk, dv, x, q, v, do, lse, delta, c, DOT, luck, u, j)
    if ONCE:
        # the scores are at hand: queries need no pass of their own, but meet other programs in memory
        add(SUM, mixed(tl.trans(ds), k, empty(BM, BD), DOT), token(u, m, n), u < n, un, D, BD)
    return dk, dv


@triton.jit
def descend_kv(Q, K, V, S, ADDRESS, EDGE, SIGHT, KEEP, GRAD, LSE, DELTA, DK, DV, SUM, SEED, head, drop, first, qh, qn,
               kn, vn, gh, gn, dn, en, uh, un, sh, eh, m, n, c, scale, groups, D: tl.constexpr, BD: tl.constexpr,
               E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, TAIL: tl.constexpr,
               HAS_BIAS: tl.constexpr, HAS_KEEP: tl.constexpr, DOT: tl.constexpr, SKIP: tl.constexpr,
               ONCE: tl.constexpr, DROP: tl.constexpr):  # fmt: skip
    """Write dk and dv of the keys from `first` on; pointers to queries lead to the first of their `groups` heads."""
    LESS: tl.constexpr = BM if BM < NARROW else NARROW
    j = first + tl.arange(0, BN)
    k = ranked(K, j, kn, m, n, D, BD, TAIL)
    v = ranked(V, j, vn, m, n, E, BE, TAIL)
    real = seen(KEEP, j, m, n, TAIL, HAS_KEEP)
    dk = empty(BN, BD)
    dv = empty(BN, BE)
    # one head of queries after the other, so that the sums have one order
    for group in range(0, groups):
        # 64 bits, since heads may lie 2^31 elements apart
        h = group + tl.zeros((), tl.int64)
        q, do, dq = Q + h * qh, GRAD + h * gh, SUM + h * uh
        s, edge, seen_by = bias_of(S, EDGE, SIGHT, h, sh, eh)
        lse, delta = sums_of(LSE, DELTA, h, n)
        luck = luck_of(SEED, head + group, drop, DROP)
        low, high, tail = sight(seen_by, first, m, n, BN, BM, LESS, True, SKIP)
        for t in range(low, high):
            dk, dv = step_kv(dk, dv, k, v, j, real, luck, q, do, lse, delta, s, ADDRESS, edge, dq, t * BM, qn, gn, un,
                             m, n, c, D, BD, E, BE, BM, BN, TAIL, False, HAS_BIAS, HAS_KEEP, DOT, ONCE)  # fmt: skip
        for start in range(tail, n, LESS):
            dk, dv = step_kv(dk, dv, k, v, j, real, luck, q, do, lse, delta, s, ADDRESS, edge, dq, start, qn, gn, un,
                             m, n, c, D, BD, E, BE, LESS, BN, TAIL, True, HAS_BIAS, HAS_KEEP, DOT, ONCE)  # fmt: skip
    write(DK, times(dk, scale), token(j, m, n), j < n, dn, D, BD)
    if DROP:
        dv = times(dv, 1.0 / (1.0 - drop))
    write(DV, dv, token(j, m, n), j < n, en, E, BE)


@triton.jit(do_not_specialize=["n", "p"])
def grad_kv(Q, K, V, S, COPY, ADDRESS, EDGE, SIGHT, KEEP, SEED, GRAD, LSE, DELTA, DK, DV, SUM, qb, qh, qn, kb, kh, kn,
            vb, vh, vn, gb, gh, gn, db, dh, dn, eb, et, en, ub, uh, un, sh, eh, n, p, c, drop, scale, batch, heads,
            groups, D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
            BN: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_COPY: tl.constexpr, HAS_KEEP: tl.constexpr,
            DOT: tl.constexpr, SKIP: tl.constexpr, ONCE: tl.constexpr, DROP: tl.constexpr):  # fmt: skip
    """Write dk and dv of one tile of keys of a head, looping over the queries of all heads that it serves.

    ONCE: add dS k to SUM (b, heads, n, d), zeros before in float32, which is then dq without the scale.
    """
    # of the narrow tiles, those of 64 + 32 columns have fewer keys: warps would do the same work twice
    MOST: tl.constexpr = FEW if BD == 96 or BE == 96 else NARROW
    LESS: tl.constexpr = BN if BN < MOST else MOST
    m = n - p
    b, h, whole, t = place(tl.program_id(0), batch, m, n, BN, LESS, False)
    Q = of_head(Q, b, h * groups, qb, qh, qn, p)
    K = of_head(K, b, h, kb, kh, kn, p)
    V = of_head(V, b, h, vb, vh, vn, p)
    GRAD = of_head(GRAD, b, h * groups, gb, gh, gn, p)
    DK = of_head(DK, b, h, db, dh, dn, p)
    DV = of_head(DV, b, h, eb, et, en, p)
    SUM = of_head(SUM, b, h * groups, ub, uh, un, p)
    KEEP += b * n + p
    S, EDGE, SIGHT = bias_of(S, EDGE, SIGHT, h * groups, sh, eh)
    head = b * heads + h * groups
    LSE, DELTA = sums_of(LSE, DELTA, head, n)
    half = False
    if HAS_COPY:
        COPY += h * groups * sh
        half = (t < whole) & copied(EDGE, eh, groups)
    if half:
        descend_kv(Q, K, V, COPY, ADDRESS, EDGE, SIGHT, KEEP, GRAD, LSE, DELTA, DK, DV, SUM, SEED, head, drop, t * BN,
                   qh, qn, kn, vn, gh, gn, dn, en, uh, un, sh, eh, m, n, c, scale, groups, D, BD, E, BE, BM, BN,
                   False, HAS_BIAS, HAS_KEEP, DOT, SKIP, ONCE, DROP)  # fmt: skip
    elif t < whole:
        descend_kv(Q, K, V, S, ADDRESS, EDGE, SIGHT, KEEP, GRAD, LSE, DELTA, DK, DV, SUM, SEED, head, drop, t * BN,
                   qh, qn, kn, vn, gh, gn, dn, en, uh, un, sh, eh, m, n, c, scale, groups, D, BD, E, BE, BM, BN,
                   False, HAS_BIAS, HAS_KEEP, DOT, SKIP, ONCE, DROP)  # fmt: skip
    else:
        first = whole * BN + (t - whole) * LESS
        descend_kv(Q, K, V, S, ADDRESS, EDGE, SIGHT, KEEP, GRAD, LSE, DELTA, DK, DV, SUM, SEED, head, drop, first, qh,
                   qn, kn, vn, gh, gn, dn, en, uh, un, sh, eh, m, n, c, scale, groups, D, BD, E, BE, BM, LESS, True,
                   HAS_BIAS, HAS_KEEP, DOT, SKIP, ONCE, DROP)  # fmt: skip
