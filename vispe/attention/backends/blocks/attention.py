"""Attention in blocks, forward and backward, with the fast CPU kernel or explicit products of one block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from vispe.attention.backends.blocks.bias import BiasBlock, SumOfBlocks, blocks
from vispe.attention.bias.strip.layout import Layout
from vispe.attention.precision import rounded
from vispe.utils.autocast import no_autocast

FORWARD_BLOCK = 1 << 24  # bytes of a mask
# bytes of a block of scores, per thread (measured: 1.0 and 4 MB equal, 0.5 MB slower)
BACKWARD_BLOCK = 1 << 21
KERNEL: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
BACKWARD_KERNEL: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)


class BlockAttention(torch.autograd.Function):
    """Attention (b, h, n, d) from q, k, v, keep (b, n) or None, a bias without tensors, layout, scale, and tensors."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, template: SumOfBlocks, layout: Layout,
                scale: float, *tensors: Tensor) -> Tensor:  # fmt: skip
        """Return the output, with one block of the bias at a time."""
        with no_autocast(q.device):
            out, lse = _forward(q, k, v, template.replace(tensors), keep, layout, scale)
        ctx.save_for_backward(q, k, v, keep, out, lse, *tensors)
        ctx.rest = template, layout, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        """Return the gradients of q, k, v and the tensors of the bias, which is recomputed."""
        q, k, v, keep, out, lse, *tensors = ctx.saved_tensors
        template, layout, scale = ctx.rest
        with no_autocast(q.device):
            # double backward: differentiate the plain definition, which the kernel is not
            if torch.is_grad_enabled():
                inputs = [t if t.requires_grad else t.detach().requires_grad_() for t in (q, k, v, *tensors)]
                q, k, v, *tensors = inputs
                output = _by_definition(q, k, v, template.replace(tensors), keep, scale)
                grads = torch.autograd.grad(output, inputs, grad, create_graph=True, allow_unused=True)
            elif any(ctx.needs_input_grad[7:]):
                grads = _backward(grad, q, k, v, out, lse, template.replace(tensors), keep, layout, scale)
            else:
                bias = template.replace(tensors)
                grads = _backward_of_fixed(grad, q, k, v, out, lse, bias, keep, layout, scale)
                grads += (None,) * len(tensors)
        return *grads[:3], None, None, None, None, *grads[3:]


