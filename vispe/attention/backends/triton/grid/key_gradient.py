"""Backward kernel of attention on a grid: the gradients of keys and values."""

import triton
import triton.language as tl

from vispe.attention.backends.triton.grid.column_tiles import (
    atomic_add_rows,
    load_tokens,
    matmul_nt,
    scaled,
    store_rows,
    token_index,
    weighted_sum,
    zeros,
)
from vispe.attention.backends.triton.grid.dropout import not_dropped, random_bits
from vispe.attention.backends.triton.grid.shared import (
    FEW,
    NARROW,
    bias_pointers,
    copy_is_exact,
    gate_pointers,
    head_pointer,
    load_gates,
    load_sums,
    ordered_key_mask,
    ordered_tile,
    prefix_bias,
    sum_pointers,
    visible_range,
)


@triton.jit
def update_dkv(dk, dv, x, q, v, do, lse, delta, c, DOT: tl.constexpr, rng=None, u=None, keys=None):
    """Return the sums of dS^T q and P^T dO after one more tile of logits / scale (keys x queries), and dS^T.

    With dropout (`rng`), dv is not yet multiplied by 1 / (1 - p).
    """
    # recompute the weights as keys x queries, so that no tile has to be transposed
    weight = tl.exp2(x * c - lse[None, :])
    dp = matmul_nt(v, do, tl.zeros_like(x), DOT)
    dropped_weight = weight
    if rng is not None:  # noqa: SIM102 (Triton evaluates both sides of an `and`)
        if len(rng) > 0:
            keep = not_dropped(rng, u[None, :], keys[:, None])
            dp = tl.where(keep, dp * rng[3], 0.0)
            dropped_weight = tl.where(keep, weight, 0.0)
    dv = weighted_sum(dropped_weight, do, dv, DOT)
    ds = weight * (dp - delta[None, :])
    return weighted_sum(ds, q, dk, DOT), dv, ds


@triton.jit
def step_kv(dk, dv, dc, k, v, j, real, rng, Q, GRAD, LSE, DELTA, S, ADDRESS, EDGE, gates, SUM, start, qn, gn, un, m, n,
            c, D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
            KEYS_TAIL: tl.constexpr, TAIL: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_KEEP: tl.constexpr,
            DOT: tl.constexpr, ONCE: tl.constexpr):  # fmt: skip
    """Return the sums of dS^T q, P^T dO and dS^T profile after one more tile of queries; tiles are keys x queries.

    `gates`: pointer to the gates of queries and the gates of keys, or (). ONCE: add dS k to the rows of these queries
    in SUM.
    """
    u = start + tl.arange(0, BM)
    q = load_tokens(Q, u, qn, m, n, D, BD, TAIL)
    do = load_tokens(GRAD, u, gn, m, n, E, BE, TAIL)
    lse, delta = load_sums(LSE, DELTA, u, n, TAIL)
    x = tl.zeros((BN, BM), tl.float32)
    if HAS_BIAS:
        address = tl.load(ADDRESS + u, mask=u < n, other=0) if TAIL else tl.load(ADDRESS + u)
        # bias run of each query, transposed: keys x queries
        where = S + tl.multiple_of(address, 8)[None, :] + j[:, None]
        if KEYS_TAIL:
            patch = j[:, None] < m
            x = tl.where(patch, tl.load(where, mask=patch, other=0.0).to(tl.float32),
                         prefix_bias(EDGE, u >= m, True)[None, :])  # fmt: skip
        else:
            x = tl.load(where).to(tl.float32)
    profile = x
    if len(gates) > 0:
        x = profile * (gates[1][:, None] + load_gates(gates[0], u, m, n, TAIL)[None, :])
    x = matmul_nt(k, q, x, DOT)
    if KEYS_TAIL or HAS_KEEP:
        x = tl.where(real[:, None], x, float("-inf"))
    dk, dv, ds = update_dkv(dk, dv, x, q, v, do, lse, delta, c, DOT, rng, u, j)
    if len(gates) > 0:
        # the gradient of a gate is dS times the profile, summed over the other axis
        dc += tl.sum(ds * profile, 1)
    if ONCE:
        # dq from the scores computed here, with atomic additions, instead of a separate pass
        atomic_add_rows(
            SUM, weighted_sum(tl.trans(ds), k, zeros(BM, BD), DOT), token_index(u, m, n), u < n, un, D, BD
        )
    return dk, dv, dc


