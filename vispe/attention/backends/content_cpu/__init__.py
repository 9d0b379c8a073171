"""Attention on CPU with content-dependent tables (`ContextBias`), for blocks of queries that fit into the CPU cache.

In evaluation the n x n bias of all heads would be written to memory and read again: with 37 x 37 patches and 6 heads
(one thread, float32) this takes 2.2 times as long as SDPA without bias. A few rows of one head at a time take 1.3 times
(`irpe`): two plain matrix products and a softmax, with logits that stay in the CPU cache and are accumulated into the
bias. SDPA with a mask is used for several threads, for float32 with AVX2, and for half precision on processors with
units for it (`prefers_explicit`); it gets whole heads, since it is 20 % slower with fewer than 768 queries.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise, product

import torch
from torch import Tensor
from torch.nn import functional as F

from vispe.attention.backends.blocks.bias import BiasBlock, sum_of_masks
from vispe.attention.backends.content_cpu.lookup import Lookup, SampleBias
from vispe.attention.backends.content_cpu.runs import Runs, runs_of
from vispe.attention.backends.content_cpu.windows import WindowTable, windows_of
from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.cache.entries import MAX_TOTAL_BYTES
from vispe.attention.bias.content import ContextBias, OffsetBuckets
from vispe.attention.bias.dense import SumBias
from vispe.attention.bias.dense_request import DenseRequest
from vispe.attention.call import Call
from vispe.attention.precision import exporting, no_infinity, readable, rounded
from vispe.utils.autocast import autocast_on

# bytes of the bias of all heads in float32, below which a dense mask stays in the CPU cache
MIN_BIAS_BYTES = 8 << 20
ROWS = 256  # queries of a block
SDPA_ROWS = 768  # queries of a block for SDPA
SPLIT = 256  # queries per work item of an SDPA thread


def attend(call: Call) -> Tensor | None:
    """Return attention (b, h, n, d_v) computed for blocks of queries, or None if a dense mask has to be used."""
    terms = _terms(call.bias)
    if not terms or not supports(call, terms):
        return None
    q, k, v = call.transformed()
    heads, explicit = q.shape[1], prefers_explicit(call.dtype)
    wide = torch.promote_types(call.dtype, torch.float32)
    biases = _biases(terms, call.request(), wide)
    blocks = _blocks(biases, q.shape[2], ROWS if explicit else SDPA_ROWS)
    heads_per_group = (
        1 if explicit else min(heads, max(1, torch.get_num_threads() * SPLIT // blocks[0].tokens.stop))
    )
    # padding keys in front, which some methods need; their bias is -inf
    skip = biases[0].skip if explicit and len(biases) == 1 else 0
    out = q.new_empty(*q.shape[:3], v.shape[3])
    for i, first in product(range(len(q)), range(0, heads, heads_per_group)):
        group = slice(first, first + heads_per_group)
        # SDPA is faster with contiguous keys
        keys, values = (t[i, group].to(wide) if explicit else t[i, group].contiguous() for t in (k, v))
        for rows in blocks:
            block = rows._replace(heads=group)
            bias = biases[0].padded(block, i) if skip else sum_of_masks(biases, block, i)
            queries, output = q[i, group, block.tokens], out[i, group, block.tokens]
            if explicit:
                _attend_head(
                    queries[0].to(wide), keys[0], values[0], bias[0], skip, call.factor, out=output[0]
                )
            else:
                mask = rounded(bias, call.dtype)
                output.copy_(
                    F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=call.factor)
                )
    return call.finish(out)


def prefers_explicit(dtype: torch.dtype) -> bool:
    """Whether explicit float32 matrix products are faster than SDPA.

    They are with one thread, since several would synchronise at every product. In float32 they are not with AVX2: there
    the speed relative to SDPA without bias (1,370 tokens, AMD EPYC) is 0.68 for `irpe` and 0.37 for `shaw`, and with
    SDPA 0.72 and 0.46. In half precision they are faster on processors without matrix units for it.
    """
    capability = torch.backends.cpu.get_cpu_capability()
    if torch.get_num_threads() > 1:
        return False
    if dtype in (torch.float32, torch.float64):
        return capability != "AVX2"
    units: Callable[[], bool] = getattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    return capability.startswith("AVX") and not units()


def _attend_head(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, skip: int, scale: float, out: Tensor) -> None:
    """Write attention of one head into `out` (n, d_v), overwriting the bias (n, skip + m)."""
    bias = bias.contiguous()
    # accumulate the product into the bias
    logits = bias[:, skip:].addmm_(q, k.t(), alpha=scale)
    torch.softmax(bias, -1, out=bias)
    if out.dtype == logits.dtype:
        torch.mm(logits, v, out=out)
    else:
        out.copy_(logits.mm(v))


def _terms(bias: Bias | None) -> list[ContextBias]:
    """Return the tables that a bias consists of, or an empty list if it has other terms."""
    terms = bias.terms if isinstance(bias, SumBias) else [bias]
    tables = [t for t in terms if type(t) is ContextBias and not t.replaces_product]
    return tables if len(tables) == len(terms) else []


def supports(call: Call, terms: list[ContextBias]) -> bool:
    """Whether nothing needs a gradient, the call has only a bias, and that is too large for the CPU cache.

    Args:
        call: the call.
        terms: the tables that its bias consists of.
    """
    q, k, v = call.q, call.k, call.v
    if not all(map(readable, (q, k, v))) or exporting() or autocast_on(q.device):
        return False
    masked = call.attn_mask is not None or call.key_padding_mask is not None or call.cu_seqlens is not None
    if masked or call.is_causal or call.dropout_p or call.value_term is not None:
        return False
    numbers = [q, k, v] + [t.weights for t in terms]
    if torch.is_grad_enabled() and any(t.requires_grad for t in numbers):
        return False
    if 4 * q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] <= MIN_BIAS_BYTES:
        return False
    # the offset and the bucket of each pair (int64) are cached; larger grids are computed in blocks
    pairs = 16 * q.shape[2] * k.shape[2]
    if pairs > MAX_TOTAL_BYTES and any(isinstance(t.pair_buckets, OffsetBuckets) for t in terms):
        return False
    return no_infinity(*(t.weights for t in terms))


def _biases(terms: list[ContextBias], request: DenseRequest, dtype: torch.dtype) -> list[SampleBias]:
    """Return the fastest method to compute the rows of each table; all `WindowTable` are on one grid."""
    biases: list[SampleBias] = []
    grid = None
    for term in terms:
        pattern = runs_of(term)
        offsets = windows_of(term) if pattern is None else None
        if pattern is not None:
            biases.append(Runs(term, request, dtype, pattern))
        elif offsets is not None and grid in (None, offsets.grid):
            grid = offsets.grid
            biases.append(WindowTable(term, request, dtype, offsets))
        else:
            biases.append(Lookup(term, request, dtype))
    return biases


def _blocks(biases: list[SampleBias], tokens: int, size: int) -> list[BiasBlock]:
    """Return blocks of about `size` queries of nearly equal length, as a small last block would be slow."""
    grid = next((bias.offsets.grid for bias in biases if isinstance(bias, WindowTable)), None)
    # `WindowTable` needs whole grid rows; prefix tokens are in the first block
    prefix, length = (0, 1) if grid is None else (grid.prefix, grid.shape[-1])
    lines = (tokens - prefix) // length
    count = max(1, min(tokens // size, lines))
    bounds = [lines * j // count for j in range(count + 1)]
    return [
        BiasBlock(
            slice(None), first, last, slice(prefix + first * length if first else 0, prefix + last * length)
        )
        for first, last in pairwise(bounds)
    ]
