"""Attention as its definition: plain matrix products and a softmax, in float32 or float64."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from vispe.attention.call import Call, combine
from vispe.attention.precision import no_autocast


def refuses(call: Call) -> str | None:
    """Return why this backend cannot serve `call`: never."""
    del call
    return None


def run(call: Call) -> Tensor:
    """Return attention (b, h, n, d_v) in `Call.dtype`; the attention matrix is materialised."""
    attn = weights(call)
    return weighted(call, F.dropout(attn, call.dropout_p) if call.dropout_p else attn)


def weights(call: Call) -> Tensor:
    """Return the attention weights (b, h, n, m) before dropout, float32 or better; rows without a key are 0."""
    with no_autocast(call.q.device):
        total, dead = logits(call)
        attn = total.softmax(-1)
        return attn if dead is None else attn.masked_fill(dead, 0.0)


def logits(call: Call) -> tuple[Tensor, Tensor | None]:
    """Return the logits (b, h, n, m), masks included, and which rows have no key (b, h, n, 1); None where none can."""
    with no_autocast(call.q.device):
        q, k, _ = call.transformed()
        wide = torch.promote_types(q.dtype, torch.float32)
        product = (q.to(wide) * call.factor) @ k.to(wide).transpose(-1, -2)
        mask, dead = combine(call.dense_bias(), call.added(), call.allowed(), call.finite)
        return product if mask is None else product + mask, dead


def weighted(call: Call, attn: Tensor) -> Tensor:
    """Return what attention weights (b, h, n, m) make of the values of a call, (b, h, n, d_v) in `Call.dtype`."""
    dtype = call.dtype  # that of autocast, which ends here
    with no_autocast(call.q.device):
        v = call.real(call.v)
        v = v if call.transform is None else call.transform.value(v)
        groups = call.q.shape[1] // call.k.shape[1]
        if groups > 1:  # each key head serves a run of query heads
            v = v.repeat_interleave(groups, 1)
        out = attn @ v.to(attn.dtype)
        if call.value_term is not None:
            out = out + call.value_term.apply(attn)
        return call.finish(out.to(dtype))
