"""Fused rotation as a torch operator, with fake kernel and gradients, including those of the tables."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vispe.attention.backends.triton.derivatives import check_backward, refuse_second_derivative
from vispe.attention.backends.triton.device import record_failures
from vispe.attention.backends.triton.eager import eager_call
from vispe.attention.backends.triton.grid.launch import Constants, launch, tokens_first
from vispe.attention.backends.triton.rotary.kernels import grad_tables, rotate
from vispe.attention.backends.triton.tiles import cdiv, power_of_2

ELEMENTS = 1024  # pairs in a tile: two loads of 16 bytes for each of 128 threads, in half precision
HEADS = 4  # heads that share the loaded tables
PROGRAMS = 1024  # programs that occupy a GPU


@record_failures("rotation")
def _forward(
    x: Tensor, y: Tensor | None, z: Tensor | None, cos: Tensor, sin: Tensor, half: bool, back: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return up to three tensors with rotated pairs of channels; outputs of missing inputs are empty.

    Args:
        x: (b, h, n, d) float16, bfloat16 or float32.
        y: (b, h_y, n, d), or None.
        z: (b, h_z, n, e), or None; only together with y.
        cos: (b or 1, tables, n, pairs) float32; all numbers of heads are multiples of `tables`.
        sin: like cos.
        half: pair channel c with c + pairs instead of 2c with 2c + 1.
        back: rotate by the negative angles.
    """
    inputs = [_contiguous_channels(t) for t in (x, y, z) if t is not None]
    cos, sin = _contiguous_channels(cos), _contiguous_channels(sin)
    outputs = [_empty(t, x) for t in (x, y, z)]
    b, _, n, _ = x.shape
    tables, pairs = cos.shape[1], cos.shape[3]
    size = _tile(pairs, n)
    max_heads, heads_per_program = max(t.shape[1] for t in inputs), HEADS if tables == 1 else 1
    (width, rest), (last_width, last_rest) = _widths(x, pairs), _widths(inputs[-1], pairs)
    compile_constants: Constants = {
        "D": width, "BR": rest, "E": last_width, "BS": last_rest, "PAIRS": pairs, "BP": power_of_2(pairs), "BM": size,
        "PER": heads_per_program, "COUNT": len(inputs), "HALF": half, "BACK": back, "SHARED": tables == 1,
        "num_warps": 4, "enable_fp_fusion": True,
    }  # fmt: skip
    launch(
        rotate,
        cdiv(n, size) * cdiv(max_heads, heads_per_program) * b,
        (*_pad_to_three(inputs), *outputs, cos, sin),
        (
            *_strides(inputs), *_table_strides(cos), *_table_strides(sin), n, *_heads(inputs), max_heads, tables,
        ),
        compile_constants,
    )  # fmt: skip
    return outputs[0], outputs[1], outputs[2]


rotate_pairs = torch.library.custom_op("vispe::rotate_pairs", _forward, mutates_args=())


@rotate_pairs.register_fake
def _(
    x: Tensor, y: Tensor | None, z: Tensor | None, cos: Tensor, sin: Tensor, half: bool, back: bool
) -> tuple[Tensor, Tensor, Tensor]:
    del cos, sin, half, back
    return _empty(x, x), _empty(y, x), _empty(z, x)


