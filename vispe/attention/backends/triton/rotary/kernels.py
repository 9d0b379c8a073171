"""Kernels that rotate pairs of channels of q, k and v in one pass over memory, and the gradient of the tables.

Up to three tensors share one launch. If heads share the tables, those of a tile of tokens are loaded once for several
heads. The inverse rotation, which is also the gradient, has the opposite sign of the sine.
"""

import triton
import triton.language as tl


@triton.jit
def in_bounds(i, d, n, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Return the mask of tile elements within the tensor."""
    real = i[:, None] < n
    if WIDTH != BLOCK:
        real = real & (d[None, :] < WIDTH)
    return real


@triton.jit
def load_pairs(X, i, stride, n, PAIRS: tl.constexpr, BP: tl.constexpr, HALF: tl.constexpr):
    """Return the first and the second channels of the pairs of rows `i`, in float32."""
    if HALF:
        d = tl.arange(0, BP)
        real = in_bounds(i, d, n, PAIRS, BP)
        first = X + i[:, None] * stride + d[None, :]
        return (
            tl.load(first, mask=real, other=0.0).to(tl.float32),
            tl.load(first + PAIRS, mask=real, other=0.0).to(tl.float32),
        )
    d = tl.arange(0, 2 * BP)
    both = tl.load(
        X + i[:, None] * stride + d[None, :], mask=in_bounds(i, d, n, 2 * PAIRS, 2 * BP), other=0.0
    )
    # interleaved layout: one contiguous load, then split into first and second channels
    return tl.split(tl.reshape(both.to(tl.float32), (i.shape[0], BP, 2)))


@triton.jit
def store_pairs(OUT, a, b, i, stride, n, PAIRS: tl.constexpr, BP: tl.constexpr, HALF: tl.constexpr):
    """Store pairs in the layout of `load_pairs`, rounded once to the dtype of OUT."""
    to = OUT.dtype.element_ty
    if HALF:
        d = tl.arange(0, BP)
        real = in_bounds(i, d, n, PAIRS, BP)
        first = OUT + i[:, None] * stride + d[None, :]
        tl.store(first, a.to(to), mask=real)
        tl.store(first + PAIRS, b.to(to), mask=real)
    else:
        d = tl.arange(0, 2 * BP)
        both = tl.reshape(tl.join(a, b), (i.shape[0], 2 * BP)).to(to)
        tl.store(OUT + i[:, None] * stride + d[None, :], both, mask=in_bounds(i, d, n, 2 * PAIRS, 2 * BP))


@triton.jit
def load_table(TABLE, i, stride, n, PAIRS: tl.constexpr, BP: tl.constexpr):
    """Return rows `i` of a table (n, pairs)."""
    d = tl.arange(0, BP)
    return tl.load(TABLE + i[:, None] * stride + d[None, :], mask=in_bounds(i, d, n, PAIRS, BP), other=0.0)


@triton.jit
def rotate_tile(X, OUT, COS, SIN, cos, sin, h, heads, xh, xn, ch, cn, sh, sn, tables, i, n, D: tl.constexpr,
         BR: tl.constexpr, PAIRS: tl.constexpr, BP: tl.constexpr, HALF: tl.constexpr, BACK: tl.constexpr,
         SHARED: tl.constexpr):  # fmt: skip
    """Rotate one tile of tokens of head `h` if it exists; channels after the pairs are copied."""
    if h < heads:
        if not SHARED:
            # query heads of one group share a table
            table = h // (heads // tables) + tl.zeros((), tl.int64)
            cos = load_table(COS + table * ch, i, cn, n, PAIRS, BP)
            sin = load_table(SIN + table * sh, i, sn, n, PAIRS, BP)
        if BACK:
            # inverse rotation, or gradient
            sin = -sin
        X += (h + tl.zeros((), tl.int64)) * xh
        OUT += h * D
        a, b = load_pairs(X, i, xn, n, PAIRS, BP, HALF)
        store_pairs(OUT, a * cos - b * sin, b * cos + a * sin, i, heads * D, n, PAIRS, BP, HALF)
        # remaining channels, which are not rotated
        REST: tl.constexpr = D - 2 * PAIRS
        if REST > 0:
            d = tl.arange(0, BR)
            real = in_bounds(i, d, n, REST, BR)
            rest = tl.load(X + 2 * PAIRS + i[:, None] * xn + d[None, :], mask=real)
            tl.store(OUT + 2 * PAIRS + i[:, None] * (heads * D) + d[None, :], rest, mask=real)


@triton.jit(do_not_specialize=["n", "x_heads", "y_heads", "z_heads", "most", "tables"])
def rotate(X, Y, Z, XO, YO, ZO, COS, SIN, xb, xh, xn, yb, yh, yn, zb, zh, zn, cb, ch, cn, sb, sh, sn, n, x_heads,
           y_heads, z_heads, most, tables, D: tl.constexpr, BR: tl.constexpr, E: tl.constexpr, BS: tl.constexpr,
           PAIRS: tl.constexpr, BP: tl.constexpr, BM: tl.constexpr, PER: tl.constexpr, COUNT: tl.constexpr,
           HALF: tl.constexpr, BACK: tl.constexpr, SHARED: tl.constexpr):  # fmt: skip
    """Rotate `COUNT` tensors: one tile of tokens, `PER` heads. X and Y have `D` channels, Z has `E`."""
    pid = tl.program_id(0)
    # one program processes PER heads of a tile, with the tables in registers
    chunks, tiles = tl.cdiv(most, PER), tl.cdiv(n, BM)
    first = pid % chunks * PER
    start = (pid // chunks % tiles * BM).to(tl.int64)
    b = (pid // chunks // tiles).to(tl.int64)
    # offsets are relative to the tile, so that 32 bits do not overflow in long sequences
    remaining = n - start.to(tl.int32)
    i = tl.arange(0, BM)
    COS += b * cb + start * cn
    SIN += b * sb + start * sn
    cos = load_table(COS, i, cn, remaining, PAIRS, BP)
    sin = load_table(SIN, i, sn, remaining, PAIRS, BP)
    row = b * n + start
    for h in range(first, tl.minimum(first + PER, most)):
        rotate_tile(X + b * xb + start * xn, XO + row * (x_heads * D), COS, SIN, cos, sin, h, x_heads, xh, xn, ch, cn,
                    sh, sn, tables, i, remaining, D, BR, PAIRS, BP, HALF, BACK, SHARED)  # fmt: skip
        if COUNT > 1:
            rotate_tile(Y + b * yb + start * yn, YO + row * (y_heads * D), COS, SIN, cos, sin, h, y_heads, yh, yn, ch,
                        cn, sh, sn, tables, i, remaining, D, BR, PAIRS, BP, HALF, BACK, SHARED)  # fmt: skip
        if COUNT > 2:
            rotate_tile(Z + b * zb + start * zn, ZO + row * (z_heads * E), COS, SIN, cos, sin, h, z_heads, zh, zn, ch,
                        cn, sh, sn, tables, i, remaining, E, BS, PAIRS, BP, HALF, BACK, SHARED)  # fmt: skip


@triton.jit
def add_products(cos, sin, X, G, heads, xb, xh, xn, gb, gh, gn, b, t, part, parts, samples, tables, i, n,
                 PAIRS: tl.constexpr, BP: tl.constexpr, HALF: tl.constexpr):  # fmt: skip
    """Return the gradients of one tile of the tables after one tensor, over a part of its heads and samples."""
    group = heads // tables
    count = samples * group
    step = tl.cdiv(count, parts)
    for member in range(part * step, tl.minimum(part * step + step, count)):
        sample = b + member // group + tl.zeros((), tl.int64)
        h = t * group + member % group + tl.zeros((), tl.int64)
        x, y = load_pairs(X + sample * xb + h * xh, i, xn, n, PAIRS, BP, HALF)
        dx, dy = load_pairs(G + sample * gb + h * gh, i, gn, n, PAIRS, BP, HALF)
        # derivatives of (a cos - b sin, b cos + a sin) with respect to cos and sin
        cos += dx * x + dy * y
        sin += dy * x - dx * y
    return cos, sin


@triton.jit(do_not_specialize=["n", "x_heads", "y_heads", "z_heads", "tables", "parts", "fields", "samples"])
def grad_tables(X, Y, Z, GX, GY, GZ, DCOS, DSIN, xb, xh, xn, yb, yh, yn, zb, zh, zn, ub, uh, un, vb, vh, vn, wb, wh,
                wn, n, x_heads, y_heads, z_heads, tables, parts, fields, samples, PAIRS: tl.constexpr,
                BP: tl.constexpr, BM: tl.constexpr, COUNT: tl.constexpr, HALF: tl.constexpr,
                BACK: tl.constexpr):  # fmt: skip
    """Write the gradients of one tile of tokens of one table, (parts, fields, tables, n, pairs), without atomics.

    `fields` is the batch size of the tables, and `samples` the number of samples that share one.
    """
    pid = tl.program_id(0)
    tiles = tl.cdiv(n, BM)
    start = (pid % tiles * BM).to(tl.int64)
    t = pid // tiles % tables
    b = pid // tiles // tables % fields
    part = pid // tiles // tables // fields
    remaining = n - start.to(tl.int32)
    i = tl.arange(0, BM)
    cos, sin = tl.zeros((BM, BP), tl.float32), tl.zeros((BM, BP), tl.float32)
    cos, sin = add_products(cos, sin, X + start * xn, GX + start * un, x_heads, xb, xh, xn, ub, uh, un, b, t, part,
                            parts, samples, tables, i, remaining, PAIRS, BP, HALF)  # fmt: skip
    if COUNT > 1:
        cos, sin = add_products(cos, sin, Y + start * yn, GY + start * vn, y_heads, yb, yh, yn, vb, vh, vn, b, t,
                                part, parts, samples, tables, i, remaining, PAIRS, BP, HALF)  # fmt: skip
    if COUNT > 2:
        cos, sin = add_products(cos, sin, Z + start * zn, GZ + start * wn, z_heads, zb, zh, zn, wb, wh, wn, b, t,
                                part, parts, samples, tables, i, remaining, PAIRS, BP, HALF)  # fmt: skip
    if BACK:
        # inverse rotation, or gradient
        sin = -sin
    d = tl.arange(0, BP)
    where = ((pid // tiles).to(tl.int64) * n + start) * PAIRS + i[:, None] * PAIRS + d[None, :]
    real = in_bounds(i, d, remaining, PAIRS, BP)
    tl.store(DCOS + where, cos, mask=real)
    tl.store(DSIN + where, sin, mask=real)
