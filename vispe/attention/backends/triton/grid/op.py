"""Fused attention on a grid as torch operators, with fake kernels and gradients, for compile and export."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vispe.attention.backends.triton.derivatives import check_backward, refuse_second_derivative
from vispe.attention.backends.triton.device import record_failures
from vispe.attention.backends.triton.eager import eager_call
from vispe.attention.backends.triton.grid.launch import (
    fake_output,
    grads_like,
    row_gradient,
    run_forward,
    scaled_grad,
    with_row_pitch,
)
from vispe.attention.backends.triton.grid.launch_backward import run_backward, run_bias


@record_failures("table")
def _forward(
    q: Tensor, k: Tensor, v: Tensor, packed: Tensor | None, address: Tensor | None, edge: Tensor | None, base: Tensor |
    None, keep: Tensor | None, runs: Tensor | None, prefix_runs: Tensor | None, prefix: int, scale: float, sharers: int,
    deterministic: bool, visible: Tensor | None = None, copy: Tensor | None = None, once: bool = False, seed: Tensor |
    None = None, dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the output (b, h, n, d_v) and the row sums of `sums_of`, with a gradient for the bias.

    `runs` and `prefix_runs` are the tensors that `packed` and `edge` were computed from; they are not read, but get the
    gradient. `visible` is from `strip.visible_offsets`, `copy` from `narrow.pack_both`; `once` is for the backward
    pass; `seed` and `dropout` as in `run_forward`.
    """
    del base, runs, prefix_runs, sharers, deterministic, once
    return run_forward(q, k, v, packed, address, edge, keep, prefix, scale, visible, copy, seed, dropout)


table_attention = torch.library.custom_op("vispe::table_attention", _forward, mutates_args=())
table_attention.register_fake(fake_output)


@record_failures("table")
def _gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, packed: Tensor | None,
    address: Tensor | None, edge: Tensor | None, base: Tensor | None, keep: Tensor | None, prefix: int, scale: float,
    length: int, sharers: int, deterministic: bool, visible: Tensor | None = None, copy: Tensor | None = None,
    once: bool = False, seed: Tensor | None = None, dropout: float = 0.0, lse_grad: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k, v and of the bias; those of the bias are empty if `length` is 0."""
    # d lse / d logits is the softmax, as for the output: delta of a row is reduced by this gradient
    rows_grad = row_gradient(lse_grad, lse, prefix if packed is not None else 0)
    grad, lse = scaled_grad(grad, lse), with_row_pitch(lse)
    dq, dk, dv, delta = run_backward(
        grad,
        q,
        k,
        v,
        out,
        lse,
        packed,
        address,
        edge,
        keep,
        prefix,
        scale,
        visible,
        copy,
        once,
        seed,
        dropout,
        rows_grad,
    )
    if not length or packed is None or address is None or edge is None or base is None:
        return dq, dk, dv, lse.new_empty(0), lse.new_empty(0)
    # a separate kernel, since the gradient of the bias is a sum over the batch
    bias = run_bias(
        grad, q, k, v, lse, delta, packed, address, edge, keep, base, prefix, scale, length, sharers, deterministic,
        seed, dropout,
    )  # fmt: skip
    return dq, dk, dv, *bias


table_attention_grad = torch.library.custom_op("vispe::table_attention_grad", _gradients, mutates_args=())


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
    q, k, v, packed, address, edge, base, keep, runs, _, prefix, scale, *options = inputs
    sharers, deterministic, visible, copy, once, seed, dropout = options
    ctx.save_for_backward(q, k, v, *output, packed, address, edge, base, keep, visible, copy, seed)
    # length 0: the bias needs no gradient
    ctx.length = 0 if runs is None else runs.shape[1]
    ctx.rest = prefix, scale, sharers, deterministic
    ctx.once, ctx.dropout = once, dropout
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, lse_grad: Tensor | None) -> tuple[Tensor | None, ...]:
    check_backward()
    prefix, scale, sharers, deterministic = ctx.rest
    # needs_input_grad of runs and prefix_runs
    length = ctx.length if any(ctx.needs_input_grad[8:10]) else 0
    *saved, visible, copy, seed = ctx.saved_tensors
    # only the log-sum-exp was used
    grad = torch.zeros_like(saved[3]) if grad is None else grad
    options = (
        prefix,
        scale,
        length,
        sharers,
        deterministic,
        visible,
        copy,
        ctx.once,
        seed,
        ctx.dropout,
        lse_grad,
    )
    dq, dk, dv, runs, prefix_runs = _eager_gradients(grad, *saved, *options)
    # one entry per argument of the operator; those before are strips and addresses
    bias = (runs, prefix_runs) if length else (None, None)
    return dq, dk, dv, *[None] * 5, *bias, *[None] * 9


table_attention.register_autograd(_backward, setup_context=_keep_for_backward)
refuse_second_derivative(table_attention_grad)
attend = eager_call(table_attention, _forward, _keep_for_backward, _backward)
_eager_gradients = eager_call(table_attention_grad, _gradients)
