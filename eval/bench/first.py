"""First benchmark on a GPU: compilation, checks, peak rates, the quick protocol, and the time of each kernel.

Then latencies with CUDA graphs, whole models, and a sanitizer.

    python eval/bench/first.py --out FOLDER [--minutes 9] [--num-workers 14]
    TRITON_INTERPRET=1 python eval/bench/first.py --out FOLDER --dry-run       (tiny tensors, without times)

It runs from a plain checkout. Every stage is a process with a time limit, which is terminated with all its child
processes. It appends each result to FOLDER/<stage>.jsonl; FOLDER/first.json lists the completed stages. The next run
skips them and continues the others. Next comes `tune.py`, then `attention.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
from latency import models, replay
from precompile import HEAD_DIMS, KERNELS, TINY, compile_all
from stages import Results, run_limited
from timing import environment
from tune import WORK, milliseconds, strips, work

from vispe import Grid
from vispe.experimental.speed.correctness import check

HERE = Path(__file__)
SECONDS = {"facts": 20, "precompile": 180, "ceilings": 30, "quick": 250, "kernels": 60, "replay": 60,
           "models": 150, "sanitizer": 120}  # fmt: skip
SIZE = 8192  # side of the matrices of the ceiling


def main() -> int:
    """Run the missing stages, or one stage in this process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--num-workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--dry-run", action="store_true", help="tiny tensors on the CPU, in the interpreter")
    parser.add_argument("--stage", choices=(*STAGES, "tiny"), help="run one of them, here")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.stage == "tiny":
        # never resumed: the sanitizer has to see all launches
        tiny(args, Results())
        return 0
    if args.stage:
        STAGES[args.stage](args, Results(args.out / f"{args.stage}.jsonl"))
        return 0
    path, end = args.out / "first.json", time.monotonic() + 60 * args.minutes
    records: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for stage in STAGES:
        remaining = end - time.monotonic()
        if "result" in records.get(stage, {}) or remaining < 5:
            continue
        start = time.monotonic()
        records[stage] = run(stage, args, min(remaining, SECONDS[stage]))
        records[stage]["seconds"] = round(time.monotonic() - start, 1)
        path.write_text(json.dumps(records, indent=1) + "\n")
        print(stage, json.dumps(records[stage])[:600], flush=True)
    return 0 if all("result" in records.get(stage, {}) for stage in STAGES) else 1


def run(stage: str, args: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Run a stage in a process; return its result, or the failure with the results up to it."""
    command = [sys.executable, HERE, "--stage", stage, "--out", args.out, "--num-workers", args.num_workers]
    command += ["--dry-run"] if args.dry_run else []
    log = args.out / f"{stage}.log"
    status = run_limited(command, log, seconds)
    results = Results(args.out / f"{stage}.jsonl")
    if status == 0:
        return {"result": results}
    failure = f"not done after {seconds:.0f} s" if status is None else f"exit {status}"
    return {"failure": failure, "partial": results, "end": log.read_text(errors="replace")[-1500:]}


def facts(args: argparse.Namespace, results: Results) -> None:
    """Record versions, and the clocks and power of nvidia-smi."""
    for name, value in environment("triton").items():
        results[name] = value
    results["cuda"] = torch.version.cuda
    results["nvidia_smi"] = clocks()


def clocks() -> list[str]:
    """Return clocks, power and temperature from nvidia-smi; empty if it is not installed."""
    if not shutil.which("nvidia-smi"):
        return []
    requested = (
        "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.draw,power.limit,temperature.gpu"
    )
    command = ["nvidia-smi", f"--query-gpu={requested}", "--format=csv"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()


def precompile(args: argparse.Namespace, results: Results) -> None:
    """Compile all kernels of the later stages."""
    compile_all(results, args.num_workers, args.dry_run)


def ceilings(args: argparse.Namespace, results: Results) -> None:
    """Record the best rates of this machine: matrix products, and copies of memory."""
    device, side = ("cpu", 64) if args.dry_run else ("cuda", SIZE)
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    product_ms = milliseconds(lambda _: a @ b, device)
    results["product_tflops"] = round(2 * side**3 / product_ms / 1e9, 1)
    source = torch.empty(2**12 if args.dry_run else 2**30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_ms = milliseconds(lambda _: target.copy_(source), device)
    results["copy_gb_s"] = round(2 * source.numel() / copy_ms / 1e6, 1)


def quick(args: argparse.Namespace, results: Results) -> None:
    """Run correctness checks and the quick protocol of `attention.py`, which writes FOLDER/quick.json."""
    path = args.out / "quick.json"
    command = [sys.executable, HERE.with_name("attention.py"), "--out", path]
    command += ["--dry-run"] if args.dry_run else ["--quick", "--minutes", "3.5"]
    subprocess.run(list(map(str, command)), check=False)
    state = json.loads(path.read_text())
    results["checks"] = len(state["checks"])
    results["failed"] = [c for c in state["checks"] if not c["passed"]]
    results["rows"] = len(state["rows"])


def sanitizer(args: argparse.Namespace, results: Results) -> None:
    """Search for out-of-bounds reads and writes on tiny shapes with compute-sanitizer, where it is installed."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        results["missing"] = "compute-sanitizer"
        if args.dry_run:
            results["tiny"] = tiny(args, Results())
        return
    command = [tool, "--tool", "memcheck", sys.executable, HERE, "--stage", "tiny", "--out", args.out]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    lines = (done.stdout + done.stderr).splitlines()
    results["exit"] = done.returncode
    results["summary"] = [line for line in lines if "ERROR SUMMARY" in line][-1:]


def tiny(args: argparse.Namespace, results: Results) -> Results:
    """Compare every kernel with float64 on an odd grid with prefix tokens."""
    device = "cpu" if args.dry_run else "cuda"
    for grid, kind, width in TINY:
        if not args.dry_run or grid == TINY[0][0]:
            errors = check(grid, width, torch.float32, kind, device, "triton")["errors"]
            results[f"{grid.shape} {kind} {width} columns"] = errors
    return results


def kernels(args: argparse.Namespace, results: Results) -> None:
    """Measure milliseconds of each kernel on the main shapes in bfloat16 by dtype of the strip; clocks at the end."""
    device = "cpu" if args.dry_run else "cuda"
    shapes = ((Grid((3, 4), 1), 1),) if args.dry_run else WORK["long"]
    for kernel, (grid, batch), width in product(KERNELS, shapes, (16,) if args.dry_run else HEAD_DIMS):
        h, w = grid.shape
        for stored in strips(kernel, "bfloat16"):
            name = f"{kernel} {h}x{w}+{grid.prefix} b{batch} d{width} strip {stored}"
            if name not in results:
                run_ = work(kernel, grid, batch, width, torch.bfloat16, device, stored)
                results[name] = round(milliseconds(run_, device), 4)
    results["clocks"] = clocks()


STAGES: dict[str, Callable[[argparse.Namespace, Results], object]] = {
    f.__name__: f for f in (facts, precompile, ceilings, quick, kernels, replay, models, sanitizer)
}


if __name__ == "__main__":
    sys.exit(main())
