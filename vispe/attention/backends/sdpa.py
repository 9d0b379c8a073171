"""Attention by `torch.nn.functional.scaled_dot_product_attention` with the bias as one dense mask.

The mask has q's dtype (a float32 mask under bfloat16 inputs costs 1.4 times the time on CPU). Masks of fixed biases
are kept with their positions, those of learned ones while their numbers stay the same (`vispe.attention.bias.mask_cache`);
tables that the content reads are served some rows at a time (`rows`). Batch and head axes are swapped when each
head has its own mask and that is large, which lets the CPU kernel reuse a mask for the whole batch. A mask above 1 GiB
is made and used group by group.

With a few hundred tokens on CPU, checks and choices take a tenth of the time of attention. So what they came to is
kept beside a kept mask, and a call of the same shapes and dtypes with nothing but that bias goes straight to SDPA.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from vispe.attention.backends import blocked as strip_gradient
from vispe.attention.backends import content_cpu
from vispe.attention.bias import mask_cache
from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.call import Call, combine
from vispe.attention.precision import autocast_on, exporting, narrowed, no_infinity, rounded

MASK_LIMIT = 1 << 30  # bytes
# Keys from which swapped axes pay. Forward relative to SDPA without mask, one thread, b 2 and 8, d 64, float32, as they
# are / swapped: 257 keys 1.11 / 1.15, 577 keys 1.19 / 1.20, 1025 keys 1.22 / 1.24, 2026 keys 1.22 / 1.215.
SWAPPED = 2000


def refuses(call: Call) -> str | None:
    """Return why this backend cannot serve `call`, or None."""
    if call.value_term is not None:
        return "a value term needs the attention weights, which SDPA does not return"
    return None


def run(call: Call) -> Tensor:
    """Return attention (b, h, n, d_v) in the dtype of q."""
    by_strips = strip_gradient.attend(call)
    if by_strips is not None:
        return by_strips
    rows_at_a_time = content_cpu.attend(call)
    if rows_at_a_time is not None:
        return rows_at_a_time
    q, k, v = call.transformed()
    if (
        call.bias is None
        and call.attn_mask is None
        and call.key_padding_mask is None
        and call.cu_seqlens is None
    ):
        return call.finish(_sdpa(call, q, k, v, None, call.is_causal))
    step = _heads_per_group(call)
    if step >= q.shape[1]:
        return call.finish(_masked(call, q, k, v, None))
    outs: list[Tensor] = []
    for start in range(0, q.shape[1], step):
        heads = slice(start, start + step)
        part = (call, q[:, heads], k[:, heads], v[:, heads], heads)
        # in training each group's mask is made again in the backward pass instead of being kept
        again = (
            torch.is_grad_enabled() and not torch.compiler.is_compiling()
        )  # compilers choose for themselves
        outs.append(checkpoint(_masked, *part, use_reentrant=False) if again else _masked(*part))
    return call.finish(torch.cat(outs, 1))


def known(q: Tensor, k: Tensor, v: Tensor, bias: Bias) -> Tensor | None:
    """Return the mask of calls like one that was checked before, or None."""
    pos, key = bias.pos, bias.key
    if bias.whole or pos is None or pos.memo is None or torch.compiler.is_compiling():
        return None
    if not (q.is_cpu and k.is_cpu and v.is_cpu) or torch.is_autocast_enabled("cpu"):
        return None
    if key is not None:
        return pos.memo.get(("checked", key, q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype))
    entry = mask_cache.look(bias, q.dtype, q.shape[1])
    if entry is None or (q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype) not in entry.checked:
        return None
    return entry.mask


def know(call: Call) -> None:
    """Keep the mask of a call that was served, which had nothing but a bias, for calls like it."""
    q, k, v, bias = call.q, call.k, call.v, call.bias
    if (
        bias is None
        or bias.pos is None
        or bias.whole
        or torch.compiler.is_compiling()
        or not q.is_cpu
        or q.shape[1] != k.shape[1]
        or _heads_per_group(call) < q.shape[1]
        or autocast_on(q.device)
    ):
        return
    like = (q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype)
    if bias.key is None:
        entry = mask_cache.look(bias, q.dtype, q.shape[1])
        if entry is not None and entry.finite:
            entry.checked.add(like)
    elif bias.pos.remember(("open", bias.key, call.dtype), lambda: no_infinity(bias.mask(call.dtype))):
        bias.pos.remember(("checked", bias.key, *like), lambda: bias.mask(call.dtype))


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    """Return attention (b, h, n, d_v) with a mask of `known`."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if not _swap(q, mask):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    q, k, v, mask = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), mask.transpose(0, 1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).transpose(0, 1)


def _masked(call: Call, q: Tensor, k: Tensor, v: Tensor, heads: slice | None) -> Tensor:
    dense = call.dense_bias(heads, kept=call.dtype)
    added, keep = (
        t[:, heads] if t is not None and heads is not None and t.shape[1] > 1 else t
        for t in (call.added(), call.allowed())
    )
    mask, dead = combine(dense, added, keep, call.finite)
    if mask is not None:
        # an additive mask may be anything
        mask = narrowed(mask, call.dtype) if added is None else rounded(mask, call.dtype)
    if mask is not None and _swap(q, mask):
        turned = (t.transpose(0, 1) for t in (q, k, v))
        out = _sdpa(call, *turned, mask=mask.transpose(0, 1)).transpose(0, 1)
    else:
        out = _sdpa(call, q, k, v, mask)
    return out if dead is None else out.masked_fill(dead, 0.0)


def _sdpa(call: Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool = False) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH) if call.deterministic and q.is_cuda else nullcontext():
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=call.dropout_p, is_causal=causal, scale=call.factor
        )


def _swap(q: Tensor, mask: Tensor) -> bool:
    if torch.compiler.is_compiling() or q.device.type != "cpu":
        return False
    return (
        mask.shape[-1] >= SWAPPED
        and q.shape[0] > 1
        and mask.shape[0] == 1
        and mask.shape[1] == q.shape[1] > 1
    )


def _heads_per_group(call: Call) -> int:
    h, n, m = call.q.shape[1], call.q.shape[2], call.k.shape[2]
    if call.bias is None or not call.bias.per_head or exporting():
        return h
    batched = (
        call.bias.per_sample
        or call.padding_per_sample
        or (call.attn_mask is not None and call.attn_mask.ndim == 4 and call.attn_mask.shape[0] > 1)
    )
    one = (call.q.shape[0] if batched else 1) * n * m * call.dtype.itemsize
    return max(1, MASK_LIMIT // one) if one * h > MASK_LIMIT else h
