"""Stages of `first.py`: processes with a time limit, whose results are written one by one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any


class Results(dict[str, Any]):
    """Results of a stage by name, each appended to a file when it is set; those of an interrupted run are loaded.

    Args:
        path: file with one JSON object per line; None stores nothing.
    """

    def __init__(self, path: Path | None = None) -> None:
        super().__init__()
        self.path = path
        for line in path.read_text().splitlines() if path is not None and path.exists() else ():
            # the last line of a killed process may be incomplete
            with suppress(json.JSONDecodeError):
                self.update(json.loads(line))

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        if self.path is not None:
            with self.path.open("a") as file:
                # the line break comes first, so that an incomplete line does not spoil this one
                file.write(f"\n{json.dumps({name: value})}")


def run_limited(command: Sequence[object], log: Path, seconds: float) -> int | None:
    """Run a command and return its exit status, or None if it took longer than `seconds`.

    All processes that it started are ended with it. Its output is written to `log`.
    """
    with log.open("w") as output:
        # a session of its own is also a process group of its own
        process = subprocess.Popen(
            list(map(str, command)), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
