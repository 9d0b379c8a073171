"""Blockwise attention on CPU: gradients of learned and content-dependent tables, and masks too large to cache.

SDPA does not use its fast CPU kernel if the mask needs a gradient, and stores several (b, h, n, n) tensors; with a
fixed mask it stores one. Here the fast kernel runs with the mask of some heads and query rows at a time (`blocks`), and
returns the log-sum-exp of the rows. The backward pass recomputes the masks. If the bias has a gradient, it computes
``dS = P (dO v^T - delta)`` for one block after the other and passes it to the bias; otherwise the backward pass of the
fast kernel runs for each block. Nothing of size n x n is stored: blocks have a fixed size, and a strip takes n times
the width of the grid. Content-dependent tables with buckets given for all pairs keep these.

Half precision is computed in float32 if the bias has a gradient, as SDPA does with such masks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vispe.attention.backends import content_cpu
from vispe.attention.backends.blocks.attention import BACKWARD_KERNEL, KERNEL, BlockAttention
from vispe.attention.backends.blocks.bias import BlockBias, StripBias, SumOfBlocks
from vispe.attention.backends.blocks.content import block_content
from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.cache.masks import exceeds_cache, is_cacheable
from vispe.attention.bias.content import ContextBias, OffsetBuckets
from vispe.attention.bias.dense import SumBias
from vispe.attention.bias.lower_to_table import lower_to_table, table_unsupported_reason
from vispe.attention.bias.strip.layout import Layout
from vispe.attention.bias.strip.runs import build
from vispe.attention.call import Call
from vispe.attention.precision import exporting
from vispe.utils.autocast import no_autocast

# Queries of the whole batch from which strips are faster. Measured in float32 with d = 64, 6 or 12 heads, one thread:
# time of forward and backward with a learned table relative to SDPA without mask, strips / dense mask with a gradient:
# 257 tokens: b 1 2.2 / 1.7, b 2 1.8 / 2.0, b 8 1.5 / 1.9; 576 tokens: b 1 1.9 / 1.7;
# 1025 tokens: b 1 1.9 / 2.2, b 2 1.9 / 2.6.
MIN_QUERIES: float = 1024
# Tokens from which blocks are faster for content-dependent tables with a gradient. Time of forward and backward
# relative to SDPA without mask, blocks / dense mask, in float32 with d = 64 and 6 heads, one thread:
# irpe: 257 tokens: b 1 1.75 / 1.62, b 8 1.77 / 1.93; 1370 tokens: 2.1 / 2.6;
# irpe(on=qk): 257 tokens: b 1 2.1 / 2.05, b 8 2.85 / 2.4; 1370 tokens: 3.6 / 4.0.
MIN_CONTENT_TOKENS = 1024
# bytes of a dense content-dependent bias from which blocks are used without a gradient
MIN_CONTENT_BYTES = 1 << 26
SHORTEST_ROW = 4  # grid columns from which processing whole grid rows is faster


class _Plan(NamedTuple):
    """How a call is computed: the terms with an offset table, the others, and whether the bias needs a gradient."""

    table: Bias | None
    content: list[ContextBias]
    layout: Layout
    is_learned: bool


def attend(call: Call) -> Tensor | None:
    """Return attention (b, h, n, d_v) computed in blocks, or None if a dense mask has to be used."""
    plan = _plan(call)
    if plan is None:
        return None
    with no_autocast(call.q.device):
        bias = _block_bias(call, plan)
    if any(
        t.shape[0] not in (1, call.q.shape[1])
        for term in bias.terms
        if not term.per_sample
        for t in term.tensors
    ):
        return None  # the dense path raises the error
    q, k, v = (t.to(call.dtype) for t in call.transformed())
    if plan.is_learned:
        wide = torch.promote_types(call.dtype, torch.float32)
        q, k, v = q.to(wide), k.to(wide), v.to(wide)
    key_padding, dead = call.key_padding_mask, None
    if key_padding is not None:
        # rows without any key: computed with all keys to avoid NaN, and set to 0 afterwards
        dead = ~key_padding.any(1)[:, None, None, None]
        key_padding = key_padding | dead[:, :, 0, 0]
    # the node of the graph must not keep the tensors in addition to those it saves
    template = bias.replace([t.new_empty(0) for t in bias.tensors])
    out: Tensor = BlockAttention.apply(  # pyright: ignore
        q, k, v, key_padding, template, plan.layout, call.factor, *bias.tensors
    )
    out = out.to(call.dtype)
    return call.finish(out if dead is None else out.masked_fill(dead, 0.0))


def applies(call: Call) -> bool:
    """Whether `attend` supports the call."""
    return _plan(call) is not None


def _plan(call: Call) -> _Plan | None:
    """Return how the call is computed in blocks, or None if a dense mask is faster or has to be used."""
    bias = call.bias
    if bias is None or not _supports(call):
        return None
    tables, content = _split(bias)
    table = None if not tables else tables[0] if len(tables) == 1 else SumBias(tables)
    # without a table any number of rows is a block
    layout = Layout((call.q.shape[2],), 0, rows=False)
    grid = next((t.pos.grid for t in content if isinstance(t.pair_buckets, OffsetBuckets) and t.pos), None)
    if grid is not None and Layout(grid.shape, grid.prefix, rows=False).pitch >= SHORTEST_ROW:
        layout = Layout(grid.shape, grid.prefix, rows=False)
    if table is not None:
        if table_unsupported_reason(table) is not None or table.pos is None or table.pos.grid is None:
            return None
        layout = Layout(table.pos.grid.shape, table.pos.grid.prefix, rows=False)
        if layout.pitch < SHORTEST_ROW:
            return None
    is_learned = _needs_gradient(call, table, content)
    if content and not _content_in_blocks(call, is_learned, None if table is not None else content):
        return None
    if content or is_learned or _is_too_large(call, bias):
        return _Plan(table, content, layout, is_learned)
    return None


def _split(bias: Bias) -> tuple[list[Bias], list[ContextBias]]:
    """Return the content-dependent tables of a bias, and all other terms first."""
    if isinstance(bias, SumBias):
        parts = [_split(term) for term in bias.terms]
        return [t for tables, _ in parts for t in tables], [t for _, content in parts for t in content]
    return ([], [bias]) if type(bias) is ContextBias else ([bias], [])


def _needs_gradient(call: Call, table: Bias | None, content: list[ContextBias]) -> bool:
    if not torch.is_grad_enabled():
        return False
    tensors: list[Tensor | None] = []
    if table is not None and table.key is None:
        with no_autocast(call.q.device):
            tensors += lower_to_table(table)
    for term in content:
        tensors += [
            term.weights,
            term.content if term.content is not None else call.q if term.dot == "query" else call.k,
        ]
    return any(t is not None and t.requires_grad for t in tensors)


def _content_in_blocks(call: Call, is_learned: bool, terms: list[ContextBias] | None) -> bool:
    """Whether blocks are faster than a dense content-dependent bias; `terms` if there are no other terms."""
    b, h, n = call.q.shape[:3]
    if is_learned:
        return n >= MIN_CONTENT_TOKENS
    return 4 * b * h * n * n > MIN_CONTENT_BYTES and (terms is None or not content_cpu.supports(call, terms))


def _is_too_large(call: Call, bias: Bias) -> bool:
    """Whether a fixed mask would be computed in every call, or take too much memory."""
    heads = call.q.shape[1]
    if exceeds_cache(bias, call.dtype, heads):
        return True
    if torch.is_grad_enabled() and any(t.requires_grad for t in (call.q, call.k, call.v)):
        return False
    return bias.key is None and not is_cacheable(bias, call.dtype, heads) and bias.finite


def _block_bias(call: Call, plan: _Plan) -> SumOfBlocks:
    terms: list[BlockBias] = []
    if plan.table is not None:
        terms.append(StripBias(_strip(call, plan, plan.table), plan.layout))
    return SumOfBlocks(terms + [block_content(term, call, plan.layout) for term in plan.content])


def _strip(call: Call, plan: _Plan, table: Bias) -> tuple[Tensor, Tensor]:
    """Return runs and biases of prefix keys of a table; those of a fixed one are cached with its positions."""
    dtype = torch.promote_types(call.dtype, torch.float32)

    def make() -> tuple[Tensor, Tensor]:
        values, edge = lower_to_table(table)
        return build(values.to(dtype), edge, plan.layout)

    if table.key is None or table.pos is None:
        return make()
    return table.pos.remember(("strip", table.key, dtype), make)


def _supports(call: Call) -> bool:
    """Whether everything but the bias is supported by blocks."""
    if torch.compiler.is_compiling() or exporting() or torch.jit.is_tracing():  # pyright: ignore
        return False
    q, k, v = call.q, call.k, call.v
    if q.device.type != "cpu":
        return False
    if call.value_term is not None or call.attn_mask is not None or call.is_causal or call.dropout_p:
        return False
    if call.cu_seqlens is not None or q.shape[2] != k.shape[2] or q.shape[3] != v.shape[3] or not q.numel():
        return False
    if KERNEL is None or BACKWARD_KERNEL is None or q.shape[0] * q.shape[2] < MIN_QUERIES:
        return False
    # forward mode has no tangents here, as `sdpa` refuses it
    is_transformed: bool = torch._C._are_functorch_transforms_active()  # pyright: ignore
    return not is_transformed and all(type(t) in (Tensor, torch.nn.Parameter) for t in (q, k, v))
