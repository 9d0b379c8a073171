"""Blockwise attention on CPU with a learned bias table: gradients of the table, and masks too large to cache.

SDPA does not use its fast CPU kernel if the mask needs a gradient, and stores several (b, h, n, n) tensors. Here the
fast kernel runs with a mask without gradient, computed for some heads and grid rows at a time, and returns the
log-sum-exp of the rows. The backward pass computes ``dS = P (dO v^T - delta)`` for one block after the other, sums it
over the batch and adds it to the strip of `vispe.attention.bias.strip`, where the queries of one grid row share one
window per column. Nothing of size n x n is stored and blocks have a fixed size, so the memory is linear in n.

Half precision is computed in float32, as SDPA does with such masks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from vispe.attention.bias.lower_to_table import lower_to_table, table_unsupported_reason
from vispe.attention.bias.mask_cache import is_cacheable
from vispe.attention.bias.strip import Layout, build
from vispe.attention.call import Call
from vispe.attention.precision import exporting, no_autocast, rounded

FORWARD_BLOCK = 1 << 24  # bytes of a mask
# bytes of a block of scores, per thread (measured: 1.0 and 4 MB equal, 0.5 MB slower)
BACKWARD_BLOCK = 1 << 21
# Queries of the whole batch from which strips are faster. Measured in float32 with d = 64, 6 or 12 heads, one thread:
# time of forward and backward with a learned table relative to SDPA without mask, strips / dense mask with a gradient:
# 257 tokens: b 1 2.2 / 1.7, b 2 1.8 / 2.0, b 8 1.5 / 1.9; 576 tokens: b 1 1.9 / 1.7;
# 1025 tokens: b 1 1.9 / 2.2, b 2 1.9 / 2.6.
MIN_QUERIES: float = 1024
SHORTEST_ROW = 4  # grid columns from which processing whole grid rows is faster
_KERNEL: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


def attend(call: Call) -> Tensor | None:
    """Return attention (b, h, n, d_v) computed in blocks, or None if a dense mask has to be used."""
    if not _supports(call) or call.bias is None or call.bias.pos is None or call.bias.pos.grid is None:
        return None
    grid = call.bias.pos.grid
    layout = Layout(grid.shape, grid.prefix, rows=False)
    wide = torch.promote_types(call.dtype, torch.float32)
    with no_autocast(call.q.device):
        table, edge = lower_to_table(call.bias)
        is_learned = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (table, edge))
        if not is_learned and not _too_large_to_cache(call):
            return None
        runs, prefix_biases = build(table.to(wide), edge, layout)
    if runs.shape[0] not in (1, call.q.shape[1]):
        return None  # the dense path raises the error
    q, k, v = (t.to(call.dtype) for t in call.transformed())
    if is_learned:
        q, k, v = q.to(wide), k.to(wide), v.to(wide)
    key_padding, dead = call.key_padding_mask, None
    if key_padding is not None:
        # rows without any key: computed with all keys to avoid NaN, and set to 0 afterwards
        dead = ~key_padding.any(1)[:, None, None, None]
        key_padding = key_padding | dead[:, :, 0, 0]
    if is_learned:
        out: Tensor = _StripAttention.apply(q, k, v, runs, prefix_biases, key_padding, layout, call.factor)  # pyright: ignore
    else:
        with no_autocast(q.device):
            out = _forward(q, k, v, _Strip(runs, prefix_biases, layout), key_padding, call.factor)[0]
    out = out.to(call.dtype)
    return call.finish(out if dead is None else out.masked_fill(dead, 0.0))


def applies(call: Call) -> bool:
    """Whether `attend` supports the call."""
    if not _supports(call) or call.bias is None:
        return False
    with no_autocast(call.q.device):
        is_learned = any(t is not None and t.requires_grad for t in lower_to_table(call.bias))
    return (torch.is_grad_enabled() and is_learned) or _too_large_to_cache(call)


def _too_large_to_cache(call: Call) -> bool:
    """Whether nothing needs a gradient, and a mask would be computed in every call."""
    if call.bias is None or (
        torch.is_grad_enabled() and any(t.requires_grad for t in (call.q, call.k, call.v))
    ):
        return False
    return not is_cacheable(call.bias, call.dtype, call.q.shape[1]) and call.bias.finite


def _supports(call: Call) -> bool:
    """Whether the bias is learned and on the CPU, and everything else is supported by blocks."""
    if torch.compiler.is_compiling() or exporting() or torch.jit.is_tracing():  # pyright: ignore
        return False
    q, k, v, bias = call.q, call.k, call.v, call.bias
    if bias is None or bias.key is not None or q.device.type != "cpu":
        return False
    if call.value_term is not None or call.attn_mask is not None or call.is_causal or call.dropout_p:
        return False
    if call.cu_seqlens is not None or q.shape[2] != k.shape[2] or q.shape[3] != v.shape[3] or not q.numel():
        return False
    if (
        _KERNEL is None
        or q.shape[0] * q.shape[2] < MIN_QUERIES
        or not (_is_plain(q) and _is_plain(k) and _is_plain(v))
    ):
        return False
    if table_unsupported_reason(bias) is not None or bias.pos is None or bias.pos.grid is None:
        return False
    return Layout(bias.pos.grid.shape, bias.pos.grid.prefix, rows=False).pitch >= SHORTEST_ROW


def _is_plain(x: Tensor) -> bool:
    """Whether `x` is a plain tensor, outside of `torch.func` transforms and forward-mode autodiff."""
    if type(x) not in (Tensor, torch.nn.Parameter) or torch._C._are_functorch_transforms_active():  # pyright: ignore
        return False
    return forward_ad.unpack_dual(x).tangent is None  # pyright: ignore[reportUnknownMemberType]


class _Block(NamedTuple):
    """Some heads and the queries of whole grid rows `first` to `last`; prefix queries belong to the first row."""

    heads: slice
    first: int
    last: int
    tokens: slice


def _blocks(heads: int, layout: Layout, limit: int) -> Iterator[_Block]:
    """Yield blocks of at most `limit` scores, at least one grid row each."""
    n, heads_per_block = layout.tokens, max(1, min(heads, limit // layout.tokens**2))
    rows = layout.shape[0] if n * n <= limit else max(1, limit // n // layout.pitch)
    for head in range(0, heads, heads_per_block):
        for first in range(0, layout.shape[0], rows):
            last = min(first + rows, layout.shape[0])
            start = layout.prefix + first * layout.pitch if first else 0
            tokens = slice(start, layout.prefix + last * layout.pitch)
            yield _Block(slice(head, min(head + heads_per_block, heads)), first, last, tokens)


class _Strip:
    """Runs and biases of prefix keys, accessed as windows of one grid row of queries."""

    def __init__(self, runs: Tensor, prefix_biases: Tensor, layout: Layout) -> None:
        self.runs, self.prefix_biases, self.layout = runs, prefix_biases, layout
        length = layout.pitch * (2 * layout.shape[0] - 1) * layout.pitch
        self.windows = runs[:, layout.prefix : layout.prefix + length].view(len(runs), layout.pitch, -1)

    def pick(self, heads: slice) -> slice:
        return heads if len(self.runs) > 1 else slice(None)

    def rows(self, block: _Block) -> Tensor:
        """Return the windows of a block, last grid row first, (h or 1, pitch, grid rows, patches)."""
        layout = self.layout
        # the window of the last grid row comes first in memory
        windows = self.windows[self.pick(block.heads), :, (layout.shape[0] - block.last) * layout.pitch :]
        return windows.unfold(2, layout.patches, layout.pitch)[:, :, : block.last - block.first]

    def patches(self, block: _Block, scores: Tensor) -> Tensor:
        """Return the patch part of scores (h or 1, rows, n) as a view (h or 1, grid rows, pitch, patches)."""
        count, pitch = block.last - block.first, self.layout.pitch
        return scores[:, -count * pitch :, self.layout.prefix :].view(len(scores), count, pitch, -1)

    def mask(self, block: _Block) -> Tensor:
        """Return the bias of a block, (h or 1, rows, n)."""
        prefix, heads = self.layout.prefix, self.pick(block.heads)
        prefix_biases, bias = self.prefix_biases[heads], self.rows(block).transpose(1, 2).flip(1)
        if not prefix:
            return bias.flatten(1, 2)
        mask = prefix_biases.new_empty(
            len(prefix_biases), block.tokens.stop - block.tokens.start, self.layout.tokens
        )
        self.patches(block, mask).copy_(bias)
        mask[:, :, :prefix] = prefix_biases[:, None, :1]
        if not block.first:
            mask[:, :prefix, :prefix] = prefix_biases[:, None, 1:]
            mask[:, :prefix, prefix:] = self.runs[heads, -1:, None]
        return mask

    def add(self, block: _Block, scores: Tensor) -> None:
        """Add the gradients `scores` (h, rows, n) of the bias of a block."""
        prefix, heads = self.layout.prefix, self.pick(block.heads)
        # heads that share one bias share its gradient
        if len(self.runs) == 1:
            scores = scores.sum(0, keepdim=True)
        windows, parts = self.rows(block).unbind(2), self.patches(block, scores).unbind(1)
        # windows overlap, so they are added one at a time
        for window, part in zip(windows[::-1], parts, strict=True):
            window.add_(part)
        if not prefix:
            return
        prefix_queries = prefix if not block.first else 0  # prefix queries of this block
        self.prefix_biases[heads, 0] += scores[:, prefix_queries:, :prefix].sum((1, 2))
        if prefix_queries:
            self.prefix_biases[heads, 1] += scores[:, :prefix_queries, :prefix].sum((1, 2))
            self.runs[heads, -self.layout.patches :] += scores[:, :prefix_queries, prefix:].sum(1)


class _StripAttention(torch.autograd.Function):
    """Attention (b, h, n, d) from q, k, v, runs, ends, keep (b, n) or None, layout and scale."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, runs: Tensor, prefix_biases: Tensor, keep: Tensor | None,
                layout: Layout, scale: float) -> Tensor:  # fmt: skip
        with no_autocast(q.device):
            out, lse = _forward(q, k, v, _Strip(runs, prefix_biases, layout), keep, scale)
        ctx.save_for_backward(q, k, v, runs, prefix_biases, keep, out, lse)
        ctx.rest = layout, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        q, k, v, runs, prefix_biases, keep, out, lse = ctx.saved_tensors
        layout, scale = ctx.rest
        with no_autocast(q.device):
            # double backward: differentiate the plain definition, which the kernel is not
            if torch.is_grad_enabled():
                saved = (q, k, v, runs, prefix_biases)
                inputs = [t if t.requires_grad else t.detach().requires_grad_() for t in saved]
                q, k, v, runs, prefix_biases = inputs
                output = _by_definition(q, k, v, runs, prefix_biases, keep, layout, scale)
                grads = torch.autograd.grad(output, inputs, grad, create_graph=True, allow_unused=True)
            else:
                grads = _backward(grad, q, k, v, out, lse, _Strip(runs, prefix_biases, layout), keep, scale)
        return *grads, None, None, None


