"""SDPA backend: `torch.nn.functional.scaled_dot_product_attention` with the bias as one dense mask.

The mask has the dtype of q (a float32 mask with bfloat16 inputs takes 1.4 times as long on CPU), with a constant
subtracted from each row before it is rounded. Masks of fixed biases are cached with their positions, masks of learned
biases until their parameters change; content-dependent tables are computed for some rows at a time (`rows`). Batch and
head axes are swapped if each head has its own large mask, which lets the CPU kernel reuse a mask for the whole batch. A
mask above 1 GiB is computed and used for groups of heads.

With a few hundred tokens on CPU, validation and dispatch take a tenth of the time of attention. Their result is cached
with the mask, so calls of the same shapes and dtypes that have nothing but this bias go directly to SDPA.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from vispe.attention.backends import blocked, content_cpu
from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.cache.masks import is_open, lookup
from vispe.attention.call import Call
from vispe.attention.masks import combine_masks
from vispe.attention.precision import (
    every_row_open,
    exporting,
    forward_mode,
    is_eager,
    readable,
    rounded,
    rows_are_aligned,
)
from vispe.utils.autocast import autocast_on

MASK_LIMIT = 1 << 30  # bytes of the mask of one group of heads
# Keys from which swapping axes is faster. Forward time relative to SDPA without mask, one thread, b 2 and 8, d 64,
# float32, not swapped / swapped: 257 keys 1.11 / 1.15, 577 keys 1.19 / 1.20, 1025 keys 1.22 / 1.24,
# 2026 keys 1.22 / 1.215.
MIN_SWAPPED_KEYS = 2000


def unsupported_reason(call: Call) -> str | None:
    """Return why this backend does not support `call`, or None."""
    if forward_mode():
        return "the kernels of SDPA have no forward-mode derivative"
    if call.value_term is not None:
        return "a value term needs the attention weights, which SDPA does not return"
    if call.needs_lse:
        return "return_lse and sinks need the log-sum-exp of the logits, which SDPA does not return"
    if call.softcap is not None:
        return "SDPA has no softcap"
    return None


def run(call: Call) -> Tensor:
    """Return attention (b, h, n, d_v) in the dtype of q."""
    blocked_out = blocked.attend(call)
    if blocked_out is not None:
        return blocked_out
    rows_out = content_cpu.attend(call)
    if rows_out is not None:
        return rows_out
    q, k, v = call.transformed()
    if (
        call.bias is None
        and call.attn_mask is None
        and call.key_padding_mask is None
        and call.cu_seqlens is None
    ):
        return call.finish(_sdpa(call, q, k, v, None, call.is_causal))
    step = heads_per_group(call)
    if step >= q.shape[1]:
        return call.finish(_masked(call, q, k, v, None))
    outs: list[Tensor] = []
    for start in range(0, q.shape[1], step):
        heads = slice(start, start + step)
        arguments = (call, q[:, heads], k[:, heads], v[:, heads], heads)
        # in training the mask of each group is recomputed in the backward pass, except in compiled programs, where
        # the compiler decides what to recompute
        recompute = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        outs.append(
            checkpoint(_masked, *arguments, use_reentrant=False) if recompute else _masked(*arguments)
        )
    return call.finish(torch.cat(outs, 1))


def cached_mask(q: Tensor, k: Tensor, v: Tensor, bias: Bias) -> Tensor | None:
    """Return the cached mask for a bias-only call that was validated before with equal shapes and dtypes, or None."""
    pos, key = bias.pos, bias.key
    if (
        bias.replaces_product
        or pos is None
        or pos.memo is None
        or torch.compiler.is_compiling()
        or forward_mode()
    ):
        return None
    if not (q.is_cpu and k.is_cpu and v.is_cpu) or torch.is_autocast_enabled("cpu"):
        return None
    if key is not None:
        return pos.memo.get(("checked", key, q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype))
    entry = lookup(bias, q.dtype, q.shape[1])
    if entry is None or (q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype) not in entry.checked:
        return None
    return entry.mask


def cache_mask(call: Call) -> None:
    """Cache the mask of a bias-only call for later calls with equal shapes and dtypes."""
    q, k, v, bias = call.q, call.k, call.v, call.bias
    if (
        bias is None
        or bias.pos is None
        or bias.replaces_product
        or torch.compiler.is_compiling()
        or not q.is_cpu
        or q.shape[1] != k.shape[1]
        or heads_per_group(call) < q.shape[1]
        or autocast_on(q.device)
    ):
        return
    signature = (q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype)
    if bias.key is None:
        entry = lookup(bias, q.dtype, q.shape[1])
        if entry is not None and entry.is_open:
            entry.checked.add(signature)
    elif not blocked.applies(call) and is_open(bias, call.dtype):
        bias.pos.remember(("checked", bias.key, *signature), lambda: bias.mask(call.dtype))


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    """Return attention (b, h, n, d_v) with a mask from `cached_mask`."""
    scale, width = q.shape[-1] ** -0.5 if scale is None else scale, v.shape[-1]
    if q.shape[-1] != width:
        q, k, v = _with_equal_widths(q, k, v)
    if not _swap(q, mask):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)[..., :width]
    q, k, v, mask = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), mask.transpose(0, 1)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return out.transpose(0, 1)[..., :width]


def _masked(call: Call, q: Tensor, k: Tensor, v: Tensor, heads: slice | None) -> Tensor:
    added, allowed = (
        t[:, heads] if t is not None and heads is not None and t.shape[1] > 1 else t
        for t in (call.added(), call.allowed())
    )
    # cached masks in half precision are shifted by constants that depend on all keys, which another mask may hide
    no_mask = added is None and allowed is None
    wide = torch.promote_types(call.dtype, torch.float32)
    dense = call.dense_bias(heads, cache_dtype=call.dtype if no_mask else wide)
    # a mask with a key in each row needs no search for rows without any
    if no_mask and dense is not None and _is_open(call, dense, heads):
        mask, dead = dense, None
    else:
        mask, dead = combine_masks(dense, added, allowed, call.finite)
    if mask is not None:
        # without biases there are only 0 and -inf
        mask = mask.to(call.dtype) if dense is added is None else rounded(mask, call.dtype)
    if mask is not None and _swap(q, mask):
        swapped = (t.transpose(0, 1) for t in (q, k, v))
        out = _sdpa(call, *swapped, mask=mask.transpose(0, 1)).transpose(0, 1)
    else:
        out = _sdpa(call, q, k, v, mask)
    return out if dead is None else out.masked_fill(dead, 0.0)


def _is_open(call: Call, dense: Tensor, heads: slice | None) -> bool:
    """Whether the mask of the bias of a call has a key in each row, whether it is cached or not.

    If that depended on the cache, the recomputation in a checkpointed block would save other tensors than its forward.
    """
    if call.bias is None or call.finite or not readable(dense):
        return False
    cached = heads is None and is_open(call.bias, call.dtype, call.q.shape[1])
    return cached or every_row_open(dense)


def _sdpa(call: Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool = False) -> Tensor:
    width = v.shape[-1]
    needs_plain_products = call.dropout_p > 0 or (mask is not None and mask.requires_grad)
    if q.is_cpu and q.shape[-1] != width and not needs_plain_products:
        return _sdpa(call, *_with_equal_widths(q, k, v), mask, causal)[..., :width]
    scale = call.factor
    # fused kernels multiply the causal mask, -inf, by the scale as well: +inf or NaN if it is not positive
    if not scale > 0:
        q, scale = (-q, -scale) if scale < 0 else (q * 0.0, 1.0)
    if q.is_cuda and is_eager(q):
        q, k, v = _aligned(q), _aligned(k), _aligned(v)
    with sdpa_kernel(SDPBackend.MATH) if call.deterministic and q.is_cuda else nullcontext():
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=call.dropout_p, is_causal=causal, scale=scale
        )


def _aligned(x: Tensor) -> Tensor:
    """Return `x`, as a copy if that lets its rows start at multiples of 16 bytes, without which CUDA kernels raise."""
    copies = x.shape[-1] * x.element_size() % 16 == 0 and not rows_are_aligned(x)
    return x.clone(memory_format=torch.contiguous_format) if copies else x


def _with_equal_widths(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values with zero channels up to the largest width, which the fast CPU kernel needs.

    With 577 tokens this takes 0.4 of the time of plain products in evaluation and 0.9 in training; with 1,370 tokens
    0.35 and 0.55, without an n x n tensor.
    """
    width = max(q.shape[-1], v.shape[-1])
    padded = [F.pad(t, (0, width - t.shape[-1])) for t in (q, k, v)]
    return padded[0], padded[1], padded[2]


def _swap(q: Tensor, mask: Tensor) -> bool:
    if torch.compiler.is_compiling() or q.device.type != "cpu":
        return False
    return (
        mask.shape[-1] >= MIN_SWAPPED_KEYS
        and q.shape[0] > 1
        and mask.shape[0] == 1
        and mask.shape[1] == q.shape[1] > 1
    )


def heads_per_group(call: Call) -> int:
    """Return the number of heads whose mask is computed at a time; all of them up to `MASK_LIMIT`."""
    h, n, m = call.q.shape[1], call.q.shape[2], call.k.shape[2]
    if call.bias is None or not call.bias.per_head or exporting():
        return h
    batched = (
        call.bias.per_sample
        or call.padding_per_sample
        or (call.attn_mask is not None and call.attn_mask.ndim == 4 and call.attn_mask.shape[0] > 1)
    )
    head_bytes = (call.q.shape[0] if batched else 1) * n * m * call.dtype.itemsize
    return max(1, MASK_LIMIT // head_bytes) if head_bytes * h > MASK_LIMIT else h
