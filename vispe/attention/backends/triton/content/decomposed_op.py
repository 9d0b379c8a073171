"""Fused attention with a decomposed bias as torch operators, with the launches of their kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vispe.attention.backends.triton.content.axis_tables import Slots, rows_of, slots_of
from vispe.attention.backends.triton.content.decomposed import decomposed_forward
from vispe.attention.backends.triton.content.decomposed_backward import decomposed_grad_kv, decomposed_grad_q
from vispe.attention.backends.triton.derivatives import check_backward, refuse_second_derivative
from vispe.attention.backends.triton.device import record_failures
from vispe.attention.backends.triton.eager import eager_call
from vispe.attention.backends.triton.grid.column_tiles import aligned
from vispe.attention.backends.triton.grid.launch import (
    choose,
    constants,
    fake_output,
    grads_like,
    launch,
    mask_of,
    missing,
    strides,
    tokens_first,
)
from vispe.attention.backends.triton.grid.launch_backward import row_sums_of
from vispe.attention.backends.triton.grid.row_sums import (
    LOG2E,
    row_gradient,
    scaled_grad,
    sums_of,
    with_row_pitch,
)
from vispe.attention.backends.triton.tiles import Tiles, cdiv


def slots_for(q: Tensor, v: Tensor, shape: tuple[int, int], prefix: int) -> Slots:
    """Return the layout of a grid for the tile sizes that kernels use with these tensors."""
    sizes = _tiles("forward", q, v).keys, _tiles("grad_q", q, v).keys, _tiles("grad_kv", q, v).queries
    return slots_of(shape, prefix, sizes)


def _tiles(kernel: str, q: Tensor, v: Tensor) -> Tiles:
    """Return the tiles of a kernel, independent of the TF32 setting, which may change after slots are laid out."""
    return choose(kernel, q, v, product="ieee")


@record_failures("decomposed")
def _forward(
    q: Tensor, k: Tensor, v: Tensor, by_query: Tensor | None, by_key: Tensor | None, keep: Tensor | None, gh: int,
    gw: int, prefix: int, width: int, high: int, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the output (b, h, n, d_v) and the row sums of `sums_of`.

    Args:
        q: (b, h, n, d), last stride 1; float16, bfloat16 or float32.
        k: likewise.
        v: (b, h, n, d_v).
        by_query: terms of queries, (b, h, lines, slots) from `slots.lay_out`, or None.
        by_key: terms of keys, likewise.
        keep: (b, n) bool, True for real keys.
        gh: rows of the grid.
        gw: columns of the grid.
        prefix: number of tokens without a position.
        width: columns of a panel of slots.
        high: rows of all panels.
        scale: factor of the logits, positive.
    """
    q, k, v = aligned(q, k, v)
    # terms of rows and of columns are in panels of slots, so that a tile reads a contiguous block
    slots = Slots((gh, gw), prefix, width, high)
    b, h, n, _ = q.shape
    out = tokens_first(q, v.shape[-1])
    lse = sums_of(q)
    size = _tiles("forward", q, v)
    launch(
        decomposed_forward,
        cdiv(n, size.queries) * b * h,
        (q, k, v, *_operands(by_query, by_key, q), mask_of(keep, q), out, lse),
        (*strides(q, k, v, out), *_layout_args(n, slots), scale * LOG2E, h),
        _constants(q, v, size, size.queries, size.keys, slots, by_query, by_key, keep),
    )
    return out, lse


decomposed_attention = torch.library.custom_op("vispe::decomposed_attention", _forward, mutates_args=())
decomposed_attention.register_fake(fake_output)


