"""Times, memory and error of one contender on one case."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vispe.experimental.speed.case_inputs import SETS, CaseInputs
from vispe.experimental.speed.cases import BenchmarkPlan, is_forward
from vispe.experimental.speed.contenders import Contender

MIB = 1 << 20


def measure(contender: Contender, setup: CaseInputs, plan: BenchmarkPlan) -> dict[str, Any]:
    """Measure one contender and return a record.

    `ms` is the median and `spread_ms` the quartiles of at least `BenchmarkPlan.reps` calls with four sets of inputs in
    rotation; `host_ms` is the CPU time to launch a call (shorter kernels wait for it); `cold_s` the first call,
    including compilation; `extra_mib` the peak memory of a later call in addition to inputs, outputs and gradients, and
    `extra_first_mib` the additional peak memory of the first call (both including caches).
    """
    setup.begin()
    before = start_memory(setup.device)
    start = time.perf_counter()
    step = stepper(contender, setup)
    first = step(0)
    finish(setup.device)
    row: dict[str, Any] = {"cold_s": round(time.perf_counter() - start, 3)}
    size = sum(t.numel() * t.element_size() for t in first)
    relative, largest = setup.error(first[0], contender.kind(setup.mode))
    row |= {"error": float(f"{relative:.2e}"), "max_error": float(f"{largest:.2e}")}
    if before is not None:
        row["extra_first_mib"] = round((torch.cuda.max_memory_allocated() - before - size) / MIB, 3)
    del first
    if not plan.dry:
        warm(step, setup.device, plan.warmup)
    if before is not None:
        torch.cuda.reset_peak_memory_stats()
        step(1)
        row["extra_mib"] = round((torch.cuda.max_memory_allocated() - before - size) / MIB, 3)
    times, host = timed(step, setup.device, plan.reps)
    low, middle, high = quartiles(times)
    row |= {"ms": round(middle, 5), "spread_ms": [round(low, 5), round(high, 5)], "reps": len(times)}
    row["host_ms"] = round(host, 5)
    row["tflops"] = float(f"{setup.case.flop(setup.mode) / max(middle, 1e-9) / 1e9:.4g}")
    return row


def stepper(contender: Contender, setup: CaseInputs) -> Callable[[int], tuple[Tensor, ...]]:
    """Return the timed function: one call, with gradients if the mode has any."""
    attend = contender.make(setup)
    leaves = setup.leaves

    def step(i: int) -> tuple[Tensor, ...]:
        q, k, v, cotangent = setup.sets[i % SETS]
        if is_forward(setup.mode):
            with torch.no_grad():
                return (attend(q, k, v),)
        out = attend(q, k, v)
        return (out.detach(), *torch.autograd.grad(out, (q, k, v, *leaves), cotangent))

    return step


def start_memory(device: str) -> int | None:
    """Reset the peak memory statistics and return the bytes in use; None on a CPU."""
    if device == "cpu":
        return None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def finish(device: str) -> None:
    """Synchronise the device."""
    if device != "cpu":
        torch.cuda.synchronize()


def warm(step: Callable[[int], Any], device: str, seconds: float) -> None:
    """Run warm-up calls for some seconds, so that clocks and caches are in a steady state."""
    end = time.perf_counter() + seconds
    for i in range(1, 10_000):
        step(i)
        finish(device)
        if i >= 2 and time.perf_counter() >= end:
            return


def timed(step: Callable[[int], Any], device: str, reps: int) -> tuple[list[float], float]:
    """Return milliseconds of each call, and the median CPU time to launch one.

    On a CPU with one thread these are process times, which exclude other processes.
    """
    if device == "cpu":
        times = []
        clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        for i in range(reps):
            start = clock()
            step(i)
            times.append(1000 * (clock() - start))
        return times, statistics.median(times)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(reps)]
    torch.cuda.synchronize()
    hosts = []
    for i, (begin, end) in enumerate(events):
        start = time.perf_counter()
        begin.record()
        step(i)
        end.record()
        hosts.append(1000 * (time.perf_counter() - start))
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in events], statistics.median(hosts)


def quartiles(times: list[float]) -> tuple[float, float, float]:
    """Return lower quartile, median and upper quartile."""
    ordered = sorted(times)
    quarter = len(ordered) // 4
    return ordered[quarter], statistics.median(ordered), ordered[-1 - quarter]
