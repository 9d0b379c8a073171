"""The forward kernel, and what it shares with the backward kernels.

Logits are kept divided by the scale: ``x = q k^T + S``, where `S` is what `strip.pack` made, so that the bias is what
the matrix product starts from, and the scale is part of the exponential: ``p = 2^(x c - lse)``, c = scale log2(e).

Kernels count patches first and prefix tokens behind them, wherever these stand in memory: `u` is such a number, and
pointers to tokens lead to the first patch. So a grid fills whole tiles without masks, as far as it goes, and what is
left (the rest of the grid, the prefix) comes in narrow tiles, TAIL, that need care. Where a bias hides keys (SKIP),
loops run over the tokens in sight alone, so that blocks which are -inf throughout cost nothing.
"""

import triton
import triton.language as tl

FAR = tl.constexpr(1024.0)  # of a row maximum in log2 units, whose rounding is then 2^-14
# tokens in a tile behind the whole ones, at most, as instructions were counted (compute capability 9.0, Triton 3.6)
NARROW = tl.constexpr(32)
FEW = tl.constexpr(
    16
)  # in programs whose loop does not mind which queries they have; above two, a whole one is less


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
def ranked(X, u, stride, m, n, D: tl.constexpr, BD: tl.constexpr, TAIL: tl.constexpr):
    """Return rows `u`, patches first, of a matrix that is given by the row of its first patch; zeros behind the end."""
    if TAIL:
        d = tl.arange(0, BD)
        where = X + token(u, m, n)[:, None].to(tl.int64) * stride + d[None, :]
        return tl.load(where, mask=(u[:, None] < n) & (d[None, :] < D), other=0.0)
    return rows(X, u, stride, n, D, BD, False)


@triton.jit
def token(u, m, n):
    """Return where token `u` stands, counted from the first of `m` patches: prefix tokens stand in front of it."""
    return tl.where(u < m, u, u - n)


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
def edges(EDGE, prefix, HAS_BIAS: tl.constexpr):
    """Return the bias of queries on prefix keys; `prefix` says which queries are such tokens themselves."""
    if HAS_BIAS:
        return tl.where(prefix, tl.load(EDGE + 1), tl.load(EDGE))
    return tl.zeros_like(prefix).to(tl.float32)


@triton.jit
def seen(KEEP, u, m, n, TAIL: tl.constexpr, HAS_KEEP: tl.constexpr):
    """Return which keys `u` exist; KEEP leads to the first patch."""
    real = u < n
    if HAS_KEEP:
        at = u
        if TAIL:
            at = token(u, m, n)
        real = real & (tl.load(KEEP + at, mask=real, other=0) != 0)
    return real


