"""Correctness checks: output and all gradients against float64 on the same rounded inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vispe.attention import attention
from vispe.experimental.speed.cases import BenchmarkPlan
from vispe.experimental.speed.structured_calls import KINDS, Attend, Structured
from vispe.grid import Grid

LIMITS = {"float32": (2e-6, 1e-5), "float16": (6e-4, 2e-3), "bfloat16": (4e-3, 1.2e-2)}  # output, gradients
OF_SDPA = 1.3  # max ratio to the error of SDPA without a bias
GRID_KINDS = ("none", "distance", "slopes", "table", "padding")
"""Biases of the first shape, in addition to those of `structured`."""

BATCH, HEADS, SLOPES = 2, 3, (0.004, 0.1, 1.0)


def planned_checks(plan: BenchmarkPlan, flex: bool = False) -> list[dict[str, Any]]:
    """Return dtype, grid, head_dim and bias of every check; together they cover every compiled kernel.

    `flex` adds a table by FlexAttention to the checks of a long run.
    """
    checks = []
    for dtype in plan.check_dtypes:
        for index, (shape, prefix, width) in enumerate(plan.check_shapes):
            if index > {"float32": 1, "float16": 2}.get(dtype, index):
                continue
            kinds = GRID_KINDS if index == 0 else ("slopes", "table")
            # in short runs the other paths are checked in one dtype only
            if index == 0 and (plan.structured != 1 or dtype == plan.check_dtypes[-1]):
                kinds = (*kinds, *KINDS, *(("flex",) if flex and plan.structured > 1 else ()))
            name = f"{shape[0]}x{shape[1]}+{prefix}"
            checks += [{"dtype": dtype, "grid": name, "width": width, "bias": kind} for kind in kinds]
    return checks


def run_check(record: dict[str, Any], device: str, backend: str) -> dict[str, Any]:
    """Return a check with its result; `passed` is whether all errors are within the limits."""
    shape, _, prefix = record["grid"].partition("+")
    grid = Grid(tuple(map(int, shape.split("x"))), int(prefix))
    try:
        width, dtype = record["width"], getattr(torch, record["dtype"])
        result = check(grid, width, dtype, record["bias"], device, backend)
    except Exception as error:  # failures are recorded as results
        return {**record, "failure": f"{type(error).__name__}: {error}"[:300], "passed": False}
    limits = LIMITS[record["dtype"]]
    passed = all(e <= limits[name != "out"] for name, e in result["errors"].items())
    return {**record, **result, "limits": limits, "passed": passed}


def check(grid: Grid, width: int, dtype: torch.dtype, kind: str, device: str, backend: str) -> dict[str, Any]:
    """Return relative errors of output and gradients, and their ratio to SDPA without a bias."""
    make = torch.Generator(device).manual_seed(1)
    size = (BATCH, grid.tokens, HEADS, width)

    def random(shape: tuple[int, ...] = size) -> Tensor:
        return torch.randn(shape, generator=make, device=device)

    inputs = [random().to(dtype).transpose(1, 2).requires_grad_() for _ in range(3)]
    cotangent = random().to(dtype).transpose(1, 2)
    if kind == "flex":
        kind, backend = "table", "flex"
    size = (BATCH, HEADS, grid.tokens, width)
    call = Structured(kind, grid.positions(device), size, SLOPES, random)
    if kind == "padding":
        call.keep = torch.rand(BATCH, grid.tokens, generator=make, device=device) < 0.7
        call.keep[:, 0] = True
    for leaf in call.leaves():
        leaf.requires_grad_()
    exact = call.double()
    errors = compared(
        lambda *qkv: call.attend(*qkv, backend), lambda *qkv: exact.attend(*qkv, "reference"),
        inputs, cotangent, call.leaves(), exact.leaves(),
    )  # fmt: skip
    sdpa = compared(
        F.scaled_dot_product_attention, lambda *qkv: attention(*qkv, backend="reference"), inputs, cotangent
    )
    worst = max(errors[name] / max(error, 1e-12) for name, error in sdpa.items())
    return {
        "errors": {name: float(f"{error:.2e}") for name, error in errors.items()},
        "times_sdpa": round(worst, 2), "as_exact_as_sdpa": worst <= OF_SDPA,
    }  # fmt: skip


def compared(
    call: Attend,
    exact: Attend,
    inputs: Sequence[Tensor],
    cotangent: Tensor,
    leaves: Sequence[Tensor] = (),
    exact_leaves: Sequence[Tensor] = (),
) -> dict[str, float]:
    """Return the relative errors of output and gradients against the same in float64.

    Args:
        call: function from q, k and v to the output.
        exact: the same function in float64.
        inputs: q, k and v.
        cotangent: gradient of the output.
        leaves: parameters of the bias; their gradients are concatenated for the comparison.
        exact_leaves: the same parameters in float64.
    """
    double_inputs = [t.detach().double().requires_grad_() for t in inputs]
    out, expected = call(*inputs), exact(*double_inputs)
    ours = (out, *torch.autograd.grad(out, (*inputs, *leaves), cotangent))
    theirs = (expected, *torch.autograd.grad(expected, (*double_inputs, *exact_leaves), cotangent.double()))
    errors = {n: relative(a, b) for n, a, b in zip(("out", "dq", "dk", "dv"), ours, theirs, strict=False)}
    if leaves:
        errors["dbias"] = relative(*(torch.cat([t.flatten() for t in side[4:]]) for side in (ours, theirs)))
    return errors


def relative(ours: Tensor, theirs: Tensor) -> float:
    """Return the norm of the difference relative to the norm of the expected value."""
    return ((ours.double() - theirs).norm() / theirs.norm().clamp(min=1e-12)).item()


def line(record: dict[str, Any]) -> str:
    """Return one check as a line of text."""
    what = f"{record['dtype']:<8} {record['grid']:<8} d{record['width']:<4} {record['bias']:<10}"
    if "failure" in record:
        return f"FAIL {what} {record['failure'].splitlines()[0]}"
    errors = "  ".join(f"{name} {error:.1e}" for name, error in record["errors"].items())
    limits = " / ".join(f"{limit:.1e}" for limit in record["limits"])
    more = "" if record["as_exact_as_sdpa"] else f", {record['times_sdpa']} times the error of SDPA"
    return f"{'ok  ' if record['passed'] else 'FAIL'} {what} {errors}  (limits {limits}{more})"
