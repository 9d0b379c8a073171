"""Benchmark of speed and memory of `vispe segment` on 0.01, 1, 4 and 16 Mpixel, each in a separate process.

    python eval/bench/segment.py [--rounds 5] [--out eval/results/segment_speed.json]
    OMP_NUM_THREADS=1 python eval/bench/segment.py --megapixels 0.01 1 --classifier ensemble logistic --rounds 3 \\
        --out eval/results/segment_cpu.json

The image is scikit-image's `cell` micrograph, mirrored to size; strokes 3 pixels wide all over it label a quarter per
cent of the pixels.
`wall_s` is the wall time of the command, including the start of Python and training; `prediction_s` that of the image
alone, including its files. The smallest image shows the fixed cost of a run, mostly imports. Each row is the fastest
round, as other processes can only add time, with the highest peak memory of all rounds; `walls_s` has the
times of all and `median_s` their median, and `matmul_gflops` is the speed of the machine just before each of them:
products of float32 matrices of 2048 x 2048 on all cores, the median of ten. `least_cpu_s` is the least CPU time of all
rounds (user and system), and `libraries_cpu_s` the least of a process that imports PyTorch and scikit-learn: the part
of the start that does not depend on vispe. `load_average` is that at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from timing import environment

MEGAPIXELS = (0.01, 1, 4, 16)
IMPORTS = "import torch, sklearn.ensemble, sklearn.linear_model"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--classifier", nargs="+", default=["logistic", "forest"])
    parser.add_argument("--megapixels", nargs="+", type=float, default=MEGAPIXELS)
    parser.add_argument("--rounds", type=int, default=5, help="runs of each, in turns with the others")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parents[1] / "results" / "segment_speed.json"
    )
    args = parser.parse_args()
    if args.rounds < 1:
        raise SystemExit(f"--rounds {args.rounds} must be 1 or more.")
    jobs = [(count, classifier) for count in args.megapixels for classifier in args.classifier]
    result: dict[tuple[float, str], list[dict[str, Any]]] = {job: [] for job in jobs}
    with tempfile.TemporaryDirectory() as folder:
        files = {count: inputs(count, Path(folder)) for count in args.megapixels}
        for _ in range(args.rounds):
            for count, classifier in jobs:
                speed, out = matmul_speed(), Path(folder) / "out"
                row = measure(*files[count], classifier, count, out) | {"matmul_gflops": speed}
                shutil.rmtree(out)
                result[count, classifier].append(row)
                print(*(f"{k}={v}" for k, v in row.items()), flush=True)
    libraries = [cpu_seconds(resources([sys.executable, "-c", IMPORTS])) for _ in range(args.rounds)]
    rows = [fastest(of_one) for of_one in result.values()]
    packages = ("scikit-learn", "scipy", "numpy", "pillow")
    facts = {"libraries_cpu_s": min(libraries), "load_average": round(os.getloadavg()[0], 1)}
    args.out.write_text(
        json.dumps({"environment": environment(*packages), **facts, "rows": rows}, indent=1) + "\n"
    )


def inputs(megapixels: float, folder: Path) -> tuple[Path, Path]:
    """Write an image of `megapixels` and its labels."""
    from skimage import data

    cell = data.cell()
    side = round((megapixels * 1e6) ** 0.5)
    reps = [-(-side // n) for n in cell.shape]
    padded = np.pad(cell, [(0, (r - 1) * n) for r, n in zip(reps, cell.shape, strict=True)], mode="symmetric")
    image = padded[:side, :side]
    rng = np.random.default_rng(0)
    labels = np.zeros(image.shape, np.uint8)
    light = image > np.median(cell)
    while (drawn := np.bincount(labels.ravel(), minlength=3)[1:]).min() < image.size / 800:
        (y, x), angle = rng.uniform(2, side - 2, 2), rng.uniform(0, 2 * np.pi)
        bright = light[int(y), int(x)]
        if drawn[int(bright)] >= image.size / 800:
            continue
        for _ in range(60):
            angle += rng.normal(0, 0.3)
            y, x = y + np.sin(angle), x + np.cos(angle)
            pen = (slice(int(y) - 1, int(y) + 2), slice(int(x) - 1, int(x) + 2))
            if not (1 <= y < side - 2 and 1 <= x < side - 2) or light[int(y), int(x)] != bright:
                break
            labels[pen][light[pen] == bright] = 1 + bright
    paths = folder / f"image{megapixels}.png", folder / f"labels{megapixels}.png"
    for path, array in zip(paths, (image, labels), strict=True):
        Image.fromarray(np.ascontiguousarray(array)).save(path)
    return paths


def fastest(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the fastest round, with the times of all."""
    walls = [r["wall_s"] for r in rounds]
    more = {"median_s": statistics.median(walls), "walls_s": walls}
    more["least_cpu_s"] = min(r["cpu_s"] for r in rounds)
    more["peak_memory_gib"] = max(r["peak_memory_gib"] for r in rounds)
    speeds = {"matmul_gflops": [r["matmul_gflops"] for r in rounds]}
    return min(rounds, key=lambda r: r["wall_s"]) | more | speeds


def matmul_speed(side: int = 2048, rounds: int = 10) -> float:
    """Return the speed of float32 matrix products on all cores in GFLOP/s."""
    a, times = torch.rand(side, side), []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - start)
    return round(2 * side**3 / statistics.median(times[1:]) / 1e9, 1)


def measure(image: Path, labels: Path, classifier: str, megapixels: float, out: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "vispe", "segment", str(image), "--labels", str(labels), "-o", str(out)]
    start = time.perf_counter()
    usage = resources([*command, "--classifier", classifier])
    wall = time.perf_counter() - start
    (record,) = json.loads((out / "report.json").read_text())["images"]
    return {
        "megapixels": megapixels,
        "classifier": classifier,
        "wall_s": round(wall, 2),
        "cpu_s": cpu_seconds(usage),
        "megapixels_per_second": round(megapixels / wall, 3),
        "peak_memory_gib": round(usage.ru_maxrss / 2**20, 2),
        "prediction_s": round(record["seconds"], 2),
    }


def resources(command: list[str]) -> resource.struct_rusage:
    """Run a command and return the resources that it used."""
    _, status, usage = os.wait4(os.spawnv(os.P_NOWAIT, command[0], command), 0)
    if status:
        raise SystemExit(f"{' '.join(command)} failed")
    return usage


def cpu_seconds(usage: resource.struct_rusage) -> float:
    """Return user and system time in seconds."""
    return round(usage.ru_utime + usage.ru_stime, 2)


if __name__ == "__main__":
    main()
