"""What the kernels share: the order of tokens, what stands for each, and which program has which of them.

Kernels of a grid count patches first and prefix tokens behind them, wherever these stand in memory: `u` is such a
number, and pointers to tokens lead to the first patch. So a grid fills whole tiles without masks, as far as it goes,
and what is left (the rest of the grid, the prefix) comes in narrow tiles, TAIL, that need care. Where a bias hides keys
(SKIP), loops run over the tokens in sight alone, so that blocks which are -inf throughout cost nothing.
"""

import triton
import triton.language as tl

from vispe.attention.backends.triton.grid.column_tiles import token

# tokens in a tile behind the whole ones, at most, as instructions were counted (compute capability 9.0, Triton 3.6)
NARROW = tl.constexpr(32)
# in programs whose loop does not mind which queries they have; above two, a whole one is less
FEW = tl.constexpr(16)
# samples whose keys and values stay in the cache of the GPU while all tiles of queries read them
TOGETHER = tl.constexpr(16)


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
def sums_of(LSE, DELTA, head, n):
    """Return where the sums of the rows of a head lie, heads counted over all samples."""
    at = head * pitch_of(n)
    return LSE + at, DELTA + at


@triton.jit
def padding(KEEP, j, n, HAS_KEEP: tl.constexpr):
    """Return which keys exist."""
    real = j < n
    if HAS_KEEP:
        real = real & (tl.load(KEEP + j, mask=real, other=0) != 0)
    return real


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
def edges(EDGE, prefix, HAS_BIAS: tl.constexpr):
    """Return the bias of queries on prefix keys; `prefix` says which queries are such tokens themselves."""
    if HAS_BIAS:
        return tl.where(prefix, tl.load(EDGE + 1), tl.load(EDGE))
    return tl.zeros_like(prefix).to(tl.float32)


@triton.jit
def of_head(X, b, h, xb, xh, xn, p):
    """Return where the first patch of a head lies, behind `p` prefix tokens."""
    return X + (b * xb + h * xh + p.to(tl.int64) * xn)


@triton.jit
def bias_of(S, EDGE, SIGHT, h, sh, eh):
    """Return where the runs of a head lie, its biases on prefix keys, and its sight."""
    return S + h * sh, EDGE + h * eh, SIGHT + 2 * h


@triton.jit
def copied(EDGE, eh, groups):
    """Whether the copies in float16 of the runs of so many heads hold their numbers, as `narrow.pack` says in EDGE."""
    fits = tl.load(EDGE + 2) != 0.0
    for group in range(1, groups):
        fits = fits & (tl.load(EDGE + group * eh + 2) != 0.0)
    return fits


@triton.jit
def run_of(ADDRESS, EDGE, u, m, n, HAS_BIAS: tl.constexpr):
    """Return where the runs of queries `u` start, and their biases on prefix keys."""
    address = u
    if HAS_BIAS:
        address = tl.multiple_of(tl.load(ADDRESS + u, mask=u < n, other=0), 8)
    return address, edges(EDGE, u >= m, HAS_BIAS)


@triton.jit
def program(batch, n, B: tl.constexpr):
    """Return sample, head and tile of a program, where a head has tiles of `B` tokens and no others."""
    return turn(tl.program_id(0), batch, tl.cdiv(n, B))


@triton.jit
def turn(pid, batch, tiles):
    """Return sample, head and tile of a program, where each head of a sample has so many tiles.

    Programs count samples first, so that neighbours read the same bias from the cache, but no more of them than leave
    room for their keys and values: few samples have all their tiles before the next come.
    """
    h = pid // (tiles * batch)
    pid -= h * tiles * batch
    first = pid // (tiles * TOGETHER) * TOGETHER
    size = tl.minimum(batch - first, TOGETHER)
    pid -= first * tiles
    return (first + pid % size).to(tl.int64), h.to(tl.int64), pid // size


@triton.jit
def place(pid, batch, m, n, B: tl.constexpr, LESS: tl.constexpr, WIDE: tl.constexpr):
    """Return sample, head, the number of tiles of `B` tokens, and which tile of its head a program has.

    Those are whole, or the last is not (WIDE), where more than two narrow tiles would take its place.
    """
    whole = m // B
    if WIDE:
        whole += tl.where(n - whole * B > 2 * LESS, 1, 0)
    b, h, t = turn(pid, batch, whole + tl.cdiv(tl.maximum(n - whole * B, 0), LESS))
    return b, h, whole, t


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
