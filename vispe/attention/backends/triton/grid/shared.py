"""Shared parts of the kernels: token order, pointers, and the assignment of tiles to programs.

The grid kernels order patches first and prefix tokens last, independent of their order in memory: `u` is an index in
this order, and pointers to tokens refer to the first patch. Thus a grid consists of whole tiles without masks, and the
remaining tokens (the rest of the grid, the prefix) are in narrow tiles (TAIL), which need masks. If a bias masks many
keys (SKIP), loops only visit the visible tokens, so fully masked blocks are skipped.
"""

import triton
import triton.language as tl

from vispe.attention.backends.triton.grid.column_tiles import token_index

# maximum size of narrow tiles, chosen by instruction counts (compute capability 9.0, Triton 3.6)
NARROW = tl.constexpr(32)
# size of narrow tiles of queries in programs that loop over keys; more than two are slower than a whole tile
FEW = tl.constexpr(16)
# samples whose keys and values stay in the L2 cache while all tiles of queries read them
TOGETHER = tl.constexpr(16)


@triton.jit
def pitch_of(n):
    """Return the head stride of row sums: n rounded up to a multiple of 128, for aligned loads."""
    return tl.cdiv(n, 128) * 128


@triton.jit
def load_sums(LSE, DELTA, i, n, MASKED: tl.constexpr):
    """Return log2-sum-exp of rows `i` and their delta = dO . O; tiles without MASKED have no rows beyond `n`."""
    if MASKED:
        return tl.load(LSE + i, mask=i < n, other=float("inf")), tl.load(DELTA + i, mask=i < n, other=0.0)
    return tl.load(LSE + i), tl.load(DELTA + i)


@triton.jit
def sum_pointers(LSE, DELTA, head, n):
    """Return the pointers to the row sums of a head, with `head` counted over all samples."""
    at = head * pitch_of(n)
    return LSE + at, DELTA + at


@triton.jit
def key_mask(KEEP, j, n, HAS_KEEP: tl.constexpr):
    """Return the mask of real keys `j` in memory order."""
    real = j < n
    if HAS_KEEP:
        real = real & (tl.load(KEEP + j, mask=real, other=0) != 0)
    return real


@triton.jit
def ordered_key_mask(KEEP, u, m, n, TAIL: tl.constexpr, HAS_KEEP: tl.constexpr):
    """Return the mask of real keys `u`, patches first; KEEP points to the first patch."""
    real = u < n
    if HAS_KEEP:
        at = u
        if TAIL:
            at = token_index(u, m, n)
        real = real & (tl.load(KEEP + at, mask=real, other=0) != 0)
    return real


@triton.jit
def prefix_bias(EDGE, prefix, HAS_BIAS: tl.constexpr):
    """Return the bias of queries on prefix keys; `prefix` is True for queries that are prefix tokens."""
    if HAS_BIAS:
        return tl.where(prefix, tl.load(EDGE + 1), tl.load(EDGE))
    return tl.zeros_like(prefix).to(tl.float32)


@triton.jit
def head_pointer(X, b, h, xb, xh, xn, p):
    """Return the pointer to the first patch of a head, after `p` prefix tokens."""
    return X + (b * xb + h * xh + p.to(tl.int64) * xn)


@triton.jit
def bias_pointers(S, EDGE, VISIBLE, h, sh, eh):
    """Return the pointers to the runs of a head, its biases on prefix keys, and its visible offsets."""
    return S + h * sh, EDGE + h * eh, VISIBLE + 2 * h


@triton.jit
def copy_is_exact(EDGE, eh, groups):
    """Whether the float16 copies of the runs of `groups` heads are exact, by the flags of `pack_with_copy` in EDGE."""
    fits = tl.load(EDGE + 2) != 0.0
    for group in range(1, groups):
        fits = fits & (tl.load(EDGE + group * eh + 2) != 0.0)
    return fits


