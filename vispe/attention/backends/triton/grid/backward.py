"""The backward kernels: rows of dO . O, the gradient of queries, and those of keys and values."""

import triton
import triton.language as tl

from vispe.attention.backends.triton.grid.forward import (
    edges,
    padding,
    pitch_of,
    plan,
    plan_sight,
    product,
    rows,
    scores,
    sums_at,
)


@triton.jit(do_not_specialize=["n"])
def row_sums(OUT, GRAD, DELTA, ob, oh, on, gb, gh, gn, n, heads, E: tl.constexpr, BE: tl.constexpr,
             BM: tl.constexpr):  # fmt: skip
    """Write ``sum_e dO O`` of one tile of queries."""
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    b = tl.program_id(2).to(tl.int64)
    h = tl.program_id(1).to(tl.int64)
    out = rows(OUT + b * ob + h * oh, i, on, n, E, BE, True).to(tl.float32)
    grad = rows(GRAD + b * gb + h * gh, i, gn, n, E, BE, True).to(tl.float32)
    tl.store(DELTA + (b * heads + h) * pitch_of(n) + i, tl.sum(out * grad, 1), mask=i < n)


@triton.jit
def grad_scores(x, do, v, lse, delta, c, BN: tl.constexpr, UPCAST: tl.constexpr):
    """Return the gradient of the logits for a tile of scores (queries x keys)."""
    # weights again from logits: nothing n x n was kept
    weight = tl.exp2(x * c - lse[:, None])
    dp = product(do, tl.trans(v), tl.zeros((do.shape[0], BN), tl.float32), UPCAST)
    # softmax: what all weights of a row have in common goes
    return weight * (dp - delta[:, None])