def _forward(
    q: Tensor, k: Tensor, v: Tensor, bias: SumOfBlocks, keep: Tensor | None, layout: Layout, scale: float
) -> tuple[Tensor, Tensor]:
    out, lse = (
        q.new_empty(q.shape),
        q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32)),
    )
    for block in blocks(q.shape[1], layout, FORWARD_BLOCK // q.itemsize):
        heads, tokens = block.heads, block.tokens
        for samples, mask in _masks(bias, block, keep, len(q), q.dtype):
            # swap batch and head axes, so that one mask is reused for the whole batch
            swapped = (
                t.transpose(0, 1) for t in (q[samples, heads, tokens], k[samples, heads], v[samples, heads])
            )
            part, sums = KERNEL(*swapped, attn_mask=mask[:, None], scale=scale)
            out[samples, heads, tokens], lse[samples, heads, tokens] = (
                part.transpose(0, 1),
                sums.transpose(0, 1),
            )
    return out, lse


def _masks(
    bias: SumOfBlocks, block: BiasBlock, keep: Tensor | None, batch: int, dtype: torch.dtype
) -> Iterator[tuple[slice, Tensor]]:
    """Yield samples and their mask of a block (h or 1, rows, n), one for all samples if they share it."""
    # a mask in half precision costs less time than one in float32
    mask = None if bias.per_sample else bias.mask(block, 0)
    if mask is not None and keep is None:
        yield slice(None), rounded(mask, dtype)
        return
    for i in range(batch):
        of_sample = bias.mask(block, i) if mask is None else mask
        # key padding differs between samples
        of_sample = of_sample if keep is None else of_sample.masked_fill(~keep[i], float("-inf"))
        yield slice(i, i + 1), rounded(of_sample, dtype)


def _backward_of_fixed(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: SumOfBlocks, keep: Tensor | None,
    layout: Layout, scale: float,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return the gradients of q, k and v for a bias without gradient."""
    # rows without any key
    lse = torch.where(lse.isfinite(), lse, 0.0)
    dq, wide = torch.empty_like(q), torch.promote_types(q.dtype, torch.float32)
    dk, dv = (torch.zeros(t.shape, dtype=wide) for t in (k, v))
    for block in blocks(q.shape[1], layout, FORWARD_BLOCK // q.itemsize):
        heads, tokens = block.heads, block.tokens
        for samples, mask in _masks(bias, block, keep, len(q), q.dtype):
            rows, keys = (samples, heads, tokens), (samples, heads)
            swapped = (
                t.transpose(0, 1) for t in (grad[rows], q[rows], k[keys], v[keys], out[rows], lse[rows])
            )
            parts = BACKWARD_KERNEL(*swapped, 0.0, False, attn_mask=mask[:, None], scale=scale)
            dq[rows] = parts[0].transpose(0, 1)
            dk[keys] += parts[1].transpose(0, 1)
            dv[keys] += parts[2].transpose(0, 1)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: SumOfBlocks, keep: Tensor | None,
    layout: Layout, scale: float,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return the gradients of q, k, v and of the tensors of the bias."""
    b, h, n, d = q.shape
    # one extra channel subtracts log-sum-exp and delta within the matrix products
    q1 = torch.cat([q, -lse[..., None]], -1)
    grad1 = torch.cat([grad, -(grad * out).sum(-1, keepdim=True)], -1)
    k1, v1 = (t.new_ones(b, h, d + 1, n) for t in (k, v))
    torch.mul(k.transpose(-1, -2), scale, out=k1[:, :, :d])
    v1[:, :, :d] = v.transpose(-1, -2)
    dq, dk, dv = (q.new_empty(b, h, n, d) for _ in range(3))
    summed = bias.replace([torch.zeros_like(t, memory_format=torch.contiguous_format) for t in bias.tensors])
    memory: list[Tensor] = []
    for block in blocks(h, layout, BACKWARD_BLOCK * torch.get_num_threads() // q.itemsize):
        heads, tokens = block.heads, block.tokens
        # the first block of rows writes the gradients of keys and values, others add to them
        beta = 1 if block.first else 0
        shape = heads.stop - heads.start, tokens.stop - tokens.start, n
        p, ds, total = _buffers(q, shape, memory)
        mask = None if bias.per_sample else bias.mask(block, 0)
        for i in range(b):
            # logits of this block minus log-sum-exp: their exponential is P
            of_sample = bias.mask(block, i).to(q.dtype) if mask is None else mask
            torch.baddbmm(of_sample, q1[i, heads, tokens], k1[i, heads], out=p)
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
            if bias.per_sample:
                summed.add(bias, block, i, ds)
            elif b > 1:
                # samples share the bias, so its gradient is summed over the batch
                total = total.copy_(ds) if i == 0 else total.add_(ds)
        if not bias.per_sample:
            summed.add(bias, block, 0, total if b > 1 else ds)
    return dq, dk, dv, *summed.tensors


def _buffers(like: Tensor, shape: tuple[int, int, int], memory: list[Tensor]) -> Iterator[Tensor]:
    """Return three tensors (heads, rows, n) in memory shared by all blocks."""
    size = shape[0] * shape[1] * shape[2]
    # allocated once: the first block is the largest
    if not memory:
        memory += [like.new_empty(size) for _ in range(3)]
    return (t[:size].view(shape) for t in memory)


def _by_definition(
    q: Tensor, k: Tensor, v: Tensor, block_bias: SumOfBlocks, keep: Tensor | None, scale: float
) -> Tensor:
    """Return the same attention by plain differentiable operations, for double backward."""
    bias = block_bias.dense()
    if keep is not None:
        bias = torch.where(keep[:, None, None], bias, float("-inf"))
    dead = (bias == float("-inf")).all(-1, keepdim=True)
    weights = ((q * scale) @ k.transpose(-1, -2) + bias.masked_fill(dead, 0.0)).softmax(-1)
    return weights.masked_fill(dead, 0.0) @ v
