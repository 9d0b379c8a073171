"""The forward kernel, and what it shares with the backward kernels.

Logits are kept divided by the scale: ``x = q k^T + S``, where `S` is what `strip.pack` made, so that the bias is what
the matrix product starts from, and the scale is part of the exponential: ``p = 2^(x c - lse)``, c = scale log2(e).
"""

import triton
import triton.language as tl

from vispe.attention.backends.triton.grid.column_tiles import (
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
from vispe.attention.backends.triton.grid.shared import (
    FEW,
    NARROW,
    bias_of,
    copied,
    of_head,
    pitch_of,
    place,
    run_of,
    seen,
    sight,
)

FAR = tl.constexpr(1024.0)  # of a row maximum in log2 units, whose rounding is then 2^-14


@triton.jit
def scores(q, K, S, address, edge, KEEP, start, stride, m, n, D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr,
           TAIL: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_KEEP: tl.constexpr, DOT: tl.constexpr):  # fmt: skip
    """Return logits / scale of a tile of queries and the keys from `start` on, and these keys."""
    u = start + tl.arange(0, BN)
    k = ranked(K, u, stride, m, n, D, BD, TAIL)
    if HAS_BIAS:
        # the strip of a query is one contiguous read: its address plus the number of the key
        where = S + address[:, None] + u[None, :]
        if TAIL:
            # prefix keys have no place, so one number of their own stands for all
            patch = u[None, :] < m
            bias = tl.where(patch, tl.load(where, mask=patch, other=0.0).to(tl.float32), edge[:, None])
        else:
            bias = tl.load(where).to(tl.float32)
        # the matrix product starts from the bias: no addition afterwards
        x = inner(q, k, bias, DOT)
    else:
        x = inner(q, k, tl.zeros((q[0].shape[0], BN), tl.float32), DOT)
    if TAIL or HAS_KEEP:
        x = tl.where(seen(KEEP, u, m, n, TAIL, HAS_KEEP)[None, :], x, float("-inf"))
    return x, k


@triton.jit
def weights(x, top, total, c):
    """Return the weights of one more tile, what older ones fade by, and the row maximum (log2) and sum after it.

    The maximum is kept as the rounded number that was subtracted, so that fused products cannot differ from it.
    """
    # online softmax: older tiles fade when a larger logit appears
    higher = tl.maximum(top, tl.max(x, 1) * c)
    # rows that are masked so far must not subtract -inf from -inf
    safe = tl.where(higher == float("-inf"), 0.0, higher)
    weight = tl.exp2(x * c - safe[:, None])
    fade = tl.exp2(top - safe)
    return weight, fade, higher, total * fade + tl.sum(weight, 1)


@triton.jit
def weigh(acc, top, total, x, V, start, stride, n, c, E: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr,
          MASKED: tl.constexpr, DOT: tl.constexpr):  # fmt: skip
    """Return accumulator, row maximum and row sum after the values of one more tile of logits / scale."""
    weight, fade, top, total = weights(x, top, total, c)
    v = rows(V, start + tl.arange(0, BN), stride, n, E, BE, MASKED)
    return mixed(weight, v, times(acc, fade[:, None]), DOT), top, total


@triton.jit
def shares(LSE, n, BM: tl.constexpr):
    """Return where the shares of rows begin: behind the sums of all samples and heads, of tiles of `BM` rows each."""
    return LSE + (tl.num_programs(0) // tl.cdiv(n, BM)).to(tl.int64) * pitch_of(n)


@triton.jit
def finish(OUT, LSE, SHARE, acc, top, total, i, u, stride, n, E: tl.constexpr, BE: tl.constexpr):
    """Write the output of one tile of queries and their shares at `i`, and log2 of their row sums at `u`.

    Where the maximum is far from 0, its sum with log2(total) would lose the latter. Such rows store the maximum alone,
    and 1 / total as the share by which the backward pass multiplies the gradient of their output; others have 1.
    """
    alive = total > 0
    # rows without a key keep their zeros
    share = 1.0 / tl.where(alive, total, 1.0)
    write(OUT, times(acc, share[:, None]), i, u < n, stride, E, BE)
    # a row without keys weighs every key 2^-inf in the backward pass
    far = alive & (tl.abs(top) > FAR)
    lse = tl.where(far, top, top + tl.log2(tl.where(alive, total, 1.0)))
    tl.store(LSE + u, tl.where(alive, lse, float("inf")), mask=u < n)
    tl.store(SHARE + i, tl.where(far, share, 1.0), mask=u < n)


@triton.jit
def step(acc, top, total, q, u, K, V, S, address, edge, KEEP, luck, start, kn, vn, m, n, c, D: tl.constexpr,
         BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr, TAIL: tl.constexpr,
         HAS_BIAS: tl.constexpr, HAS_KEEP: tl.constexpr, DOT: tl.constexpr):  # fmt: skip
    """Return accumulator, row maximum and row sum after one more tile of keys."""
    x, _ = scores(q, K, S, address, edge, KEEP, start, kn, m, n, D, BD, BN, TAIL, HAS_BIAS, HAS_KEEP, DOT)
    weight, fade, top, total = weights(x, top, total, c)
    keys = start + tl.arange(0, BN)
    if len(luck) > 0:
        # after the sums, of which dropped weights are a part
        weight = tl.where(survive(luck, u[:, None], keys[None, :]), weight, 0.0)
    v = ranked(V, keys, vn, m, n, E, BE, TAIL)
    return mixed(weight, v, times(acc, fade[:, None]), DOT), top, total


@triton.jit
def attend(Q, K, V, S, ADDRESS, EDGE, SIGHT, KEEP, OUT, LSE, SHARE, luck, first, qn, kn, vn, on, m, n, c,
           D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
           HAS_BIAS: tl.constexpr, HAS_KEEP: tl.constexpr, DOT: tl.constexpr, SKIP: tl.constexpr):  # fmt: skip
    """Write the output and log2 of the row sums of the queries from `first` on."""
    LESS: tl.constexpr = BN if BN < NARROW else NARROW
    u = first + tl.arange(0, BM)
    q = ranked(Q, u, qn, m, n, D, BD, True)
    address, edge = run_of(ADDRESS, EDGE, u, m, n, HAS_BIAS)
    top = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = empty(BM, BE)
    low, high, tail = sight(SIGHT, first, m, n, BM, BN, LESS, False, SKIP)
    # narrow tiles behind the grid first, then the whole ones in a loop without masks
    for start in range(tail, n, LESS):
        acc, top, total = step(acc, top, total, q, u, K, V, S, address, edge, KEEP, luck, start, kn, vn, m, n, c, D,
                               BD, E, BE, LESS, True, HAS_BIAS, HAS_KEEP, DOT)  # fmt: skip
    for t in range(low, high):
        acc, top, total = step(acc, top, total, q, u, K, V, S, address, edge, KEEP, luck, t * BN, kn, vn, m, n, c, D,
                               BD, E, BE, BN, False, HAS_BIAS, HAS_KEEP, DOT)  # fmt: skip
    if len(luck) > 0:
        acc = times(acc, luck[3])
    finish(OUT, LSE, SHARE, acc, top, total, token(u, m, n), u, on, n, E, BE)


@triton.jit(do_not_specialize=["n", "p"])
def forward(Q, K, V, S, COPY, ADDRESS, EDGE, SIGHT, KEEP, SEED, OUT, LSE, qb, qh, qn, kb, kh, kn, vb, vh, vn, ob, oh,
            on, sh, eh, n, p, c, drop, batch, heads, groups, D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr,
            BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_COPY: tl.constexpr,
            HAS_KEEP: tl.constexpr, DOT: tl.constexpr, SKIP: tl.constexpr, DROP: tl.constexpr):  # fmt: skip
    """Write the output and log2 of the row sums for one tile of queries; neighbours share the tile of the bias.

    `groups` query heads in a row share a head of keys and values.
    """
    LESS: tl.constexpr = BM if BM < FEW else FEW
    m = n - p
    b, h, whole, t = place(tl.program_id(0), batch, m, n, BM, LESS, True)
    Q = of_head(Q, b, h, qb, qh, qn, p)
    K = of_head(K, b, h // groups, kb, kh, kn, p)
    V = of_head(V, b, h // groups, vb, vh, vn, p)
    OUT = of_head(OUT, b, h, ob, oh, on, p)
    KEEP += b * n + p
    S, EDGE, SIGHT = bias_of(S, EDGE, SIGHT, h, sh, eh)
    luck = luck_of(SEED, b * heads + h, drop, DROP)
    # log2 of sums, patches first, and behind those of all heads the shares, in the order of the tokens
    at = (b * heads + h) * pitch_of(n)
    SHARE = LSE + (tl.cast(batch, tl.int64) * heads * pitch_of(n) + at + p)
    LSE += at
    # whole tiles read the copy in half the space, where it holds the same numbers
    half = False
    if HAS_COPY:
        COPY += h * sh
        half = (t < whole) & copied(EDGE, eh, 1)
    if half:
        attend(Q, K, V, COPY, ADDRESS, EDGE, SIGHT, KEEP, OUT, LSE, SHARE, luck, t * BM, qn, kn, vn, on, m, n, c, D,
               BD, E, BE, BM, BN, HAS_BIAS, HAS_KEEP, DOT, SKIP)  # fmt: skip
    elif t < whole:
        attend(Q, K, V, S, ADDRESS, EDGE, SIGHT, KEEP, OUT, LSE, SHARE, luck, t * BM, qn, kn, vn, on, m, n, c, D, BD,
               E, BE, BM, BN, HAS_BIAS, HAS_KEEP, DOT, SKIP)  # fmt: skip
    else:
        first = whole * BM + (t - whole) * LESS
        attend(Q, K, V, S, ADDRESS, EDGE, SIGHT, KEEP, OUT, LSE, SHARE, luck, first, qn, kn, vn, on, m, n, c, D, BD,
               E, BE, LESS, BN, HAS_BIAS, HAS_KEEP, DOT, SKIP)  # fmt: skip
