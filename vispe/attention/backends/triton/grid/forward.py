"""The forward kernel, and what it shares with the backward kernels.

Logits are kept divided by the scale: ``x = q k^T + S``, where `S` is what `strip.pack` made, so that the bias is what
the matrix product starts from, and the scale is part of the exponential: ``p = 2^(x c - lse)``, c = scale log2(e).
Tiles that need no care (no prefix key, no end, no padding) run in a loop of their own. Where a bias hides keys (SKIP),
loops run over the tokens in sight alone, so that blocks which are -inf throughout cost nothing.
"""

import triton
import triton.language as tl

FAR = tl.constexpr(1024.0)  # of a row maximum in log2 units, whose rounding is then 2^-14


@triton.jit
def product(a, b, acc, UPCAST: tl.constexpr):
    """Return ``a @ b + acc``, exact for float32; the interpreter cannot multiply bfloat16, hence UPCAST."""
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def rows(X, i, stride, n, D: tl.constexpr, BD: tl.constexpr, MASKED: tl.constexpr):
    """Return rows `i` of a matrix with `D` columns, zeros beyond its end."""
    d = tl.arange(0, BD)
    # a token may lie 2^31 elements or more behind the first
    where = X + i[:, None].to(tl.int64) * stride + d[None, :]
    if MASKED:
        return tl.load(where, mask=(i[:, None] < n) & (d[None, :] < D), other=0.0)
    if D != BD:
        return tl.load(where, mask=d[None, :] < D, other=0.0)
    return tl.load(where)


@triton.jit
def pitch_of(n):
    """Return how far apart the sums of two heads lie: at a multiple of 128, so that tiles read them aligned."""
    return tl.cdiv(n, 128) * 128


@triton.jit
def sums_at(LSE, DELTA, i, n, MASKED: tl.constexpr):
    """Return log2 of the sums of rows `i`, and what goes off their gradients; plain tiles have no rows beyond `n`."""
    if MASKED:
        return tl.load(LSE + i, mask=i < n, other=float("inf")), tl.load(DELTA + i, mask=i < n, other=0.0)
    return tl.load(LSE + i), tl.load(DELTA + i)


@triton.jit
def padding(KEEP, j, n, HAS_KEEP: tl.constexpr):
    """Return which keys exist."""
    real = j < n
    if HAS_KEEP:
        real = real & (tl.load(KEEP + j, mask=real, other=0) != 0)
    return real


@triton.jit
def edges(EDGE, i, p, HAS_BIAS: tl.constexpr):
    """Return the bias of queries `i` on prefix keys."""
    if HAS_BIAS:
        return tl.where(i < p, tl.load(EDGE + 1), tl.load(EDGE))
    return tl.zeros_like(i).to(tl.float32)


