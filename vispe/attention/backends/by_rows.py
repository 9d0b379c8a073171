"""Attention on CPU with tables that the content reads: the bias of some queries at a time, while it is in the cache.

In evaluation the n x n bias of all heads would be written to memory and read again. With 37 x 37 patches and 6 heads
(one thread, relative to SDPA without bias) that takes 2.2 times the time; one head at a time 1.5 times, and 1.4 in
float32 and 1.3 in bfloat16 where runs of keys are copied (`runs`). SDPA is as quick with many queries of one head as
with all heads, and a fifth slower with less than 768 queries, which it divides into smaller blocks.
"""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor
from torch.nn import functional as F

from vispe.attention.backends.runs import runs_of
from vispe.attention.bias.base import Bias, Request
from vispe.attention.bias.content import ContextBias
from vispe.attention.bias.dense import SumBias
from vispe.attention.call import Call
from vispe.attention.precision import autocast_on, exporting, no_infinity, readable, rounded

BLOCK = 8 << 20  # bytes of a mask in float32
LEAST = 768  # queries of a block, below which SDPA is slower
SPLIT = 256  # queries that a thread of SDPA takes at a time


def attend(call: Call) -> Tensor | None:
    """Return attention (b, h, n, d_v) with a bias made for some rows at a time, or None if a dense mask must serve."""
    terms = _terms(call.bias)
    if not terms or not _serves(call) or not no_infinity(*(t.weights for t in terms)):
        return None
    heads, tokens = call.q.shape[1:3]
    reads = [_read(call, term) for term in terms]
    # of a single table the numbers may be rounded before they are spread: the same bits, and half of the memory
    reads = [rounded(reads[0], call.dtype)] if len(reads) == 1 else reads
    q, k, v = call.transformed()
    runs = [runs_of(term) for term in terms]
    if any(of is None for of in runs):
        runs = [None] * len(terms)
    elif runs[0] is not None and runs[0].prefix:
        # from the first patch on, as runs count them
        k, v = (t.roll(-runs[0].prefix, 2) for t in (k, v))
    out = q.new_empty(*q.shape[:3], v.shape[3])
    # blocks of one size: a small one at the end would be slow
    rows = -(-tokens // -(-tokens // max(LEAST, BLOCK // (4 * call.k.shape[2]))))
    some = max(1, torch.get_num_threads() * SPLIT // rows)
    rooms = [
        read.new_empty(0 if of is None else some * rows * of.keys)
        for of, read in zip(runs, reads, strict=True)
    ]
    for i, head, first in product(range(len(q)), range(0, heads, some), range(0, tokens, rows)):
        at = slice(i, i + 1), slice(head, head + some), slice(first, first + rows)
        own = [read[i if len(read) > 1 else 0, at[1]] for read in reads]
        masks = [
            _rows(term, i, at[2], read) if of is None else of.spread(read, at[2], room)
            for term, of, read, room in zip(terms, runs, own, rooms, strict=True)
        ]
        mask = rounded(sum(masks[1:], masks[0]), call.dtype)[None]
        out[at] = F.scaled_dot_product_attention(
            q[at], k[at[:2]], v[at[:2]], attn_mask=mask, scale=call.factor
        )
    return call.finish(out)


def _terms(bias: Bias | None) -> list[ContextBias]:
    """Return the tables that a bias consists of, none where there is something else in it."""
    terms = bias.terms if isinstance(bias, SumBias) else [bias]
    found = [t for t in terms if type(t) is ContextBias and not t.whole]
    return found if len(found) == len(terms) else []


def _serves(call: Call) -> bool:
    """Whether nothing needs a gradient, all that is there is the bias, and it is too large for the cache."""
    q, k, v = call.q, call.k, call.v
    if not all(map(readable, (q, k, v))) or exporting() or autocast_on(q.device):
        return False
    masked = call.attn_mask is not None or call.key_padding_mask is not None or call.cu_seqlens is not None
    if masked or call.is_causal or call.dropout_p or call.value_term is not None:
        return False
    numbers = [q, k, v] + [t.weights for t in _terms(call.bias)]
    if torch.is_grad_enabled() and any(t.requires_grad for t in numbers):
        return False
    return 4 * q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] > BLOCK


def _read(call: Call, term: ContextBias) -> Tensor:
    """Return what each token reads in each bucket, (b, h, n, buckets)."""
    groups = call.q.shape[1] // call.k.shape[1]
    k = call.k.repeat_interleave(groups, 1) if groups > 1 else call.k
    return term.read(Request(None, None, call.q, k, call.factor, slice(None)))


def _rows(term: ContextBias, sample: int, rows: slice, read: Tensor) -> Tensor:
    """Return the bias of some queries (h, rows, m) from what the tokens of one sample read (h, n, buckets)."""
    buckets = term.buckets if term.buckets.ndim == 2 else term.buckets[sample if len(term.buckets) > 1 else 0]
    some = buckets[rows]
    if term.dot == "query":
        return read[:, rows].gather(-1, some.expand(len(read), -1, -1))
    return read.gather(-1, some.t().expand(len(read), -1, -1)).transpose(-1, -2)
