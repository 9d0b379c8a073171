"""Masks of attention as tensors: broadcasting, masks that are key padding, and the sum of all masks of a call."""

from __future__ import annotations

import torch
from torch import Tensor

from vispe.attention.precision import readable
from vispe.errors import ShapeError


def combine_masks(
    bias: Tensor | None, added: Tensor | None, keep: Tensor | None, finite: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return one additive mask, and the rows without any key (bool, (b, h, n, 1)) or None.

    Rows without any key get a mask of zeros, so that softmax gives no NaN; the caller sets their output to 0.

    Args:
        bias: (b or 1, h or 1, n, m), or None.
        added: additive mask, likewise.
        keep: bool mask, likewise, True for pairs that may attend.
        finite: whether neither `bias` nor `added` can contain -inf.
    """
    # sizes of 1 broadcast, as in (b or 1, h or 1, n, m)
    total = bias if added is None else added if bias is None else bias + added
    if not finite and total is not None:
        attended = total != float("-inf")
        keep = attended if keep is None else keep & attended
    if keep is None:
        return total, None
    # rows (b or 1, h or 1, n, 1) without any key
    dead = ~keep.any(-1, keepdim=True)
    if total is None:
        total = torch.zeros((), device=keep.device)
    elif not finite:
        total = total.masked_fill(dead, 0.0)
    return total.masked_fill(~(keep | dead), float("-inf")), dead


def as_key_padding(mask: Tensor, batch: int, keys: int) -> Tensor | None:
    """Return a mask that is equal for all heads and queries as key padding (b, m), True for real keys, or None.

    A mask shared by all samples is expanded. Additive masks are converted only if their values can be read without a
    device sync, have no gradient, and are all 0 or -inf.
    """
    mask_4d = as_4d(mask)
    # different for heads or queries
    if mask_4d.shape[1] != 1 or mask_4d.shape[2] != 1:
        return None
    # (b or 1, 1, 1, m) -> (b, m)
    if mask.dtype != torch.bool:
        if mask.requires_grad or not readable(mask):
            return None
        attended = mask == 0
        if not bool((attended | (mask == float("-inf"))).all()):
            return None
        mask_4d = as_4d(attended)
    return mask_4d[:, 0, 0].expand(batch, keys)


def as_4d(mask: Tensor) -> Tensor:
    """Return a mask as (b or 1, h or 1, n or 1, m or 1).

    Raises:
        ShapeError: it has more than 4 axes.
    """
    if mask.ndim > 4:
        raise ShapeError(f"attn_mask must broadcast to (b, h, n, m), got {tuple(mask.shape)}.")
    return mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))