@triton.jit
def accumulate_dkv(Q, K, V, S, ADDRESS, EDGE, VISIBLE, gates, KEEP, GRAD, LSE, DELTA, DK, DV, DCOL, SUM, SEED, head,
                   drop, first, qh, qn, kn, vn, gh, gn, dn, en, uh, un, sh, eh, m, n, c, scale, groups, D: tl.constexpr,
                   BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                   TAIL: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_KEEP: tl.constexpr, DOT: tl.constexpr,
                   SKIP: tl.constexpr, ONCE: tl.constexpr, DROP: tl.constexpr):  # fmt: skip
    """Write dk, dv and the gradients of the gates of the keys from `first` on.

    Pointers to queries refer to the first of their `groups` heads; with gates, a head of keys has one.
    """
    LESS: tl.constexpr = BM if BM < NARROW else NARROW
    j = first + tl.arange(0, BN)
    k = load_tokens(K, j, kn, m, n, D, BD, TAIL)
    v = load_tokens(V, j, vn, m, n, E, BE, TAIL)
    real = ordered_key_mask(KEEP, j, m, n, TAIL, HAS_KEEP)
    dk = zeros(BN, BD)
    dv = zeros(BN, BE)
    dc = tl.zeros((BN,), tl.float32)
    if len(gates) > 0:
        gates = gates[0], load_gates(gates[1], j, m, n, TAIL)
    # query heads in sequence, so that the order of summation is fixed
    for group in range(0, groups):
        # 64 bits, since head offsets may exceed 2^31 elements
        h = group + tl.zeros((), tl.int64)
        q, do, dq = Q + h * qh, GRAD + h * gh, SUM + h * uh
        s, edge, visible = bias_pointers(S, EDGE, VISIBLE, h, sh, eh)
        lse, delta = sum_pointers(LSE, DELTA, h, n)
        rng = random_bits(SEED, head + group, drop, DROP)
        low, high, tail = visible_range(visible, first, m, n, BN, BM, LESS, True, SKIP)
        for t in range(low, high):
            dk, dv, dc = step_kv(dk, dv, dc, k, v, j, real, rng, q, do, lse, delta, s, ADDRESS, edge, gates, dq, t * BM,
                                 qn, gn, un, m, n, c, D, BD, E, BE, BM, BN, TAIL, False, HAS_BIAS, HAS_KEEP, DOT,
                                 ONCE)  # fmt: skip
        for start in range(tail, n, LESS):
            dk, dv, dc = step_kv(dk, dv, dc, k, v, j, real, rng, q, do, lse, delta, s, ADDRESS, edge, gates, dq, start,
                                 qn, gn, un, m, n, c, D, BD, E, BE, LESS, BN, TAIL, True, HAS_BIAS, HAS_KEEP, DOT,
                                 ONCE)  # fmt: skip
    store_rows(DK, scaled(dk, scale), token_index(j, m, n), j < n, dn, D, BD)
    if DROP:
        dv = scaled(dv, 1.0 / (1.0 - drop))
    store_rows(DV, dv, token_index(j, m, n), j < n, en, E, BE)
    if len(gates) > 0:
        tl.store(DCOL + token_index(j, m, n), dc * scale, mask=j < n)