@triton.jit
def step_q(acc, q, do, lse, delta, K, V, S, address, edge, KEEP, start, kn, vn, n, p, c, D: tl.constexpr,
           BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr,
           HAS_BIAS: tl.constexpr, HAS_KEEP: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
    """Return the sum of dS k after one more tile of keys."""
    x, k = scores(
        q, K, S, address, edge, KEEP, start, kn, n, p, D, BD, BN, MASKED, HAS_BIAS, HAS_KEEP, UPCAST
    )
    v = rows(V, start + tl.arange(0, BN), vn, n, E, BE, MASKED)
    ds = grad_scores(x, do, v, lse, delta, c, BN, UPCAST)
    return product(ds.to(k.dtype), k, acc, UPCAST)


@triton.jit(do_not_specialize=["n", "p"])
def grad_q(Q, K, V, S, ADDRESS, EDGE, SIGHT, KEEP, GRAD, LSE, DELTA, DQ, qb, qh, qn, kb, kh, kn, vb, vh, vn, gb, gh, gn,
           db, dh, dn, sh, eh, n, p, c, scale, batch, heads, D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr,
           BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_KEEP: tl.constexpr,
           UPCAST: tl.constexpr, SKIP: tl.constexpr):  # fmt: skip
    """Write dq of one tile of queries, looping over keys."""
    pid = tl.program_id(0)
    # programs count samples first, so that neighbours read the same bias from the cache
    b = (pid % batch).to(tl.int64)
    tiles = tl.cdiv(n, BM)
    h = (pid // batch // tiles).to(tl.int64)
    first = (pid // batch % tiles) * BM
    i = first + tl.arange(0, BM)
    q = rows(Q + b * qb + h * qh, i, qn, n, D, BD, True)
    do = rows(GRAD + b * gb + h * gh, i, gn, n, E, BE, True)
    row = (b * heads + h) * pitch_of(n)
    lse, delta = sums_at(LSE + row, DELTA + row, i, n, True)
    K += b * kb + h * kh
    V += b * vb + h * vh
    KEEP += b * n
    address = i
    if HAS_BIAS:
        S += h * sh
        EDGE += h * eh
        address = tl.multiple_of(tl.load(ADDRESS + i, mask=i < n, other=0), 8)
    edge = edges(EDGE, i, p, HAS_BIAS)
    acc = tl.zeros((BM, BD), tl.float32)
    # tiles that need care first, the others in a loop without masks
    front, end, masked = plan(n, p, BN, HAS_KEEP)
    plain, tail = front, end
    if SKIP:
        front, end, masked, plain, tail = plan_sight(tl.load(SIGHT + 2 * h), tl.load(SIGHT + 2 * h + 1), first, n, p,
                                                     HAS_KEEP, BM, BN)  # fmt: skip
    for t in range(0, masked):
        start = tl.where(t < front, t, tail + t - front) * BN
        acc = step_q(acc, q, do, lse, delta, K, V, S, address, edge, KEEP, start, kn, vn, n, p, c, D, BD, E, BE, BN,
                     True, HAS_BIAS, HAS_KEEP, UPCAST)  # fmt: skip
    for t in range(plain, end):
        acc = step_q(acc, q, do, lse, delta, K, V, S, address, edge, KEEP, t * BN, kn, vn, n, p, c, D, BD, E, BE, BN,
                     False, HAS_BIAS, HAS_KEEP, UPCAST)  # fmt: skip
    d = tl.arange(0, BD)
    tl.store(DQ + b * db + h * dh + i[:, None].to(tl.int64) * dn + d[None, :], (acc * scale).to(DQ.dtype.element_ty),
             mask=(i[:, None] < n) & (d[None, :] < D))  # fmt: skip


@triton.jit
def weigh_kv(dk, dv, x, q, v, do, lse, delta, c, BM: tl.constexpr, BN: tl.constexpr, UPCAST: tl.constexpr):
    """Return the sums of dS^T q and P^T dO after one more tile of logits / scale (keys x queries)."""
    # weights again from logits, keys x queries, so that no tile is transposed
    weight = tl.exp2(x * c - lse[None, :])
    dv = product(weight.to(do.dtype), do, dv, UPCAST)
    dp = product(v, tl.trans(do), tl.zeros((BN, BM), tl.float32), UPCAST)
    ds = weight * (dp - delta[None, :])
    return product(ds.to(q.dtype), q, dk, UPCAST), dv


@triton.jit
def step_kv(dk, dv, k, v, j, real, Q, GRAD, LSE, DELTA, S, ADDRESS, EDGE, start, qn, gn, n, p, c, D: tl.constexpr,
            BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
            MASKED: tl.constexpr, HAS_BIAS: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
    """Return the sums of dS^T q and P^T dO after one more tile of queries; tiles are keys x queries."""
    i = start + tl.arange(0, BM)
    q = rows(Q, i, qn, n, D, BD, MASKED)
    do = rows(GRAD, i, gn, n, E, BE, MASKED)
    lse, delta = sums_at(LSE, DELTA, i, n, MASKED)
    x = tl.zeros((BN, BM), tl.float32)
    if HAS_BIAS:
        address = tl.load(ADDRESS + i, mask=i < n, other=0) if MASKED else tl.load(ADDRESS + i)
        address = tl.multiple_of(address, 8)
        # the strip of each query, read across keys
        x = tl.load(S + address[None, :] + j[:, None]).to(tl.float32)
        if MASKED:
            x = tl.where(j[:, None] < p, edges(EDGE, i, p, True)[None, :], x)
    x = product(k, tl.trans(q), x, UPCAST)
    if MASKED:
        x = tl.where(real[:, None], x, float("-inf"))
    return weigh_kv(dk, dv, x, q, v, do, lse, delta, c, BM, BN, UPCAST)


@triton.jit(do_not_specialize=["n", "p"])
def grad_kv(Q, K, V, S, ADDRESS, EDGE, SIGHT, KEEP, GRAD, LSE, DELTA, DK, DV, qb, qh, qn, kb, kh, kn, vb, vh, vn, gb,
            gh, gn, db, dh, dn, eb, eh_, en, sh, eh, n, p, c, scale, batch, heads, D: tl.constexpr, BD: tl.constexpr,
            E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, HAS_BIAS: tl.constexpr,
            HAS_KEEP: tl.constexpr, UPCAST: tl.constexpr, SKIP: tl.constexpr):  # fmt: skip
    """Write dk and dv of one tile of keys, looping over queries."""
    pid = tl.program_id(0)
    # programs count samples first, so that neighbours read the same bias from the cache
    b = (pid % batch).to(tl.int64)
    tiles = tl.cdiv(n, BN)
    h = (pid // batch // tiles).to(tl.int64)
    first = (pid // batch % tiles) * BN
    j = first + tl.arange(0, BN)
    k = rows(K + b * kb + h * kh, j, kn, n, D, BD, True)
    v = rows(V + b * vb + h * vh, j, vn, n, E, BE, True)
    real = padding(KEEP + b * n, j, n, HAS_KEEP)
    Q += b * qb + h * qh
    GRAD += b * gb + h * gh
    LSE += (b * heads + h) * pitch_of(n)
    DELTA += (b * heads + h) * pitch_of(n)
    if HAS_BIAS:
        S += h * sh
        EDGE += h * eh
    dk = tl.zeros((BN, BD), tl.float32)
    dv = tl.zeros((BN, BE), tl.float32)
    end = n // BM
    # a tile of keys that needs care needs it for all queries
    if HAS_KEEP:
        end = 0
    end = tl.where((first < p) | (first + BN > n), 0, end)
    front, plain, tail, masked = 0, 0, end, tl.cdiv(n, BM) - end
    if SKIP:
        # who sees these keys lies the other way
        front, end, masked, plain, tail = plan_sight(-tl.load(SIGHT + 2 * h + 1), -tl.load(SIGHT + 2 * h), first, n, p,
                                                     end == 0, BN, BM)  # fmt: skip
    for t in range(plain, end):
        dk, dv = step_kv(dk, dv, k, v, j, real, Q, GRAD, LSE, DELTA, S, ADDRESS, EDGE, t * BM, qn, gn, n, p, c, D, BD,
                         E, BE, BM, BN, False, HAS_BIAS, UPCAST)  # fmt: skip
    for t in range(0, masked):
        start = tl.where(t < front, t, tail + t - front) * BM
        dk, dv = step_kv(dk, dv, k, v, j, real, Q, GRAD, LSE, DELTA, S, ADDRESS, EDGE, start, qn, gn, n, p, c, D, BD,
                         E, BE, BM, BN, True, HAS_BIAS, UPCAST)  # fmt: skip
    d = tl.arange(0, BD)
    e = tl.arange(0, BE)
    tl.store(DK + b * db + h * dh + j[:, None].to(tl.int64) * dn + d[None, :], (dk * scale).to(DK.dtype.element_ty),
             mask=(j[:, None] < n) & (d[None, :] < D))  # fmt: skip
    tl.store(DV + b * eb + h * eh_ + j[:, None].to(tl.int64) * en + e[None, :], dv.to(DV.dtype.element_ty),
             mask=(j[:, None] < n) & (e[None, :] < E))  # fmt: skip
