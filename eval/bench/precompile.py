"""Compilation of all kernels that the stages of `first.py` launch, in many processes that share the cache.

A job launches the kernels of one measurement with two samples. Kernels are not specialised on the number of samples,
heads or tokens, so these are the kernels of the full size.
"""

from __future__ import annotations

import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from itertools import product
from multiprocessing import get_context
from typing import Any

import torch
from latency import ENCODINGS, GRIDS, MODELS, calls, step_functions
from stages import Results
from tune import ODD, strips, work

from vispe import Grid
from vispe.experimental.speed import plan_for
from vispe.experimental.speed.case_inputs import CaseInputs
from vispe.experimental.speed.cases import STRUCTURED
from vispe.experimental.speed.contenders import contenders
from vispe.experimental.speed.correctness import check, planned_checks, run_check
from vispe.experimental.speed.timing import stepper

# grad_q also launches the kernel of keys and values
KERNELS = (
    "forward",
    "grad_q",
    "grad_once",
    "grad_bias",
)
HEAD_DIMS = (64, 72, 128)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
TINY = tuple(product((Grid((3, 4), 1), Grid((9, 15), 5)), ("distance", "table"), (16, 72)))
Job = tuple[Any, ...]  # kind, and what identifies the measurement


def jobs(dry: bool) -> list[Job]:
    """Return all jobs; one of each kind if `dry`."""
    plan = plan_for("dry" if dry else "quick", "cpu" if dry else "cuda")
    kinds: list[list[Job]] = [
        [("kernel", *job) for job in product(KERNELS, HEAD_DIMS, DTYPES, ("long", "short"))],
        [("check", *record.values()) for record in planned_checks(plan)],
        [
            ("row", case, mode, rival.name)
            for index, case in enumerate(plan.cases)
            for mode in (*plan.modes, *(STRUCTURED if index < plan.structured else ()))
            for rival in contenders(plan, "cuda")
            if mode in rival.modes and rival.name.startswith("vispe") and not rival.slow
        ],
        [("tiny", *case) for case in TINY],
        [("replay", grid) for grid in GRIDS],
        [("model", arch, size, spec) for (arch, size, _), spec in product(MODELS, ENCODINGS)],
    ]
    return [job for kind in kinds for job in (kind[:1] if dry else kind)]


def name_of(job: Job) -> str:
    """Return the name of a job in the results."""
    return " ".join(map(str, job))


def compile_all(results: Results, workers: int, dry: bool) -> None:
    """Run the jobs that have no result in `workers` processes; a result is seconds, or the error as text."""
    missing = [job for job in jobs(dry) if name_of(job) not in results]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(timed_launch, job, dry): job for job in missing}
        for done in as_completed(running):
            # a worker that crashed is a result as well
            error = done.exception()
            results[name_of(running[done])] = done.result() if error is None else f"{error!r}"[:300]


def timed_launch(job: Job, dry: bool) -> float | str:
    """Launch the kernels of a job; return the seconds, or the error as text."""
    start = time.monotonic()
    try:
        launch(job, "cpu" if dry else "cuda", dry)
    # the other jobs go on
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]
    return round(time.monotonic() - start, 1)


def launch(job: Job, device: str, dry: bool = False, batch: int = 2) -> None:
    """Launch the kernels of a job once.

    Raises:
        RuntimeError: a check did not run.
    """
    kind, *rest = job
    if kind == "kernel":
        kernel, head_dim, dtype, tokens = rest
        grid, head_dim = (Grid((3, 4), 1), 16) if dry else (ODD[tokens], head_dim)
        for stored in strips(kernel, dtype):
            work(kernel, grid, batch, head_dim, DTYPES[dtype], device, stored)(0)
    elif kind == "check":
        result = run_check(dict(zip(("dtype", "grid", "width", "bias"), rest, strict=True)), device, "triton")
        if "failure" in result:
            raise RuntimeError(result["failure"])
    elif kind == "row":
        case, mode, name = rest
        setup = CaseInputs(replace(case, batch=batch), mode, device, "triton", dry)
        plan = plan_for("dry" if dry else "quick", device)
        for rival in contenders(plan, "cuda"):
            if rival.name == name and mode in rival.modes:
                stepper(rival, setup)(0)
    elif kind == "tiny":
        grid, bias, head_dim = rest
        check(grid, head_dim, torch.float32, bias, device, "triton")
    elif kind == "replay":
        for name, call in calls(Grid((3, 4), 1) if dry else rest[0], device, dry).items():
            if name.startswith("vispe"):
                call()
    else:
        arch, size, spec = ("vit_tiny_patch16_224", 32, rest[2]) if dry else rest
        for step in step_functions(arch, size, batch, spec, device, depth=1).values():
            step()
