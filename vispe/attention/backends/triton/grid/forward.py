"""Forward kernel of attention on a grid, and functions shared with the backward kernels.

Logits are computed divided by the scale: ``x = q k^T + S``, where `S` is from `packed.pack`, so that the matrix product
accumulates onto the bias, and the scale is part of the exponential: ``p = 2^(x c - lse)``, c = scale log2(e).
"""

import triton
import triton.language as tl

from vispe.attention.backends.triton.grid.column_tiles import (
    load_rows,
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
    load_run,
    ordered_key_mask,
    ordered_tile,
    pitch_of,
    query_gates,
    visible_range,
)

# bound of the row maximum in log2 units, above which its rounding error exceeds 2^-14
FAR = tl.constexpr(1024.0)


@triton.jit
def scores(q, K, S, address, edge, gates, KEEP, start, stride, m, n, D: tl.constexpr, BD: tl.constexpr,
           BN: tl.constexpr, TAIL: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_KEEP: tl.constexpr,
           DOT: tl.constexpr):  # fmt: skip
    """Return logits / scale of a tile of queries and the keys from `start` on, these keys, and (profile, gates) or ().

    With `gates` from `query_gates`, the bias is the profile times the sum of the gates of query and key.
    """
    factors = ()
    u = start + tl.arange(0, BN)
    k = load_tokens(K, u, stride, m, n, D, BD, TAIL)
    if HAS_BIAS:
        # the biases of a query are contiguous: its address plus the key index
        where = S + address[:, None] + u[None, :]
        if TAIL:
            # prefix keys have no position: one bias per query for all of them
            patch = u[None, :] < m
            bias = tl.where(patch, tl.load(where, mask=patch, other=0.0).to(tl.float32), edge[:, None])
        else:
            bias = tl.load(where).to(tl.float32)
        if len(gates) > 0:
            factors = bias, gates[0][:, None] + load_gates(gates[1], u, m, n, TAIL)[None, :]
            bias = factors[0] * factors[1]
        # the matrix product accumulates onto the bias
        x = matmul_nt(q, k, bias, DOT)
    else:
        x = matmul_nt(q, k, tl.zeros((q[0].shape[0], BN), tl.float32), DOT)
    if TAIL or HAS_KEEP:
        x = tl.where(ordered_key_mask(KEEP, u, m, n, TAIL, HAS_KEEP)[None, :], x, float("-inf"))
    return x, k, factors


@triton.jit
def softmax_weights(x, row_max, row_sum, c):
    """Return the weights of one more tile, the rescaling factor of earlier tiles, and the updated row maximum and sum.

    The maximum (log2) is the rounded number that was subtracted, so that fused multiply-adds are consistent with it.
    """
    # online softmax: earlier tiles are rescaled when the maximum increases
    higher = tl.maximum(row_max, tl.max(x, 1) * c)
    # fully masked rows so far: avoid -inf - (-inf) = NaN
    safe = tl.where(higher == float("-inf"), 0.0, higher)
    weight = tl.exp2(x * c - safe[:, None])
    rescale = tl.exp2(row_max - safe)
    return weight, rescale, higher, row_sum * rescale + tl.sum(weight, 1)


@triton.jit
def accumulate_values(acc, row_max, row_sum, x, V, start, stride, n, c, E: tl.constexpr, BE: tl.constexpr, BN:
                      tl.constexpr, MASKED: tl.constexpr, DOT: tl.constexpr):  # fmt: skip
    """Return accumulator, row maximum and row sum after the values of one more tile of logits / scale."""
    weight, rescale, row_max, row_sum = softmax_weights(x, row_max, row_sum, c)
    v = load_rows(V, start + tl.arange(0, BN), stride, n, E, BE, MASKED)
    return weighted_sum(weight, v, scaled(acc, rescale[:, None]), DOT), row_max, row_sum


