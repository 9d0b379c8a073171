"""Reference backend: plain matrix products and a softmax in float32 or float64."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from vispe.attention.call import Call, combine_masks
from vispe.attention.precision import no_autocast


def unsupported_reason(call: Call) -> str | None:
    """Return None: this backend supports all calls."""
    del call
    return None


def run(call: Call) -> Tensor:
    """Return attention (b, h, n, d_v) in `Call.dtype`; materialises the attention weights (b, h, n, m)."""
    attn = weights(call)
    return weighted(call, F.dropout(attn, call.dropout_p) if call.dropout_p else attn)


def weights(call: Call) -> Tensor:
    """Return the attention weights (b, h, n, m) before dropout, float32 or better; 0 in rows without a key."""
    with no_autocast(call.q.device):
        total, dead = logits(call)
        attn = total.softmax(-1)
        return attn if dead is None else attn.masked_fill(dead, 0.0)


def logits(call: Call) -> tuple[Tensor, Tensor | None]:
    """Return the logits (b, h, n, m) including masks, and the rows without any key (b, h, n, 1), or None."""
    with no_autocast(call.q.device):
        q, k, _ = call.transformed()
        wide = torch.promote_types(q.dtype, torch.float32)
        product = (q.to(wide) * call.factor) @ k.to(wide).transpose(-1, -2)
        mask, dead = combine_masks(call.dense_bias(), call.added(), call.allowed(), call.finite)
        return product if mask is None else product + mask, dead


def weighted(call: Call, attn: Tensor) -> Tensor:
    """Return the output (b, h, n, d_v) in `Call.dtype` for attention weights (b, h, n, m)."""
    # read before autocast is disabled, as it may be the dtype of autocast
    dtype = call.dtype
    with no_autocast(call.q.device):
        v = call.zero_padding(call.v)
        v = v if call.transform is None else call.transform.value(v)
        groups = call.q.shape[1] // call.k.shape[1]
        # each key head is shared by consecutive query heads
        if groups > 1:
            v = v.repeat_interleave(groups, 1)
        out = attn @ v.to(attn.dtype)
        if call.value_term is not None:
            out = out + call.value_term.apply(attn)
        return call.finish(out.to(dtype))
