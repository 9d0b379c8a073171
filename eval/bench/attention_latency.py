"""Benchmark of the host overhead of one call of the fused kernels, without the launches themselves.

    python eval/bench/attention_latency.py [--calls 400] [--out eval/results/attention_latency.json]

A fake CUDA driver compiles the kernels for compute capability 9.0, and a launch does nothing, so no GPU is needed.
Inputs: one image of 14 x 14 patches and a class token, 6 heads of 64 channels, bfloat16. The table of learned biases is
created once per call, as in a model. Each row has the lowest decile of all calls, which other processes hardly affect,
and the median. 'SDPA' is torch's attention without a bias for 16 tokens.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from timing import environment
from torch.nn import functional as F

from vispe import Grid
from vispe.attention import DistanceBias, TableBias, attention

sys.path.insert(1, str(Path(__file__).resolve().parents[2]))
from tests.attention.triton.compiled.stand_in_driver import stand_in_gpu

RESULTS = Path(__file__).parents[1] / "results"
HEADS, HEAD_DIM = 6, 64
TOGETHER = 40  # calls of one kind in a turn
TARGETS = {
    "forward, learned table, no gradient": 150,
    "forward, fixed bias": 65,
    "forward and backward, fixed bias": 350,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=800)
    parser.add_argument("--out", type=Path, default=RESULTS / "attention_latency.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with stand_in_gpu(90):
        times = measure(calls(), args.calls)
    rows = [{"call": name, **time_, "target_us": TARGETS.get(name)} for name, time_ in times.items()]
    print(*rows, sep="\n")
    args.out.write_text(json.dumps({"environment": environment("triton"), "rows": rows}, indent=1) + "\n")


def calls() -> dict[str, Callable[[], Any]]:
    """Return the calls by name."""
    torch.manual_seed(0)
    grid = Grid((14, 14), 1)
    pos = grid.positions()
    q, k, v = (
        torch.randn(1, grid.tokens, HEADS, HEAD_DIM, dtype=torch.bfloat16).transpose(1, 2) for _ in range(3)
    )
    cotangent = torch.randn_like(q)
    inputs = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    fixed = DistanceBias(tuple(2.0**-head for head in range(HEADS)), pos)
    table = torch.randn(HEADS, *(2 * n - 1 for n in grid.shape), requires_grad=True)

    @torch.no_grad()
    def forward(learned: bool) -> torch.Tensor:
        return attention(q, k, v, bias=TableBias(table, pos) if learned else fixed)

    def backward(learned: bool) -> tuple[torch.Tensor, ...]:
        bias = TableBias(table, pos) if learned else fixed
        return torch.autograd.grad(
            attention(*inputs, bias=bias), [*inputs, table] if learned else inputs, cotangent
        )

    few = q[:, :1, :16]
    return {
        "SDPA": lambda: F.scaled_dot_product_attention(few, few, few),
        "forward, fixed bias": lambda: forward(False),
        "forward, learned table, no gradient": lambda: forward(True),
        "forward and backward, fixed bias": lambda: backward(False),
        "forward and backward, learned table": lambda: backward(True),
    }


def measure(functions: dict[str, Callable[[], Any]], repeats: int) -> dict[str, dict[str, float]]:
    """Return the lowest tenth and the median of the microseconds of each call, measured in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(-2, repeats // TOGETHER):
        for name, call in functions.items():
            gc.collect()
            for _ in range(TOGETHER):
                start = time.perf_counter()
                call()
                # the first turns compile kernels
                if turn >= 0:
                    seconds[name].append(time.perf_counter() - start)
    return {
        name: {
            "us": round(values[len(values) // 10] * 1e6, 1),
            "median_us": round(values[len(values) // 2] * 1e6, 1),
        }
        for name, values in ((name, sorted(values)) for name, values in seconds.items())
    }


if __name__ == "__main__":
    main()
