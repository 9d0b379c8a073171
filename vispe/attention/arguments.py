"""Checks of the tensors that attention is called with."""

from __future__ import annotations

import torch
from torch import Tensor

from vispe.attention.masks import as_4d
from vispe.attention.precision import check_floating, readable
from vispe.errors import ShapeError, counted
from vispe.utils.autocast import autocast_on

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # of queries, keys and values


def check_tensors(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool, scale: float | None) -> None:
    """Raise `ShapeError` if shapes, dtypes or devices of queries, keys and values do not fit together."""
    if not (q.ndim == k.ndim == v.ndim == 4):
        raise ShapeError(
            "attention needs q, k, v of shape (b, h, n, d), got "
            f"q={tuple(q.shape)}, k={tuple(k.shape)}, v={tuple(v.shape)}."
        )
    if any(t.dtype not in DTYPES for t in (q, k, v)):
        raise ShapeError(
            "attention: q, k, v must be float16, bfloat16, float32 or float64, got "
            f"q={q.dtype}, k={k.dtype}, v={v.dtype}. Convert them first."
        )
    if not (q.shape[1] and k.shape[1] and v.shape[1]):
        raise ShapeError(
            "attention: q, k, v must have at least one head, got "
            f"q={tuple(q.shape)}, k={tuple(k.shape)}, v={tuple(v.shape)}. Pass tensors (b, h, n, d) with h >= 1."
        )
    # under autocast a norm returns q and k in float32
    same_dtype = q.dtype == k.dtype == v.dtype or autocast_on(q.device)
    if not (same_dtype and q.device == k.device == v.device):
        raise ShapeError(
            "attention needs q, k, v with one dtype on one device, got "
            f"q={q.dtype}/{q.device}, k={k.dtype}/{k.device}, v={v.dtype}/{v.device}."
        )
    if not (
        q.shape[0] == k.shape[0] == v.shape[0] and k.shape[1:3] == v.shape[1:3] and q.shape[3] == k.shape[3]
    ):
        raise ShapeError(
            "attention needs equal batch sizes, as many keys as values, and q and k of equal head_dim, got "
            f"q={tuple(q.shape)}, k={tuple(k.shape)}, v={tuple(v.shape)}."
        )
    if q.shape[1] != k.shape[1] and not (enable_gqa and q.shape[1] % k.shape[1] == 0):
        raise ShapeError(
            f"attention got {counted(q.shape[1], 'query head')} and {counted(k.shape[1], 'key head')}. Pass "
            "enable_gqa=True, which requires the number of query heads to be a multiple of the number of key heads."
        )
    if scale is None and not q.shape[3]:
        raise ShapeError(
            "attention: the default scale head_dim ** -0.5 needs head_dim >= 1, got "
            f"q={tuple(q.shape)}, k={tuple(k.shape)}. Pass scale, or queries and keys with channels."
        )


def check_masks(
    q: Tensor, k: Tensor, mask: Tensor | None, key_padding: Tensor | None, cu_seqlens: Tensor | None
) -> None:
    """Raise `ShapeError` if a mask has another shape, dtype or device than queries and keys need."""
    if mask is not None:
        if mask.dtype != torch.bool and not mask.is_floating_point():
            raise ShapeError(
                f"attn_mask must be bool (True = attend) or floating point (added), got {mask.dtype}."
            )
        check_broadcast("attn_mask", as_4d(mask), (q.shape[0], q.shape[1], q.shape[2], k.shape[2]))
    if key_padding is not None and (
        key_padding.dtype != torch.bool or key_padding.shape != (k.shape[0], k.shape[2])
    ):
        raise ShapeError(
            f"key_padding_mask must be bool (True = real key) of shape {(k.shape[0], k.shape[2])}, got "
            f"{key_padding.dtype} {tuple(key_padding.shape)}."
        )
    if cu_seqlens is not None:
        _check_lengths(q, k, cu_seqlens)
    for name, tensor in (("attn_mask", mask), ("key_padding_mask", key_padding)):
        if tensor is not None and tensor.device != q.device:
            raise ShapeError(f"{name} must be on the device of q, {q.device}, got {tensor.device}.")


def _check_lengths(q: Tensor, k: Tensor, cu_seqlens: Tensor) -> None:
    # lengths are cumulative over one axis of tokens
    if q.shape[0] != 1 or q.shape[2] != k.shape[2]:
        raise ShapeError(
            "cu_seqlens packs sequences along one token axis, so it needs batch size 1 and as many queries as "
            f"keys, got q={tuple(q.shape)}, k={tuple(k.shape)}."
        )
    if cu_seqlens.ndim != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ShapeError(
            "cu_seqlens must be int32 or int64 of shape (sequences + 1,), got "
            f"{cu_seqlens.dtype} {tuple(cu_seqlens.shape)}."
        )
    if not readable(cu_seqlens):
        return
    lengths, tokens = [int(length) for length in cu_seqlens], q.shape[2]
    if len(lengths) < 2 or lengths[0] != 0 or lengths[-1] != tokens or lengths != sorted(lengths):
        raise ShapeError(f"cu_seqlens must increase from 0 to {tokens} tokens, got {lengths}.")


def check_sinks(sinks: Tensor | None, q: Tensor) -> None:
    """Raise `ShapeError` if `sinks` are not one floating-point logit per query head."""
    if sinks is not None and (sinks.shape != (q.shape[1],) or sinks.device != q.device):
        raise ShapeError(
            f"attention: sinks must have shape ({q.shape[1]},), one logit per query head, on {q.device}, got "
            f"{tuple(sinks.shape)} on {sinks.device}."
        )
    check_floating("attention", sinks=sinks)


def check_broadcast(name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    """Raise `ShapeError` if a tensor does not broadcast to (b, h, n, m) = `expected`."""
    shape = tuple(tensor.shape)
    if any(size not in (1, full) for size, full in zip(shape, expected, strict=True)):
        raise ShapeError(f"{name} has shape {shape}, which does not broadcast to (b, h, n, m) = {expected}.")
