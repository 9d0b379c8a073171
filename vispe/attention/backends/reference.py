"""Reference backend: plain matrix products and a softmax in float32 or float64."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from vispe.attention.call import Call
from vispe.attention.masks import combine_masks
from vispe.utils.autocast import no_autocast


def unsupported_reason(call: Call) -> str | None:
    """Return None: this backend supports all calls."""
    del call
    return None


def run(call: Call) -> Tensor:
    """Return attention (b, h, n, d_v) in `Call.dtype`; materialises the attention weights (b, h, n, m)."""
    return _dropped_and_weighted(call, weights(call))


def run_with_lse(call: Call) -> tuple[Tensor, Tensor]:
    """Return attention and the log-sum-exp (b, h, n) of the logits, including sinks; -inf in rows without a key."""
    with no_autocast(call.q.device):
        total, dead = _logits_and_sink(call)
        # the weights in the backward pass of logsumexp lose digits if the logits of a row are far from 0
        top = total.detach().amax(-1, keepdim=True) if total.shape[-1] else total.new_zeros(1)
        top = top.where(top.isfinite(), 0.0)
        lse = (total - top).logsumexp(-1) + top[..., 0]
        if dead is not None:
            empty = lse.new_full((), -torch.inf) if call.sinks is None else total[..., -1]
            lse = torch.where(dead[..., 0], empty, lse)
    return _dropped_and_weighted(call, _softmax(call, total, dead)), lse


def _dropped_and_weighted(call: Call, attn: Tensor) -> Tensor:
    return weighted(call, F.dropout(attn, call.dropout_p) if call.dropout_p else attn)


def weights(call: Call) -> Tensor:
    """Return the attention weights (b, h, n, m) before dropout, float32 or better; 0 in rows without a key."""
    with no_autocast(call.q.device):
        return _softmax(call, *_logits_and_sink(call))


def _logits_and_sink(call: Call) -> tuple[Tensor, Tensor | None]:
    """Return the results of `logits`, with the sinks as one more column."""
    total, dead = logits(call)
    if call.sinks is not None:
        column = call.sinks.to(total.dtype)[:, None, None].expand(*total.shape[:3], 1)
        total = torch.cat([total, column], -1)
    return total, dead


def _softmax(call: Call, total: Tensor, dead: Tensor | None) -> Tensor:
    attn = total.softmax(-1)
    attn = attn if call.sinks is None else attn[..., :-1]
    return attn if dead is None else attn.masked_fill(dead, 0.0)


def logits(call: Call) -> tuple[Tensor, Tensor | None]:
    """Return the logits (b, h, n, m) including masks, and the rows without any key (b, h, n, 1), or None."""
    with no_autocast(call.q.device):
        q, k, _ = call.transformed()
        wide = torch.promote_types(q.dtype, torch.float32)
        product = (q.to(wide) * call.factor) @ k.to(wide).transpose(-1, -2)
        if call.softcap is not None:
            product = call.softcap * (product / call.softcap).tanh()
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
        out = call.finish(attn @ v.to(attn.dtype))
        # relative already: rotated back like the values, it would depend on absolute positions
        if call.value_term is not None:
            out = out + call.value_term.apply(attn)
        return out.to(dtype)
