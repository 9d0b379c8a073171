"""The fused kernels as operators of torch: seen by compile and export, with fake kernels and gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vispe.attention.backends.triton.device import watched
from vispe.attention.backends.triton.grid.launch import apart, fake_output, grads_like, run_forward, shared
from vispe.attention.backends.triton.grid.launch_backward import run_backward, run_bias


@torch.library.custom_op("vispe::table_attention", mutates_args=())
@watched("table")
def table_attention(
    q: Tensor, k: Tensor, v: Tensor, packed: Tensor | None, address: Tensor | None, edge: Tensor | None,
    base: Tensor | None, keep: Tensor | None, runs: Tensor | None, ends: Tensor | None, prefix: int, scale: float,
    sharers: int, deterministic: bool, sight: Tensor | None = None, copy: Tensor | None = None,
    once: bool = False, seed: Tensor | None = None, dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the output (b, h, n, d_v) and the sums of rows of `sums_of`, with a gradient for the bias.

    `runs` and `ends` are what `packed` and `edge` were made from, and are not read: the gradient goes to them. `sight`
    is that of `strip.sight_of`, `copy` that of `narrow.pack_both`; `once` is for the backward pass; `seed`
    and `dropout` are those of `run_forward`.
    """
    del base, runs, ends, sharers, deterministic, once
    return run_forward(q, k, v, packed, address, edge, keep, prefix, scale, sight, copy, seed, dropout)


table_attention.register_fake(fake_output)


@torch.library.custom_op("vispe::table_attention_grad", mutates_args=())
@watched("table")
def table_attention_grad(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, packed: Tensor | None,
    address: Tensor | None, edge: Tensor | None, base: Tensor | None, keep: Tensor | None, prefix: int, scale: float,
    length: int, sharers: int, deterministic: bool, sight: Tensor | None = None, copy: Tensor | None = None,
    once: bool = False, seed: Tensor | None = None, dropout: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k, v and of the bias; those of the bias are empty when `length` is 0."""
    grad, lse = shared(grad, lse), apart(lse)
    dq, dk, dv, delta = run_backward(
        grad, q, k, v, out, lse, packed, address, edge, keep, prefix, scale, sight, copy, once, seed, dropout
    )
    if not length or packed is None or address is None or edge is None or base is None:
        return dq, dk, dv, lse.new_empty(0), lse.new_empty(0)
    bias = run_bias(
        grad, q, k, v, lse, delta, packed, address, edge, keep, base, prefix, scale, length, sharers, deterministic,
        seed, dropout,
    )  # fmt: skip
    return dq, dk, dv, *bias


@table_attention_grad.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, packed: Tensor | None,
    address: Tensor | None, edge: Tensor | None, base: Tensor | None, keep: Tensor | None, prefix: int, scale: float,
    length: int, *rest: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    del grad, out, address, edge, base, keep, prefix, scale, rest
    made = grads_like(q, k, v)
    if not length or packed is None:
        return *made, lse.new_empty(0), lse.new_empty(0)
    return *made, lse.new_empty(packed.shape[0], length), lse.new_empty(packed.shape[0], 2)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, packed, address, edge, base, keep, runs, _, prefix, scale, *more = inputs
    sharers, deterministic, sight, copy, once, seed, dropout = more
    ctx.save_for_backward(q, k, v, *output, packed, address, edge, base, keep, sight, copy, seed)
    ctx.length = 0 if runs is None else runs.shape[1]
    ctx.rest = prefix, scale, sharers, deterministic
    ctx.once, ctx.dropout = once, dropout
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    prefix, scale, sharers, deterministic = ctx.rest
    length = ctx.length if any(ctx.needs_input_grad[8:10]) else 0
    *saved, sight, copy, seed = ctx.saved_tensors
    more = prefix, scale, length, sharers, deterministic, sight, copy, ctx.once, seed, ctx.dropout
    dq, dk, dv, runs, ends = table_attention_grad(grad, *saved, *more)
    bias = (runs, ends) if length else (None, None)
    return dq, dk, dv, *[None] * 5, *bias, *[None] * 9


table_attention.register_autograd(_backward, setup_context=_keep_for_backward)
