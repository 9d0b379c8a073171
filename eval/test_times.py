"""CPU seconds and number of tests per package and file of the test suite.

python eval/test_times.py [arguments of pytest] [--depth 2] [--json results.json]

Runs pytest in one process. Times are CPU times of the process and of the subprocesses that it has waited for, so
other work on the machine does not count. `collect` is the import of the test files, `tests` includes fixtures and
pytest's own cost per test; a fixture of the session counts for the first file that requests it. Extra arguments go to
pytest: `python eval/test_times.py tests/grid -m slow`. The last rows of the table are the ten slowest tests.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections import defaultdict
from importlib import metadata
from pathlib import Path

import pytest
from checkout import ROOT


def cpu() -> float:
    """Return the CPU seconds of this process and its finished subprocesses."""
    return sum(os.times()[:4])


class Recorder:
    """Plugin of pytest that records the CPU time of each file and test."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, float]] = defaultdict(
            lambda: {"items": 0, "collect": 0.0, "tests": 0.0}
        )
        self.tests: dict[str, float] = {}
        self.last = cpu()

    def _passed(self) -> float:
        now = cpu()
        passed, self.last = now - self.last, now
        return passed

    @pytest.hookimpl(hookwrapper=True)
    def pytest_make_collect_report(self, collector):
        start = self._passed()  # belongs to the session, not to a file
        yield
        if isinstance(collector, pytest.File):
            self.files[collector.nodeid]["collect"] += self._passed()
        else:
            self.files["(session)"]["collect"] += start + self._passed()

    def pytest_collection_finish(self):
        self.files["(session)"]["collect"] += self._passed()

    def pytest_runtest_logfinish(self, nodeid):
        """Charge the time since the end of the previous test to this one."""
        name, seconds = nodeid.partition("::")[0], self._passed()
        self.files[name]["items"] += 1
        self.files[name]["tests"] += seconds
        self.tests[nodeid] = seconds


def package(name: str, depth: int) -> str:
    """Return the first folders of a file of tests; its name if it has fewer."""
    return "/".join(name.split("/")[:depth])


def sums(files: dict[str, dict[str, float]], depth: int) -> dict[str, list[float]]:
    """Return items and CPU seconds of collection and tests per package, the slowest first."""
    rows: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for name, record in files.items():
        for key in (package(name, depth), "all"):
            for k, value in enumerate((record["items"], record["collect"], record["tests"])):
                rows[key][k] += value
    return dict(sorted(rows.items(), key=lambda row: -sum(row[1][1:])))


def table(rows: dict[str, list[float]]) -> str:
    """Return the sums as text."""
    lines = [f"{'items':>7} {'collect':>8} {'tests':>8} {'sum':>8}"]
    for name, (items, collect, tests) in rows.items():
        lines.append(f"{items:7.0f} {collect:8.1f} {tests:8.1f} {collect + tests:8.1f}  {name}")
    return "\n".join(lines)


def write(path: Path, rows: dict[str, list[float]], slowest: list[tuple[str, float]]) -> None:
    """Write the sums, the slowest tests and what they depend on."""
    versions = {p: metadata.version(p) for p in ("torch", "timm", "transformers", "pytest")}
    record = {
        "columns": ["items", "collect", "tests"],
        "packages": {name: [round(v, 1) for v in row] for name, row in rows.items()},
        "slowest": {name: round(seconds, 1) for name, seconds in slowest},
        "versions": versions,
        "python": platform.python_version(),
    }
    path.write_text(
        "{\n" + ",\n".join(f" {json.dumps(k)}: {json.dumps(v)}" for k, v in record.items()) + "\n}\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--depth", type=int, default=2, help="folders per row of the table")
    parser.add_argument("--json", type=Path, help="file for the sums and the 30 slowest tests")
    options, words = parser.parse_known_args()
    recorder = Recorder()
    os.chdir(ROOT)
    status = pytest.main(["-p", "no:cacheprovider", "-p", "no:xdist", *words], plugins=[recorder])
    rows = sums(recorder.files, options.depth)
    slowest = sorted(recorder.tests.items(), key=lambda test: -test[1])
    print(table(rows))
    for name, seconds in slowest[:10]:
        print(f"{seconds:33.1f}  {name}")
    if options.json:
        write(options.json, rows, slowest[:30])
    return int(status)


if __name__ == "__main__":
    raise SystemExit(main())
