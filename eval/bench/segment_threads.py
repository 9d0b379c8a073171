"""Benchmark of the CPU time of `vispe segment` with two threads and with one on a busy machine.

    python eval/bench/segment_threads.py [--rounds 1] [--busy 2] [--out eval/results/segment_threads.json]

Threads that wait for a thread without a core must not spin: on a shared machine they take the cores of other users, and
cluster nodes bill them. Therefore the same run, 1 Mpixel of scikit-image's `cell` micrograph with the strokes of
`interactive.py`, is repeated with one thread and with two (`OMP_NUM_THREADS`), alongside `--busy` processes that each
use a complete core. `cpu_s` is user and system time of the whole command, start of Python included, the median over
rounds; `ratio` is that of two threads over that of one. `--busy 0` on a quiet machine shows whether two threads are
still faster: see `wall_s`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from interactive import strokes, synthetic_image
from PIL import Image
from timing import environment

MODES: dict[str, list[str]] = {
    "default": ["--classifier", "logistic"],
    "filters": ["--features", "filters", "--classifier", "logistic"],
    "forest": ["--classifier", "forest"],
}
MOST = 1.3
"""Largest ratio that is accepted."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--busy", type=int, default=2, help="processes alongside that want a core each")
    parser.add_argument("--img-size", type=int, default=1000, help="of the image, in pixels")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    results = Path(__file__).parents[1] / "results"
    parser.add_argument("--out", type=Path, default=results / "segment_threads.json")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        grey = synthetic_image(args.img_size)
        Image.fromarray(grey).save(folder / "a.png")
        Image.fromarray(strokes(grey, 3)[1]).save(folder / "a_labels.png")
        for mode in args.modes:
            rows.append(compare(folder, mode, args))
            print(json.dumps(rows[-1]), flush=True)
    result = {"environment": environment("scikit-learn", "scipy", "numpy"), "busy": args.busy, "most": MOST}
    args.out.write_text(json.dumps({**result, "rows": rows}, indent=1) + "\n")


def compare(folder: Path, mode: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run one mode with one and two threads in turn."""
    cpu: dict[int, list[float]] = {1: [], 2: []}
    wall: dict[int, list[float]] = {1: [], 2: []}
    load = []
    for _ in range(args.rounds):
        for threads in cpu:
            seconds, wall_time = measured(folder, MODES[mode], threads, args.busy)
            cpu[threads].append(seconds)
            wall[threads].append(wall_time)
            load.append(os.getloadavg()[0])
    middle = {threads: statistics.median(values) for threads, values in cpu.items()}
    return {
        "mode": mode,
        "megapixels": round(args.img_size**2 / 1e6, 3),
        "rounds": args.rounds,
        "cpu_s": {str(threads): round(value, 2) for threads, value in middle.items()},
        "wall_s": {str(threads): round(statistics.median(values), 1) for threads, values in wall.items()},
        "ratio": round(middle[2] / middle[1], 3),
        "load_average": round(max(load), 1),
    }


def measured(folder: Path, words: list[str], threads: int, busy: int) -> tuple[float, float]:
    """Return the CPU time of all cores and the wall time of one run in seconds."""
    command = [sys.executable, "-m", "vispe.cli.main", "segment", str(folder / "a.png"), *words, "--force"]
    command += ["--labels", str(folder / "a_labels.png"), "-o", str(folder / "out")]
    env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    others = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(busy)]
    try:
        start = time.perf_counter()
        process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        wall_time = time.perf_counter() - start
    finally:
        for one in others:
            one.kill()
            one.wait()
    if status:
        raise SystemExit(f"vispe segment failed with status {status}.")
    return usage.ru_utime + usage.ru_stime, wall_time


if __name__ == "__main__":
    main()
