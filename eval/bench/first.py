"""The first minutes on a GPU: compile, check, ceilings, the quick protocol, a sanitizer, and the time of each kernel.

Then latencies with CUDA graphs, and whole models.

    python eval/bench/first.py --out FOLDER [--minutes 9] [--workers 14]
    TRITON_INTERPRET=1 python eval/bench/first.py --out FOLDER --dry       (every path on tiny tensors; no times)

It runs from a plain checkout. Every stage is a process with its own limit of time and writes FOLDER/first.json when it
ends, so nothing is lost; stages that are there are left out the next time. Next comes `tune.py`, then `attention.py`.
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
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from latency import models, replay
from timing import environment
from tune import ODD, WORK, milliseconds, strips, work

from vispe import Grid
from vispe.evaluate.speed.correctness import check

HERE = Path(__file__)
KERNELS = ("forward", "grad_q", "grad_once", "grad_bias")  # grad_q launches that of keys and values as well
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SECONDS = {"facts": 20, "precompile": 150, "ceilings": 30, "quick": 250, "sanitizer": 60, "kernels": 60,
           "replay": 60, "models": 150}  # fmt: skip
SIZE = 8192  # side of the matrices of the ceiling


def main() -> int:
    """Run the stages that are missing, or one of them in this process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--dry", action="store_true", help="tiny tensors on the CPU, in the interpreter")
    parser.add_argument("--stage", choices=(*STAGES, "tiny"), help="run one of them, here")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.stage:
        print(json.dumps(tiny(args) if args.stage == "tiny" else STAGES[args.stage](args)))
        return 0
    path, end = args.out / "first.json", time.monotonic() + 60 * args.minutes
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for stage in STAGES:
        left = end - time.monotonic()
        if "result" in found.get(stage, {}) or left < 5:
            continue
        start = time.monotonic()
        found[stage] = run(stage, args, min(left, SECONDS[stage]))
        found[stage]["seconds"] = round(time.monotonic() - start, 1)
        path.write_text(json.dumps(found, indent=1) + "\n")
        print(stage, json.dumps(found[stage])[:600], flush=True)
    return 0 if all("result" in found.get(stage, {}) for stage in STAGES) else 1


