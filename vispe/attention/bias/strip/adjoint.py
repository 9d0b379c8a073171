"""Gradient of a bias table from that of its runs, which are not computed.

The fused operators return the gradient of the runs of `runs.build`, but read packed runs, which have no gradient. Each
entry of the table is the sum of one diagonal of the runs, for which rows are shifted against each other in memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vispe.attention.bias.strip.layout import Layout


def gradient_inputs(table: Tensor, edge: Tensor | None, layout: Layout) -> tuple[Tensor, Tensor]:
    """Return tensors with the shapes of the results of `runs.build` whose gradients reach the table; not to be read.

    Args as in `runs.build`. Only for eager programs; compilers need the operations of `runs.build`.
    """
    return _Adjoint.apply(table, edge, layout)


class _Adjoint(torch.autograd.Function):
    # without a separate setup_context, for which torch inspects the signature in each call
    @staticmethod
    def forward(ctx: Any, table: Tensor, edge: Tensor | None, layout: Layout) -> tuple[Tensor, Tensor]:
        # prefix biases are not part of the runs of a grid without prefix tokens
        heads = max(len(table), len(edge)) if edge is not None and layout.prefix else len(table)
        ctx.layout, ctx.heads = layout, (len(table), None if edge is None else len(edge))
        # no memory, since nothing reads them
        runs, ends = (
            torch.empty_strided((heads, n), (0, 0), device=table.device) for n in (layout.length, 2)
        )
        return runs, ends

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (runs, ends), layout, (table_heads, edge_heads) = grads, ctx.layout, ctx.heads
        table, edge = None, None
        if ctx.needs_input_grad[0]:
            table = _of_heads(table_gradient(runs, layout), table_heads)
        if edge_heads is not None and ctx.needs_input_grad[1]:
            gradient = edge_gradient(runs, ends, layout) if layout.prefix else ends.new_zeros(edge_heads, 3)
            edge = _of_heads(gradient, edge_heads)
        return table, edge, None


def table_gradient(runs: Tensor, layout: Layout) -> Tensor:
    """Return the gradient of a table (h, 2 n_1 - 1, ...), given that of its runs (h, `Layout.length`)."""
    shape, prefix = layout.shape, layout.prefix
    if layout.rows:
        # rows of tokens -> queries x keys
        dense = runs.view(len(runs), layout.tokens, layout.pitch)[:, prefix:, prefix : layout.tokens]
        pairs, axes = dense.view(len(runs), *shape, *shape), len(shape)
    else:
        rest, end = shape[1:], layout.length - layout.patches if prefix else layout.length
        pairs = runs[:, prefix:end].view(len(runs), *rest, 2 * shape[0] - 1, *rest)
        axes = len(rest)
    for _ in range(axes):
        # the first axes of queries and of keys become the last axis, of their difference
        pairs = _diagonal_sums(pairs, 1, pairs.ndim - axes)
    # a larger key coordinate means a smaller offset
    return pairs.flip([1 + axis for axis in range(len(shape))])


def edge_gradient(runs: Tensor, ends: Tensor, layout: Layout) -> Tensor:
    """Return the gradient of prefix biases (h, 3), given those of the results of `runs.build`, with prefix tokens."""
    prefix = layout.prefix
    if not layout.rows:
        # all prefix queries read one constant run
        run = runs[:, layout.length - layout.patches :]
        return torch.cat([run.sum(1, keepdim=True), ends], 1)
    pairs = runs.view(len(runs), layout.tokens, layout.pitch)[..., : layout.tokens]
    parts = pairs[:, :prefix, prefix:], pairs[:, prefix:, :prefix], pairs[:, :prefix, :prefix]
    return torch.stack([part.sum((1, 2)) for part in parts], 1)


def _diagonal_sums(pairs: Tensor, query: int, key: int) -> Tensor:
    """Return sums over pairs of equal ``key - query``, with 2 n - 1 entries in the last axis instead of both axes."""
    pairs = pairs.movedim((query, key), (-2, -1))
    n, width = pairs.shape[-1], 2 * pairs.shape[-1] - 1
    # rows of queries are written one element closer than they are read, so that diagonals become columns
    padded = torch.zeros(*pairs.shape[:-2], n, width, dtype=pairs.dtype, device=pairs.device)
    skewed = padded.as_strided(pairs.shape, (*padded.stride()[:-2], width - 1, 1), n - 1)
    skewed.copy_(pairs)
    return padded.sum(-2)


def _of_heads(gradient: Tensor, heads: int) -> Tensor:
    """Return the gradient of a tensor with `heads` heads, which was expanded if there is one."""
    return gradient.sum(0, keepdim=True) if heads == 1 < len(gradient) else gradient
