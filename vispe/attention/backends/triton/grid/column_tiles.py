"""Matrices (tokens x channels) in kernels, as tuples of column tiles.

Tile widths in Triton are powers of 2. A head_dim from 65 to 96 (SigLIP So400m, ViT-H, ViT-g) is split into 64 + 32
columns instead of padded to 128: BD is then 96. All other widths are one tile.
"""

import torch
import triton
import triton.language as tl

from vispe.attention.precision import rows_are_aligned


def aligned(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return tensors (..., channels) as `row_pointers` requires them; others are copied."""
    return tuple(
        x if x.shape[-1] % 16 != 8 or rows_are_aligned(x) else x.clone(memory_format=torch.contiguous_format)
        for x in tensors
    )


@triton.jit
def matmul(a, b, acc, DOT: tl.constexpr):
    """Return ``a @ b + acc``; `DOT`: 'ieee', 'tf32x3', or 'wider' in the interpreter, which has no bfloat16."""
    if DOT == "wider":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision=DOT)


@triton.jit
def matmul_nt(a, b, acc, DOT: tl.constexpr):
    """Return ``a @ b^T + acc`` of two matrices, summed over column tiles."""
    acc = matmul(a[0], tl.trans(b[0]), acc, DOT)
    if len(a) == 2:
        acc = matmul(a[1], tl.trans(b[1]), acc, DOT)
    return acc


@triton.jit
def weighted_sum(weight, x, acc, DOT: tl.constexpr):
    """Return ``weight @ x + acc``, with weights rounded to the dtype of `x`."""
    if len(x) == 2:
        # tensor cores need operands of one dtype
        weight = weight.to(x[0].dtype)
        return matmul(weight, x[0], acc[0], DOT), matmul(weight, x[1], acc[1], DOT)
    else:
        return (matmul(weight.to(x[0].dtype), x[0], acc[0], DOT),)


@triton.jit
def zeros(B: tl.constexpr, BD: tl.constexpr):
    """Return a matrix of zeros with `B` rows and `BD` columns, float32."""
    # 64 + 32 columns
    if BD == 96:
        return tl.zeros((B, 64), tl.float32), tl.zeros((B, 32), tl.float32)
    else:
        return (tl.zeros((B, BD), tl.float32),)


@triton.jit
def scaled(x, factor):
    """Return a matrix multiplied by a scalar or a column vector."""
    if len(x) == 2:
        return x[0] * factor, x[1] * factor
    else:
        return (x[0] * factor,)


@triton.jit
def masked_rows(x, real):
    """Return a matrix with rows that are not `real` set to 0."""
    if len(x) == 2:
        return tl.where(real[:, None], x[0], 0.0), tl.where(real[:, None], x[1], 0.0)
    else:
        return (tl.where(real[:, None], x[0], 0.0),)


@triton.jit
def row_dots(a, b):
    """Return the row-wise dot products of two matrices, float32."""
    row_sum = tl.sum(a[0].to(tl.float32) * b[0].to(tl.float32), 1)
    if len(a) == 2:
        row_sum += tl.sum(a[1].to(tl.float32) * b[1].to(tl.float32), 1)
    return row_sum


@triton.jit
def row_pointers(X, i, stride, BD: tl.constexpr, WIDTH: tl.constexpr):
    """Return the pointers to rows `i` of one column tile of a matrix with `WIDTH` columns."""
    # 64 bits: offsets of tokens may exceed 2^31 elements
    where = X + i[:, None].to(tl.int64) * stride + tl.arange(0, BD)[None, :]
    # rows of 8, 24, 40, ... channels start at multiples of 16 bytes, see `aligned`; Triton only recognises strides that
    # are multiples of 16, and would otherwise load single numbers
    if WIDTH % 16 == 8:
        where = tl.multiple_of(where, (1, 16))
    return where


@triton.jit
def load_tile(
    X, i, real, stride, D: tl.constexpr, BD: tl.constexpr, MASKED: tl.constexpr, WIDTH: tl.constexpr
):
    """Return rows `i` of one column tile, 0 for rows that are not `real` and after the last column."""
    d = tl.arange(0, BD)
    where = row_pointers(X, i, stride, BD, WIDTH)
    # rows and columns masked, columns only, or neither
    if MASKED:
        return tl.load(where, mask=real[:, None] & (d[None, :] < D), other=0.0)
    if D != BD:
        return tl.load(where, mask=d[None, :] < D, other=0.0)
    return tl.load(where)


@triton.jit
def load_masked(X, i, real, stride, D: tl.constexpr, BD: tl.constexpr, MASKED: tl.constexpr):
    """Return rows `i` of a matrix with `D` columns, 0 for rows that are not `real`."""
    if BD == 96:
        return (
            load_tile(X, i, real, stride, 64, 64, MASKED, D),
            load_tile(X + 64, i, real, stride, D - 64, 32, MASKED, D),
        )
    else:
        return (load_tile(X, i, real, stride, D, BD, MASKED, D),)


@triton.jit
def load_rows(X, i, stride, n, D: tl.constexpr, BD: tl.constexpr, MASKED: tl.constexpr):
    """Return rows `i` of a matrix with `D` columns, 0 beyond its end."""
    return load_masked(X, i, i < n, stride, D, BD, MASKED)


@triton.jit
def token_index(u, m, n):
    """Return the memory index of token `u` (patches first) relative to the first of `m` patches; prefix < 0."""
    return tl.where(u < m, u, u - n)


@triton.jit
def load_tokens(X, u, stride, m, n, D: tl.constexpr, BD: tl.constexpr, TAIL: tl.constexpr):
    """Return rows `u`, patches first, of a matrix whose pointer refers to the first patch; 0 beyond the end."""
    if TAIL:
        return load_masked(X, token_index(u, m, n), u < n, stride, D, BD, True)
    return load_rows(X, u, stride, n, D, BD, False)


@triton.jit
def store_tile(X, x, i, real, stride, D: tl.constexpr, BD: tl.constexpr, WIDTH: tl.constexpr):
    """Store the `real` rows `i` of one column tile in the dtype of X."""
    mask = real[:, None] & (tl.arange(0, BD)[None, :] < D)
    tl.store(row_pointers(X, i, stride, BD, WIDTH), x.to(X.dtype.element_ty), mask=mask)


@triton.jit
def store_rows(X, x, i, real, stride, D: tl.constexpr, BD: tl.constexpr):
    """Store the `real` rows `i` of a matrix in the dtype of X."""
    if BD == 96:
        store_tile(X, x[0], i, real, stride, 64, 64, D)
        store_tile(X + 64, x[1], i, real, stride, D - 64, 32, D)
    else:
        store_tile(X, x[0], i, real, stride, D, BD, D)


@triton.jit
def atomic_add_tile(X, x, i, real, stride, D: tl.constexpr, BD: tl.constexpr):
    """Add one column tile to the `real` rows `i` atomically, in no fixed order."""
    d = tl.arange(0, BD)
    tl.atomic_add(X + i[:, None].to(tl.int64) * stride + d[None, :], x, mask=real[:, None] & (d[None, :] < D),
                  sem="relaxed")  # fmt: skip


@triton.jit
def atomic_add_rows(X, x, i, real, stride, D: tl.constexpr, BD: tl.constexpr):
    """Add a matrix to the `real` rows `i` of a float32 matrix atomically, in no fixed order."""
    if BD == 96:
        atomic_add_tile(X, x[0], i, real, stride, 64, 64)
        atomic_add_tile(X + 64, x[1], i, real, stride, D - 64, 32)
    else:
        atomic_add_tile(X, x[0], i, real, stride, D, BD)