# groups = 1 remains a kernel of its own: the loop over heads of a group would spill registers
@triton.jit(do_not_specialize=["eh", "n", "p", "batch", "heads"], do_not_specialize_on_alignment=["groups"])
def grad_kv(Q, K, V, S, COPY, ADDRESS, EDGE, VISIBLE, ROW, COL, KEEP, SEED, GRAD, LSE, DELTA, DK, DV, DCOL, SUM, qb, qh,
            qn, kb, kh, kn, vb, vh, vn, gb, gh, gn, db, dh, dn, eb, et, en, ub, uh, un, sh, eh, n, p, c, drop, scale,
            batch, heads, groups, D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr,
            BM: tl.constexpr, BN: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_COPY: tl.constexpr, GATED: tl.constexpr,
            HAS_KEEP: tl.constexpr, DOT: tl.constexpr, SKIP: tl.constexpr, ONCE: tl.constexpr,
            DROP: tl.constexpr):  # fmt: skip
    """Write dk, dv and the gradients of the gates of one tile of keys of a head.

    It loops over the queries of all heads that share it. ONCE: add dS k to SUM (b, heads, n, d), float32 and initially
    0, which gives dq without the scale.
    """
    # narrow tiles of 64 + 32 columns have fewer keys, as warps would otherwise duplicate work
    MOST: tl.constexpr = FEW if BD == 96 or BE == 96 else NARROW
    LESS: tl.constexpr = BN if BN < MOST else MOST
    m = n - p
    b, h, whole, t = ordered_tile(tl.program_id(0), batch, m, n, BN, LESS, False)
    Q = head_pointer(Q, b, h * groups, qb, qh, qn, p)
    K = head_pointer(K, b, h, kb, kh, kn, p)
    V = head_pointer(V, b, h, vb, vh, vn, p)
    GRAD = head_pointer(GRAD, b, h * groups, gb, gh, gn, p)
    DK = head_pointer(DK, b, h, db, dh, dn, p)
    DV = head_pointer(DV, b, h, eb, et, en, p)
    SUM = head_pointer(SUM, b, h * groups, ub, uh, un, p)
    KEEP += b * n + p
    S, EDGE, VISIBLE = bias_pointers(S, EDGE, VISIBLE, h * groups, sh, eh)
    # index of the first query head of the group
    head = b * heads + h * groups
    LSE, DELTA = sum_pointers(LSE, DELTA, head, n)
    gates = gate_pointers(ROW, COL, head, n, p, GATED)
    DCOL += head * n + p
    half = False
    if HAS_COPY:
        COPY += h * groups * sh
        half = (t < whole) & copy_is_exact(EDGE, eh, groups)
    if half:
        accumulate_dkv(Q, K, V, COPY, ADDRESS, EDGE, VISIBLE, gates, KEEP, GRAD, LSE, DELTA, DK, DV, DCOL, SUM, SEED,
                       head, drop, t * BN, qh, qn, kn, vn, gh, gn, dn, en, uh, un, sh, eh, m, n, c, scale, groups, D,
                       BD, E, BE, BM, BN, False, HAS_BIAS, HAS_KEEP, DOT, SKIP, ONCE, DROP)  # fmt: skip
    elif t < whole:
        accumulate_dkv(Q, K, V, S, ADDRESS, EDGE, VISIBLE, gates, KEEP, GRAD, LSE, DELTA, DK, DV, DCOL, SUM, SEED, head,
                       drop, t * BN, qh, qn, kn, vn, gh, gn, dn, en, uh, un, sh, eh, m, n, c, scale, groups, D, BD, E,
                       BE, BM, BN, False, HAS_BIAS, HAS_KEEP, DOT, SKIP, ONCE, DROP)  # fmt: skip
    else:
        first = whole * BN + (t - whole) * LESS
        accumulate_dkv(Q, K, V, S, ADDRESS, EDGE, VISIBLE, gates, KEEP, GRAD, LSE, DELTA, DK, DV, DCOL, SUM, SEED, head,
                       drop, first, qh, qn, kn, vn, gh, gn, dn, en, uh, un, sh, eh, m, n, c, scale, groups, D, BD, E,
                       BE, BM, LESS, True, HAS_BIAS, HAS_KEEP, DOT, SKIP, ONCE, DROP)  # fmt: skip
