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
    dtype = call.dtype
    with no_autocast(call.q.device):
        q, k, v = call.transformed()
        wide = torch.promote_types(q.dtype, torch.float32)
        logits = (q.to(wide) * call.factor) @ k.to(wide).transpose(-1, -2)
        mask, dead = combine(call.dense_bias(), call.added(), call.allowed(), call.finite)
        if mask is not None:
            logits = logits + mask
        attn = logits.softmax(-1)
        if dead is not None:
            attn = attn.masked_fill(dead, 0.0)
        attn = F.dropout(attn, call.dropout_p) if call.dropout_p else attn
        out = attn @ v.to(wide)
        if call.value_term is not None:
            out = out + call.value_term.apply(attn)
        return call.finish(out.to(dtype))
