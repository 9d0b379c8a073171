"""Interleaved timing: two functions run alternately, so that a noisy machine slows both equally."""

from __future__ import annotations

import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
import checkout  # noqa: F401  (finds vispe, for programs that import this module first)


def compare(
    base: Callable[[], Any], other: Callable[[], Any], rounds: int, warmup: int = 2
) -> dict[str, float]:
    """Return seconds of both (medians) and the speed of `other` as a share of that of `base`.

    The ratio is the median over rounds of (time of base / time of other), each pair run back to back, in
    alternating order.
    """
    for _ in range(warmup):
        base(), other()
    times: list[tuple[float, float]] = []
    for i in range(rounds):
        pair = {}
        for name, call in (("base", base), ("other", other))[:: 1 if i % 2 == 0 else -1]:
            start = time.perf_counter()
            call()
            pair[name] = time.perf_counter() - start
        times.append((pair["base"], pair["other"]))
    ratios = sorted(b / o for b, o in times)
    quarter = len(ratios) // 4
    return {
        "base_s": round(statistics.median(b for b, _ in times), 5),
        "other_s": round(statistics.median(o for _, o in times), 5),
        "relative_speed": round(statistics.median(ratios), 4),
        "quartiles": [round(ratios[quarter], 4), round(ratios[-1 - quarter], 4)],
        "rounds": rounds,
    }


def environment(*packages: str) -> dict[str, Any]:
    """Return the environment of a measurement: versions, machine, commit."""
    import vispe

    return {
        "versions": {"vispe": vispe.__version__} | {p: version(p) for p in ("torch", "timm", *packages)},
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu": _cpu(),
        "threads": torch.get_num_threads(),
        "commit": _commit(),
    }


def version(package: str) -> str:
    """Return the version of a package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    """Return the commit of the checkout; empty without a repository or without git."""
    root = Path(__file__).parents[2]
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return done.stdout.strip()


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.processor(),
    )
