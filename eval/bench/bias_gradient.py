"""Benchmark of attention with a bias on CPU, forward and backward, relative to SDPA without a bias.

    python eval/bench/bias_gradient.py [--rounds 11] [--grid-sizes 14 16 32 37] [--dtypes float32 bfloat16] [--fresh]

All variants of a shape run interleaved on one thread; the numbers are CPU times relative to SDPA without a mask
(medians), so other load on the machine matters little. `before` is a learned bias as a dense mask with a gradient,
which was the only implementation before `vispe.attention.backends.blocked`; strips are always measured, and a row
states whether they are selected. An interrupted run resumes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
from timing import environment
from torch import Tensor
from torch.nn import functional as F

import vispe
from vispe.attention import DistanceBias, TableBias, attention
from vispe.attention.backends import blocked as strip_gradient
from vispe.grid import Grid

OUT = Path(__file__).parents[1] / "results" / "bias_gradient_cpu.json"
KEYS = ("grid", "prefix", "heads", "batch", "dtype")
LARGEST = 4e7  # scores of a shape that is measured
TARGETS = {257: 1.15, 2049: 1.35}  # forward with a stored mask, up to so many tokens


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--grid-sizes", type=int, nargs="+", default=[14, 16, 32, 37])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--num-heads", type=int, nargs="+", default=[6, 12])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 2, 8])
    parser.add_argument("--fresh", action="store_true", help="measure all again, also what the file has")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    retained = json.loads(args.out.read_text())["rows"] if args.out.exists() and not args.fresh else []
    rows = {tuple(r[k] for k in KEYS): r for r in retained}
    for side, heads, batch, dtype in product(args.grid_sizes, args.num_heads, args.batch_sizes, args.dtypes):
        prefix = int(side != 14)
        key, scores = (side, prefix, heads, batch, dtype), batch * heads * (side * side + prefix) ** 2
        if key in rows or scores > LARGEST:
            continue
        rows[key] = {**dict(zip(KEYS, key, strict=True)), **measure(*key, args.rounds)}
        for (size, extra, _, samples, _), row in rows.items():
            row["strips are taken"] = samples * (size * size + extra) >= strip_gradient.MIN_QUERIES
        result = {"environment": environment(), "rows": list(rows.values())}
        args.out.write_text(json.dumps(result, indent=1) + "\n")
        print(*(f"{k}={v}" for k, v in rows[key].items()), flush=True)


def measure(side: int, prefix: int, heads: int, batch: int, dtype: str, rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    pos = Grid((side, side), prefix).positions()
    like = {"dtype": getattr(torch, dtype)}
    q, k, v = (torch.randn(batch, heads, pos.tokens, 64, **like).requires_grad_() for _ in range(3))
    cotangent = torch.randn(q.shape, **like)
    table = (0.2 * torch.randn(heads, 2 * side - 1, 2 * side - 1)).requires_grad_()
    slopes = torch.rand(heads).requires_grad_()
    fixed = DistanceBias(tuple(2.0 ** -(i + 1) for i in range(heads)), pos)
    mask = fixed.dense().to(**like)
    free = mask.clone().requires_grad_()

    def sdpa(mask: Tensor | None = None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def learned(bias: Any, leaf: Tensor, strips: bool) -> Callable[[], Any]:
        def call() -> Any:
            own, strip_gradient.MIN_QUERIES = strip_gradient.MIN_QUERIES, 0 if strips else float("inf")
            try:
                return train(attention(q, k, v, bias=bias), leaf)
            finally:
                strip_gradient.MIN_QUERIES = own

        return call

    def train(out: Tensor, *leaves: Tensor) -> Any:
        return torch.autograd.grad(out, (q, k, v, *leaves), cotangent)

    @torch.inference_mode()
    def predict(bias: Any) -> Tensor:
        return sdpa() if bias is None else attention(q, k, v, bias=bias)

    by_table, by_slopes = TableBias(table, pos), DistanceBias(slopes, pos)
    training = ratios(
        {
            "none": lambda: train(sdpa()),
            "frozen dense mask": lambda: train(sdpa(mask)),
            "dense mask with a gradient": lambda: train(sdpa(free), free),
            "frozen bias": lambda: train(attention(q, k, v, bias=fixed)),
            "learned table": learned(by_table, table, True),
            "learned table, before": learned(by_table, table, False),
            "learned slopes": learned(by_slopes, slopes, True),
            "learned slopes, before": learned(by_slopes, slopes, False),
        },
        rounds,
    )
    forward = ratios({"none": lambda: predict(None), "kept mask": lambda: predict(fixed)}, 3 * rounds)
    target = next((limit for tokens, limit in TARGETS.items() if pos.tokens <= tokens), None)
    return {"training": training, "forward": {**forward, "target": target}}


def ratios(ways: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Return milliseconds of the first variant, and times of the others relative to it."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(rounds + 1):
        for name, call in list(ways.items())[:: 1 if i % 2 else -1]:
            start = time.thread_time()
            call()
            times[name].append(time.thread_time() - start)
    middle = {name: statistics.median(t[1:]) for name, t in times.items()}  # the first round warms up
    base = middle.pop("none")
    return {"none_ms": round(1000 * base, 2), **{name: round(t / base, 2) for name, t in middle.items()}}


if __name__ == "__main__":
    print(f"vispe {vispe.__version__}")
    main()