@record_failures("rotation")
def _gradients(
    x: Tensor, y: Tensor | None, z: Tensor | None, gx: Tensor, gy: Tensor, gz: Tensor, fields: int, tables: int,
    pairs: int, half: bool, back: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the gradients of cos and sin, (fields, tables, n, pairs) float32, deterministic.

    Args:
        x: input of the rotation (b, h, n, d).
        y: likewise, or None.
        z: likewise, or None.
        gx: gradient of the rotated x.
        gy: gradient of the rotated y.
        gz: gradient of the rotated z.
        fields: batch size of the tables, b or 1.
        tables: number of heads of the tables.
        pairs: number of pairs.
        half: layout, as in `rotate_pairs`.
        back: direction, as in `rotate_pairs`.
    """
    inputs = [_contiguous_channels(t) for t in (x, y, z) if t is not None]
    grads = [_contiguous_channels(t) for t in (gx, gy, gz)[: len(inputs)]]
    b, n = x.shape[0], x.shape[2]
    samples = b if fields == 1 else 1
    size = _tile(pairs, n)
    programs = cdiv(n, size) * tables * fields
    max_parts = samples * max(t.shape[1] for t in inputs) // tables
    # split heads and samples, so that there are enough programs to occupy the GPU
    parts = max(1, min(cdiv(PROGRAMS, programs), max_parts))
    outputs = [x.new_empty(parts, fields, tables, n, pairs, dtype=torch.float32) for _ in range(2)]
    compile_constants: Constants = {
        "PAIRS": pairs, "BP": power_of_2(pairs), "BM": size, "COUNT": len(inputs), "HALF": half, "BACK": back,
        "num_warps": 4, "enable_fp_fusion": True,
    }  # fmt: skip
    launch(
        grad_tables,
        programs * parts,
        (*_pad_to_three(inputs), *_pad_to_three(grads), *outputs),
        (*_strides(inputs), *_strides(grads), n, *_heads(inputs), tables, parts, fields, samples),
        compile_constants,
    )
    return outputs[0].sum(0), outputs[1].sum(0)


rotate_pairs_grad = torch.library.custom_op("vispe::rotate_pairs_grad", _gradients, mutates_args=())


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
    check_backward()
    half, back, count = ctx.rest
    cos, sin, *inputs = ctx.saved_tensors
    grads_in: tuple[Tensor | None, ...] = (None, None, None)
    if any(ctx.needs_input_grad[:3]):
        # the gradient of a rotation is the inverse rotation of the gradient
        rotated = rotated_pairs(grads[0], *(g if i < count else None for i, g in enumerate(grads[1:], 1)), cos, sin,
                            half, not back)  # fmt: skip
        grads_in = tuple(g if i < count else None for i, g in enumerate(rotated))
    tables = (None, None)
    if inputs:
        tables = _eager_gradients(*inputs, *grads, cos.shape[0], cos.shape[1], cos.shape[3], half, back)
    return *grads_in, *tables, None, None


rotate_pairs.register_autograd(_backward, setup_context=_keep_for_backward)
refuse_second_derivative(rotate_pairs_grad)
rotated_pairs = eager_call(rotate_pairs, _forward, _keep_for_backward, _backward)
_eager_gradients = eager_call(rotate_pairs_grad, _gradients)


def _contiguous_channels(x: Tensor) -> Tensor:
    """Return `x` with contiguous channels."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _empty(t: Tensor | None, x: Tensor) -> Tensor:
    return x.new_empty(0) if t is None else tokens_first(t, t.shape[-1])


def _tile(pairs: int, n: int) -> int:
    """Return the number of tokens per tile."""
    return min(max(1, ELEMENTS // power_of_2(pairs)), power_of_2(n))


def _pad_to_three(tensors: list[Tensor]) -> list[Tensor]:
    """Return three tensors; the first stands in for missing ones, which have its dtype and are not read."""
    return tensors + tensors[:1] * (3 - len(tensors))


def _strides(tensors: list[Tensor]) -> list[int]:
    return [stride for t in _pad_to_three(tensors) for stride in t.stride()[:3]]


def _heads(tensors: list[Tensor]) -> list[int]:
    return [t.shape[1] for t in tensors] + [0] * (3 - len(tensors))


def _widths(x: Tensor, pairs: int) -> tuple[int, int]:
    """Return the number of channels of `x`, and the tile size for those after the pairs."""
    return x.shape[3], power_of_2(max(1, x.shape[3] - 2 * pairs))


def _table_strides(table: Tensor) -> tuple[int, int, int]:
    """Return the strides of batch, heads and tokens, with 0 for the batch or the heads if these share one table."""
    batch, heads, tokens = table.stride()[:3]
    return batch if table.shape[0] > 1 else 0, heads if table.shape[1] > 1 else 0, tokens