@triton.jit
def load_run(ADDRESS, EDGE, u, m, n, HAS_BIAS: tl.constexpr):
    """Return the addresses of the runs of queries `u`, and their biases on prefix keys."""
    address = u
    if HAS_BIAS:
        address = tl.multiple_of(tl.load(ADDRESS + u, mask=u < n, other=0), 8)
    return address, prefix_bias(EDGE, u >= m, HAS_BIAS)


@triton.jit
def gate_pointers(ROW, COL, head, n, p, GATED: tl.constexpr):
    """Return the pointers to the gates of queries and keys at the first patch of a head, or ()."""
    if GATED:
        at = head * n + p
        return ROW + at, COL + at
    else:
        return ()


@triton.jit
def load_gates(X, u, m, n, TAIL: tl.constexpr):
    """Return the gates of tokens `u`, patches first; 0 beyond the end."""
    if TAIL:
        return tl.load(X + token_index(u, m, n), mask=u < n, other=0.0)
    return tl.load(X + u)


@triton.jit
def query_gates(gates, u, m, n):
    """Return the gates of queries `u` and the pointer to those of keys, from `gate_pointers`; () without gates."""
    if len(gates) > 0:
        return load_gates(gates[0], u, m, n, True), gates[1]
    else:
        return ()


@triton.jit
def program_tile(batch, n, B: tl.constexpr):
    """Return sample, head and tile of a program, for heads that consist of tiles of `B` tokens."""
    return unravel_program(tl.program_id(0), batch, tl.cdiv(n, B))


@triton.jit
def unravel_program(pid, batch, tiles):
    """Return sample, head and tile of a program, for `tiles` tiles per head and sample.

    Consecutive programs process different samples, so that they read the same bias from the cache, in groups of
    TOGETHER samples, whose keys and values fit into the cache.
    """
    h = pid // (tiles * batch)
    pid -= h * tiles * batch
    first = pid // (tiles * TOGETHER) * TOGETHER
    size = tl.minimum(batch - first, TOGETHER)
    pid -= first * tiles
    return (first + pid % size).to(tl.int64), h.to(tl.int64), pid // size


@triton.jit
def ordered_tile(pid, batch, m, n, B: tl.constexpr, LESS: tl.constexpr, WIDE: tl.constexpr):
    """Return sample, head, number of tiles of `B` tokens, and tile index of a program.

    Tiles of `B` tokens are followed by narrow tiles of LESS tokens. With WIDE, the last tile of `B` tokens may be
    partial, if it replaces more than two narrow tiles.
    """
    whole = m // B
    if WIDE:
        whole += tl.where(n - whole * B > 2 * LESS, 1, 0)
    b, h, t = unravel_program(pid, batch, whole + tl.cdiv(tl.maximum(n - whole * B, 0), LESS))
    return b, h, whole, t


@triton.jit
def visible_range(VISIBLE, first, m, n, B: tl.constexpr, OTHER: tl.constexpr, LESS: tl.constexpr, BACK: tl.constexpr,
          SKIP: tl.constexpr):  # fmt: skip
    """Return the range of whole tiles of OTHER tokens visible from `B` tokens, and the start of the narrow tiles.

    VISIBLE has the minimum and maximum unmasked offset from query to key. BACK: the `B` tokens are keys, OTHER queries.
    """
    start, stop = 0, m // OTHER
    tail = stop * OTHER
    if SKIP:
        lowest, highest = tl.load(VISIBLE), tl.load(VISIBLE + 1)
        if BACK:
            lowest, highest = -highest, -lowest
        low, high = tl.maximum(first + lowest, 0), tl.maximum(first + B + highest, 0)
        # prefix tokens attend to all tokens and vice versa
        if first + B <= m:
            # narrow tiles of patches before the visible range are skipped, or all of them
            end = m if n > m else n + LESS - 1
            tail += tl.maximum((end if high <= tail else low) - tail, 0) // LESS * LESS
            start = tl.minimum(low // OTHER, stop)
            stop = tl.maximum(start, tl.minimum(stop, tl.cdiv(high, OTHER)))
    return start, stop, tail