def _forward(
    q: Tensor, k: Tensor, v: Tensor, strip: _Strip, keep: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    out, lse = q.new_empty(q.shape), q.new_empty(q.shape[:3])
    for block in _blocks(q.shape[1], strip.layout, FORWARD_BLOCK // strip.runs.itemsize):
        heads, tokens = block.heads, block.tokens
        mask = strip.mask(block)
        # swap batch and head axes, so that one mask is reused for the whole batch
        if keep is None:
            swapped = (t.transpose(0, 1) for t in (q[:, heads, tokens], k[:, heads], v[:, heads]))
            # a mask in half precision costs less time than one in float32
            part, sums = _KERNEL(*swapped, attn_mask=rounded(mask, q.dtype)[:, None], scale=scale)
            out[:, heads, tokens], lse[:, heads, tokens] = part.transpose(0, 1), sums.transpose(0, 1)
            continue
        for i in range(len(q)):
            # key padding differs between samples, so each has a separate mask
            sample_mask = rounded(mask.masked_fill(~keep[i], float("-inf")), q.dtype)[None]
            sample = slice(i, i + 1)
            part, sums = _KERNEL(
                q[sample, heads, tokens],
                k[sample, heads],
                v[sample, heads],
                attn_mask=sample_mask,
                scale=scale,
            )
            out[sample, heads, tokens], lse[sample, heads, tokens] = part, sums
    return out, lse


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, strip: _Strip, keep: Tensor | None,
    scale: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    b, h, n, d = q.shape
    # one extra channel subtracts log-sum-exp and delta within the matrix products
    q1 = torch.cat([q, -lse[..., None]], -1)
    grad1 = torch.cat([grad, -(grad * out).sum(-1, keepdim=True)], -1)
    k1, v1 = (t.new_ones(b, h, d + 1, n) for t in (k, v))
    torch.mul(k.transpose(-1, -2), scale, out=k1[:, :, :d])
    v1[:, :, :d] = v.transpose(-1, -2)
    dq, dk, dv = (q.new_empty(b, h, n, d) for _ in range(3))
    summed = _Strip(torch.zeros_like(strip.runs), torch.zeros_like(strip.prefix_biases), strip.layout)
    memory: list[Tensor] = []
    for block in _blocks(h, strip.layout, BACKWARD_BLOCK * torch.get_num_threads() // q.itemsize):
        heads, tokens = block.heads, block.tokens
        # the first block of rows writes the gradients of keys and values, others add to them
        mask, beta = strip.mask(block), 1 if block.first else 0
        p, ds, total = _buffers(mask, heads.stop - heads.start, memory)
        for i in range(b):
            # logits of this block minus log-sum-exp: their exponential is P
            torch.baddbmm(mask, q1[i, heads, tokens], k1[i, heads], out=p)
            if keep is not None:
                p.masked_fill_(~keep[i], float("-inf"))
            p.exp_()
            # dS = P (dP - delta), with dP - delta from one product
            torch.bmm(grad1[i, heads, tokens], v1[i, heads], out=ds)
            ds.mul_(p)
            # dv = P^T dO, dk = dS^T q, dq = dS k
            dv[i, heads].baddbmm_(p.transpose(1, 2), grad[i, heads, tokens], beta=beta)
            dk[i, heads].baddbmm_(ds.transpose(1, 2), q[i, heads, tokens], beta=beta, alpha=scale)
            dq[i, heads, tokens].baddbmm_(ds, k[i, heads], beta=0, alpha=scale)
            if b > 1:
                # samples share the bias, so its gradient is summed over the batch
                total = total.copy_(ds) if i == 0 else total.add_(ds)
        summed.add(block, total if b > 1 else ds)
    return dq, dk, dv, summed.runs, summed.prefix_biases


def _buffers(mask: Tensor, heads: int, memory: list[Tensor]) -> Iterator[Tensor]:
    """Return three tensors (heads, rows, n) for a mask (heads or 1, rows, n), in memory shared by all blocks."""
    shape = heads, *mask.shape[1:]
    size = heads * mask.shape[1] * mask.shape[2]
    # allocated once: the first block is the largest
    if not memory:
        memory += [mask.new_empty(size) for _ in range(3)]
    return (t[:size].view(shape) for t in memory)


def _by_definition(
    q: Tensor, k: Tensor, v: Tensor, runs: Tensor, prefix_biases: Tensor, keep: Tensor | None, layout: Layout, scale:
    float
) -> Tensor:  # fmt: skip
    """Return the same attention by plain differentiable operations, for double backward."""
    token = torch.arange(layout.tokens)
    prefix = token < layout.prefix
    bias = runs[:, (layout.base()[:, None] + token).clamp(max=runs.shape[1] - 1)]
    bias = torch.where(prefix, prefix_biases[:, prefix.long()][:, :, None], bias)
    if keep is not None:
        bias = torch.where(keep[:, None, None], bias, float("-inf"))
    dead = (bias == float("-inf")).all(-1, keepdim=True)
    weights = ((q * scale) @ k.transpose(-1, -2) + bias.masked_fill(dead, 0.0)).softmax(-1)
    return weights.masked_fill(dead, 0.0) @ v
