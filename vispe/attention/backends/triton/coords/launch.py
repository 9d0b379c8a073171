"""Launch of the coordinate kernels on tensors, without autograd."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vispe.attention.backends.triton.coords.backward import grad_kv_coords, grad_q_coords, grad_table
from vispe.attention.backends.triton.coords.forward import forward_coords
from vispe.attention.backends.triton.grid.launch import (
    choose,
    constants,
    grads_like,
    is_older,
    launch,
    mask_of,
    missing,
    strides,
    tokens_first,
)
from vispe.attention.backends.triton.grid.launch_backward import row_sums_of, unit_of
from vispe.attention.backends.triton.grid.row_sums import LOG2E, sums_of
from vispe.attention.backends.triton.tiles import Tiles, cdiv

# of table, cells, coords, period, slopes and segment
OPERAND_DTYPES = torch.float32, torch.int32, torch.float32, torch.float32, torch.float32, torch.int32


class Operands(NamedTuple):
    """Operands of the kernels in addition to q, k and v.

    Args:
        table: (h or 1, length) float32, or None.
        cells: (b or 1, 2, n) int32: the bias of query i and key j is entry ``cells[0, i] - cells[1, j]``, or None.
            For m keys at other positions (b or 1, 2, n + m), queries first.
        slopes: (h,) float32, or None.
        coords: (b or 1, 1 + axes, n) float32: 1 for tokens with a position, else 0, and their coordinates, or None;
            (b or 1, 1 + axes, n + m) likewise.
        period: (b or 1, axes) float32, period of wrapped distances, or None.
        segment: (2, n) int32, start and end of the packed sequence of each token, or None.
        keep: (b, m) bool, True for real keys, or None.
        metric: 0 for no distance, or a value of `METRICS`.
        scale: factor of the logits, positive.
    """

    table: Tensor | None
    cells: Tensor | None
    slopes: Tensor | None
    coords: Tensor | None
    period: Tensor | None
    segment: Tensor | None
    keep: Tensor | None
    metric: int
    scale: float

    def read(self, q: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors in the order of the kernels' arguments, or their stand-ins on the device of `q`."""
        table = self.table
        # softmax ignores a constant per head; the largest biases become small numbers with small rounding errors
        if table is not None:
            table = ((table - table_shift(table)) / self.scale).contiguous()
        operands = (table, self.cells, self.coords, self.period, self.slopes, self.segment)
        return (
            *(
                missing(dtype, q.device) if tensor is None else tensor
                for tensor, dtype in zip(operands, OPERAND_DTYPES, strict=True)
            ),
            mask_of(self.keep, q),
        )

    def steps(self) -> tuple[int, ...]:
        """Return the strides of heads or samples, 0 if these are shared."""
        return tuple(
            0 if tensor is None or tensor.shape[0] == 1 else tensor.stride(0)
            for tensor in (self.table, self.cells, self.coords, self.period)
        )

    def sizes(self, q: Tensor, k: Tensor) -> tuple[int, int, int]:
        """Return the number of queries, of keys, and of tokens in the rows of `cells` and `coords`."""
        numbers = self.coords if self.cells is None else self.cells
        return q.shape[2], k.shape[2], k.shape[2] if numbers is None else numbers.shape[-1]

    def constants(self, q: Tensor, v: Tensor, size: Tiles) -> dict[str, int | bool | str]:
        """Return the compile-time constants and launch options of a kernel."""
        values = constants(q, v, size, None, self.keep)
        del values["HAS_BIAS"]
        return values | {
            "GATHER": self.table is not None, "METRIC": self.metric, "WRAP": self.period is not None,
            "AXES": 1 if self.coords is None else self.coords.shape[1] - 1, "PACKED": self.segment is not None,
        }  # fmt: skip


def table_shift(table: Tensor) -> Tensor:
    """Return the constants (h or 1, 1) that are subtracted from a table: the maximum of each head."""
    top = table.amax(1, keepdim=True)
    return torch.where(top.isfinite(), top, 0.0)


def size_of(kernel: str, q: Tensor, v: Tensor, more: Operands) -> Tiles:
    """Return the tiles of a kernel: those of the grid kernels, reduced where table lookups would spill registers."""
    size, wide = choose(kernel, q, v), max(q.shape[-1], v.shape[-1]) > 64
    older = is_older(q)
    # measured: table lookups need registers
    if kernel == "grad_kv" and more.table is not None and q.dtype != torch.float32 and older != wide:
        return size._replace(queries=min(size.queries, 32), stages=1)
    if kernel == "forward" and more.table is not None and more.metric:
        return size._replace(keys=min(size.keys, 64))
    return size


