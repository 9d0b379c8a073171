"""Fused attention with a gated bias as torch operators, with the launches of their kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vispe.attention.backends.triton.content.gated import (
    gated_forward,
    gated_grad_kv,
    gated_grad_profile,
    gated_grad_q,
)
from vispe.attention.backends.triton.derivatives import check_backward, refuse_second_derivative
from vispe.attention.backends.triton.device import record_failures
from vispe.attention.backends.triton.eager import eager_call
from vispe.attention.backends.triton.grid.launch import (
    LOG2E,
    bias_strides,
    choose,
    constants,
    fake_output,
    grads_like,
    launch,
    mask_of,
    missing,
    row_gradient,
    scaled_grad,
    strides,
    sums_of,
    tokens_first,
    with_row_pitch,
)
from vispe.attention.backends.triton.grid.launch_backward import row_sums_of, sums_over_heads, unit_of
from vispe.attention.backends.triton.tiles import Tiles, cdiv


@record_failures("gated")
def _forward(
    q: Tensor, k: Tensor, v: Tensor, row: Tensor, col: Tensor, packed: Tensor, address: Tensor, edge: Tensor,
    base: Tensor, keep: Tensor | None, runs: Tensor | None, prefix_runs: Tensor | None, prefix: int, scale: float,
    sharers: int, deterministic: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the output (b, h, n, d_v) and the row sums of `sums_of`.

    Args:
        q: queries (b, h, n, d), last stride 1; float16, bfloat16 or float32.
        k: keys.
        v: values.
        row: gates of queries (b, h, n), float32, contiguous.
        col: gates of keys, likewise.
        packed: the profile from `strip.pack` with shift=False, float32.
        address: starts of its runs.
        edge: the profile of prefix keys.
        base: (n,) int32 from `Layout.base`.
        keep: True for real keys.
        runs: the tensor that `packed` was computed from; not read, but gets the gradient.
        prefix_runs: the tensor that `edge` was computed from, likewise.
        prefix: number of keys whose profile is in `edge`.
        scale: factor of the logits.
        sharers: number of queries that may share an element of the runs.
        deterministic: sum in fixed point if queries share elements.
    """
    del base, runs, prefix_runs, sharers, deterministic
    b, h, n, _ = q.shape
    out = tokens_first(q, v.shape[-1])
    lse = sums_of(q)
    size = choose("forward", q, v)
    launch(
        gated_forward,
        cdiv(n, size.queries) * b * h,
        (q, k, v, packed, address, edge, row, col, mask_of(keep, q), out, lse),
        (*strides(q, k, v, out), *bias_strides(packed, edge), n, prefix, scale * LOG2E, b, h),
        _constants(q, v, size, keep),
    )
    return out, lse


gated_attention = torch.library.custom_op("vispe::gated_attention", _forward, mutates_args=())
gated_attention.register_fake(fake_output)


