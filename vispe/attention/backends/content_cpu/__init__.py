"""Attention on CPU with tables that the content reads: the bias of some queries at a time, while it is in the cache.

In evaluation the n x n bias of all heads would be written to memory and read again: with 37 x 37 patches and 6 heads
(one thread, float32) that takes 2.2 times the time of SDPA without bias. A few rows of one head at a time take 1.3
times (`irpe`): two products and a softmax as they are, whose logits are in the cache and begin with the bias. SDPA with
a mask serves several threads, and half precision on processors that have products for it (`by_hand`); it gets whole
heads, as it is a fifth slower with less than 768 queries.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from vispe.attention.backends.content_cpu.lookup import Lookup, Way
from vispe.attention.backends.content_cpu.runs import Runs, runs_of
from vispe.attention.backends.content_cpu.windows import Windows, windows_of
from vispe.attention.bias.abstract_bias import Bias, Request
from vispe.attention.bias.content import ContextBias
from vispe.attention.bias.dense import SumBias
from vispe.attention.call import Call
from vispe.attention.precision import autocast_on, exporting, narrowed, no_infinity, readable

LEAST = 8 << 20  # bytes of the bias of all heads in float32, below which it stays in the cache as it is
ROWS = 256  # queries of a block
WHOLE = 768  # queries of a block for SDPA
SPLIT = 256  # queries that a thread of SDPA takes at a time


def attend(call: Call) -> Tensor | None:
    """Return attention (b, h, n, d_v) with a bias made for some rows at a time, or None if a dense mask must serve."""
    terms = _terms(call.bias)
    if not terms or not _serves(call) or not no_infinity(*(t.weights for t in terms)):
        return None
    q, k, v = call.transformed()
    heads, hand = q.shape[1], by_hand(call.dtype)
    wide = torch.promote_types(call.dtype, torch.float32)
    # SDPA wants a mask in the dtype of q; of a single table the numbers are rounded before they are spread
    dtype = wide if hand or len(terms) > 1 else call.dtype
    ways = _ways(terms, dtype)
    blocks = _blocks(ways, q.shape[2], ROWS if hand else WHOLE)
    some = 1 if hand else min(heads, max(1, torch.get_num_threads() * SPLIT // blocks[0].stop))
    # keys before the first one, which some ways need; their bias is -inf
    skip = ways[0].skip if hand and len(ways) == 1 else 0
    keys = call.k.repeat_interleave(heads // call.k.shape[1], 1) if heads > call.k.shape[1] else call.k
    out = q.new_empty(*q.shape[:3], v.shape[3])
    for i in range(len(q)):
        ask = Request(None, None, call.q[i : i + 1], keys[i : i + 1], call.factor, None)
        reads = [way.read(ask, i) for way in ways]
        for first in range(0, heads, some):
            own = slice(first, first + some)
            # SDPA is quicker when keys lie together
            near, values = (t[i, own].to(wide) if hand else t[i, own].contiguous() for t in (k, v))
            asking, room = q[i, own], out[i, own]
            for block in blocks:
                made = [way.rows(read, own, block) for way, read in zip(ways, reads, strict=True)]
                bias = _sum([(rows, way.skip - skip) for rows, way in zip(made, ways, strict=True)])
                if hand:
                    head = (asking[0, block].to(wide), near[0], values[0], bias[0], skip, call.factor)
                    _attend(*head, out=room[0, block])
                else:
                    mask = narrowed(bias, call.dtype)
                    room[:, block] = F.scaled_dot_product_attention(
                        asking[:, block], near, values, attn_mask=mask, scale=call.factor
                    )
    return call.finish(out)


def by_hand(dtype: torch.dtype) -> bool:
    """Whether products in float32 are quicker than SDPA.

    They are with one thread: more of them would meet at every product. In half precision they are where the processor
    has no units for it.
    """
    if torch.get_num_threads() > 1 or dtype in (torch.float32, torch.float64):
        return torch.get_num_threads() == 1
    units: Callable[[], bool] = getattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    return torch.backends.cpu.get_cpu_capability().startswith("AVX") and not units()


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, skip: int, scale: float, out: Tensor) -> None:
    """Write attention of a head into `out` (n, d_v); the bias (n, skip + m) is written over."""
    bias = bias.contiguous()
    # the product is added to what is there
    logits = bias[:, skip:].addmm_(q, k.t(), alpha=scale)
    torch.softmax(bias, -1, out=bias)
    if out.dtype == logits.dtype:
        torch.mm(logits, v, out=out)
    else:
        out.copy_(logits.mm(v))


def _sum(rows: list[tuple[Tensor, int]]) -> Tensor:
    """Return the sum of rows of tables (h, n, skip + m), each without its first keys."""
    cut = [made[..., skip:] if skip else made for made, skip in rows]
    return sum(cut[1:], cut[0])


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
    return 4 * q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] > LEAST


def _ways(terms: list[ContextBias], dtype: torch.dtype) -> list[Way]:
    """Return the quickest way to make rows of each table; windows of all are on one grid."""
    ways: list[Way] = []
    grid = None
    for term in terms:
        pattern = runs_of(term)
        offsets = windows_of(term) if pattern is None else None
        if pattern is not None:
            ways.append(Runs(term, pattern, dtype))
        elif offsets is not None and grid in (None, offsets.grid):
            grid = offsets.grid
            ways.append(Windows(term, offsets, dtype))
        else:
            ways.append(Lookup(term, dtype))
    return ways


def _blocks(ways: list[Way], tokens: int, size: int) -> list[slice]:
    """Return slices of about `size` queries, all alike: a small one at the end would be slow."""
    grid = next((way.offsets.grid for way in ways if isinstance(way, Windows)), None)
    # windows need whole rows of the grid; prefix tokens are in the first block
    prefix, length = (0, 1) if grid is None else (grid.prefix, grid.shape[-1])
    lines = (tokens - prefix) // length
    count = max(1, min(tokens // size, lines))
    ends = [prefix + lines * (j + 1) // count * length for j in range(count)]
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