def run_forward(q: Tensor, k: Tensor, v: Tensor, more: Operands) -> tuple[Tensor, Tensor]:
    """Return the output (b, h, n, d_v), stored as (b, n, h, d_v), and the row sums of `sums_of`.

    Args:
        q: (b, h, n, d), last stride 1; float16, bfloat16 or float32.
        k: (b, h, m, d), likewise.
        v: (b, h, m, d_v).
        more: further operands.
    """
    b, h, n, _ = q.shape
    out = tokens_first(q, v.shape[-1])
    lse = sums_of(q)
    size = size_of("forward", q, v, more)
    launch(
        forward_coords,
        cdiv(n, size.queries) * b * h,
        (q, k, v, *more.read(q), out, lse),
        (*strides(q, k, v, out), *more.steps(), *more.sizes(q, k), more.scale * LOG2E, more.scale, b, h),
        more.constants(q, v, size),
    )
    return out, lse


def run_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, more: Operands, learned: bool,
    rows_grad: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k, v and of the slopes, and delta, the row sums of ``grad * out``, for `run_table`.

    The gradient of the slopes (h,) is empty unless `learned`. `rows_grad`: from `row_gradient`.
    """
    b, h, n, _ = q.shape
    delta = row_sums_of(out, grad, rows_grad=rows_grad)
    size = size_of("grad_q", q, v, more)
    dq, dk, dv = grads_like(q, k, v)
    # one partial sum of the slope gradient per tile, so that no atomics are needed
    tiles = cdiv(n, size.queries)
    slope_grad = torch.empty(b, h, tiles if learned else 0, dtype=torch.float32, device=q.device)
    tensors = q, k, v, *more.read(q), grad, lse, delta
    numbers = *more.steps(), *more.sizes(q, k), more.scale * LOG2E, more.scale, b, h
    launch(
        grad_q_coords,
        tiles * b * h,
        (*tensors, dq, slope_grad),
        (*strides(q, k, v, grad, dq), *numbers),
        more.constants(q, v, size) | {"LEARNED": learned},
    )
    size = size_of("grad_kv", q, v, more)
    launch(
        grad_kv_coords,
        cdiv(k.shape[2], size.keys) * b * h,
        (*tensors, dk, dv),
        (*strides(q, k, v, grad, dk, dv), *numbers),
        more.constants(q, v, size),
    )
    return dq, dk, dv, slope_grad.sum((0, 2)) if learned else slope_grad.new_empty(0), delta


def run_table(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, more: Operands, deterministic: bool
) -> Tensor:  # fmt: skip
    """Return the gradient (h or 1, length) of the table, float32.

    Samples that share cells are summed in registers before atomic additions.

    Args:
        grad: of the output, with last stride 1.
        q: queries (b, h, n, d).
        k: keys.
        v: values.
        lse: from `run_forward`.
        delta: from `run_backward`.
        more: further operands, with a table.
        deterministic: sum in fixed point, independent of the order.
    """
    b, h, n, _ = q.shape
    table, cells = more.table, more.cells
    size = size_of("grad_bias", q, v, more)
    # samples that share cells are summed in one program
    groups = cells.shape[0]
    unit = unit_of(grad, v, b * n) if deterministic else missing(torch.float64, q.device)
    # fixed point needs int64
    table_grad = torch.zeros(
        h, table.shape[1], dtype=torch.int64 if deterministic else torch.float32, device=q.device
    )
    launch(
        grad_table,
        cdiv(n, size.queries) * cdiv(k.shape[2], size.keys) * h * groups,
        (q, k, v, *more.read(q), grad, lse, delta, table_grad, unit),
        (
            *strides(q, k, v, grad), *more.steps(), table_grad.shape[1], *more.sizes(q, k), more.scale * LOG2E,
            more.scale, b, h, b // groups,
        ),
        more.constants(q, v, size) | {"FIXED": deterministic},
    )  # fmt: skip
    if deterministic:
        table_grad = (table_grad.double() / unit).float()
    # heads that share a table share its gradient
    return table_grad.sum(0, keepdim=True) if table.shape[0] == 1 < h else table_grad