@record_failures("gated")
def _gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, row: Tensor, col: Tensor, packed: Tensor,
    address: Tensor, edge: Tensor, base: Tensor, keep: Tensor | None, prefix: int, scale: float, length: int,
    sharers: int, deterministic: bool, lse_grad: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k, v, both gates and the profile; the last two are empty if `length` is 0."""
    rows_grad = row_gradient(lse_grad, lse)
    grad, lse = scaled_grad(grad, lse), with_row_pitch(lse)
    b, h, n, _ = q.shape
    delta, drow, dcol = (
        row_sums_of(out, grad, rows_grad=rows_grad),
        lse.new_empty(lse.shape[1:]),
        lse.new_empty(lse.shape[1:]),
    )
    # first pass: gradients of queries and their gates
    dq, dk, dv = grads_like(q, k, v)
    size = choose("grad_q", q, v)
    common = (q, k, v, packed, address, edge, row, col, mask_of(keep, q), grad, lse, delta)
    rest = (*bias_strides(packed, edge), n, prefix, scale * LOG2E, scale, b, h)
    launch(
        gated_grad_q,
        cdiv(n, size.queries) * b * h,
        (*common, dq, drow),
        (*strides(q, k, v, grad, dq), *rest),
        _constants(q, v, size, keep),
    )
    # second pass: gradients of keys, values and key gates
    size = choose("grad_kv", q, v)
    launch(
        gated_grad_kv,
        cdiv(n, size.keys) * b * h,
        (*common, dk, dv, dcol),
        (*strides(q, k, v, grad, dk, dv), *rest),
        _constants(q, v, size, keep),
    )
    if not length:
        return dq, dk, dv, drow, dcol, lse.new_empty(0), lse.new_empty(0)
    # third pass: gradient of the profile
    size = choose("grad_bias", q, v)
    # one program per tile of scores
    down, across = cdiv(n, size.queries), cdiv(n, size.keys)
    fixed = deterministic and sharers > 1
    unit = missing(torch.float64, q.device)
    if fixed:
        # the gradient of the profile is that of a logit times a gate, so the unit is scaled by the largest gate
        largest = row.abs().amax().double() + col.abs().amax().double()
        unit = unit_of(grad, v, b * sharers) / torch.exp2(torch.ceil(torch.log2(largest.clamp(min=1e-30))))
    runs = torch.zeros(h, length, dtype=torch.int64 if fixed else torch.float32, device=q.device)
    prefix_runs = torch.zeros(h, down * across, 2, dtype=torch.float32, device=q.device)
    launch(
        gated_grad_profile,
        h * down * across,
        (*common, base, runs, prefix_runs, unit),
        (*strides(q, k, v, grad), *bias_strides(packed, edge), length, n, prefix, scale * LOG2E, b, h),
        _constants(q, v, size, keep) | {"SHARED": sharers > 1, "FIXED": fixed},
    )
    return dq, dk, dv, drow, dcol, *sums_over_heads(packed, runs, prefix_runs, unit if fixed else None)


gated_attention_grad = torch.library.custom_op("vispe::gated_attention_grad", _gradients, mutates_args=())


@gated_attention_grad.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, row: Tensor, col: Tensor, packed: Tensor,
    address: Tensor, edge: Tensor, base: Tensor, keep: Tensor | None, prefix: int, scale: float, length: int,
    sharers: int, deterministic: bool, lse_grad: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    del grad, out, address, edge, base, keep, prefix, scale, sharers, deterministic, lse_grad
    made = *grads_like(q, k, v), lse.new_empty(lse.shape[1:]), lse.new_empty(lse.shape[1:])
    if not length:
        return *made, lse.new_empty(0), lse.new_empty(0)
    return *made, lse.new_empty(packed.shape[0], length), lse.new_empty(packed.shape[0], 2)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, row, col, packed, address, edge, base, keep, runs, _, *ctx.rest = inputs
    ctx.save_for_backward(q, k, v, *output, row, col, packed, address, edge, base, keep)
    ctx.length = 0 if runs is None else runs.shape[1]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, lse_grad: Tensor | None) -> tuple[Tensor | None, ...]:
    check_backward()
    prefix, scale, sharers, deterministic = ctx.rest
    # only the log-sum-exp was used
    grad = torch.zeros_like(ctx.saved_tensors[3]) if grad is None else grad
    # length 0: the profile needs no gradient, and its kernel is not launched
    length = ctx.length if any(ctx.needs_input_grad[10:12]) else 0
    *grads, runs, prefix_runs = _eager_gradients(
        grad, *ctx.saved_tensors, prefix, scale, length, sharers, deterministic, lse_grad
    )
    profile = (runs, prefix_runs) if length else (None, None)
    return *grads, *[None] * 5, *profile, *[None] * 4


gated_attention.register_autograd(_backward, setup_context=_keep_for_backward)
refuse_second_derivative(gated_attention_grad)
attend = eager_call(gated_attention, _forward, _keep_for_backward, _backward)
_eager_gradients = eager_call(gated_attention_grad, _gradients)


def _constants(q: Tensor, v: Tensor, size: Tiles, keep: Tensor | None) -> dict[str, int | bool | str]:
    values = constants(q, v, size, None, keep)
    del values["HAS_BIAS"]
    return values
