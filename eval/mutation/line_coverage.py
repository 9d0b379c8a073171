"""Pytest plugin: line coverage of vispe per test file.

    PYTHONPATH=eval/mutation VISPE_LINES=lines.json python -m pytest -p line_coverage -n 2 --dist loadfile

Each process writes its part, `lines.json.NAME`; `merged` joins the parts. Lines that run during imports or in
subprocesses are not attributed to a test file. Needs the package coverage.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path

import pytest


class LineCoverage:
    """Collect lines of vispe by test file."""

    def __init__(self, root: Path, out: Path) -> None:
        import coverage  # needed here only, so that the program starts without it

        self.root, self.out = root, out
        self.context = ""
        self.collector = coverage.Coverage(
            data_file=None, source=[str(root / "vispe")], config_file=False, messages=False
        )

    def start(self) -> None:
        """Start to collect; before tests run, so that imports of the test files do not count."""
        self.collector.start()
        self.collector.switch_context("import")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Switch to the test file of the next test."""
        if (name := nodeid.partition("::")[0]) != self.context:
            self.context = name
            self.collector.switch_context(name)

    def pytest_sessionfinish(self) -> None:
        """Write the lines of each test file."""
        self.collector.stop()
        data = self.collector.get_data()
        files: dict[str, dict[str, list[int]]] = defaultdict(dict)
        for source in data.measured_files():
            name = str(Path(source).relative_to(self.root))
            lines: dict[str, list[int]] = defaultdict(list)
            for line, contexts in data.contexts_by_lineno(source).items():
                for context in contexts:
                    lines[context].append(line)
            for context in set(lines) - {"", "import"}:
                files[context][name] = sorted(lines[context])
        worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
        self.out.with_name(f"{self.out.name}.{worker}").write_text(json.dumps(files))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start in the processes that run tests: not in the controller of xdist."""
    if getattr(session.config.option, "numprocesses", None):
        return
    plugin = LineCoverage(session.config.rootpath, Path(os.environ["VISPE_LINES"]).resolve())
    session.config.pluginmanager.register(plugin, "vispe_line_coverage")
    plugin.start()


def merged(out: Path) -> dict[tuple[str, int], set[str]]:
    """Return the test files of each line (source file, number) from the parts of all processes."""
    tests: dict[tuple[str, int], set[str]] = defaultdict(set)
    for part in out.parent.glob(f"{out.name}.*"):
        for test, sources in json.loads(part.read_text()).items():
            for source, lines in sources.items():
                for line in lines:
                    tests[source, line].add(test)
    return tests
