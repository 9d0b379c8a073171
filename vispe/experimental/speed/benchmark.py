"""Runner of the benchmark: correctness checks, then one record after another, with a resumable results file."""

from __future__ import annotations

import gc
import json
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vispe.errors import InputError, VispeError
from vispe.experimental.speed.case_inputs import CaseInputs
from vispe.experimental.speed.cases import STRUCTURED, BenchmarkPlan, Case, Mode
from vispe.experimental.speed.compile_latency import new_grid
from vispe.experimental.speed.contenders import Contender, contenders, ours
from vispe.experimental.speed.correctness import line, planned_checks, run_check
from vispe.experimental.speed.environment import environment
from vispe.experimental.speed.timing import measure
from vispe.utils.files import atomic_path

TRIES = 2  # max attempts at a record that terminated the process
LATER = 4  # number of cases that precede slow contenders
Task = tuple[Case, Mode, Contender]


class Bench:
    """The measurements of one device.

    Args:
        plan: what to measure.
        device: 'cuda' or 'cpu'.
        path: JSON results file, from which the run resumes; None stores nothing.
        fresh: ignore the contents of the file.
        minutes: time limit, checked before each record; None for no limit.
        say: called with lines of progress.
        extra: additional entries of the environment.

    Raises:
        InputError: the file has results of other versions or another machine.
        VispeError: the device failed during `run`.

    Example:
        >>> from vispe.experimental.speed.cases import plan_for
        >>> bench = Bench(plan_for("dry", "cpu"), "cpu")
        >>> bench.state["rows"], len(bench.tasks()) > 0
        ([], True)
    """

    def __init__(
        self,
        plan: BenchmarkPlan,
        device: str,
        path: Path | None = None,
        *,
        fresh: bool = False,
        minutes: float | None = None,
        say: Callable[[str], None] = lambda text: None,
        extra: dict[str, Any] | None = None,
    ) -> None:
        self.plan, self.device, self.path, self.say = plan, device, path, say
        self.end = time.monotonic() + 60 * (1e9 if minutes is None else minutes)
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        self.backend = "triton" if device != "cpu" or interpreted else "auto"
        facts = environment(device) | (extra or {})
        self.state: dict[str, Any] = {"environment": facts, "checks": [], "rows": []}
        if path is not None and path.exists() and not fresh:
            self._resume(json.loads(path.read_text()))

    def _resume(self, previous: dict[str, Any]) -> None:
        """Load the records of an earlier run; those of vispe only if the kernels are unchanged."""
        now, then = self.state["environment"], previous["environment"]
        for key in ("versions", "device", "clock", *(["cpu"] if self.device == "cpu" else [])):
            mine, theirs = ({k: v for k, v in e[key].items() if k != "vispe"} if key == "versions" else e[key]
                            for e in (now, then))  # fmt: skip
            if mine != theirs:
                raise InputError(
                    f"Bench: {self.path} was measured with {key} {theirs}, got {mine}. Use a new file."
                )
        same = then["kernels"] == now["kernels"]
        self.state["checks"] = previous["checks"] if same else []
        self.state["rows"] = [r for r in previous["rows"] if same or not r["contender"].startswith("vispe")]
        rest = ("running", "new_grid") if same else ("running",)
        self.state |= {key: previous[key] for key in rest if key in previous}

    def check(self) -> bool | None:
        """Run the missing checks; return whether all passed, None if the time limit was reached before."""
        done = {row_key(c["dtype"], f"{c['grid']} {c['width']}", c["bias"]) for c in self.state["checks"]}
        for record in planned_checks(self.plan, self.device != "cpu"):
            if row_key(record["dtype"], f"{record['grid']} {record['width']}", record["bias"]) in done:
                continue
            if time.monotonic() > self.end:
                return None
            result = run_check(record, self.device, self.backend)
            self.say(line(result))
            self.state["checks"].append(result)
            self.save()
        return all(c["passed"] for c in self.state["checks"])

    def tasks(self) -> list[Task]:
        """Return all tasks in order of importance."""
        all_contenders = contenders(self.plan, self.device)
        ranked: list[tuple[int, Task]] = []
        for index, case in enumerate(self.plan.cases):
            ranked += [
                (index + (LATER if contender.slow else 0), (case, mode, contender))
                for mode in (*self.plan.modes, *(STRUCTURED if index < self.plan.structured else ()))
                for contender in all_contenders
                if mode in contender.modes
            ]
        tasks = [task for _, task in sorted(ranked, key=lambda pair: pair[0])]
        largest = Contender("vispe, largest", "table", ours("table"))
        extra: list[Task] = [(case, "table", largest) for case in self.plan.largest]
        first = sum(task[0] == self.plan.cases[0] for task in tasks)  # early, so that short runs include them
        return tasks[:first] + extra + tasks[first:]

    def run(self) -> int:
        """Measure missing records until the time limit, and return the number of records still missing.

        Raises:
            VispeError: the device is unusable after a failure. Run again to continue.
        """
        tasks = self.tasks()
        todo = [t for t in tasks if task_key(t) not in self._done()]
        setup: CaseInputs | Exception | None = None
        last: tuple[Case, Mode] | None = None
        for count, (case, mode, contender) in enumerate(todo):
            if time.monotonic() > self.end:
                break
            if (case, mode) != last:
                setup, last = None, (case, mode)
                setup = self._setup(case, mode)
            row = self._row(setup, case, mode, contender)
            self.state["rows"].append(row)
            self.state.pop("running", None)
            self.save()
            shown = row.get("failure") or f"{row['ms']:.4g} ms, error {row['error']:.1e}"
            self.say(f"{count + 1}/{len(todo)} {case} {mode}: {contender.name}: {shown}")
            if row.get("lost"):
                raise VispeError(
                    f"Bench: the device failed in {contender.name}. Run again to continue after it."
                )
        if self.backend == "triton" and "new_grid" not in self.state and time.monotonic() < self.end:
            self.state["new_grid"] = new_grid(self.plan, self.device)
            self.save()
        return len({task_key(t) for t in tasks} - self._done())

    def _done(self) -> set[str]:
        return {row_key(r["case"], r["mode"], r["contender"]) for r in self.state["rows"]}

    def _setup(self, case: Case, mode: Mode) -> CaseInputs | Exception:
        """Return the inputs of a case, or the out-of-memory error."""
        if not self.plan.dry:
            gc.collect()
        try:
            return CaseInputs(case, mode, self.device, self.backend, self.plan.dry)
        except torch.OutOfMemoryError as error:
            return error.with_traceback(None)  # the traceback would keep the tensors alive

    def _row(
        self, setup: CaseInputs | Exception | None, case: Case, mode: Mode, contender: Contender
    ) -> dict[str, Any]:
        """Measure one record; failures are stored in it."""
        row: dict[str, Any] = {"case": str(case), "mode": mode, "contender": contender.name}
        key = row_key(str(case), mode, contender.name)
        row |= {"tokens": case.tokens, "batch": case.batch, "heads": case.heads, "width": case.width}
        row |= {"dtype": case.dtype, "exact": contender.exact}
        tries = 1 + (self.state["running"]["tries"] if self.state.get("running", {}).get("key") == key else 0)
        if tries > TRIES:
            return {**row, "failure": f"the process ended {TRIES} times while this ran"}
        self.state["running"] = {"key": key, "tries": tries}
        self.save()
        few = contender.name.endswith("largest")
        plan = replace(self.plan, reps=min(3, self.plan.reps)) if few else self.plan
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                if not isinstance(setup, CaseInputs):
                    raise setup or VispeError("no inputs")
                return {**row, **measure(contender, setup, plan)}
            except Exception as error:  # failures are recorded as results
                why = [
                    str(w.message).strip().splitlines()[0]
                    for w in warned
                    if issubclass(w.category, UserWarning)
                ]
                text = str(error).strip().splitlines()
                row["failure"] = f"{type(error).__name__}: {text[0] if text else ''}"[:300]
                row |= {"warnings": list(dict.fromkeys(why))[:6]} if why else {}
        return row | ({"lost": True} if self._lost() else {})

    def _lost(self) -> bool:
        """Return whether the device is unusable after an error."""
        if self.device == "cpu":
            return False
        try:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.synchronize()
        except RuntimeError:
            return True
        return False

    def save(self) -> None:
        """Write the state to the results file, if there is one."""
        if self.path is None:
            return
        rows = ",\n  ".join(json.dumps(r) for r in self.state["rows"])
        rest = json.dumps({k: v for k, v in self.state.items() if k != "rows"}, indent=1)
        text = f'{rest[:-2]},\n "rows": [\n  {rows}\n ]\n}}\n'
        with atomic_path(self.path, force=True) as partial:
            partial.write_text(text)


def task_key(task: Task) -> str:
    """Return the key of the record of a task."""
    return row_key(str(task[0]), task[1], task[2].name)


def row_key(case: str, mode: str, contender: str) -> str:
    """Return the key of a record."""
    return f"{case} | {mode} | {contender}"
