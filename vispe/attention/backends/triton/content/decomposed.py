"""The kernels of decomposed biases: a token reads one number for each row and one for each column of the grid.

A kernel keeps a tile of tokens, its *own* ones, and loops over the *others*: panels of W columns, R rows at a time.
What the own tokens read for the W columns then stays in registers for a whole panel, and a row is one number per token,
so that a score costs one addition. Gradients of what own tokens read are sums over a tile, with one writer. What others
read is contiguous along them. All is stored by `slots.lay_out`: lines (rows, columns, two for prefix tokens) x slots
(tokens in the order of the loop), -inf where there is no such row, column or token, so that nothing needs a mask.
"""

import triton
import triton.language as tl

from vispe.attention.backends.triton.grid.column_tiles import empty, inner, mixed, rows, times
from vispe.attention.backends.triton.grid.forward import finish, shares, weights
from vispe.attention.backends.triton.grid.shared import pitch_of

FEW = tl.constexpr(16)  # prefix tokens in one tile


@triton.jit
def lines_of(i, n, p, gw, high, wide, ls, W: tl.constexpr):
    """Return slot, row line and column line of tokens `i`; those beyond the end are taken for the last."""
    i = tl.minimum(i, n - 1)
    cell = tl.maximum(i - p, 0)
    y = cell // gw
    x = cell - y * gw
    # prefix tokens stand behind all panels
    slot = tl.where(i < p, high * wide + i, (x // W * high + y) * W + x % W)
    return slot, tl.where(i < p, high + wide, y) * ls, tl.where(i < p, high + wide + 1, high + x) * ls


@triton.jit
def tokens_at(row, panel, n, p, gw, R: tl.constexpr, W: tl.constexpr):
    """Return the tokens of R rows of a panel; any token stands where there is none."""
    s = tl.arange(0, R * W)
    return tl.minimum(p + (row + s // W) * gw + panel * W + s % W, n - 1)


@triton.jit
def columns(
    OWN, slot, panel, high, ls, BA: tl.constexpr, R: tl.constexpr, W: tl.constexpr, HAS_OWN: tl.constexpr
):
    """Return what own tokens read for the columns of a panel, (BA, R W)."""
    if HAS_OWN:
        line = high + panel * W + tl.arange(0, R * W) % W
        return tl.load(OWN + slot[:, None] + (line * ls)[None, :])
    return tl.zeros((BA, R * W), tl.float32)


@triton.jit
def biases(held, OWN, OTHER, slot, ly, lx, row, start, ls, BA: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
           HAS_OWN: tl.constexpr, HAS_OTHER: tl.constexpr):  # fmt: skip
    """Return the bias / scale of own tokens on R rows of a panel, (BA, R W)."""
    if HAS_OWN:
        line = (row + tl.arange(0, R)) * ls
        read = tl.load(OWN + slot[:, None] + line[None, :])
        # one number for each row, repeated along its columns
        held += tl.reshape(tl.broadcast_to(read[:, :, None], (BA, R, W)), (BA, R * W))
        if HAS_OTHER:
            return held + others(OTHER, ly, lx, start, R * W)
        return held
    return others(OTHER, ly, lx, start, R * W)


@triton.jit
def others(OTHER, ly, lx, start, BS: tl.constexpr):
    """Return what the others from slot `start` on read for own tokens."""
    s = tl.multiple_of(start, 8) + tl.arange(0, BS)
    return tl.load(OTHER + ly[:, None] + s[None, :]) + tl.load(OTHER + lx[:, None] + s[None, :])


@triton.jit
def prefix_biases(OWN, OTHER, slot, ly, lx, first, p, high, wide, ls, BA: tl.constexpr, HAS_OWN: tl.constexpr,
                  HAS_OTHER: tl.constexpr):  # fmt: skip
    """Return the bias / scale of own tokens on prefix tokens from `first` on, and these tokens."""
    j = first + tl.arange(0, FEW)
    bias = tl.zeros((BA, FEW), tl.float32)
    if HAS_OWN:
        end = OWN + slot + (high + wide) * ls
        # prefix tokens have a row line and a column line of their own
        read = tl.load(end) + tl.load(end + ls)
        bias += tl.where(j[None, :] < p, read[:, None], float("-inf"))
    if HAS_OTHER:
        bias += others(OTHER, ly, lx, high * wide + first, FEW)
    return bias, tl.minimum(j, p - 1)


@triton.jit
def attend(acc, top, total, q, K, V, KEEP, j, bias, kn, vn, n, c, D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr,
           BE: tl.constexpr, HAS_KEEP: tl.constexpr, DOT: tl.constexpr):  # fmt: skip
    """Return accumulator, row maximum and row sum after the keys `j`."""
    x = inner(q, rows(K, j, kn, n, D, BD, False), bias, DOT)
    if HAS_KEEP:
        x = tl.where((tl.load(KEEP + j) != 0)[None, :], x, float("-inf"))
    # online softmax, as in the kernel of a table
    weight, fade, top, total = weights(x, top, total, c)
    v = rows(V, j, vn, n, E, BE, False)
    return mixed(weight, v, times(acc, fade[:, None]), DOT), top, total


@triton.jit(do_not_specialize=["n", "p", "gh", "gw"])
def decomposed_forward(Q, K, V, OWN, OTHER, KEEP, OUT, LSE, qb, qh, qn, kb, kh, kn, vb, vh, vn, ob, oh, on, n, p, gh,
                       gw, high, wide, ls, many, c, heads, D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr,
                       BE: tl.constexpr, BA: tl.constexpr, R: tl.constexpr, W: tl.constexpr, HAS_OWN: tl.constexpr,
                       HAS_OTHER: tl.constexpr, HAS_KEEP: tl.constexpr, DOT: tl.constexpr):  # fmt: skip
    """Write the output and log2 of the row sums for one tile of queries; OWN is read by queries, OTHER by keys."""
    tiles = tl.cdiv(n, BA)
    i = tl.program_id(0) % tiles * BA + tl.arange(0, BA)
    head = (tl.program_id(0) // tiles).to(tl.int64)
    b, h = head // heads, head % heads
    q = rows(Q + b * qb + h * qh, i, qn, n, D, BD, True)
    K += b * kb + h * kh
    V += b * vb + h * vh
    KEEP += b * n
    OWN += head * many * ls
    OTHER += head * many * ls
    slot, ly, lx = lines_of(i, n, p, gw, high, wide, ls, W)
    top = tl.full((BA,), float("-inf"), tl.float32)
    total = tl.zeros((BA,), tl.float32)
    acc = empty(BA, BE)
    for panel in range(0, wide // W):
        # numbers for columns stay in registers for the whole panel
        held = columns(OWN, slot, panel, high, ls, BA, R, W, HAS_OWN)
        for row in range(0, gh, R):
            bias = biases(held, OWN, OTHER, slot, ly, lx, row, (panel * high + row) * W, ls, BA, R, W, HAS_OWN,
                          HAS_OTHER)  # fmt: skip
            j = tokens_at(row, panel, n, p, gw, R, W)
            acc, top, total = attend(acc, top, total, q, K, V, KEEP, j, bias, kn, vn, n, c, D, BD, E, BE, HAS_KEEP,
                                     DOT)  # fmt: skip
    # prefix tokens come last, few at a time
    for first in range(0, p, FEW):
        bias, j = prefix_biases(OWN, OTHER, slot, ly, lx, first, p, high, wide, ls, BA, HAS_OWN, HAS_OTHER)
        acc, top, total = attend(
            acc, top, total, q, K, V, KEEP, j, bias, kn, vn, n, c, D, BD, E, BE, HAS_KEEP, DOT
        )
    at = head * pitch_of(n)
    finish(OUT + b * ob + h * oh, LSE + at, shares(LSE, n, BA) + at, acc, top, total, i, i, on, n, E, BE)