@triton.jit
def scores(q, K, S, address, edge, KEEP, start, stride, n, p, D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr,
           MASKED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_KEEP: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
    """Return logits / scale of a tile of queries and the keys from `start` on, and these keys."""
    j = start + tl.arange(0, BN)
    k = rows(K, j, stride, n, D, BD, MASKED)
    if HAS_BIAS:
        # the strip of a query is one contiguous read: its address plus the number of the key
        bias = tl.load(S + address[:, None] + j[None, :]).to(tl.float32)
        if MASKED:
            # prefix keys have no place, so one number of their own stands for all
            bias = tl.where(j[None, :] < p, edge[:, None], bias)
        # the matrix product starts from the bias: no addition afterwards
        x = product(q, tl.trans(k), bias, UPCAST)
    else:
        x = product(q, tl.trans(k), tl.zeros((q.shape[0], BN), tl.float32), UPCAST)
    if MASKED:
        x = tl.where(padding(KEEP, j, n, HAS_KEEP)[None, :], x, float("-inf"))
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
          MASKED: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
    """Return accumulator, row maximum and row sum after the values of one more tile of logits / scale."""
    weight, fade, top, total = weights(x, top, total, c)
    v = rows(V, start + tl.arange(0, BN), stride, n, E, BE, MASKED)
    return product(weight.to(v.dtype), v, acc * fade[:, None], UPCAST), top, total


@triton.jit
def finish(OUT, LSE, acc, top, total, i, stride, n, E: tl.constexpr, BE: tl.constexpr):
    """Write the output of one tile of queries, log2 of its row sums and, behind those of all rows, their shares.

    Where the maximum is far from 0, its sum with log2(total) would lose the latter. Such rows store the maximum alone,
    and 1 / total as the share by which the backward pass multiplies the gradient of their output; others have 1.
    """
    alive = total > 0
    # rows without a key keep their zeros
    acc = acc / tl.where(alive, total, 1.0)[:, None]
    e = tl.arange(0, BE)
    tl.store(OUT + i[:, None].to(tl.int64) * stride + e[None, :], acc.to(OUT.dtype.element_ty),
             mask=(i[:, None] < n) & (e[None, :] < E))  # fmt: skip
    # a row without keys weighs every key 2^-inf in the backward pass
    far = alive & (tl.abs(top) > FAR)
    lse = tl.where(far, top, top + tl.log2(tl.where(alive, total, 1.0)))
    tl.store(LSE + i, tl.where(alive, lse, float("inf")), mask=i < n)
    # the second half of LSE starts behind the rows of all samples and heads
    every = (tl.num_programs(0) // tl.cdiv(n, acc.shape[0])).to(tl.int64) * pitch_of(n)
    tl.store(LSE + every + i, tl.where(far, 1.0 / tl.where(alive, total, 1.0), 1.0), mask=i < n)


@triton.jit
def step(acc, top, total, q, K, V, S, address, edge, KEEP, start, stride_k, stride_v, n, p, c,
         D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr,
         MASKED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_KEEP: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
    """Return accumulator, row maximum and row sum after one more tile of keys."""
    x, _ = scores(
        q, K, S, address, edge, KEEP, start, stride_k, n, p, D, BD, BN, MASKED, HAS_BIAS, HAS_KEEP, UPCAST
    )
    return weigh(acc, top, total, x, V, start, stride_v, n, c, E, BE, BN, MASKED, UPCAST)


@triton.jit
def plan(n, p, BN: tl.constexpr, HAS_KEEP: tl.constexpr):
    """Return how many tiles are masked at the front, where the plain ones end, and how many are masked in all."""
    tiles = tl.cdiv(n, BN)
    # tiles with prefix keys stand in front, the ragged one at the end
    front = tl.minimum(tl.cdiv(p, BN), tiles)
    if HAS_KEEP:
        front = tiles
    end = tl.maximum(front, n // BN)
    return front, end, front + tiles - end


@triton.jit
def plan_sight(lowest, highest, first, n, p, care, BM: tl.constexpr, BN: tl.constexpr):
    """Return `plan` for a tile that sees the tokens `lowest` to `highest` behind its own, and two more numbers.

    The loop over plain tiles starts at the fourth; masked ones behind those in front are counted from the fifth on.
    """
    tiles = tl.cdiv(n, BN)
    start = tl.minimum(tl.maximum(first + lowest, 0), n) // BN
    stop = tl.cdiv(tl.minimum(tl.maximum(tl.minimum(first + BM, n) + highest, 0), n), BN)
    # prefix tokens see and are seen by all
    start = tl.where(first < p, 0, start)
    stop = tl.where(first < p, tiles, stop)
    front = tl.minimum(tl.cdiv(p, BN), tiles)
    start = tl.maximum(front, start)
    # what needs care throughout has no plain tiles; what does not may see the ragged one behind them
    end = tl.where(care, start, tl.maximum(start, tl.minimum(n // BN, stop)))
    tail = tl.where(care, start, n // BN)
    stop = tl.where(care, tl.maximum(start, stop), tl.maximum(n // BN, stop))
    return front, end, front + stop - tail, start, tail


@triton.jit(do_not_specialize=["n", "p"])
def forward(Q, K, V, S, ADDRESS, EDGE, SIGHT, KEEP, OUT, LSE, qb, qh, qn, kb, kh, kn, vb, vh, vn, ob, oh, on, sh, eh, n,
            p, c, batch, heads, D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
            BN: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_KEEP: tl.constexpr, UPCAST: tl.constexpr,
            SKIP: tl.constexpr):  # fmt: skip
    """Write the output and log2 of the row sums for one tile of queries; neighbours share the tile of the bias."""
    pid = tl.program_id(0)
    # programs count samples first, so that neighbours read the same bias from the cache
    b = (pid % batch).to(tl.int64)
    tiles = tl.cdiv(n, BM)
    h = (pid // batch // tiles).to(tl.int64)
    first = (pid // batch % tiles) * BM
    i = first + tl.arange(0, BM)
    q = rows(Q + b * qb + h * qh, i, qn, n, D, BD, True)
    K += b * kb + h * kh
    V += b * vb + h * vh
    KEEP += b * n
    address = i
    if HAS_BIAS:
        S += h * sh
        EDGE += h * eh
        address = tl.multiple_of(tl.load(ADDRESS + i, mask=i < n, other=0), 8)
    edge = edges(EDGE, i, p, HAS_BIAS)
    top = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, BE), tl.float32)
    front, end, masked = plan(n, p, BN, HAS_KEEP)
    plain, tail = front, end
    if SKIP:
        front, end, masked, plain, tail = plan_sight(tl.load(SIGHT + 2 * h), tl.load(SIGHT + 2 * h + 1), first, n, p,
                                                     HAS_KEEP, BM, BN)  # fmt: skip
    # tiles that need care first, the others in a loop without masks
    for t in range(0, masked):
        start = tl.where(t < front, t, tail + t - front) * BN
        acc, top, total = step(acc, top, total, q, K, V, S, address, edge, KEEP, start, kn, vn, n, p, c, D, BD, E, BE,
                               BN, True, HAS_BIAS, HAS_KEEP, UPCAST)  # fmt: skip
    for t in range(plain, end):
        acc, top, total = step(acc, top, total, q, K, V, S, address, edge, KEEP, t * BN, kn, vn, n, p, c, D, BD, E,
                               BE, BN, False, HAS_BIAS, HAS_KEEP, UPCAST)  # fmt: skip
    finish(OUT + b * ob + h * oh, LSE + (b * heads + h) * pitch_of(n), acc, top, total, i, on, n, E, BE)
