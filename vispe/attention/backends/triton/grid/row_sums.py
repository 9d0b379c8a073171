"""Row sums of attention: log2-sum-exp, the shares of rows with huge logits, and their gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from vispe.attention.backends.triton.tiles import cdiv

LOG2E = 1.4426950408889634


def sums_of(q: Tensor) -> Tensor:
    """Return an empty tensor (2, b, h, n) for log2-sum-exp of the rows and their shares (see `scaled_grad`).

    The grid kernels store the sums with patches first; shares are always in memory order.
    """
    return numbers_of_rows(q, 2)


def numbers_of_rows(q: Tensor, *several: int) -> Tensor:
    """Return an empty float32 tensor (b, h, n) or (several, b, h, n): one number per row.

    Its head stride is that of `pitch_of`.
    """
    b, h, n, _ = q.shape
    pitch = cdiv(n, 128) * 128
    steps = [b * h * pitch] * len(several) + [h * pitch, pitch, 1]
    return torch.empty_strided((*several, b, h, n), steps, dtype=torch.float32, device=q.device)


def with_row_pitch(lse: Tensor) -> Tensor:
    """Return row sums with the strides of `sums_of`, which a compiler may have changed."""
    h, n = lse.shape[2:]
    pitch = -(-n // 128) * 128
    if lse.stride() == (lse.shape[1] * h * pitch, h * pitch, pitch, 1):
        return lse
    return torch.nn.functional.pad(lse, (0, pitch - n))[..., :n]


def scaled_grad(grad: Tensor, lse: Tensor) -> Tensor:
    """Return the gradient of the output times the share of each row, with last stride 1.

    For rows with huge logits, float32 log2-sum-exp cannot represent max + log2(sum). Such a row stores its maximum
    there, and 1 / sum as its share; the backward pass is linear in this gradient. The share of other rows is 1.
    """
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    return torch.mul(grad, lse[1, ..., None], out=torch.empty_like(grad))


def log_sum_exp(sums: Tensor, prefix: int = 0) -> Tensor:
    """Return the natural log-sum-exp of the rows (b, h, n) in memory order, -inf for rows without any key.

    Its gradient reaches the operator as that of ``sums[0]``, see `row_gradient`.

    Args:
        sums: row sums of `sums_of`.
        prefix: number of tokens that `sums` has at the end instead of in front.
    """
    lse, share = sums[0], sums[1].detach()
    # rolled, as symbolic slices would be specialised in compiled programs
    lse = lse.roll(prefix, -1) if prefix else lse
    closed = lse == torch.inf
    return ((lse.where(~closed, 0.0) - share.log2()) / LOG2E).masked_fill(closed, -torch.inf)


def row_gradient(grad: Tensor | None, sums: Tensor, prefix: int = 0) -> Tensor | None:
    """Return what delta has to be reduced by (b, h, n), given the gradient of the row sums of `sums_of`.

    The gradient of a logit is ``P (dP - delta + g)`` for a gradient g of the natural log-sum-exp. The weights that
    kernels compute are P over the share of their row (`scaled_grad`).
    """
    if grad is None:
        return None
    share = sums[1].roll(-prefix, -1) if prefix else sums[1]
    return grad[0] * share * LOG2E
