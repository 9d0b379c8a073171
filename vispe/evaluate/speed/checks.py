"""Correctness before speed: output and all gradients against float64 on the same rounded inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vispe.attention import Bias, DistanceBias, TableBias, attention
from vispe.evaluate.speed import structured
from vispe.evaluate.speed.cases import Plan
from vispe.grid import Grid, Positions

LIMITS = {"float32": (2e-6, 1e-5), "float16": (6e-4, 2e-3), "bfloat16": (4e-3, 1.2e-2)}  # output, gradients
OF_SDPA = 1.3  # how many times the error of SDPA without a bias is still as exact
KINDS = ("none", "distance", "slopes", "table", "padding")  # of the first shape, with those of `structured`
BATCH, HEADS = 2, 3


def what_to_check(plan: Plan, flex: bool = False) -> list[dict[str, Any]]:
    """Return dtype, grid, width of heads and bias of every check; every compiled kernel is in one of them.

    `flex` adds a table by FlexAttention to the checks of a long run.
    """
    found = []
    for dtype in plan.check_dtypes:
        for place, (shape, prefix, width) in enumerate(plan.check_shapes):
            if place > {"float32": 1, "float16": 2}.get(dtype, place):
                continue
            kinds = KINDS if place == 0 else ("slopes", "table")
            if place == 0 and (
                plan.structured != 1 or dtype == plan.check_dtypes[-1]
            ):  # few, where time is short
                kinds = (*kinds, *structured.KINDS, *(("flex",) if flex and plan.structured > 1 else ()))
            name = f"{shape[0]}x{shape[1]}+{prefix}"
            found += [{"dtype": dtype, "grid": name, "width": width, "bias": kind} for kind in kinds]
    return found


def run_check(record: dict[str, Any], device: str, backend: str) -> dict[str, Any]:
    """Return a check with its result; `passed` says whether all limits are kept."""
    shape, _, prefix = record["grid"].partition("+")
    grid = Grid(tuple(map(int, shape.split("x"))), int(prefix))
    try:
        found = check(grid, record["width"], getattr(torch, record["dtype"]), record["bias"], device, backend)
    except Exception as error:  # a failure is a result, too
        return {**record, "failure": f"{type(error).__name__}: {error}"[:300], "passed": False}
    limits = LIMITS[record["dtype"]]
    passed = all(e <= limits[name != "out"] for name, e in found["errors"].items())
    return {**record, **found, "limits": limits, "passed": passed}


def check(grid: Grid, width: int, dtype: torch.dtype, kind: str, device: str, backend: str) -> dict[str, Any]:
    """Return relative errors of output and gradients, and how they compare with SDPA without a bias."""
    make = torch.Generator(device).manual_seed(1)
    size = (BATCH, grid.tokens, HEADS, width)

    def random(shape: tuple[int, ...] = size) -> Tensor:
        return torch.randn(shape, generator=make, device=device)

    q, k, v = (random().to(dtype).transpose(1, 2).requires_grad_() for _ in range(3))
    cotangent = random().to(dtype).transpose(1, 2)
    pos = grid.positions(device)
    if kind in structured.KINDS:
        size = (BATCH, HEADS, grid.tokens, width)
        what = structured.Structured(kind, pos, size, (0.004, 0.1, 1.0), random)
        return _compare_structured(what, (q, k, v), cotangent, backend)
    if kind == "flex":
        kind, backend = "table", "flex"
    params = parameters(kind, grid, random, device)
    keep = None
    if kind == "padding":
        keep = torch.rand(BATCH, grid.tokens, generator=make, device=device) < 0.7
        keep[:, 0] = True
    leaves = (q, k, v, *params)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    out = attention(q, k, v, bias=bias_of(kind, params, pos), key_padding_mask=keep, backend=backend)
    ours = (out, *torch.autograd.grad(out, leaves, cotangent))
    exact = attention(
        *wide[:3], bias=bias_of(kind, wide[3:], pos), key_padding_mask=keep, backend="reference"
    )
    theirs = (exact, *torch.autograd.grad(exact, wide, cotangent.double()))
    errors = {n: relative(a, b) for n, a, b in zip(("out", "dq", "dk", "dv"), ours, theirs, strict=False)}
    return _result(errors, ours, theirs, (q, k, v), cotangent)


def _compare_structured(
    what: structured.Structured, inputs: tuple[Tensor, ...], cotangent: Tensor, backend: str
) -> dict[str, Any]:
    """Do the same for a call of `structured`."""
    exact = what.double()
    wide = [t.detach().double().requires_grad_() for t in inputs]
    for leaf in what.leaves():
        leaf.requires_grad_()
    out, wanted = what.attend(*inputs, backend), exact.attend(*wide, "reference")
    ours = (out, *torch.autograd.grad(out, (*inputs, *what.leaves()), cotangent))
    theirs = (wanted, *torch.autograd.grad(wanted, (*wide, *exact.leaves()), cotangent.double()))
    errors = {n: relative(a, b) for n, a, b in zip(("out", "dq", "dk", "dv"), ours, theirs, strict=False)}
    return _result(errors, ours, theirs, inputs, cotangent)


def _result(
    errors: dict[str, float],
    ours: tuple[Tensor, ...],
    theirs: tuple[Tensor, ...],
    inputs: tuple[Tensor, ...],
    cotangent: Tensor,
) -> dict[str, Any]:
    if len(ours) > 4:
        errors["dbias"] = relative(*(torch.cat([t.flatten() for t in side[4:]]) for side in (ours, theirs)))
    sdpa = of_sdpa(inputs, cotangent)
    worst = max(errors[n] / sdpa[n] for n in sdpa)
    return {
        "errors": {n: float(f"{e:.2e}") for n, e in errors.items()},
        "times_sdpa": round(worst, 2), "as_exact_as_sdpa": worst <= OF_SDPA,
    }  # fmt: skip


def parameters(kind: str, grid: Grid, random: Any, device: str) -> list[Tensor]:
    """Return the learned parameters of a bias."""
    if kind == "slopes":
        return [torch.tensor([0.004, 0.1, 1.0], device=device, requires_grad=True)]
    if kind not in ("table", "padding"):
        return []
    table = random((HEADS, *(2 * n - 1 for n in grid.shape))).requires_grad_()
    return [table, random((HEADS, 3)).requires_grad_()] if grid.prefix else [table]


def bias_of(kind: str, params: list[Tensor], pos: Positions) -> Bias | None:
    """Return the bias of a kind from its parameters."""
    if kind == "none":
        return None
    if kind in ("distance", "slopes"):
        return DistanceBias(params[0] if params else (0.004, 0.1, 1.0), pos)
    return TableBias(params[0], pos, *params[1:])


def of_sdpa(leaves: tuple[Tensor, ...], cotangent: Tensor) -> dict[str, float]:
    """Return the relative errors of SDPA without a bias."""
    names = ("out", "dq", "dk", "dv")
    out = F.scaled_dot_product_attention(*leaves)
    ours = (out, *torch.autograd.grad(out, leaves, cotangent))
    wide = [t.detach().double().requires_grad_() for t in leaves]
    exact = attention(*wide, backend="reference")
    theirs = (exact, *torch.autograd.grad(exact, wide, cotangent.double()))
    return {n: max(relative(a, b), 1e-12) for n, a, b in zip(names, ours, theirs, strict=True)}


def relative(ours: Tensor, theirs: Tensor) -> float:
    """Return the norm of the difference as a share of the norm of what it should be."""
    return ((ours.double() - theirs).norm() / theirs.norm().clamp(min=1e-12)).item()


def line(record: dict[str, Any]) -> str:
    """Return one check in words."""
    what = f"{record['dtype']:<8} {record['grid']:<8} d{record['width']:<4} {record['bias']:<10}"
    if "failure" in record:
        return f"FAIL {what} {record['failure'].splitlines()[0]}"
    errors = "  ".join(f"{name} {error:.1e}" for name, error in record["errors"].items())
    limits = " / ".join(f"{limit:.1e}" for limit in record["limits"])
    more = "" if record["as_exact_as_sdpa"] else f", {record['times_sdpa']} times the error of SDPA"
    return f"{'ok  ' if record['passed'] else 'FAIL'} {what} {errors}  (limits {limits}{more})"
