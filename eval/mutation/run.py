"""Mutation testing of vispe: fraction of seeded faults that the fast tests detect.

    python eval/mutation/run.py [--faults 203] [--seed 0] [--out eval/results/mutation.json]

Samples faults of the syntax tree (faults.py) over seven packages, equally many in each. Each is applied to a copy of
the repository, and the test files that run the changed line are run until the first failure, the most specific first.
Needs the lines of a run of the fast tests (line_coverage.py), which this program records first and stores next to the
copy for later runs. Faults in lines without coverage survive. Triton kernels are excluded: they run in the Triton
interpreter, and `tests/attention/triton` compares them with the formulas. Results are written after each fault, and an
interrupted run resumes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from faults import Fault, faults
from line_coverage import merged

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("encodings", "attention", "grid", "multimodal", "hosts", "segment/classify", "images")
LIMIT = 300  # CPU seconds per fault
OUT_OF_TIME = (-signal.SIGXCPU, -signal.SIGALRM)  # endless, or too many tests: neither noticed nor missed


def main() -> None:
    """Sample the faults, then run the tests of each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=203, help="number of faults, over all packages")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--work", type=Path, default=Path("mutation"), help="folder of the copies and lines")
    parser.add_argument("--out", type=Path, default=ROOT / "eval/results/mutation.json")
    args = parser.parse_args()
    work = args.work.resolve()
    copies = [copied(work / f"copy{k}") for k in range(args.processes)]
    commit = environment()["commit"]
    if not list(work.glob("lines.json.*")):
        record(copies[0], work)
        (work / "commit.txt").write_text(commit)
    if (recorded := (work / "commit.txt").read_text()) != commit:
        parser.error(f"the lines in {work} are those of commit {recorded}, got {commit}. Use another --work.")
    tests, seconds = merged(work / "lines.json"), durations(work / "fast.xml")
    report = json.loads(args.out.read_text()) if args.out.exists() else {"faults": []}
    if report["faults"] and report["environment"]["commit"] != commit:
        parser.error(
            f"{args.out} has faults of commit {report['environment']['commit']}, got {commit}. Use another --out."
        )
    report["environment"] = environment()
    done = {key(fault) for fault in report["faults"]}
    todo = [f for f in sampled(args.faults, args.seed) if key(asdict(f)) not in done]
    preload()
    running: dict[int, tuple[Fault, Path]] = {}
    while todo or running:
        while todo and copies:
            fault, copy = todo.pop(0), copies.pop()
            running[started(fault, copy, ordered(fault, tests, seconds))] = fault, copy
        pid, status, usage = os.wait4(-1, 0)
        fault, copy = running.pop(pid)
        copies.append(copy)
        outcome = {
            "status": os.waitstatus_to_exitcode(status),
            "cpu_s": round(usage.ru_utime + usage.ru_stime, 1),
        }
        report["faults"].append(asdict(fault) | outcome | read_outcome(copy))
        print(json.dumps(report["faults"][-1]), flush=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(table(report["faults"]))


def key(fault: dict[str, Any]) -> tuple[Any, ...]:
    """Return the identity of a fault."""
    return tuple(fault[name] for name in ("path", "line", "column", "kind"))


def copied(folder: Path) -> Path:
    """Return a fresh copy of the committed files."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "x"], cwd=folder, input=archive, check=True)
    return folder


def record(copy: Path, work: Path) -> None:
    """Run the fast tests once, and store the lines and seconds of each test file."""
    command = ["-p", "line_coverage", "-n", "2", "--dist", "loadfile", f"--junitxml={work / 'fast.xml'}"]
    paths = os.pathsep.join((str(copy), str(ROOT / "eval/mutation")))
    subprocess.run(
        [sys.executable, "-m", "pytest", *command],
        cwd=copy,
        env=os.environ | {"PYTHONPATH": paths, "VISPE_LINES": str(work / "lines.json")},
        check=True,
    )


def durations(report: Path) -> dict[str, float]:
    """Return the seconds of each test file, from a report of pytest."""
    seconds: dict[str, float] = defaultdict(float)
    for case in ElementTree.parse(report).iter("testcase"):
        # tests.grid.test_grid.TestGrid -> tests/grid/test_grid.py
        words = case.attrib["classname"].split(".")
        last = max(k for k, word in enumerate(words) if word.startswith(("test_", "check_")))
        seconds["/".join(words[: last + 1]) + ".py"] += float(case.attrib["time"])
    return seconds


def sampled(count: int, seed: int) -> list[Fault]:
    """Return faults, equally many of each package, in a random order."""
    generator, chosen = random.Random(seed), []
    for package in PACKAGES:
        candidates = [
            fault
            for path in sorted((ROOT / "vispe" / package).rglob("*.py"))
            for fault in faults(str(path.relative_to(ROOT)), ROOT)
        ]
        chosen += generator.sample(candidates, count // len(PACKAGES))
    generator.shuffle(chosen)
    return chosen


def ordered(fault: Fault, tests: dict[tuple[str, int], set[str]], seconds: dict[str, float]) -> list[str]:
    """Return the test files that run a fault's lines: those of its package first, short ones before long ones.

    Lines without any, such as those that run while torch compiles, have the tests of their folder.
    """
    names = {
        name
        for line in (fault.statement, *range(fault.line, fault.end[0] + 1))
        for name in tests.get((fault.path, line), ())
    }
    package = "/".join(Path(fault.path).parts[1:3])
    if not names:
        folder = Path("tests", *Path(fault.path).parts[1:-1])
        names = {name for name in seconds if Path(name).is_relative_to(folder)}

    def order(name: str) -> tuple[bool, float]:
        return not name.startswith(f"tests/{package}"), seconds.get(name, 0.0)

    return sorted(names, key=order)


def preload() -> None:
    """Import the libraries that all tests use, once; vispe itself is imported by each process."""
    import numpy  # noqa: F401
    import pytest  # noqa: F401
    import sklearn.linear_model  # noqa: F401
    import skops.io  # noqa: F401
    import timm
    import torch
    import transformers  # noqa: F401

    torch.set_num_threads(1)
    timm.create_model("test_vit.r160_in1k")


def started(fault: Fault, copy: Path, names: list[str]) -> int:
    """Start the tests of a fault in a process of their own, and return its number."""
    (copy / "outcome.txt").unlink(missing_ok=True)
    if pid := os.fork():
        return pid
    status = 1
    try:
        status = tested(fault, copy, names)
    finally:
        os._exit(status)


def tested(fault: Fault, copy: Path, names: list[str]) -> int:
    """Run tests with a fault, and return pytest's exit status; 0 without tests."""
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT, LIMIT))
    signal.alarm(3 * LIMIT)
    os.chdir(copy)
    # the copy, not the repository that this program belongs to
    sys.path[:] = [str(copy), *(p for p in sys.path if p and not Path(p).is_relative_to(ROOT))]
    # stored byte code is compared by second and size, which a fault can leave unchanged
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    path = copy / fault.path
    source, times = path.read_text(), path.stat()
    for number, file in ((1, "outcome.txt"), (2, "errors.txt")):
        os.dup2(os.open(copy / file, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), number)
    if not names:
        return 0
    import pytest

    path.write_text(fault.applied(source))
    try:
        return int(pytest.main([*names, "-x", "--tb=line", "-p", "no:cacheprovider", "-p", "no:xdist"]))
    finally:
        sys.stdout.flush()
        path.write_text(source)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def read_outcome(copy: Path) -> dict[str, Any]:
    """Return the first failed test, from pytest's summary."""
    lines = (copy / "outcome.txt").read_text(errors="replace").splitlines()
    failed = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return {"test": failed[0].split()[1] if failed else None}


def environment() -> dict[str, Any]:
    """Return versions and commit; in a process of its own, as vispe must not be imported here."""
    code = "from timing import environment; import json; print(json.dumps(environment('transformers', 'pytest')))"
    paths = os.pathsep.join((str(ROOT), str(ROOT / "eval/bench")))
    text = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
    ).stdout
    return json.loads(text)


def table(rows: list[dict[str, Any]]) -> str:
    """Return the numbers of faults, detected faults and timeouts by package."""
    lines = ["| package | faults | noticed | out of time |", "|---|---|---|---|"]
    for package in (*PACKAGES, ""):
        tried = [row for row in rows if row["path"].startswith(f"vispe/{package}")]
        late = sum(row["status"] in OUT_OF_TIME for row in tried)
        noticed = sum(row["status"] != 0 for row in tried) - late
        lines.append(f"| {package or 'all'} | {len(tried)} | {noticed} | {late} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
