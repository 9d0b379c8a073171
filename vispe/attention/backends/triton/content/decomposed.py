"""Forward kernel of decomposed biases: per token one term for each grid row and one for each grid column.

A program processes a tile of tokens (its own, OWN) and loops over the other tokens (OTHER): panels of W columns, R rows
at a time. The column terms of its own tokens stay in registers for a whole panel, and a row has one term per token, so
a score costs one addition. Gradients of these terms are sums over a tile without atomics. The terms of the other tokens
are contiguous. All terms are laid out by `slots.lay_out` as lines (rows, columns, two for prefix tokens) x slots
(tokens in the order of the loop), with -inf for padding, so that no masks are needed.
"""

import triton
import triton.language as tl

from vispe.attention.backends.triton.grid.column_tiles import (
    load_rows,
    matmul_nt,
    scaled,
    weighted_sum,
    zeros,
)
from vispe.attention.backends.triton.grid.forward import share_pointer, softmax_weights, store_output
from vispe.attention.backends.triton.grid.shared import pitch_of

FEW = tl.constexpr(16)  # prefix tokens per tile


@triton.jit
def line_offsets(i, n, p, gw, high, wide, ls, W: tl.constexpr):
    """Return slot, row line and column line of tokens `i`, clamped to the last token."""
    i = tl.minimum(i, n - 1)
    cell = tl.maximum(i - p, 0)
    y = cell // gw
    x = cell - y * gw
    # prefix tokens follow all panels
    slot = tl.where(i < p, high * wide + i, (x // W * high + y) * W + x % W)
    return slot, tl.where(i < p, high + wide, y) * ls, tl.where(i < p, high + wide + 1, high + x) * ls


@triton.jit
def panel_tokens(row, panel, n, p, gw, R: tl.constexpr, W: tl.constexpr):
    """Return the tokens of R rows of a panel; padding slots get an arbitrary token, as their bias is -inf."""
    s = tl.arange(0, R * W)
    return tl.minimum(p + (row + s // W) * gw + panel * W + s % W, n - 1)


@triton.jit
def column_bias(
    OWN, slot, panel, high, ls, BA: tl.constexpr, R: tl.constexpr, W: tl.constexpr, HAS_OWN: tl.constexpr
):
    """Return the column terms of a panel for the own tokens, repeated for R rows, (BA, R W)."""
    if HAS_OWN:
        line = high + panel * W + tl.arange(0, R * W) % W
        return tl.load(OWN + slot[:, None] + (line * ls)[None, :])
    return tl.zeros((BA, R * W), tl.float32)


@triton.jit
def panel_bias(bias, OWN, OTHER, slot, ly, lx, row, start, ls, BA: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
           HAS_OWN: tl.constexpr, HAS_OTHER: tl.constexpr):  # fmt: skip
    """Return the bias / scale of own tokens on R rows of a panel, (BA, R W)."""
    if HAS_OWN:
        line = (row + tl.arange(0, R)) * ls
        row_terms = tl.load(OWN + slot[:, None] + line[None, :])
        # one row term, repeated for all columns
        bias += tl.reshape(tl.broadcast_to(row_terms[:, :, None], (BA, R, W)), (BA, R * W))
        if HAS_OTHER:
            bias += other_bias(OTHER, ly, lx, start, R * W)
    else:
        bias = other_bias(OTHER, ly, lx, start, R * W)
    return bias


@triton.jit
def other_bias(OTHER, ly, lx, start, BS: tl.constexpr):
    """Return the terms of the other tokens from slot `start` on for the own tokens, (BA, BS)."""
    s = tl.multiple_of(start, 8) + tl.arange(0, BS)
    return tl.load(OTHER + ly[:, None] + s[None, :]) + tl.load(OTHER + lx[:, None] + s[None, :])


@triton.jit
def prefix_biases(OWN, OTHER, slot, ly, lx, first, p, high, wide, ls, BA: tl.constexpr, HAS_OWN: tl.constexpr,
                  HAS_OTHER: tl.constexpr):  # fmt: skip
    """Return the bias / scale of own tokens on prefix tokens from `first` on, and these tokens."""
    j = first + tl.arange(0, FEW)
    bias = tl.zeros((BA, FEW), tl.float32)
    if HAS_OWN:
        prefix_line = OWN + slot + (high + wide) * ls
        # prefix tokens have a separate row line and column line
        terms = tl.load(prefix_line) + tl.load(prefix_line + ls)
        bias += tl.where(j[None, :] < p, terms[:, None], float("-inf"))
    if HAS_OTHER:
        bias += other_bias(OTHER, ly, lx, high * wide + first, FEW)
    return bias, tl.minimum(j, p - 1)


@triton.jit
def attend_keys(acc, row_max, row_sum, q, K, V, KEEP, j, bias, kn, vn, n, c, D: tl.constexpr, BD: tl.constexpr, E:
                tl.constexpr, BE: tl.constexpr, HAS_KEEP: tl.constexpr, DOT: tl.constexpr):  # fmt: skip
    """Return accumulator, row maximum and row sum after the keys `j`."""
    x = matmul_nt(q, load_rows(K, j, kn, n, D, BD, False), bias, DOT)
    if HAS_KEEP:
        x = tl.where((tl.load(KEEP + j) != 0)[None, :], x, float("-inf"))
    # online softmax, as in the grid kernel
    weight, rescale, row_max, row_sum = softmax_weights(x, row_max, row_sum, c)
    v = load_rows(V, j, vn, n, E, BE, False)
    return weighted_sum(weight, v, scaled(acc, rescale[:, None]), DOT), row_max, row_sum


@triton.jit(do_not_specialize=["n", "p", "gh", "gw", "high", "wide", "many", "heads"])
def decomposed_forward(Q, K, V, OWN, OTHER, KEEP, OUT, LSE, qb, qh, qn, kb, kh, kn, vb, vh, vn, ob, oh, on, n, p, gh,
                       gw, high, wide, ls, many, c, heads, D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr,
                       BE: tl.constexpr, BA: tl.constexpr, R: tl.constexpr, W: tl.constexpr, HAS_OWN: tl.constexpr,
                       HAS_OTHER: tl.constexpr, HAS_KEEP: tl.constexpr, DOT: tl.constexpr):  # fmt: skip
    """Write the output and log2-sum-exp of one tile of queries; OWN has the terms of queries, OTHER of keys."""
    tiles = tl.cdiv(n, BA)
    i = tl.program_id(0) % tiles * BA + tl.arange(0, BA)
    head = (tl.program_id(0) // tiles).to(tl.int64)
    b, h = head // heads, head % heads
    q = load_rows(Q + b * qb + h * qh, i, qn, n, D, BD, True)
    K += b * kb + h * kh
    V += b * vb + h * vh
    KEEP += b * n
    OWN += head * many * ls
    OTHER += head * many * ls
    slot, ly, lx = line_offsets(i, n, p, gw, high, wide, ls, W)
    row_max = tl.full((BA,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BA,), tl.float32)
    acc = zeros(BA, BE)
    for panel in range(0, wide // W):
        # column terms stay in registers for the whole panel
        column_terms = column_bias(OWN, slot, panel, high, ls, BA, R, W, HAS_OWN)
        for row in range(0, gh, R):
            bias = panel_bias(column_terms, OWN, OTHER, slot, ly, lx, row, (panel * high + row) * W, ls, BA, R, W,
                              HAS_OWN, HAS_OTHER)  # fmt: skip
            j = panel_tokens(row, panel, n, p, gw, R, W)
            acc, row_max, row_sum = attend_keys(acc, row_max, row_sum, q, K, V, KEEP, j, bias, kn, vn, n, c, D, BD, E,
                                                BE, HAS_KEEP, DOT)  # fmt: skip
    # prefix tokens are last, in small tiles
    for first in range(0, p, FEW):
        bias, j = prefix_biases(OWN, OTHER, slot, ly, lx, first, p, high, wide, ls, BA, HAS_OWN, HAS_OTHER)
        acc, row_max, row_sum = attend_keys(
            acc, row_max, row_sum, q, K, V, KEEP, j, bias, kn, vn, n, c, D, BD, E, BE, HAS_KEEP, DOT
        )
    at = head * pitch_of(n)
    store_output(OUT + b * ob + h * oh, LSE + at, share_pointer(LSE, n, BA) + at, acc, row_max, row_sum, i, i, on, n, E,
                 BE)  # fmt: skip
