"""Attention with a decomposed bias as operators of torch, and the launches of their kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton import cdiv

from vispe.attention.backends.triton.content.axis_tables import Slots, rows_of, slots_of
from vispe.attention.backends.triton.content.decomposed import decomposed_forward
from vispe.attention.backends.triton.content.decomposed_backward import decomposed_grad_kv, decomposed_grad_q
from vispe.attention.backends.triton.device import watched
from vispe.attention.backends.triton.grid.launch import (
    LOG2E,
    apart,
    choose,
    constants,
    fake_output,
    grads_like,
    mask_of,
    shared,
    strides,
    sums_of,
    tokens_first,
)
from vispe.attention.backends.triton.grid.launch_backward import row_sums_of
from vispe.attention.backends.triton.tiles import Tiles


def slots_for(q: Tensor, v: Tensor, shape: tuple[int, int], prefix: int) -> Slots:
    """Return the slots of a grid for the tiles that kernels have with these tensors."""
    sizes = _tiles("forward", q, v).keys, _tiles("grad_q", q, v).keys, _tiles("grad_kv", q, v).queries
    return slots_of(shape, prefix, sizes)


def _tiles(kernel: str, q: Tensor, v: Tensor) -> Tiles:
    """Return the tiles of a kernel, however it multiplies: slots are laid out for them, and that may have changed."""
    return choose(kernel, q, v, product="ieee")


@torch.library.custom_op("vispe::decomposed_attention", mutates_args=())
@watched("decomposed")
def decomposed_attention(
    q: Tensor, k: Tensor, v: Tensor, by_query: Tensor | None, by_key: Tensor | None, keep: Tensor | None, gh: int,
    gw: int, prefix: int, width: int, high: int, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the output (b, h, n, d_v) and log2 of the row sums (b, h, n).

    Args:
        q: (b, h, n, d), last stride 1; float16, bfloat16 or float32.
        k: likewise.
        v: (b, h, n, d_v).
        by_query: what queries read, (b, h, lines, slots) of `slots.lay_out`, or None.
        by_key: what keys read, likewise.
        keep: (b, n) bool, True for real keys.
        gh: rows of the grid.
        gw: columns of the grid.
        prefix: tokens without a place.
        width: columns of a panel of slots.
        high: rows of all panels.
        scale: factor of the logits, positive.
    """
    slots = Slots((gh, gw), prefix, width, high)
    b, h, n, _ = q.shape
    out = tokens_first(q, v.shape[-1])
    lse = sums_of(q)
    size = _tiles("forward", q, v)
    decomposed_forward[(cdiv(n, size.queries) * b * h,)](
        q, k, v, *_read(by_query, by_key, q), mask_of(keep, q), out, lse,
        *strides(q, k, v, out), *_places(n, slots), scale * LOG2E, h,
        **_constants(q, v, size, size.queries, size.keys, slots, by_query, by_key, keep),
    )  # fmt: skip
    return out, lse


decomposed_attention.register_fake(fake_output)


@torch.library.custom_op("vispe::decomposed_attention_grad", mutates_args=())
@watched("decomposed")
def decomposed_attention_grad(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, by_query: Tensor | None,
    by_key: Tensor | None, keep: Tensor | None, gh: int, gw: int, prefix: int, width: int, high: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k, v, and of what queries and keys read (empty where that is None)."""
    grad, lse = shared(grad, lse), apart(lse)
    slots = Slots((gh, gw), prefix, width, high)
    b, h, n, _ = q.shape
    delta = row_sums_of(out, grad)
    dq, dk, dv = grads_like(q, k, v)
    read_q, read_k = _like(by_query, lse), _like(by_key, lse)
    size = _tiles("grad_q", q, v)
    made = _constants(q, v, size, size.queries, size.keys, slots, by_query, by_key, keep)
    mask = mask_of(keep, q)
    rest = (*_places(n, slots), scale * LOG2E, scale, h)
    decomposed_grad_q[(cdiv(n, size.queries) * b * h,)](
        q, k, v, *_read(by_query, by_key, q), mask, grad, lse, delta, dq, read_q, *strides(q, k, v, grad, dq), *rest,
        **made,
    )  # fmt: skip
    size = _tiles("grad_kv", q, v)
    decomposed_grad_kv[(cdiv(n, size.keys) * b * h,)](
        q, k, v, *_read(by_key, by_query, q), mask, grad, lse, delta, dk, dv, read_k, *strides(q, k, v, grad, dk, dv),
        *rest, **_constants(q, v, size, size.keys, size.queries, slots, by_key, by_query, keep),
    )  # fmt: skip
    return dq, dk, dv, read_q, read_k


@decomposed_attention_grad.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, by_query: Tensor | None,
    by_key: Tensor | None, *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    del grad, out, rest
    return *grads_like(q, k, v), _like(by_query, lse), _like(by_key, lse)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, by_query, by_key, keep, *ctx.rest = inputs
    ctx.save_for_backward(q, k, v, *output, by_query, by_key, keep)
    ctx.read = by_query is not None, by_key is not None
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    dq, dk, dv, *read = decomposed_attention_grad(grad, *ctx.saved_tensors, *ctx.rest)
    by_query, by_key = (found if given else None for found, given in zip(read, ctx.read, strict=True))
    return dq, dk, dv, by_query, by_key, *[None] * 7


decomposed_attention.register_autograd(_backward, setup_context=_keep_for_backward)


def _read(own: Tensor | None, other: Tensor | None, q: Tensor) -> tuple[Tensor, Tensor]:
    """Return both; any tensor stands in for one that is not read."""
    return q if own is None else own, q if other is None else other


def _like(read: Tensor | None, lse: Tensor) -> Tensor:
    """Return memory for the gradient of what is read, zeros as not all of it is written."""
    return lse.new_empty(0) if read is None else lse.new_zeros(read.shape)


def _places(n: int, slots: Slots) -> tuple[int, ...]:
    return n, slots.prefix, *slots.shape, slots.high, slots.wide, slots.size, slots.lines


def _constants(
    q: Tensor, v: Tensor, size: Tiles, own: int, looped: int, slots: Slots, read: Tensor | None, other: Tensor | None,
    keep: Tensor | None,
) -> dict[str, int | bool | str]:  # fmt: skip
    """Return what a kernel is compiled for, with `own` tokens in a tile and up to `looped` slots in a step."""
    made = constants(q, v, size, None, keep)
    for name in ("BM", "BN", "HAS_BIAS"):
        del made[name]
    rows = rows_of(slots.shape[0], slots.width, looped)
    return made | {
        "BA": own, "R": rows, "W": slots.width, "HAS_OWN": read is not None, "HAS_OTHER": other is not None,
    }  # fmt: skip