@triton.jit
def share_pointer(LSE, n, BM: tl.constexpr):
    """Return the pointer to the shares of rows, which follow the row sums of all samples and heads (tiles of `BM`)."""
    return LSE + (tl.num_programs(0) // tl.cdiv(n, BM)).to(tl.int64) * pitch_of(n)


@triton.jit
def store_output(OUT, LSE, SHARE, acc, row_max, row_sum, i, u, stride, n, E: tl.constexpr, BE: tl.constexpr):
    """Write the output of one tile of queries and their shares at `i`, and log2-sum-exp of their rows at `u`.

    If the maximum is far from 0, adding log2(row_sum) to it would lose the latter to rounding. Such rows store only the
    maximum, and 1 / row_sum as the share, by which the backward pass multiplies the gradient of the output; else 1.
    """
    alive = row_sum > 0
    # rows without any key have an accumulator of 0 and return 0
    share = 1.0 / tl.where(alive, row_sum, 1.0)
    store_rows(OUT, scaled(acc, share[:, None]), i, u < n, stride, E, BE)
    # lse = inf gives rows without any key weights 2^-inf = 0 in the backward pass
    far = alive & (tl.abs(row_max) > FAR)
    lse = tl.where(far, row_max, row_max + tl.log2(tl.where(alive, row_sum, 1.0)))
    tl.store(LSE + u, tl.where(alive, lse, float("inf")), mask=u < n)
    tl.store(SHARE + i, tl.where(far, share, 1.0), mask=u < n)


@triton.jit
def forward_step(acc, row_max, row_sum, q, u, K, V, S, address, edge, gates, KEEP, rng, start, kn, vn, m, n, c,
                 D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr,
                 TAIL: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_KEEP: tl.constexpr, DOT: tl.constexpr):  # fmt: skip
    """Return accumulator, row maximum and row sum after one more tile of keys."""
    x, _, _ = scores(q, K, S, address, edge, gates, KEEP, start, kn, m, n, D, BD, BN, TAIL, HAS_BIAS, HAS_KEEP,
                     DOT)  # fmt: skip
    weight, rescale, row_max, row_sum = softmax_weights(x, row_max, row_sum, c)
    keys = start + tl.arange(0, BN)
    if len(rng) > 0:
        # after the row sum, which includes dropped weights
        weight = tl.where(not_dropped(rng, u[:, None], keys[None, :]), weight, 0.0)
    v = load_tokens(V, keys, vn, m, n, E, BE, TAIL)
    return weighted_sum(weight, v, scaled(acc, rescale[:, None]), DOT), row_max, row_sum


@triton.jit
def attend_tile(Q, K, V, S, ADDRESS, EDGE, VISIBLE, gates, KEEP, OUT, LSE, SHARE, rng, first, qn, kn, vn, on, m, n, c,
           D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
           HAS_BIAS: tl.constexpr, HAS_KEEP: tl.constexpr, DOT: tl.constexpr, SKIP: tl.constexpr):  # fmt: skip
    """Write the output and log2-sum-exp of the rows of queries from `first` on."""
    LESS: tl.constexpr = BN if BN < NARROW else NARROW
    u = first + tl.arange(0, BM)
    q = load_tokens(Q, u, qn, m, n, D, BD, True)
    address, edge = load_run(ADDRESS, EDGE, u, m, n, HAS_BIAS)
    gates = query_gates(gates, u, m, n)
    row_max = tl.full((BM,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BM,), tl.float32)
    acc = zeros(BM, BE)
    low, high, tail = visible_range(VISIBLE, first, m, n, BM, BN, LESS, False, SKIP)
    # narrow tiles with masks first, then whole tiles in a loop without masks
    for start in range(tail, n, LESS):
        acc, row_max, row_sum = forward_step(acc, row_max, row_sum, q, u, K, V, S, address, edge, gates, KEEP, rng,
                                             start, kn, vn, m, n, c, D, BD, E, BE, LESS, True, HAS_BIAS, HAS_KEEP,
                                             DOT)  # fmt: skip
    for t in range(low, high):
        acc, row_max, row_sum = forward_step(acc, row_max, row_sum, q, u, K, V, S, address, edge, gates, KEEP, rng,
                                             t * BN, kn, vn, m, n, c, D, BD, E, BE, BN, False, HAS_BIAS, HAS_KEEP,
                                             DOT)  # fmt: skip
    if len(rng) > 0:
        acc = scaled(acc, rng[3])
    store_output(OUT, LSE, SHARE, acc, row_max, row_sum, token_index(u, m, n), u, on, n, E, BE)


@triton.jit(do_not_specialize=["eh", "n", "p", "batch", "heads"], do_not_specialize_on_alignment=["groups"])
def forward(Q, K, V, S, COPY, ADDRESS, EDGE, VISIBLE, ROW, COL, KEEP, SEED, OUT, LSE, qb, qh, qn, kb, kh, kn, vb, vh,
            vn, ob, oh, on, sh, eh, n, p, c, drop, batch, heads, groups, D: tl.constexpr, BD: tl.constexpr,
            E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, HAS_BIAS: tl.constexpr,
            HAS_COPY: tl.constexpr, GATED: tl.constexpr, HAS_KEEP: tl.constexpr, DOT: tl.constexpr, SKIP: tl.constexpr,
            DROP: tl.constexpr):  # fmt: skip
    """Write the output and log2-sum-exp of one tile of queries.

    `groups` consecutive query heads share a head of keys and values.
    """
    LESS: tl.constexpr = BM if BM < FEW else FEW
    m = n - p
    b, h, whole, t = ordered_tile(tl.program_id(0), batch, m, n, BM, LESS, True)
    Q = head_pointer(Q, b, h, qb, qh, qn, p)
    K = head_pointer(K, b, h // groups, kb, kh, kn, p)
    V = head_pointer(V, b, h // groups, vb, vh, vn, p)
    OUT = head_pointer(OUT, b, h, ob, oh, on, p)
    KEEP += b * n + p
    S, EDGE, VISIBLE = bias_pointers(S, EDGE, VISIBLE, h, sh, eh)
    gates = gate_pointers(ROW, COL, b * heads + h, n, p, GATED)
    rng = random_bits(SEED, b * heads + h, drop, DROP)
    # log2-sum-exp, patches first, followed after those of all heads by the shares in memory order
    at = (b * heads + h) * pitch_of(n)
    SHARE = LSE + (tl.cast(batch, tl.int64) * heads * pitch_of(n) + at + p)
    LSE += at
    # whole tiles read the float16 copy, with half the memory traffic, if it is exact
    half = False
    if HAS_COPY:
        COPY += h * sh
        half = (t < whole) & copy_is_exact(EDGE, eh, 1)
    if half:
        attend_tile(Q, K, V, COPY, ADDRESS, EDGE, VISIBLE, gates, KEEP, OUT, LSE, SHARE, rng, t * BM, qn, kn, vn, on, m,
                    n, c, D, BD, E, BE, BM, BN, HAS_BIAS, HAS_KEEP, DOT, SKIP)  # fmt: skip
    elif t < whole:
        attend_tile(Q, K, V, S, ADDRESS, EDGE, VISIBLE, gates, KEEP, OUT, LSE, SHARE, rng, t * BM, qn, kn, vn, on, m, n,
                    c, D, BD, E, BE, BM, BN, HAS_BIAS, HAS_KEEP, DOT, SKIP)  # fmt: skip
    else:
        first = whole * BM + (t - whole) * LESS
        attend_tile(Q, K, V, S, ADDRESS, EDGE, VISIBLE, gates, KEEP, OUT, LSE, SHARE, rng, first, qn, kn, vn, on, m, n,
                    c, D, BD, E, BE, LESS, BN, HAS_BIAS, HAS_KEEP, DOT, SKIP)  # fmt: skip
