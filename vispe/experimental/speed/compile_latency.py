"""Recompilation of the kernels on new grids."""

from __future__ import annotations

import time
from typing import Any

import torch

from vispe.experimental.speed.case_inputs import CaseInputs
from vispe.experimental.speed.cases import BenchmarkPlan, Case
from vispe.experimental.speed.contenders import ours
from vispe.experimental.speed.timing import finish

SHAPES = (
    ((32, 32), 1), ((37, 37), 1), ((64, 64), 0), ((64, 64), 5), ((33, 47), 1), ((48, 40), 0), ((29, 31), 5),
)  # fmt: skip


def new_grid(plan: BenchmarkPlan, device: str) -> dict[str, Any]:
    """Return the seconds of the first call on each of several grids, and the number of compiled kernels."""
    from vispe.attention.backends.triton.grid import bias_gradient, forward, key_gradient, query_gradient

    kernels = [
        forward.forward,
        query_gradient.row_sums,
        query_gradient.grad_q,
        key_gradient.grad_kv,
        bias_gradient.grad_bias,
    ]
    first = plan.cases[0]
    rows: dict[str, Any] = {"grids": [], "seconds": [], "compiled": []}
    for shape, prefix in (((3, 4), 1), ((3, 5), 1)) if plan.dry else SHAPES:
        case = Case(shape, prefix, 2, first.heads, first.width, first.dtype)
        setup = CaseInputs(case, "table", device, "triton")
        attend = ours("mode")(setup)
        before, start = compiled(kernels), time.perf_counter()
        q, k, v, cotangent = setup.sets[0]
        out = attend(q, k, v)
        torch.autograd.grad(out, (q, k, v, setup.table), cotangent)
        finish(device)
        rows["grids"].append(f"{shape[0]}x{shape[1]}+{prefix}")
        rows["seconds"].append(round(time.perf_counter() - start, 4))
        rows["compiled"].append(compiled(kernels) - before)
    return rows


def compiled(kernels: list[Any]) -> int:
    """Return the number of compiled kernel variants in this process; 0 in the interpreter."""
    caches = (getattr(kernel, "device_caches", {}) for kernel in kernels)
    return sum(len(cache[0]) for per_device in caches for cache in per_device.values())
