"""Benchmark of the coordinates of one long sequence for every position scheme on this CPU.

    python eval/bench/positions.py [mrope_i vrope ...] [--rounds 21] [--out eval/results/positions_cpu.json]

The sequence has 131,072 tokens and 1,000 images of several sizes with text between them, in the format of a processor:
token types, and grids of patches that are merged 2 x 2. For `rope_dhr` the images are four tiles and a thumbnail each,
for `group_pe` the texts belong to two groups in turn.

Measured are `Stream.from_ids`, and the coordinates of a new stream and of its next token (without values cached by an
earlier use): medians of wall time, with one thread and with all threads, and of CPU time. Other processes make runs
with all threads many times slower, so every row has the load average. If schemes are named, only their rows are
measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from timing import environment

import vispe
from vispe.multimodal import Image, Scheme, Stream, create_scheme, list_schemes

RESULTS = Path(__file__).parents[1] / "results"
TOKENS, IMAGES, MERGE = 131_072, 1_000, 2
SIDES = ((8, 12), (16, 6), (10, 10), (4, 24), (14, 9))  # rows and columns of tokens
TILES = ((4, 5), (3, 7), (6, 4), (2, 9), (5, 5))  # of one of four tiles, and of the thumbnail
TARGET_MS = 50


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("schemes", nargs="*", default=list_schemes())
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument(
        "--profile", action="store_true", help="list the operators that take most of the time"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "positions_cpu.json")
    args = parser.parse_args()
    retained = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
    rows = {row["scheme"]: row for row in retained}
    every = torch.get_num_threads()
    for name in args.schemes:
        scheme, arguments = create_scheme(name), processed(name)
        row: dict[str, Any] = {"scheme": name, "tokens": TOKENS, "images": IMAGES, "target_ms": TARGET_MS}
        for label, threads in (("one_thread", 1), ("all_threads", every)):
            torch.set_num_threads(threads)
            row[label] = {"threads": threads, **measure(scheme, arguments, args.rounds)}
        if args.profile:
            torch.set_num_threads(1)
            row["profile_ms"] = profile(lambda scheme=scheme, arguments=arguments: whole(scheme, arguments))
        torch.set_num_threads(every)
        rows[name] = row
        ordered = [rows[n] for n in sorted(rows)]
        args.out.write_text(json.dumps({"environment": environment(), "rows": ordered}, indent=1) + "\n")
        print(*(f"{k}={v}" for k, v in row.items()), flush=True)


def processed(scheme: str) -> dict[str, Any]:
    """Return the processor output for the sequence: types, image grids in patches or tiles, a mask, groups."""
    tiled = scheme == "rope_dhr"
    sides = [(TILES if tiled else SIDES)[i % 5] for i in range(IMAGES)]
    sizes = [h * w * (5 if tiled else 1) for h, w in sides]
    between = (TOKENS - sum(sizes)) // (IMAGES + 1)
    types = torch.zeros(1, TOKENS, dtype=torch.long)
    groups = torch.zeros_like(types)
    at = 0
    for number, size in enumerate(sizes):
        groups[0, at : at + between] = number % 2
        at += between
        types[0, at : at + size] = 1
        at += size
    images = (
        [Image(h, w, (2, 2), "last") for h, w in sides]
        if tiled
        else torch.tensor([[1, h * MERGE, w * MERGE] for h, w in sides])
    )
    arguments = {"types": types, "images": images, "mask": torch.ones_like(types), "merge": MERGE}
    return {**arguments, "groups": groups} if scheme == "group_pe" else arguments


def whole(scheme: Scheme, arguments: dict[str, Any]) -> tuple[float, float, float]:
    """Return the wall times of the stream and of its coordinates, and the CPU time of both, in seconds."""
    busy, start = time.process_time(), time.perf_counter()
    stream = Stream.from_ids(**arguments)
    middle = time.perf_counter()
    result = scheme.coordinates(stream)
    result.decode(1)
    return middle - start, time.perf_counter() - middle, time.process_time() - busy


def measure(scheme: Scheme, arguments: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Return medians in milliseconds, and the quartiles of the sum."""
    for _ in range(3):
        whole(scheme, arguments)
    times = [whole(scheme, arguments) for _ in range(rounds)]
    sums = sorted(a + b for a, b, _ in times)
    return {
        "stream_ms": round(1e3 * statistics.median(a for a, _, _ in times), 2),
        "coordinates_ms": round(1e3 * statistics.median(b for _, b, _ in times), 2),
        "both_ms": round(1e3 * statistics.median(sums), 2),
        "quartiles_ms": [round(1e3 * sums[i], 2) for i in (rounds // 4, -1 - rounds // 4)],
        "processor_ms": round(1e3 * statistics.median(c for _, _, c in times), 2),
        "load": round(os.getloadavg()[0], 1),
        "rounds": rounds,
    }


def profile(call: Callable[[], Any]) -> dict[str, float]:
    """Return milliseconds of the eight operators that take most, with the profiler's own share."""
    with torch.profiler.profile() as prof:
        for _ in range(3):
            call()
    events = sorted(prof.key_averages(), key=lambda e: -e.self_cpu_time_total)[:8]
    return {e.key: round(e.self_cpu_time_total / 3000, 2) for e in events}


if __name__ == "__main__":
    print(f"vispe {vispe.__version__}")
    main()
