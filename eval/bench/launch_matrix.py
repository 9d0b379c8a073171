"""Registers, spills and shared memory of all kernels that `attention(..., backend="triton")` launches, without a GPU.

    python eval/bench/launch_matrix.py RECORDS --shard 0/2    # in as many processes as there are cores
    python eval/bench/launch_matrix.py RECORDS --summary

Calls are all those of the long tests: families of kernels with each bias, dtypes, head dims, lengths, compute
capabilities 8.0 and 9.0, forward and backward, launched by vispe's own code through a stand-in driver
(`tests/attention/triton`). Each shard appends its records to a file of the folder RECORDS, and `--summary` adds them to
RESULTS. Both skip calls that are done, so an interrupted run goes on, on another machine as well. Records and RESULTS
of other kernels, tiles or calls do not count; use another folder for another Triton. All 6,732 calls take three to
six hours of two cores; after a change of tiles, Triton's cache has the kernels that did not change. Restart every half
hour, since the memory of Triton grows by 0.1 GB a minute.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from timing import environment

sys.path.insert(1, str(Path(__file__).resolve().parents[2]))
from tests.attention.triton.compiled.calls import LaunchCase, all_cases  # (tests are not installed)
from tests.attention.triton.compiled.stand_in_driver import SHARED
from tests.attention.triton.compiled.test_launches import compiled, most_spilled

ROOT = Path(__file__).resolve().parents[2]
Json = dict[str, Any]
LENGTHS = ("long", "short", "rows")  # in this order, so that each bias, dtype and head_dim has a record early
RESOURCES = ("registers", "spilled", "shared")
KERNELS = ROOT / "vispe/attention/backends/triton"
CALLS = ROOT / "tests/attention/triton/compiled/calls.py"


def version_of_kernels() -> str:
    """Return a hash of kernels, tiles and calls, without comments."""
    code = [ast.dump(ast.parse(path.read_text())) for path in (*sorted(KERNELS.rglob("*.py")), CALLS)]
    return hashlib.sha256("".join([*code, (KERNELS / "tiles.json").read_text()]).encode()).hexdigest()[:16]


def recorded(folder: Path) -> dict[str, Json]:
    """Return the records of these kernels in a folder, by the name of the call."""
    version = version_of_kernels()
    lines = [line for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]
    records = map(json.loads, lines)
    return {record["case"]: record for record in records if record["version"] == version}


def calls_of(length: str) -> list[LaunchCase]:
    """Return all calls of a length; neighbours share kernels, which Triton caches."""
    return [case for case in all_cases() if case.length == length]


def read(results: Path) -> Json:
    """Return results of these kernels and this Triton, or none."""
    known = json.loads(results.read_text()) if results.exists() else {}
    version = known.get("kernels"), known.get("environment", {}).get("versions", {}).get("triton")
    current = version_of_kernels(), environment("triton")["versions"]["triton"]
    return known if version == current else {"done": {}, "launches": {}, "rows": []}


def done(results: Json) -> set[str]:
    """Return names of the calls of results, from their ranges."""
    ranges = [(calls_of(length), span) for length, spans in results["done"].items() for span in spans]
    return {str(case) for calls, (start, stop) in ranges for case in calls[start:stop]}


def ranges_of(flags: list[bool]) -> list[list[int]]:
    """Return the ranges [start, stop) in which flags are true."""
    edges = [i for i in range(len(flags) + 1) if (i > 0 and flags[i - 1]) != (i < len(flags) and flags[i])]
    return [list(pair) for pair in zip(edges[::2], edges[1::2], strict=True)]


def record(folder: Path, results: Path, shard: int, shards: int, minutes: float) -> None:
    """Compile the calls of a shard that are not done, for at most `minutes`."""
    start, before, version = time.monotonic(), done(read(results)), version_of_kernels()
    for length in LENGTHS:
        known = before | recorded(folder).keys()
        rest = [case for case in calls_of(length) if str(case) not in known]
        for case in rest[len(rest) * shard // shards : len(rest) * (shard + 1) // shards]:
            if time.monotonic() - start > 60 * minutes:
                return
            try:
                row: Json = {"case": str(case), "kernels": compiled(case)}
            except Exception as error:  # the summary counts failures
                row = {"case": str(case), "error": f"{type(error).__name__}: {error}"[:500]}
            with (folder / f"{shard}of{shards}.jsonl").open("a") as file:
                file.write(f"{json.dumps(row | {'version': version})}\n")


def summary(folder: Path, results: Path) -> Json:
    """Return the number of calls and failures, and the largest resources per family, dtype, head_dim and capability."""
    before, records = read(results), recorded(folder)
    known, spilled = done(before), list(before.get("too_many_spills", ()))
    rows = {(row["family"], row["dtype"], row["head_dim"], row["arch"]): row for row in before["rows"]}
    launches = {"all": 0, "without_spills": 0, "too_much_shared_memory": 0} | before["launches"]
    failed: list[str] = []
    for case in all_cases():
        if str(case) in known or str(case) not in records:
            continue
        if "error" in records[str(case)]:
            failed.append(str(case))
            continue
        known.add(str(case))
        kernels = records[str(case)]["kernels"]
        launches["all"] += len(kernels)
        launches["without_spills"] += sum(kernel["spilled"] == 0 for kernel in kernels)
        launches["too_much_shared_memory"] += sum(kernel["shared"] > SHARED[case.arch] for kernel in kernels)
        group = {"family": case.family, "dtype": case.dtype, "head_dim": case.head_dim, "arch": case.arch}
        row = rows.setdefault(
            tuple(group.values()), group | {"calls": 0} | {f"max_{name}": 0 for name in RESOURCES}
        )
        row["calls"] += 1
        if any(kernel["spilled"] > most_spilled(case) for kernel in kernels):
            spilled.append(str(case))
        for name in RESOURCES:
            row[f"max_{name}"] = max(row[f"max_{name}"], *(kernel[name] for kernel in kernels))
    return {
        "environment": environment("triton"),
        "kernels": version_of_kernels(),
        "calls": sum(1 for _ in all_cases()),
        "compiled": len(known),
        "failed": failed,
        "too_many_spills": spilled,
        "done": {length: ranges_of([str(case) in known for case in calls_of(length)]) for length in LENGTHS},
        "launches": launches,
        "rows": [row for _, row in sorted(rows.items())],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("records", type=Path)
    parser.add_argument("--results", type=Path, default=ROOT / "eval/results/launch_matrix.json")
    parser.add_argument("--shard", default="0/1", help="number of this process / processes")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--summary", action="store_true", help="add the records to RESULTS")
    args = parser.parse_args()
    args.records.mkdir(parents=True, exist_ok=True)
    if args.summary:
        result = summary(args.records, args.results)
        rows = ",\n  ".join(map(json.dumps, result.pop("rows")))
        head = ",\n ".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in result.items())
        args.results.write_text(f'{{\n {head},\n "rows": [\n  {rows}\n ]\n}}\n')
    else:
        shard, shards = map(int, args.shard.split("/"))
        record(args.records, args.results, shard, shards, args.minutes)