@triton.jit
def scores(q, K, S, address, edge, KEEP, start, stride, m, n, D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr,
           TAIL: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_KEEP: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
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
        x = product(q, tl.trans(k), bias, UPCAST)
    else:
        x = product(q, tl.trans(k), tl.zeros((q.shape[0], BN), tl.float32), UPCAST)
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
          MASKED: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
    """Return accumulator, row maximum and row sum after the values of one more tile of logits / scale."""
    weight, fade, top, total = weights(x, top, total, c)
    v = rows(V, start + tl.arange(0, BN), stride, n, E, BE, MASKED)
    return product(weight.to(v.dtype), v, acc * fade[:, None], UPCAST), top, total


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
    acc = acc / tl.where(alive, total, 1.0)[:, None]
    e = tl.arange(0, BE)
    tl.store(OUT + i[:, None].to(tl.int64) * stride + e[None, :], acc.to(OUT.dtype.element_ty),
             mask=(u[:, None] < n) & (e[None, :] < E))  # fmt: skip
    # a row without keys weighs every key 2^-inf in the backward pass
    far = alive & (tl.abs(top) > FAR)
    lse = tl.where(far, top, top + tl.log2(tl.where(alive, total, 1.0)))
    tl.store(LSE + u, tl.where(alive, lse, float("inf")), mask=u < n)
    tl.store(SHARE + i, tl.where(far, 1.0 / tl.where(alive, total, 1.0), 1.0), mask=u < n)


@triton.jit
def step(acc, top, total, q, K, V, S, address, edge, KEEP, start, kn, vn, m, n, c, D: tl.constexpr, BD: tl.constexpr,
         E: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr, TAIL: tl.constexpr, HAS_BIAS: tl.constexpr,
         HAS_KEEP: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
    """Return accumulator, row maximum and row sum after one more tile of keys."""
    x, _ = scores(q, K, S, address, edge, KEEP, start, kn, m, n, D, BD, BN, TAIL, HAS_BIAS, HAS_KEEP, UPCAST)
    weight, fade, top, total = weights(x, top, total, c)
    v = ranked(V, start + tl.arange(0, BN), vn, m, n, E, BE, TAIL)
    return product(weight.to(v.dtype), v, acc * fade[:, None], UPCAST), top, total


@triton.jit
def sight(SIGHT, first, m, n, B: tl.constexpr, OTHER: tl.constexpr, LESS: tl.constexpr, BACK: tl.constexpr,
          SKIP: tl.constexpr):  # fmt: skip
    """Return between which whole tiles of OTHER tokens those lie that `B` tokens see, and where the narrow ones begin.

    SIGHT has the least and the largest step from a query to a key. BACK: of those by which they are seen.
    """
    start, stop = 0, m // OTHER
    tail = stop * OTHER
    if SKIP:
        lowest, highest = tl.load(SIGHT), tl.load(SIGHT + 1)
        if BACK:
            lowest, highest = -highest, -lowest
        low, high = tl.maximum(first + lowest, 0), tl.maximum(first + B + highest, 0)
        # prefix tokens see and are seen by all
        if first + B <= m:
            # of patches behind the whole tiles, those before the sight are passed over, or all
            end = m if n > m else n + LESS - 1
            tail += tl.maximum((end if high <= tail else low) - tail, 0) // LESS * LESS
            start = tl.minimum(low // OTHER, stop)
            stop = tl.maximum(start, tl.minimum(stop, tl.cdiv(high, OTHER)))
    return start, stop, tail


@triton.jit
def attend(Q, K, V, S, ADDRESS, EDGE, SIGHT, KEEP, OUT, LSE, SHARE, first, qn, kn, vn, on, m, n, c, D: tl.constexpr,
           BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
           HAS_BIAS: tl.constexpr, HAS_KEEP: tl.constexpr, UPCAST: tl.constexpr, SKIP: tl.constexpr):  # fmt: skip
    """Write the output and log2 of the row sums of the queries from `first` on."""
    LESS: tl.constexpr = BN if BN < NARROW else NARROW
    u = first + tl.arange(0, BM)
    q = ranked(Q, u, qn, m, n, D, BD, True)
    address = u
    if HAS_BIAS:
        address = tl.multiple_of(tl.load(ADDRESS + u, mask=u < n, other=0), 8)
    edge = edges(EDGE, u >= m, HAS_BIAS)
    top = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, BE), tl.float32)
    low, high, tail = sight(SIGHT, first, m, n, BM, BN, LESS, False, SKIP)
    # narrow tiles behind the grid first, then the whole ones in a loop without masks
    for start in range(tail, n, LESS):
        acc, top, total = step(acc, top, total, q, K, V, S, address, edge, KEEP, start, kn, vn, m, n, c, D, BD, E, BE,
                               LESS, True, HAS_BIAS, HAS_KEEP, UPCAST)  # fmt: skip
    for t in range(low, high):
        acc, top, total = step(acc, top, total, q, K, V, S, address, edge, KEEP, t * BN, kn, vn, m, n, c, D, BD, E,
                               BE, BN, False, HAS_BIAS, HAS_KEEP, UPCAST)  # fmt: skip
    finish(OUT, LSE, SHARE, acc, top, total, token(u, m, n), u, on, n, E, BE)


@triton.jit
def place(pid, batch, m, n, B: tl.constexpr, LESS: tl.constexpr, WIDE: tl.constexpr):
    """Return sample, head, the number of tiles of `B` tokens, and which tile of its head a program has.

    Those are whole, or the last is not (WIDE), where more than two narrow tiles would take its place.
    """
    whole = m // B
    if WIDE:
        whole += tl.where(n - whole * B > 2 * LESS, 1, 0)
    # programs count samples first, so that neighbours read the same bias from the cache
    b = (pid % batch).to(tl.int64)
    tiles = whole + tl.cdiv(tl.maximum(n - whole * B, 0), LESS)
    return b, (pid // batch // tiles).to(tl.int64), whole, pid // batch % tiles


@triton.jit(do_not_specialize=["n", "p"])
def forward(Q, K, V, S, ADDRESS, EDGE, SIGHT, KEEP, OUT, LSE, qb, qh, qn, kb, kh, kn, vb, vh, vn, ob, oh, on, sh, eh, n,
            p, c, batch, heads, D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
            BN: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_KEEP: tl.constexpr, UPCAST: tl.constexpr,
            SKIP: tl.constexpr):  # fmt: skip
    """Write the output and log2 of the row sums for one tile of queries; neighbours share the tile of the bias."""
    LESS: tl.constexpr = BM if BM < FEW else FEW
    m = n - p
    b, h, whole, t = place(tl.program_id(0), batch, m, n, BM, LESS, True)
    front = p.to(tl.int64)
    Q += b * qb + h * qh + front * qn
    K += b * kb + h * kh + front * kn
    V += b * vb + h * vh + front * vn
    OUT += b * ob + h * oh + front * on
    KEEP += b * n + p
    S += h * sh
    EDGE += h * eh
    SIGHT += 2 * h
    # log2 of sums, patches first, and behind those of all heads the shares, in the order of the tokens
    at = (b * heads + h) * pitch_of(n)
    SHARE = LSE + (tl.cast(batch, tl.int64) * heads * pitch_of(n) + at + p)
    LSE += at
    if t < whole:
        attend(Q, K, V, S, ADDRESS, EDGE, SIGHT, KEEP, OUT, LSE, SHARE, t * BM, qn, kn, vn, on, m, n, c, D, BD, E, BE,
               BM, BN, HAS_BIAS, HAS_KEEP, UPCAST, SKIP)  # fmt: skip
    else:
        first = whole * BM + (t - whole) * LESS
        attend(Q, K, V, S, ADDRESS, EDGE, SIGHT, KEEP, OUT, LSE, SHARE, first, qn, kn, vn, on, m, n, c, D, BD, E, BE,
               LESS, BN, HAS_BIAS, HAS_KEEP, UPCAST, SKIP)  # fmt: skip
