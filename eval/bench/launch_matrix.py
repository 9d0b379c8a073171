"""Registers, spills and shared memory of all kernels that `attention(..., backend="triton")` launches, without a GPU.

    python eval/bench/launch_matrix.py RECORDS --shard 0/2    # in as many processes as there are cores
    python eval/bench/launch_matrix.py RECORDS --summary eval/results/launch_matrix.json

Calls are all those of the long tests: families of kernels with each bias, dtypes, head dims, lengths, compute
capabilities 8.0 and 9.0, forward and backward, launched by vispe's own code through a stand-in driver
(`tests/attention/triton`). Each shard appends its records to a file of the folder RECORDS and skips calls that have
one, so an interrupted run goes on; delete the folder after a change of the kernels. All 6,732 calls take about seven
hours of two cores.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from timing import environment

sys.path.insert(1, str(Path(__file__).resolve().parents[2]))
from tests.attention.triton.compiled.calls import LaunchCase, all_cases  # (tests are not installed)
from tests.attention.triton.compiled.stand_in_driver import SHARED
from tests.attention.triton.compiled.test_launches import compiled

LENGTHS = ("long", "short", "rows")  # in this order, so that each bias, dtype and head_dim has a record early


def recorded(folder: Path) -> dict[str, dict[str, Any]]:
    """Return all records of a folder by the name of the call."""
    lines = [line for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]
    return {record["case"]: record for record in map(json.loads, lines)}


def record(folder: Path, shard: int, shards: int, minutes: float) -> None:
    """Compile the calls of a shard that have no record, for at most `minutes`."""
    start, cases = time.monotonic(), list(all_cases())
    for length in LENGTHS:
        # neighbours share kernels, which Triton caches
        stage = [case for case in cases if case.length == length]
        known = recorded(folder)
        for i, case in enumerate(stage):
            if i * shards // len(stage) != shard or str(case) in known:
                continue
            if time.monotonic() - start > 60 * minutes:
                return
            try:
                row: dict[str, Any] = {"case": str(case), "kernels": compiled(case)}
            except Exception as error:  # the summary counts failures
                row = {"case": str(case), "error": f"{type(error).__name__}: {error}"[:500]}
            with (folder / f"{shard}of{shards}.jsonl").open("a") as file:
                file.write(f"{json.dumps(row)}\n")


def summary(folder: Path) -> dict[str, Any]:
    """Return the number of calls and failures, and the largest resources per family, dtype, head_dim and capability."""
    records, cases = recorded(folder), list(all_cases())
    groups: dict[tuple[str, str, int, int], list[LaunchCase]] = defaultdict(list)
    for case in cases:
        if str(case) in records:
            groups[case.family, case.dtype, case.head_dim, case.arch].append(case)
    rows: list[dict[str, Any]] = []
    for (family, dtype, head_dim, arch), calls in sorted(groups.items()):
        kernels = [k for case in calls for k in records[str(case)].get("kernels", ())]
        rows.append({"family": family, "dtype": dtype, "head_dim": head_dim, "arch": arch, "calls": len(calls)}
                    | {f"max_{name}": max((k[name] for k in kernels), default=0)
                       for name in ("registers", "spilled", "shared")})  # fmt: skip
    launches = [
        (case, k)
        for calls in groups.values()
        for case in calls
        for k in records[str(case)].get("kernels", ())
    ]
    return {
        "environment": environment("triton"),
        "calls": len(cases),
        "compiled": sum("kernels" in records.get(str(case), ()) for case in cases),
        "failed": [str(case) for case in cases if "error" in records.get(str(case), ())],
        "lengths": {n: sum(str(c) in records for c in cases if c.length == n) for n in LENGTHS},
        "launches": len(launches),
        "launches_without_spills": sum(k["spilled"] == 0 for _, k in launches),
        "too_much_shared_memory": sum(k["shared"] > SHARED[case.arch] for case, k in launches),
        "rows": rows,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("records", type=Path)
    parser.add_argument("--shard", default="0/1", help="number of this process / processes")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--summary", type=Path)
    args = parser.parse_args()
    args.records.mkdir(parents=True, exist_ok=True)
    if args.summary is None:
        shard, shards = map(int, args.shard.split("/"))
        record(args.records, shard, shards, args.minutes)
    else:
        result = summary(args.records)
        rows = ",\n  ".join(map(json.dumps, result.pop("rows")))
        head = ",\n ".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in result.items())
        args.summary.write_text(f'{{\n {head},\n "rows": [\n  {rows}\n ]\n}}\n')
