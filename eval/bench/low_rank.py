"""Benchmark of low-rank approximations of bias tables (FlashBias, arXiv 2505.12044): rank, error and CPU time.

    python eval/bench/low_rank.py

One thread, float32, 6 heads of 64 channels. Tables: `alibi2d`, the network of `rpb_cpb` as initialised, and random
tables, smoothed by a Gaussian filter or not. A time is the CPU time of the process of one forward pass in evaluation,
the median over rounds in which the variants run in turn: no bias, a cached dense mask, and the columns of the
approximation. Errors are relative to the output with the exact bias. Writes eval/results/low_rank_cpu.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import timing
import torch
from torch import Tensor

import vispe
from vispe.attention import Bias, TableBias, attention, low_rank_approximation

OUT = Path(__file__).parents[1] / "results" / "low_rank_cpu.json"
HEADS, WIDTH = 6, 64


def biases(side: int) -> dict[str, Bias]:
    """Return the biases on a square grid."""
    grid = vispe.Grid((side, side))
    pos = grid.positions()
    made = {
        name: vispe.create_encoding(name, dim=HEADS * WIDTH, num_heads=HEADS, grid=(side, side))
        .eval()
        .bias(pos, 0)
        for name in ("alibi2d", "rpb_cpb")
    }
    noise = torch.randn(HEADS, 2 * side - 1, 2 * side - 1)
    for sigma in (4.0, 2.0, 0.0):
        made[f"random, sigma {sigma:g}"] = TableBias(smoothed(noise, sigma), pos)
    return made


def smoothed(table: Tensor, sigma: float) -> Tensor:
    """Return a table (h, a, b) after a Gaussian filter, with standard deviation 1."""
    if sigma:
        radius = int(4 * sigma)
        kernel = torch.exp(-torch.arange(-radius, radius + 1).square() / (2 * sigma**2))
        for shape in ((1, 1, -1, 1), (1, 1, 1, -1)):
            padding = [radius if n == -1 else 0 for n in shape[2:]]
            table = torch.nn.functional.conv2d(table[:, None], kernel.reshape(shape), padding=padding)[:, 0]
    return table / table.std()


def cpu_times(calls: dict[str, Callable[[], Tensor]], rounds: int) -> dict[str, float]:
    """Return the median CPU time of each call in ms."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds + 2):
        for name, call in calls.items():
            start = time.process_time()
            call()
            if i > 1:
                times[name].append(time.process_time() - start)
    return {name: 1e3 * statistics.median(values) for name, values in times.items()}


@torch.no_grad()
def measure(
    inputs: tuple[Tensor, Tensor, Tensor], bias: Bias, tolerance: float, rounds: int
) -> dict[str, object]:
    """Return rank, times and errors of one bias."""
    exact = attention(*(t.double() for t in inputs), bias=bias, backend="reference")
    start = time.process_time()
    columns = low_rank_approximation(bias, tolerance)
    seconds = time.process_time() - start
    calls = {
        "none": lambda: attention(*inputs),
        "mask": lambda: attention(*inputs, bias=bias),
        "columns": lambda: attention(*inputs, bias=columns, backend="lowrank"),
    }
    times = cpu_times(calls, rounds)
    errors = {what: float((calls[what]() - exact).norm() / exact.norm()) for what in ("mask", "columns")}
    return {
        "tolerance": tolerance, "rank": columns.row.shape[-1], "svd_s": round(seconds, 2),
        "time_relative_to_no_bias": {what: round(times[what] / times["none"], 3) for what in times},
        "relative_error": {what: float(f"{e:.2e}") for what, e in errors.items()},
    }  # fmt: skip


def main() -> None:
    """Measure all biases, grids and tolerances."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sides", nargs="+", type=int, default=[16, 24, 37])
    parser.add_argument("--tolerances", nargs="+", type=float, default=[1e-1, 1e-2])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = []
    for side in args.sides:
        inputs = tuple(torch.randn(1, HEADS, side * side, WIDTH) for _ in range(3))
        for name, bias in biases(side).items():
            for tolerance in args.tolerances:
                row = {"grid": [side, side], "bias": name} | measure(inputs, bias, tolerance, args.rounds)
                rows.append(row)
                print(row, flush=True)
    result = {"environment": timing.environment("vispe"), "rounds": args.rounds, "rows": rows}
    args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
