"""Matrices of a tile of tokens, as kernels hold them: a tuple of tiles of columns.

The columns of a tile of Triton are a power of 2. Heads of 72 to 96 columns (SigLIP So400m, ViT-H, ViT-g) come as 64 and
32 of them, instead of 128: BD is then 96. All other widths are one tile.
"""

import triton
import triton.language as tl


@triton.jit
def product(a, b, acc, DOT: tl.constexpr):
    """Return ``a @ b + acc``; `DOT`: 'ieee', 'tf32x3', or 'wider' in the interpreter, which has no bfloat16."""
    if DOT == "wider":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision=DOT)


@triton.jit
def inner(a, b, acc, DOT: tl.constexpr):
    """Return ``a @ b^T + acc`` of two matrices."""
    acc = product(a[0], tl.trans(b[0]), acc, DOT)
    if len(a) == 2:
        acc = product(a[1], tl.trans(b[1]), acc, DOT)
    return acc


@triton.jit
def mixed(weight, x, acc, DOT: tl.constexpr):
    """Return ``weight @ x + acc`` of matrices, and weights that are rounded to the dtype of `x`."""
    if len(x) == 2:
        weight = weight.to(x[0].dtype)
        return product(weight, x[0], acc[0], DOT), product(weight, x[1], acc[1], DOT)
    else:
        return (product(weight.to(x[0].dtype), x[0], acc[0], DOT),)


@triton.jit
def empty(B: tl.constexpr, BD: tl.constexpr):
    """Return zeros, `B` rows of `BD` columns."""
    if BD == 96:
        return tl.zeros((B, 64), tl.float32), tl.zeros((B, 32), tl.float32)
    else:
        return (tl.zeros((B, BD), tl.float32),)


@triton.jit
def times(x, factor):
    """Return a matrix times a number, or a column of them."""
    if len(x) == 2:
        return x[0] * factor, x[1] * factor
    else:
        return (x[0] * factor,)


@triton.jit
def kept(x, real):
    """Return a matrix with zeros in rows that are not `real`."""
    if len(x) == 2:
        return tl.where(real[:, None], x[0], 0.0), tl.where(real[:, None], x[1], 0.0)
    else:
        return (tl.where(real[:, None], x[0], 0.0),)


@triton.jit
def dots(a, b):
    """Return the product of each row of a matrix with that row of another."""
    total = tl.sum(a[0].to(tl.float32) * b[0].to(tl.float32), 1)
    if len(a) == 2:
        total += tl.sum(a[1].to(tl.float32) * b[1].to(tl.float32), 1)
    return total


@triton.jit
def tile(X, i, real, stride, D: tl.constexpr, BD: tl.constexpr, MASKED: tl.constexpr):
    """Return rows `i` of one tile of columns, zeros where rows are not `real` and behind the last column."""
    d = tl.arange(0, BD)
    # a token may lie 2^31 elements or more behind the first
    where = X + i[:, None].to(tl.int64) * stride + d[None, :]
    if MASKED:
        return tl.load(where, mask=real[:, None] & (d[None, :] < D), other=0.0)
    if D != BD:
        return tl.load(where, mask=d[None, :] < D, other=0.0)
    return tl.load(where)


@triton.jit
def read(X, i, real, stride, D: tl.constexpr, BD: tl.constexpr, MASKED: tl.constexpr):
    """Return rows `i` of a matrix with `D` columns, zeros in those that are not `real`."""
    if BD == 96:
        return (
            tile(X, i, real, stride, 64, 64, MASKED),
            tile(X + 64, i, real, stride, D - 64, 32, MASKED),
        )
    else:
        return (tile(X, i, real, stride, D, BD, MASKED),)


@triton.jit
def rows(X, i, stride, n, D: tl.constexpr, BD: tl.constexpr, MASKED: tl.constexpr):
    """Return rows `i` of a matrix with `D` columns, zeros beyond its end."""
    return read(X, i, i < n, stride, D, BD, MASKED)


@triton.jit
def token(u, m, n):
    """Return where token `u` stands, counted from the first of `m` patches: prefix tokens stand in front of it."""
    return tl.where(u < m, u, u - n)


@triton.jit
def ranked(X, u, stride, m, n, D: tl.constexpr, BD: tl.constexpr, TAIL: tl.constexpr):
    """Return rows `u`, patches first, of a matrix that is given by the row of its first patch; zeros behind the end."""
    if TAIL:
        return read(X, token(u, m, n), u < n, stride, D, BD, True)
    return rows(X, u, stride, n, D, BD, False)


@triton.jit
def put(X, x, i, real, stride, D: tl.constexpr, BD: tl.constexpr):
    """Write those rows `i` of one tile of columns that are `real`, in its dtype."""
    d = tl.arange(0, BD)
    tl.store(X + i[:, None].to(tl.int64) * stride + d[None, :], x.to(X.dtype.element_ty),
             mask=real[:, None] & (d[None, :] < D))  # fmt: skip


@triton.jit
def write(X, x, i, real, stride, D: tl.constexpr, BD: tl.constexpr):
    """Write those rows `i` of a matrix that are `real`, in its dtype."""
    if BD == 96:
        put(X, x[0], i, real, stride, 64, 64)
        put(X + 64, x[1], i, real, stride, D - 64, 32)
    else:
        put(X, x[0], i, real, stride, D, BD)


@triton.jit
def lay(X, x, i, real, stride, D: tl.constexpr, BD: tl.constexpr):
    """Add one tile of columns to those rows `i` that are `real`, in whatever order programs come."""
    d = tl.arange(0, BD)
    tl.atomic_add(X + i[:, None].to(tl.int64) * stride + d[None, :], x, mask=real[:, None] & (d[None, :] < D),
                  sem="relaxed")  # fmt: skip


@triton.jit
def add(X, x, i, real, stride, D: tl.constexpr, BD: tl.constexpr):
    """Add a matrix to those rows `i` of another, in float32, that are `real`, in whatever order programs come."""
    if BD == 96:
        lay(X, x[0], i, real, stride, 64, 64)
        lay(X + 64, x[1], i, real, stride, D - 64, 32)
    else:
        lay(X, x[0], i, real, stride, D, BD)
