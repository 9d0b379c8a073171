"""Stages of `eval/bench/first.py`: results on disk, and no remaining process."""

import importlib.util
import os
import sys
import time
from pathlib import Path

import pytest

FILE = Path(__file__).parents[3] / "eval/bench/stages.py"
# a shell starts at once, so that a short limit is enough
SLOW = 'sleep 60 & echo $! > "$0"; echo started; wait'


@pytest.fixture(scope="module")
def stages():
    spec = importlib.util.spec_from_file_location("stages_of_first", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_results_are_written_immediately(stages, tmp_path):
    path = tmp_path / "kernels.jsonl"
    results = stages.Results(path)
    results["forward"] = 1.5
    assert stages.Results(path) == {"forward": 1.5}
    with path.open("a") as file:
        file.write('\n{"grad_q": 2.')  # the process ended while it wrote
    results = stages.Results(path)
    assert results == {"forward": 1.5}
    results["grad_q"] = [2.5]
    assert stages.Results(path) == {"forward": 1.5, "grad_q": [2.5]}


def test_results_without_a_file(stages):
    results = stages.Results()
    results["forward"] = 1.5
    assert results == {"forward": 1.5}


def test_exit_status_and_log(stages, tmp_path):
    log = tmp_path / "log"
    assert stages.run_limited([sys.executable, "-c", "print(1); raise SystemExit(3)"], log, 60) == 3
    assert log.read_text() == "1\n"


def test_a_timeout_ends_all_processes_of_a_stage(stages, tmp_path):
    pid, log = tmp_path / "pid", tmp_path / "log"
    assert stages.run_limited(["sh", "-c", SLOW, pid], log, 1) is None
    assert log.read_text() == "started\n"
    child = int(pid.read_text())
    for _ in range(100):
        if not is_running(child):
            break
        time.sleep(0.05)
    assert not is_running(child)


def is_running(pid):
    """Return whether a process exists and is not a zombie."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
