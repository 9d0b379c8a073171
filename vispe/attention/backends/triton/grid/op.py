"""Fused attention on a grid as torch operators, with fake kernels and gradients, for compile and export."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vispe.attention.backends.triton.derivatives import check_backward, refuse_second_derivative
from vispe.attention.backends.triton.device import record_failures
from vispe.attention.backends.triton.eager import eager_call
from vispe.attention.backends.triton.grid.column_tiles import aligned
from vispe.attention.backends.triton.grid.launch import fake_output, grads_like, run_forward
from vispe.attention.backends.triton.grid.launch_backward import run_backward, run_bias
from vispe.attention.backends.triton.grid.row_sums import row_gradient, scaled_grad, with_row_pitch


def _forward(
    q: Tensor, k: Tensor, v: Tensor, packed: Tensor | None, address: Tensor | None, edge: Tensor | None, base: Tensor |
    None, keep: Tensor | None, runs: Tensor | None, prefix_runs: Tensor | None, prefix: int, scale: float, sharers: int,
    deterministic: bool, visible: Tensor | None = None, copy: Tensor | None = None, once: bool = False, seed: Tensor |
    None = None, dropout: float = 0.0, row: Tensor | None = None, col: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the output (b, h, n, d_v) and the row sums of `sums_of`, with a gradient for the bias.

    `runs` and `prefix_runs` are the tensors that `packed` and `edge` were computed from; they are not read, but get the
    gradient. `visible` is from `lower_to_table.visible_offsets`, `copy` from `float16_runs.pack_with_copy`; `once` is
    for the backward pass; `seed`, `dropout`, `row` and `col` as in `run_forward`.
    """
    del base, runs, prefix_runs, sharers, deterministic, once
    run = _run_forward if row is None else _run_gated_forward
    q, k, v = aligned(q, k, v)
    return run(q, k, v, packed, address, edge, keep, prefix, scale, visible, copy, seed, dropout, row, col)


# failures of one family do not disable the other
_run_forward = record_failures("table")(run_forward)
_run_gated_forward = record_failures("gated")(run_forward)


table_attention = torch.library.custom_op("vispe::table_attention", _forward, mutates_args=())
table_attention.register_fake(fake_output)


def _gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, packed: Tensor | None,
    address: Tensor | None, edge: Tensor | None, base: Tensor | None, keep: Tensor | None, prefix: int, scale: float,
    length: int, sharers: int, deterministic: bool, visible: Tensor | None = None, copy: Tensor | None = None,
    once: bool = False, seed: Tensor | None = None, dropout: float = 0.0, row: Tensor | None = None,
    col: Tensor | None = None, lse_grad: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k, v, of the bias, and of the gates.

    Those of the bias are empty if `length` is 0, those of the gates without gates.
    """
    run = _run_gradients if row is None else _run_gated_gradients
    return run(
        grad, q, k, v, out, lse, packed, address, edge, base, keep, prefix, scale, length, sharers, deterministic,
        visible, copy, once, seed, dropout, row, col, lse_grad,
    )  # fmt: skip


def _launch_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, packed: Tensor | None,
    address: Tensor | None, edge: Tensor | None, base: Tensor | None, keep: Tensor | None, prefix: int, scale: float,
    length: int, sharers: int, deterministic: bool, visible: Tensor | None, copy: Tensor | None, once: bool,
    seed: Tensor | None, dropout: float, row: Tensor | None, col: Tensor | None, lse_grad: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    # d lse / d logits is the softmax, as for the output: delta of a row is reduced by this gradient
    rows_grad = row_gradient(lse_grad, lse, prefix if packed is not None else 0)
    grad, lse = scaled_grad(grad, lse), with_row_pitch(lse)
    q, k, v, out = aligned(q, k, v, out)
    dq, dk, dv, drow, dcol, delta = run_backward(
        grad, q, k, v, out, lse, packed, address, edge, keep, prefix, scale, visible, copy, once, seed, dropout, row,
        col, rows_grad,
    )  # fmt: skip
    if not length or packed is None or address is None or edge is None or base is None:
        return dq, dk, dv, lse.new_empty(0), lse.new_empty(0), drow, dcol
    # a separate kernel, since the gradient of the bias is a sum over the batch
    bias = run_bias(
        grad, q, k, v, lse, delta, packed, address, edge, keep, base, prefix, scale, length, sharers, deterministic,
        seed, dropout, row, col,
    )  # fmt: skip
    return dq, dk, dv, *bias, drow, dcol


_run_gradients = record_failures("table")(_launch_gradients)
_run_gated_gradients = record_failures("gated")(_launch_gradients)

table_attention_grad = torch.library.custom_op("vispe::table_attention_grad", _gradients, mutates_args=())


@table_attention_grad.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, packed: Tensor | None,
    address: Tensor | None, edge: Tensor | None, base: Tensor | None, keep: Tensor | None, prefix: int, scale: float,
    length: int, sharers: int, deterministic: bool, visible: Tensor | None = None, copy: Tensor | None = None,
    once: bool = False, seed: Tensor | None = None, dropout: float = 0.0, row: Tensor | None = None,
    col: Tensor | None = None, lse_grad: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    del grad, out, address, edge, base, keep, prefix, scale, sharers, deterministic, visible, copy, once, seed
    del dropout, col, lse_grad
    heads, gates = 0 if packed is None else packed.shape[0], (0,) if row is None else row.shape
    bias = [(heads, length), (heads, 2)] if length and packed is not None else [(0,), (0,)]
    return *grads_like(q, k, v), *(lse.new_empty(shape) for shape in (*bias, gates, gates))


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, packed, address, edge, base, keep, runs, _, prefix, scale, *options = inputs
    sharers, deterministic, visible, copy, once, seed, dropout, row, col = options
    ctx.save_for_backward(q, k, v, *output, packed, address, edge, base, keep, visible, copy, seed, row, col)
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
    *saved, visible, copy, seed, row, col = ctx.saved_tensors
    # only the log-sum-exp was used
    grad = torch.zeros_like(saved[3]) if grad is None else grad
    dq, dk, dv, runs, prefix_runs, drow, dcol = _eager_gradients(
        grad, *saved, prefix, scale, length, sharers, deterministic, visible, copy, ctx.once, seed, ctx.dropout, row,
        col, lse_grad,
    )  # fmt: skip
    # one entry per argument of the operator; those before are strips and addresses
    bias = (runs, prefix_runs) if length else (None, None)
    gates = (None, None) if row is None else (drow, dcol)
    return dq, dk, dv, *[None] * 5, *bias, *[None] * 9, *gates


table_attention.register_autograd(_backward, setup_context=_keep_for_backward)
refuse_second_derivative(table_attention_grad)
attend = eager_call(table_attention, _forward, _keep_for_backward, _backward)
_eager_gradients = eager_call(table_attention_grad, _gradients)
