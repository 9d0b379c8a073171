"""Fused attention at arbitrary coordinates as torch operators, with fake kernels and gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vispe.attention.backends.triton.coords.launch import Operands, run_backward, run_forward, run_table
from vispe.attention.backends.triton.derivatives import check_backward, refuse_second_derivative
from vispe.attention.backends.triton.device import record_failures
from vispe.attention.backends.triton.eager import eager_call
from vispe.attention.backends.triton.grid.column_tiles import aligned
from vispe.attention.backends.triton.grid.launch import fake_output, grads_like
from vispe.attention.backends.triton.grid.row_sums import row_gradient, scaled_grad, with_row_pitch


@record_failures("coords")
def _forward(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, cells: Tensor | None, slopes: Tensor | None,
    coords: Tensor | None, period: Tensor | None, segment: Tensor | None, keep: Tensor | None, metric: int,
    scale: float, deterministic: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the output (b, h, n, d_v) and the row sums of `sums_of`; arguments are fields of `Operands`."""
    del deterministic
    more = Operands(table, cells, slopes, coords, period, segment, keep, metric, scale)
    return run_forward(*aligned(q, k, v), more)


coords_attention = torch.library.custom_op("vispe::coords_attention", _forward, mutates_args=())
coords_attention.register_fake(fake_output)


@record_failures("coords")
def _gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, table: Tensor | None,
    cells: Tensor | None, slopes: Tensor | None, coords: Tensor | None, period: Tensor | None,
    segment: Tensor | None, keep: Tensor | None, metric: int, scale: float, deterministic: bool, learns_table: bool,
    learns_slopes: bool, lse_grad: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k, v, the table and the slopes; the last two are empty unless they are learned."""
    rows_grad = row_gradient(lse_grad, lse)
    grad, lse = scaled_grad(grad, lse), with_row_pitch(lse)
    q, k, v, out = aligned(q, k, v, out)
    more = Operands(table, cells, slopes, coords, period, segment, keep, metric, scale)
    dq, dk, dv, slope_grad, delta = run_backward(grad, q, k, v, out, lse, more, learns_slopes, rows_grad)
    if not learns_table:
        return dq, dk, dv, lse.new_empty(0), slope_grad
    # the table needs a pass of its own over all scores
    return dq, dk, dv, run_table(grad, q, k, v, lse, delta, more, deterministic), slope_grad


coords_attention_grad = torch.library.custom_op("vispe::coords_attention_grad", _gradients, mutates_args=())


@coords_attention_grad.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, table: Tensor | None,
    cells: Tensor | None, slopes: Tensor | None, coords: Tensor | None, period: Tensor | None,
    segment: Tensor | None, keep: Tensor | None, metric: int, scale: float, deterministic: bool, learns_table: bool,
    learns_slopes: bool, lse_grad: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    del grad, out, cells, coords, period, segment, keep, metric, scale, deterministic, lse_grad
    return (
        *grads_like(q, k, v),
        lse.new_empty(0) if table is None or not learns_table else torch.empty_like(table),
        lse.new_empty(0) if slopes is None or not learns_slopes else torch.empty_like(slopes),
    )  # fmt: skip


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    # all tensor arguments, interleaved with the outputs, in the order of coords_attention_grad
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3:10])
    ctx.rest = inputs[10:]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, lse_grad: Tensor | None) -> tuple[Tensor | None, ...]:
    check_backward()
    # only the log-sum-exp was used
    grad = torch.zeros_like(ctx.saved_tensors[3]) if grad is None else grad
    learns_table, learns_slopes = ctx.needs_input_grad[3], ctx.needs_input_grad[5]
    dq, dk, dv, table, slopes = _eager_gradients(
        grad, *ctx.saved_tensors, *ctx.rest, learns_table, learns_slopes, lse_grad
    )
    return (
        dq, dk, dv, table if learns_table else None, None, slopes if learns_slopes else None, *[None] * 7,
    )  # fmt: skip


coords_attention.register_autograd(_backward, setup_context=_keep_for_backward)
refuse_second_derivative(coords_attention_grad)
attend = eager_call(coords_attention, _forward, _keep_for_backward, _backward)
_eager_gradients = eager_call(coords_attention_grad, _gradients)
