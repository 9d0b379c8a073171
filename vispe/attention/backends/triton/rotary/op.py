"""Fused rotation as an operator of torch, with fake kernel and gradients also of the angles."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton import cdiv, next_power_of_2

from vispe.attention.backends.triton.device import watched
from vispe.attention.backends.triton.grid.launch import tokens_first
from vispe.attention.backends.triton.rotary.kernels import grad_tables, rotate

ELEMENTS = 1024  # pairs in a tile: two loads of 16 bytes for each of 128 threads, in half precision
HEADS = 4  # heads that share the loaded tables
PROGRAMS = 1024  # about as many keep a GPU busy


@torch.library.custom_op("vispe::rotate_pairs", mutates_args=())
@watched("rotation")
def rotate_pairs(
    x: Tensor, y: Tensor | None, z: Tensor | None, cos: Tensor, sin: Tensor, half: bool, back: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return up to three tensors with rotated pairs of channels; those that were not given are empty.

    Args:
        x: (b, h, n, d) float16, bfloat16 or float32.
        y: (b, h_y, n, d), or None.
        z: (b, h_z, n, e), or None; only beside y.
        cos: (b or 1, tables, n, pairs) float32; all numbers of heads are multiples of `tables`.
        sin: like cos.
        half: pairs channel c with c + pairs, and not 2c with 2c + 1.
        back: rotate by minus the angles.
    """
    given = [_rows(t) for t in (x, y, z) if t is not None]
    cos, sin = _rows(cos), _rows(sin)
    made = [_empty(t, x) for t in (x, y, z)]
    b, _, n, _ = x.shape
    tables, pairs = cos.shape[1], cos.shape[3]
    size = _tile(pairs, n)
    most, per = max(t.shape[1] for t in given), HEADS if tables == 1 else 1
    rotate[(cdiv(n, size) * cdiv(most, per) * b,)](
        *_three(given), *made, cos, sin, *_strides(given), *_table_strides(cos), *_table_strides(sin), n,
        *_heads(given), most, tables, *_widths(x, pairs), *_widths(given[-1], pairs), pairs,
        next_power_of_2(pairs), size, per, len(given), half, back, tables == 1, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return made[0], made[1], made[2]


@rotate_pairs.register_fake
def _(
    x: Tensor, y: Tensor | None, z: Tensor | None, cos: Tensor, sin: Tensor, half: bool, back: bool
) -> tuple[Tensor, Tensor, Tensor]:
    del cos, sin, half, back
    return _empty(x, x), _empty(y, x), _empty(z, x)


@torch.library.custom_op("vispe::rotate_pairs_grad", mutates_args=())
@watched("rotation")
def rotate_pairs_grad(
    x: Tensor, y: Tensor | None, z: Tensor | None, gx: Tensor, gy: Tensor, gz: Tensor, fields: int, tables: int,
    pairs: int, half: bool, back: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the gradients of cos and sin, (fields, tables, n, pairs) float32, the same in every run.

    Args:
        x: what was rotated (b, h, n, d), as y and z are.
        y: see there.
        z: see there.
        gx: gradients of its outputs.
        gy: likewise.
        gz: likewise.
        fields: the batch of the tables, b or 1.
        tables: their heads.
        pairs: their width.
        half: the layout.
        back: the direction.
    """
    given = [_rows(t) for t in (x, y, z) if t is not None]
    grads = [_rows(t) for t in (gx, gy, gz)[: len(given)]]
    b, n = x.shape[0], x.shape[2]
    samples = b if fields == 1 else 1
    size = _tile(pairs, n)
    programs = cdiv(n, size) * tables * fields
    most = samples * max(t.shape[1] for t in given) // tables
    parts = max(1, min(cdiv(PROGRAMS, programs), most))
    made = [x.new_empty(parts, fields, tables, n, pairs, dtype=torch.float32) for _ in range(2)]
    grad_tables[(programs * parts,)](
        *_three(given), *_three(grads), *made, *_strides(given), *_strides(grads), n, *_heads(given), tables, parts,
        fields, samples, PAIRS=pairs, BP=next_power_of_2(pairs), BM=size, COUNT=len(given), HALF=half, BACK=back,
        num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return made[0].sum(0), made[1].sum(0)


@rotate_pairs_grad.register_fake
def _(
    x: Tensor, y: Tensor | None, z: Tensor | None, gx: Tensor, gy: Tensor, gz: Tensor, fields: int, tables: int,
    pairs: int, half: bool, back: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    del y, z, gx, gy, gz, half, back
    made = [x.new_empty(fields, tables, x.shape[2], pairs, dtype=torch.float32) for _ in range(2)]
    return made[0], made[1]


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    del output
    x, y, z, cos, sin, half, back = inputs
    learned = ctx.needs_input_grad[3] or ctx.needs_input_grad[4]
    ctx.save_for_backward(cos, sin, *((x, y, z) if learned else ()))
    ctx.rest = half, back, 1 + (y is not None) + (z is not None)


def _backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    half, back, count = ctx.rest
    cos, sin, *given = ctx.saved_tensors
    moved: tuple[Tensor | None, ...] = (None, None, None)
    if any(ctx.needs_input_grad[:3]):
        made = rotate_pairs(grads[0], *(g if place < count else None for place, g in enumerate(grads[1:], 1)), cos, sin,
                            half, not back)  # fmt: skip
        moved = tuple(g if place < count else None for place, g in enumerate(made))
    tables = (None, None)
    if given:
        tables = rotate_pairs_grad(*given, *grads, cos.shape[0], cos.shape[1], cos.shape[3], half, back)
    return *moved, *tables, None, None


rotate_pairs.register_autograd(_backward, setup_context=_keep_for_backward)


def _rows(x: Tensor) -> Tensor:
    """Return `x` with the channels of a token side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _empty(t: Tensor | None, x: Tensor) -> Tensor:
    return x.new_empty(0) if t is None else tokens_first(t, t.shape[-1])


def _tile(pairs: int, n: int) -> int:
    """Return how many tokens are in a tile."""
    return min(max(1, ELEMENTS // next_power_of_2(pairs)), next_power_of_2(n))


def _three(given: list[Tensor]) -> list[Tensor]:
    """Return three tensors; the first stands in for those that are not read."""
    return given + given[:1] * (3 - len(given))


def _strides(given: list[Tensor]) -> list[int]:
    return [stride for t in _three(given) for stride in t.stride()[:3]]


def _heads(given: list[Tensor]) -> list[int]:
    return [t.shape[1] for t in given] + [0] * (3 - len(given))


def _widths(x: Tensor, pairs: int) -> tuple[int, int]:
    """Return the channels of `x`, and the tile that holds those behind the pairs."""
    return x.shape[3], next_power_of_2(max(1, x.shape[3] - 2 * pairs))


def _table_strides(table: Tensor) -> tuple[int, int, int]:
    """Return the strides of batch, heads and tokens, 0 where samples share one table."""
    return table.stride(0) if table.shape[0] > 1 else 0, table.stride(1), table.stride(2)
