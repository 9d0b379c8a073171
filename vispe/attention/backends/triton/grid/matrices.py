"""Matrices (tokens x channels) in kernels: products, loads and stores.

Tiles in Triton have a power of 2 of columns, BD; those after the last of `D` channels are 0.
"""

import torch
import triton
import triton.language as tl


def aligned(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return tensors (..., channels) as `row_pointers` requires them; others are copied."""
    return tuple(
        x if x.shape[-1] % 16 != 8 or _rows_are_aligned(x) else x.clone(memory_format=torch.contiguous_format)
        for x in tensors
    )


def _rows_are_aligned(x: torch.Tensor) -> bool:
    steps = (step for size, step in zip(x.shape[:-1], x.stride(), strict=False) if size > 1)
    return x.data_ptr() % 16 == 0 and all(step * x.element_size() % 16 == 0 for step in steps)


@triton.jit
def matmul(a, b, acc, DOT: tl.constexpr):
    """Return ``a @ b + acc``; `DOT`: 'ieee', 'tf32x3', or 'wider' in the interpreter, which has no bfloat16."""
    if DOT == "wider":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision=DOT)


@triton.jit
def weighted_sum(weight, x, acc, DOT: tl.constexpr):
    """Return ``weight @ x + acc``, with weights rounded to the dtype of `x`."""
    # tensor cores need operands of one dtype
    return matmul(weight.to(x.dtype), x, acc, DOT)


@triton.jit
def row_pointers(X, i, stride, D: tl.constexpr, BD: tl.constexpr):
    """Return the pointers to rows `i` of a matrix; rows of 8, 24, 40, ... channels start at multiples of 16 bytes."""
    # 64 bits: offsets of tokens may exceed 2^31 elements
    where = X + i[:, None].to(tl.int64) * stride + tl.arange(0, BD)[None, :]
    # Triton only recognises strides that are multiples of 16, and would otherwise load single numbers
    if D % 16 == 8:
        where = tl.multiple_of(where, (1, 16))
    return where


@triton.jit
def load_masked(X, i, real, stride, D: tl.constexpr, BD: tl.constexpr, MASKED: tl.constexpr):
    """Return rows `i` of a matrix with `D` columns, 0 for rows that are not `real`."""
    d = tl.arange(0, BD)
    where = row_pointers(X, i, stride, D, BD)
    # rows and columns masked, columns only, or neither
    if MASKED:
        return tl.load(where, mask=real[:, None] & (d[None, :] < D), other=0.0)
    if D != BD:
        return tl.load(where, mask=d[None, :] < D, other=0.0)
    return tl.load(where)


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
def store_rows(X, x, i, real, stride, D: tl.constexpr, BD: tl.constexpr):
    """Store the `real` rows `i` of a matrix in the dtype of X."""
    mask = real[:, None] & (tl.arange(0, BD)[None, :] < D)
    tl.store(row_pointers(X, i, stride, D, BD), x.to(X.dtype.element_ty), mask=mask)


@triton.jit
def atomic_add_rows(X, x, i, real, stride, D: tl.constexpr, BD: tl.constexpr):
    """Add a matrix to the `real` rows `i` of a float32 matrix atomically, in no fixed order."""
    mask = real[:, None] & (tl.arange(0, BD)[None, :] < D)
    tl.atomic_add(row_pointers(X, i, stride, D, BD), x, mask=mask, sem="relaxed")