def run(stage: str, args: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Return the result of a stage in a process of its own, or why it has none."""
    command = [sys.executable, HERE, "--stage", stage, "--out", args.out, "--workers", args.workers]
    command += ["--dry"] if args.dry else []
    try:
        done = subprocess.run(
            list(map(str, command)), capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired as error:
        return {"failure": f"not done after {seconds:.0f} s", "end": str(error.stderr or "")[-1500:]}
    if done.returncode:
        return {"failure": f"exit {done.returncode}", "end": done.stderr[-1500:]}
    return {"result": json.loads(done.stdout.splitlines()[-1])}


def facts(args: argparse.Namespace) -> dict[str, Any]:
    """Versions, and what nvidia-smi says of clocks and power."""
    return environment("triton") | {"cuda": torch.version.cuda, "nvidia_smi": clocks()}


def clocks() -> list[str]:
    """What nvidia-smi says of clocks, power and temperature now; nothing where it is not installed."""
    if not shutil.which("nvidia-smi"):
        return []
    asked = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.draw,power.limit,temperature.gpu"
    command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()


def precompile(args: argparse.Namespace) -> dict[str, Any]:
    """Compile all kernels for their widths, dtypes and lengths, in many processes that share the cache."""
    widths = (16,) if args.dry else (64, 72, 128)
    jobs = list(product(KERNELS, widths, list(DTYPES)[: 1 if args.dry else None], ("long", "short")))
    with ProcessPoolExecutor(args.workers, mp_context=get_context("spawn")) as pool:
        done = list(pool.map(_compiled, jobs, [args.dry] * len(jobs)))
    return {"kernels": len(done), "failures": [f for f in done if f]}


def _compiled(job: tuple[str, int, str, str], dry: bool) -> str:
    """Launch the kernels of a job once; return what went wrong."""
    kernel, width, dtype, tokens = job
    try:
        grid = Grid((3, 4), 1) if dry else ODD[tokens]
        # two samples: kernels are compiled apart for a size of one
        for stored in strips(kernel, dtype):
            work(kernel, grid, 2, width, DTYPES[dtype], "cpu" if dry else "cuda", stored)(0)
    except Exception as error:  # what does not compile is a result: the others go on
        return f"{' '.join(map(str, job))}: {type(error).__name__}: {error}"[:300]
    return ""


def ceilings(args: argparse.Namespace) -> dict[str, Any]:
    """What this machine reaches at best: matrix products, and copies of memory."""
    device, side = ("cpu", 64) if args.dry else ("cuda", SIZE)
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    product_ms = milliseconds(lambda _: a @ b, device)
    source = torch.empty(2**12 if args.dry else 2**30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_ms = milliseconds(lambda _: target.copy_(source), device)
    return {
        "product_tflops": round(2 * side**3 / product_ms / 1e9, 1),
        "copy_gb_s": round(2 * source.numel() / copy_ms / 1e6, 1),
    }


def quick(args: argparse.Namespace) -> dict[str, Any]:
    """Correctness and the quick protocol of `attention.py`, into FOLDER/quick.json."""
    path = args.out / "quick.json"
    command = [sys.executable, HERE.with_name("attention.py"), "--out", path]
    command += ["--dry"] if args.dry else ["--quick", "--minutes", "3.5"]
    subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    state = json.loads(path.read_text())
    failed = [c for c in state["checks"] if not c["passed"]]
    return {"checks": len(state["checks"]), "failed": failed, "rows": len(state["rows"])}


def sanitizer(args: argparse.Namespace) -> dict[str, Any]:
    """Out-of-bounds reads and writes on tiny shapes, where CUDA's compute-sanitizer is installed."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        return {"missing": "compute-sanitizer"} | ({"tiny": tiny(args)} if args.dry else {})
    command = [
        tool,
        "--tool",
        "memcheck",
        sys.executable,
        str(HERE),
        "--stage",
        "tiny",
        "--out",
        str(args.out),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = (done.stdout + done.stderr).splitlines()
    return {"exit": done.returncode, "said": [line for line in said if "ERROR SUMMARY" in line][-1:]}


def tiny(args: argparse.Namespace) -> dict[str, Any]:
    """Every kernel on an odd grid with prefix tokens, against float64."""
    device = "cpu" if args.dry else "cuda"
    grids = (Grid((3, 4), 1),) if args.dry else (Grid((3, 4), 1), Grid((9, 15), 5))
    found = {}
    for grid, kind in product(grids, ("distance", "table")):
        for width in (16, 72):
            errors = check(grid, width, torch.float32, kind, device, "triton")["errors"]
            found[f"{grid.shape} {kind} {width} columns"] = errors
    return found


def kernels(args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of each kernel on the main shapes in bfloat16, by the dtype of the strip, and clocks at the end."""
    device = "cpu" if args.dry else "cuda"
    shapes = ((Grid((3, 4), 1), 1),) if args.dry else WORK["long"]
    found = {}
    for kernel, (grid, batch), width in product(KERNELS, shapes, (16,) if args.dry else (64, 72, 128)):
        h, w = grid.shape
        for stored in strips(kernel, "bfloat16"):
            run_ = work(kernel, grid, batch, width, torch.bfloat16, device, stored)
            name = f"{kernel} {h}x{w}+{grid.prefix} b{batch} d{width} strip {stored}"
            found[name] = round(milliseconds(run_, device), 4)
    return found | {"clocks": clocks()}


STAGES: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    f.__name__: f for f in (facts, precompile, ceilings, quick, sanitizer, kernels, replay, models)
}


if __name__ == "__main__":
    sys.exit(main())
