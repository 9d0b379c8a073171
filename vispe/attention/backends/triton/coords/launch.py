"""Launching the kernels for tokens at arbitrary coordinates: plain functions, no autograd."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton import cdiv

from vispe.attention.backends.triton.coords.backward import grad_kv_coords, grad_q_coords, grad_table
from vispe.attention.backends.triton.coords.forward import forward_coords
from vispe.attention.backends.triton.grid.launch import (
    LOG2E,
    choose,
    constants,
    grads_like,
    is_older,
    strides,
    sums_of,
    tokens_first,
)
from vispe.attention.backends.triton.grid.launch_backward import row_sums_of, unit_of
from vispe.attention.backends.triton.tiles import Tiles


class Operands(NamedTuple):
    """What the kernels read beside q, k and v.

    Args:
        table: (h or 1, length) float32, or None.
        cells: (b or 1, 2, n) int32: the bias of query i on key j is entry ``cells[0, i] - cells[1, j]``.
        slopes: (h,) float32, or None.
        places: (b or 1, 1 + axes, n) float32: 1 for tokens with a place, else 0, and their coordinates.
        period: (b or 1, axes) float32, what distances wrap around at, or None.
        segment: (2, n) int32, where the sequence of each token begins and ends, or None.
        keep: (b, n) bool, True for real keys, or None.
        metric: 0 for no distance, or a number of `coords`.
        scale: factor of the logits, positive.
    """

    table: Tensor | None
    cells: Tensor | None
    slopes: Tensor | None
    places: Tensor | None
    period: Tensor | None
    segment: Tensor | None
    keep: Tensor | None
    metric: int
    scale: float

    def read(self, like: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors in the order of the kernels; `like` stands in for those that are not read."""
        table = self.table
        if table is not None:  # softmax does not see the shift, and what decides it is added most exactly
            top = table.amax(1, keepdim=True)
            table = ((table - torch.where(top.isfinite(), top, 0.0)) / self.scale).contiguous()
        keep = None if self.keep is None else self.keep.contiguous()
        read = (table, self.cells, self.places, self.period, self.slopes, self.segment, keep)
        return tuple(like if tensor is None else tensor for tensor in read)

    def steps(self) -> tuple[int, ...]:
        """Return the strides of heads or samples, 0 where they share."""
        return tuple(
            0 if tensor is None or tensor.shape[0] == 1 else tensor.stride(0)
            for tensor in (self.table, self.cells, self.places, self.period)
        )

    def constants(self, q: Tensor, v: Tensor, size: Tiles) -> dict[str, int | bool | str]:
        """Return what a kernel is compiled for."""
        known = constants(q, v, size, None, self.keep)
        del known["HAS_BIAS"]
        return known | {
            "GATHER": self.table is not None, "METRIC": self.metric, "WRAP": self.period is not None,
            "AXES": 1 if self.places is None else self.places.shape[1] - 1, "PACKED": self.segment is not None,
        }  # fmt: skip


def size_of(kernel: str, q: Tensor, v: Tensor, more: Operands) -> Tiles:
    """Return the tiles of a kernel: those for strips, but smaller where reads of a table would spill."""
    size, wide = choose(kernel, q, v), max(q.shape[-1], v.shape[-1]) > 64
    older = is_older(q)
    if kernel == "grad_kv" and more.table is not None and q.dtype != torch.float32 and older != wide:
        return size._replace(queries=min(size.queries, 32), stages=1)
    if kernel == "forward" and more.table is not None and more.metric:
        return size._replace(keys=min(size.keys, 64))
    return size


def run_forward(q: Tensor, k: Tensor, v: Tensor, more: Operands) -> tuple[Tensor, Tensor]:
    """Return the output (b, h, n, d_v), tokens before heads in memory, and log2 of the row sums (b, h, n).

    Args:
        q: (b, h, n, d), last stride 1; float16, bfloat16 or float32.
        k: likewise.
        v: (b, h, n, d_v).
        more: what else the kernels read.
    """
    b, h, n, _ = q.shape
    out = tokens_first(q, v.shape[-1])
    lse = sums_of(q)
    size = size_of("forward", q, v, more)
    forward_coords[(cdiv(n, size.queries) * b * h,)](
        q, k, v, *more.read(q), out, lse, *strides(q, k, v, out), *more.steps(), n, more.scale * LOG2E, more.scale, b,
        h, **more.constants(q, v, size),
    )  # fmt: skip
    return out, lse


def run_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, more: Operands, learned: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and of the slopes, and the row sums of ``grad * out`` for `run_table`.

    The gradient of the slopes is empty if it is not `learned`.
    """
    b, h, n, _ = q.shape
    delta = row_sums_of(out, grad)
    size = size_of("grad_q", q, v, more)
    known = more.constants(q, v, size)
    dq, dk, dv = grads_like(q, k, v)
    tiles = cdiv(n, size.queries)
    steep = torch.empty(b, h, tiles if learned else 0, dtype=torch.float32, device=q.device)
    tensors = q, k, v, *more.read(q), grad, lse, delta
    numbers = *more.steps(), n, more.scale * LOG2E, more.scale, b, h
    grad_q_coords[(tiles * b * h,)](
        *tensors,
        dq,
        steep if learned else lse,
        *strides(q, k, v, grad, dq),
        *numbers,
        **known,
        LEARNED=learned,
    )
    size = size_of("grad_kv", q, v, more)
    grad_kv_coords[(cdiv(n, size.keys) * b * h,)](
        *tensors, dk, dv, *strides(q, k, v, grad, dk, dv), *numbers, **more.constants(q, v, size)
    )
    return dq, dk, dv, steep.sum((0, 2)) if learned else steep.new_empty(0), delta


def run_table(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, more: Operands, deterministic: bool
) -> Tensor:  # fmt: skip
    """Return the gradient (h or 1, length) of the table, float32.

    Samples that share their cells are summed before anything is added to memory.

    Args:
        grad: of the output, with last stride 1.
        q: queries (b, h, n, d).
        k: keys.
        v: values.
        lse: from `run_forward`.
        delta: from `run_backward`.
        more: what else the kernels read, with a table.
        deterministic: sum in fixed point, in which order does not matter.
    """
    b, h, n, _ = q.shape
    table, cells = more.table, more.cells
    size = size_of("grad_bias", q, v, more)
    groups = cells.shape[0]
    unit = unit_of(grad, v, b * n) if deterministic else lse
    made = torch.zeros(
        h, table.shape[1], dtype=torch.int64 if deterministic else torch.float32, device=q.device
    )
    grad_table[(cdiv(n, size.queries) * cdiv(n, size.keys) * h * groups,)](
        q, k, v, *more.read(q), grad, lse, delta, made, unit, *strides(q, k, v, grad), *more.steps(), made.shape[1], n,
        more.scale * LOG2E, more.scale, b, h, b // groups, **more.constants(q, v, size), FIXED=deterministic,
    )  # fmt: skip
    if deterministic:
        made = (made.double() / unit).float()
    return made.sum(0, keepdim=True) if table.shape[0] == 1 < h else made