@record_failures("decomposed")
def _gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, by_query: Tensor | None,
    by_key: Tensor | None, keep: Tensor | None, gh: int, gw: int, prefix: int, width: int, high: int, scale: float,
    lse_grad: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k, v, and of the terms of queries and keys (empty for None)."""
    rows_grad = row_gradient(lse_grad, lse)
    # the share of rows with huge logits, which float32 sums cannot hold, is in the gradient
    grad, lse = scaled_grad(grad, lse), with_row_pitch(lse)
    q, k, v, out = aligned(q, k, v, out)
    slots = Slots((gh, gw), prefix, width, high)
    b, h, n, _ = q.shape
    # sum_e grad out of each row, which softmax subtracts
    delta = row_sums_of(out, grad, rows_grad=rows_grad)
    dq, dk, dv = grads_like(q, k, v)
    # the own tokens of a program are queries in the first kernel, keys in the second
    terms_grad_q, terms_grad_k = _grad_like(by_query, lse), _grad_like(by_key, lse)
    size = _tiles("grad_q", q, v)
    mask = mask_of(keep, q)
    rest = (*_layout_args(n, slots), scale * LOG2E, scale, h)
    launch(
        decomposed_grad_q,
        cdiv(n, size.queries) * b * h,
        (q, k, v, *_operands(by_query, by_key, q), mask, grad, lse, delta, dq, terms_grad_q),
        (*strides(q, k, v, grad, dq), *rest),
        _constants(q, v, size, size.queries, size.keys, slots, by_query, by_key, keep),
    )
    # keys are the own tokens here, so the terms exchange their roles
    size = _tiles("grad_kv", q, v)
    launch(
        decomposed_grad_kv,
        cdiv(n, size.keys) * b * h,
        (q, k, v, *_operands(by_key, by_query, q), mask, grad, lse, delta, dk, dv, terms_grad_k),
        (*strides(q, k, v, grad, dk, dv), *rest),
        _constants(q, v, size, size.keys, size.queries, slots, by_key, by_query, keep),
    )
    return dq, dk, dv, terms_grad_q, terms_grad_k


decomposed_attention_grad = torch.library.custom_op(
    "vispe::decomposed_attention_grad", _gradients, mutates_args=()
)


@decomposed_attention_grad.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, by_query: Tensor | None,
    by_key: Tensor | None, *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    del grad, out, rest
    return *grads_like(q, k, v), _grad_like(by_query, lse), _grad_like(by_key, lse)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, by_query, by_key, keep, *ctx.rest = inputs
    ctx.save_for_backward(q, k, v, *output, by_query, by_key, keep)
    # a missing term has the gradient None, although the operator returns an empty tensor for it
    ctx.read = by_query is not None, by_key is not None
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, lse_grad: Tensor | None) -> tuple[Tensor | None, ...]:
    check_backward()
    # only the log-sum-exp was used
    grad = torch.zeros_like(ctx.saved_tensors[3]) if grad is None else grad
    dq, dk, dv, *terms_grads = _eager_gradients(grad, *ctx.saved_tensors, *ctx.rest, lse_grad)
    by_query, by_key = (t if needed else None for t, needed in zip(terms_grads, ctx.read, strict=True))
    return dq, dk, dv, by_query, by_key, *[None] * 7


decomposed_attention.register_autograd(_backward, setup_context=_keep_for_backward)
refuse_second_derivative(decomposed_attention_grad)
attend = eager_call(decomposed_attention, _forward, _keep_for_backward, _backward)
_eager_gradients = eager_call(decomposed_attention_grad, _gradients)


def _operands(first: Tensor | None, second: Tensor | None, q: Tensor) -> tuple[Tensor, Tensor]:
    """Return both, or the stand-in of a missing one."""
    stand_in = missing(torch.float32, q.device)
    return stand_in if first is None else first, stand_in if second is None else second


def _grad_like(terms: Tensor | None, lse: Tensor) -> Tensor:
    """Return a tensor for the gradient of terms, zero-filled since kernels do not write padding; empty for None."""
    return lse.new_empty(0) if terms is None else lse.new_zeros(terms.shape)


def _layout_args(n: int, slots: Slots) -> tuple[int, ...]:
    return n, slots.prefix, *slots.shape, slots.high, slots.wide, slots.size, slots.lines


def _constants(
    q: Tensor, v: Tensor, size: Tiles, tile: int, looped: int, slots: Slots, terms: Tensor | None, other_terms: Tensor |
    None, keep: Tensor | None,
) -> dict[str, int | bool | str]:  # fmt: skip
    """Return the compile-time constants of a kernel with `tile` tokens per tile and up to `looped` slots per step."""
    values = constants(q, v, size, None, keep)
    # these kernels name their tile sizes BA and R x W
    for name in ("BM", "BN", "HAS_BIAS"):
        del values[name]
    rows = rows_of(slots.shape[0], slots.width, looped)
    return values | {
        "BA": tile, "R": rows, "W": slots.width, "HAS_OWN": terms is not None, "HAS_OTHER": other_terms is not None,
    }  # fmt: skip
