"""Runs golden cases through their adapters and compares every output with the tolerance of the case."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.golden.case import Case

NO_ADAPTER = "there is no adapter; write tests/golden/adapters/{}.py"


@dataclass
class Result:
    """Result of one case."""

    case: str
    status: str  # PASS or FAIL
    error: float
    tolerance: float
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.status} {self.case} {self.error:.3g} {self.tolerance:.3g} {self.reason}".rstrip()

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, JSON-able."""
        return asdict(self)


def run_case(path: Path) -> Result:
    """Run the case of one file."""
    try:
        case = Case(path)
    except Exception as error:
        return Result(
            path.stem, "FAIL", float("inf"), 0.0, f"cannot be read: {type(error).__name__}: {error}"
        )
    rtol = float(case.meta.get("tolerance", {}).get("rtol", 0.0))
    module = f"tests.golden.adapters.{case.encoding}"
    if importlib.util.find_spec(module) is None:
        return Result(case.name, "FAIL", float("inf"), rtol, NO_ADAPTER.format(case.encoding))
    try:
        return _compare(case, importlib.import_module(module), rtol)
    except Exception as error:
        return Result(case.name, "FAIL", float("inf"), rtol, f"{type(error).__name__}: {error}")


def _compare(case: Case, adapter: Any, rtol: float) -> Result:
    worst, problems, compared = 0.0, [], set()
    for route, outputs in adapter.run(case):
        unknown = set(outputs) - case.output_names
        if unknown:
            problems.append(f"{route}: unexpected outputs {sorted(unknown)}")
        for name in sorted(set(outputs) & case.output_names):
            compared.add(name)
            error, problem = _difference(case, name, outputs[name])
            worst = max(worst, error)
            if problem:
                problems.append(f"{route}: {name} {problem}")
    missing = case.output_names - compared
    if missing:
        problems.append(f"not computed: {sorted(missing)}")
    if case.unread():
        problems.append(f"not read: {case.unread()}")
    return Result(case.name, "FAIL" if problems else "PASS", worst, rtol, "; ".join(problems))


def _difference(case: Case, name: str, value: Any) -> tuple[float, str]:
    """Return the largest error relative to the largest expected magnitude, and the error message, or None."""
    actual = value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
    expected = case.outputs[name]
    if actual.shape != expected.shape:
        return float("inf"), f"has shape {actual.shape}, expected {expected.shape}"
    if expected.size == 0:
        return 0.0, ""
    close = case.close(actual, expected)
    actual, expected = actual.astype(np.float64), expected.astype(np.float64)
    same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    with np.errstate(invalid="ignore"):  # equal infinities have no difference
        error = np.where(same, 0.0, np.abs(actual - expected))
    scale = max(np.abs(expected[np.isfinite(expected)]).max(initial=0.0), 1e-12)
    relative = float(np.nan_to_num(error, nan=np.inf, posinf=np.inf).max() / scale)
    return relative, "" if close.all() else f"differs in {int((~close).sum())} of {close.size} values"
