"""Launch of the backward kernels of a grid on tensors, without autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from vispe.attention.backends.triton.grid.bias_gradient import grad_bias
from vispe.attention.backends.triton.grid.key_gradient import grad_kv
from vispe.attention.backends.triton.grid.launch import (
    Constants,
    bias_of,
    bias_strides,
    choose,
    constants,
    grads_like,
    launch,
    mask_of,
    missing,
    product_of,
    seed_of,
    strides,
    tile_of,
    tiles_of,
)
from vispe.attention.backends.triton.grid.query_gradient import grad_q, row_sums
from vispe.attention.backends.triton.grid.row_sums import LOG2E, numbers_of_rows
from vispe.attention.backends.triton.tiles import cdiv
from vispe.attention.bias.cache.strips import training_step

FIXED_BITS = 61  # bits of the largest bias gradient in fixed point (int64)


def run_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, packed: Tensor | None,
    address: Tensor | None, edge: Tensor | None, keep: Tensor | None, prefix: int, scale: float,
    visible: Tensor | None = None, copy: Tensor | None = None, once: bool = False, seed: Tensor | None = None,
    dropout: float = 0.0, row: Tensor | None = None, col: Tensor | None = None, rows_grad: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k, v and the gates, and delta for `run_bias`.

    Gradients of gates are empty without gates. Delta is the row sums of ``grad * out``, patches first.

    Args as in `run_forward`. `once`: compute scores once instead of twice, with atomic float32 additions to dq.
    `rows_grad`: from `row_gradient`.
    """
    b, h, n, _ = q.shape
    prefix = prefix if packed is not None else 0
    delta = row_sums_of(out, grad, prefix, rows_grad)
    dq, dk, dv = grads_like(q, k, v)
    # dq: one program per tile of queries; dk, dv: one per tile of keys
    bias = bias_of(packed, copy, address, edge, visible, row, col, q)
    gates_shape = (0,) if row is None else row.shape
    drow, dcol = (torch.empty(gates_shape, dtype=torch.float32, device=q.device) for _ in range(2))
    common = (q, k, v, *bias, mask_of(keep, q), seed_of(seed, q), grad, lse, delta)
    sizes = (*bias_strides(packed, edge), n, prefix, scale * LOG2E, dropout, scale, b, h, h // k.shape[1])
    modes = {
        "HAS_COPY": copy is not None, "GATED": row is not None, "SKIP": visible is not None, "DROP": seed is not None
    }  # fmt: skip
    if not once:
        size = choose("grad_q", q, v, packed)
        launch(
            grad_q,
            tiles_of(n, prefix, size.queries, "queries") * b * h,
            (*common, dq, drow),
            (*strides(q, k, v, grad, dq), *sizes),
            constants(q, v, size, packed, keep) | modes,
        )
    size = choose("grad_kv", q, v, packed)
    width = max(tile_of(q.shape[-1]), tile_of(v.shape[-1]))
    # counted: the additional product needs more shared memory than an H100 has with larger tiles
    if once and width == 96 and product_of(q) == "tf32x3":
        size = size._replace(queries=16, keys=64, warps=4)
    keys = "few keys" if 96 in (tile_of(q.shape[-1]), tile_of(v.shape[-1])) else "keys"
    added = torch.zeros_like(dq, dtype=torch.float32) if once else missing(torch.float32, q.device)
    launch(
        grad_kv,
        tiles_of(n, prefix, size.keys, keys) * b * k.shape[1],
        (*common, dk, dv, dcol, added),
        (*strides(q, k, v, grad, dk, dv), *(strides(added) if once else (0, 0, 0)), *sizes),
        constants(q, v, size, packed, keep) | modes | {"ONCE": once},
    )
    if once:
        torch.mul(added, scale, out=dq)
    return dq, dk, dv, drow, dcol, delta


def row_sums_of(out: Tensor, grad: Tensor, prefix: int = 0, rows_grad: Tensor | None = None) -> Tensor:
    """Return delta = ``sum_e grad out`` (b, h, n) float32, which softmax subtracts from the gradients of a row.

    The first `prefix` tokens are moved to the end. `rows_grad` from `row_gradient` is subtracted. This is the first
    launch of every backward pass.
    """
    training_step()
    _, h, n, width = out.shape
    delta = numbers_of_rows(out)
    compile_constants: Constants = {"E": width, "BE": tile_of(width), "BM": 64, "enable_fp_fusion": True}
    programs = cdiv(n, 64), h, len(out)
    launch(row_sums, programs, (out, grad, delta), (*strides(out, grad), n, prefix, h), compile_constants)
    return delta if rows_grad is None else delta.sub_(rows_grad)


def run_bias(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, packed: Tensor, address: Tensor,
    edge: Tensor, keep: Tensor | None, base: Tensor, prefix: int, scale: float, length: int, sharers: int,
    deterministic: bool, seed: Tensor | None = None, dropout: float = 0.0, row: Tensor | None = None,
    col: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the gradients (h or 1, length) and (h or 1, 2) of the results of `runs.build`, float32.

    Args:
        grad: of the output, with last stride 1.
        q: queries (b, h, n, d), as in `run_forward`.
        k: keys.
        v: values.
        lse: from `run_forward`.
        delta: from `run_backward`.
        packed: the bias.
        address: starts of its runs.
        edge: the bias of prefix keys.
        keep: True for real keys.
        base: (n,) int32 from `Layout.patches_first`.
        prefix: number of keys whose bias is in `edge`.
        scale: factor of the logits.
        length: elements per head.
        sharers: number of queries that may share an element of the runs; 1 in the row layout.
        deterministic: sum in fixed point if queries share elements.
        seed: as in `run_forward`.
        dropout: as in `run_forward`.
        row: as in `run_forward`.
        col: as in `run_forward`.
    """
    b, h, n, _ = q.shape
    size = choose("grad_bias", q, v, packed)
    down = (n - prefix) // size.queries
    # whole tiles of queries x (whole and narrow tiles of keys), narrow tiles of queries x all keys
    below = tiles_of(n, prefix, size.queries) - down
    programs = down * tiles_of(n, prefix, size.keys) + below * cdiv(n, size.keys)
    # without shared elements the result is deterministic anyway
    fixed = deterministic and sharers > 1
    # fixed point: int64 multiples of 1 / unit
    unit = unit_of(grad, v, b * sharers / (1 - dropout)) if fixed else missing(torch.float64, q.device)
    if fixed and row is not None and col is not None:
        # the gradient of a profile is that of a logit times a gate, so the unit is scaled by the largest gate
        largest = row.abs().amax().double() + col.abs().amax().double()
        unit = unit / torch.exp2(torch.ceil(torch.log2(largest.clamp(min=1e-30))))
    gates = bias_of(packed, None, address, edge, None, row, col, q)[-2:]
    # one zeroed buffer for both, in words of 4 bytes; kernels are compiled for aligned pointers
    words = h * length * (2 if fixed else 1)
    start = cdiv(words, 4) * 4
    zeros = torch.zeros(start + h * programs * 2, dtype=torch.float32, device=q.device)
    runs, prefix_runs = zeros[:words].view(h, -1), zeros[start:].view(h, programs, 2)
    runs = runs.view(torch.int64) if fixed else runs
    launch(
        grad_bias,
        h * programs,
        (
            q, k, v, packed, address, edge, *gates, mask_of(keep, q), seed_of(seed, q), grad, lse, delta, base, runs,
            prefix_runs, unit,
        ),
        (
            *strides(q, k, v, grad), *bias_strides(packed, edge), length, n, prefix, scale * LOG2E, dropout, b, h,
            h // k.shape[1],
        ),
        constants(q, v, size, packed, keep) | {
            "GATED": row is not None, "SHARED": sharers > 1, "FIXED": fixed, "DROP": seed is not None
        },
    )  # fmt: skip
    return sums_over_heads(packed, runs, prefix_runs, unit if fixed else None)


def sums_over_heads(
    packed: Tensor, runs: Tensor, prefix_runs: Tensor, unit: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return gradients (h or 1, length) and (h or 1, 2) from the sums of the kernels.

    Args:
        packed: (h or 1, length); heads share one bias if it has one head.
        runs: (h, length), int64 multiples of 1 / `unit` in fixed point.
        prefix_runs: (h, tiles, 2).
        unit: unit of fixed point, or None for floating point.
    """
    runs = runs if unit is None else (runs.double() / unit).float()
    prefix_runs = prefix_runs.sum(1)
    # heads that share one bias share its gradient
    if packed.shape[0] == 1 < len(runs):
        return runs.sum(0, keepdim=True), prefix_runs.sum(0, keepdim=True)
    return runs, prefix_runs


def unit_of(grad: Tensor, v: Tensor, terms: float) -> Tensor:
    """Return the power of 2 by which any sum of `terms` gradients fits into int64, a float64 scalar on the device."""
    # the gradient of a logit is at most twice the product of the norms, over 1 - dropout
    largest = grad.float().norm(dim=-1).amax().double() * v.float().norm(dim=-1).amax().double() * 2 * terms
    exponent = FIXED_BITS - torch.ceil(torch.log2(largest.clamp(min=1e-30)))
    return torch.exp2(exponent)
