"""Registers, spills and shared memory of the candidates of `tune.py`, compiled without a GPU.

    python eval/bench/tile_counts.py [--kernels grad_kv] [--widths 128] [--out eval/results/tile_counts.json]

The kernels are those of a learned table in bfloat16 on a long grid, for compute capability 9.0. Programs per
multiprocessor follow from its 65,536 registers, 227 KiB of shared memory and 2,048 threads. Instructions per score and
asynchronous copies are those of the loop without masks. Candidates that the file has for this version of Triton are not
compiled again; the file is written after each of them.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

from timing import environment, version
from tune import HALF, KERNELS, WIDTHS, trying

from vispe.attention.backends.triton.tiles import Tiles, table_for

sys.path.insert(1, str(Path(__file__).resolve().parents[2]))
from tests.attention.triton.compiled.calls import LaunchCase  # (tests are not installed)
from tests.attention.triton.compiled.machine_code import plain_loop, reports

RESULTS = Path(__file__).parents[1] / "results"
REGISTERS, SHARED, THREADS = 65536, 227 * 1024, 2048


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=KERNELS)
    parser.add_argument("--widths", nargs="+", type=int, choices=WIDTHS, default=(64, 128))
    parser.add_argument("--out", type=Path, default=RESULTS / "tile_counts.json")
    args = parser.parse_args()
    rows = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
    triton = version("triton")
    for kernel, width in product(args.kernels, args.widths):
        current = table_for("half")[kernel, "long", "float32"][width]
        for size in dict.fromkeys([current, *(Tiles(*c) for c in HALF[kernel, width])]):
            key = {"kernel": kernel, "width": width, "tiles": list(size), "triton": triton}
            if any(key.items() <= row.items() for row in rows):
                continue
            rows.append({**key, **counts(kernel, width, size)})
            print(rows[-1], flush=True)
            text = ",\n  ".join(json.dumps(row) for row in rows)
            origin = json.dumps(environment("triton"))
            args.out.write_text(f'{{\n "environment": {origin},\n "rows": [\n  {text}\n ]\n}}\n')


def counts(kernel: str, width: int, size: Tiles) -> dict[str, Any]:
    """Return the resources of a kernel with these tiles, or the error of the compiler."""
    key = {"dtype": "half", "tokens": "long", "strip": "float32", "kernel": kernel, "width": width}
    with trying(key, size, older=False):
        try:
            report = reports(LaunchCase("grid", "table", "bfloat16", width, "long", 90))[kernel]
        except Exception as error:  # tiles that do not fit
            return {"error": f"{type(error).__name__}: {error}"[:200]}
    loop, threads = plain_loop(report), 32 * size.warps
    # registers are allocated in groups of 8 per thread
    registers = -(-report["registers"] // 8) * 8
    programs = min(
        REGISTERS // (registers * threads), SHARED // (report["shared"] + 1024), THREADS // threads
    )
    return {
        "registers": report["registers"], "spilled_bytes": report["spilled"], "loop_spills": loop["spills"],
        "shared_kib": round(report["shared"] / 1024, 1), "programs": programs, "per_score": loop["per_score"],
        "copies": loop["wide_copies"], "matrix": loop["matrix"],
    }  # fmt: skip


if __name__ == "__main__":
    main()
