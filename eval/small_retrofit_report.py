"""JSON file of `small_retrofit.py`: rows that are added one by one, and their summary over seeds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vispe.train.evaluate.criteria import BLANKED, CORNER, COSINE, GONE, RANK, READABLE

LIMITS = {
    "R² before": READABLE, "R² after": GONE, "blanked": BLANKED, "cosine": COSINE, "rank": RANK, "corner": CORNER
}  # fmt: skip
LEAST = ("R² before", "cosine", "rank")
"""Criteria whose limit is the least that is requested; of the others it is the most."""


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return mean, least and most of each criterion over the seeds, and whether all of them meet its limit."""
    result = []
    for data, student in dict.fromkeys((r["data"], r["student"]) for r in rows):
        student_rows = [r for r in rows if (r["data"], r["student"]) == (data, student)]
        line: dict[str, Any] = {"data": data, "student": student, "seeds": [r["seed"] for r in student_rows]}
        if student == "teacher":
            for key in ("untrained", "trained"):
                line[f"R² {key}"] = spread([r[key]["r2"] for r in student_rows])
        else:
            for key, limit in LIMITS.items():
                values = [r["criteria"][key] for r in student_rows if r["criteria"][key] is not None]
                least = key in LEAST
                if values:
                    met = all(v >= limit if least else v <= limit for v in values)
                    line[key] = {**spread(values), "limit": limit, "met by all": met}
        result.append(line)
    return result


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return mean, least and most."""
    return {"mean": float(np.mean(values)), "least": min(values), "most": max(values)}


def rows_of(file: Path) -> list[dict[str, Any]]:
    """Return the rows that are there."""
    return json.loads(file.read_text())["rows"] if file.exists() else []


def add(file: Path, row: dict[str, Any], head: dict[str, Any]) -> None:
    """Add a row to the results, below what all rows have in common."""
    write(file, {**head, "limits": LIMITS, "rows": [*rows_of(file), row]})


def write(file: Path, report: dict[str, Any]) -> None:
    """Write a JSON file that is complete or not there at all: a line for each row."""
    partial_file = file.with_name(f"{file.name}.part")
    text = json.dumps(without_paths(rounded(report)), ensure_ascii=False, separators=(",", ":"))
    partial_file.write_text(text.replace('{"data":', '\n{"data":') + "\n", encoding="utf-8")
    partial_file.replace(file)


def without_paths(value: Any) -> Any:
    """Return JSON values in which the path of a file or folder of this machine is its last two parts."""
    if isinstance(value, dict):
        return {k: without_paths(v) for k, v in value.items()}
    if isinstance(value, list):
        return [without_paths(v) for v in value]
    if isinstance(value, str) and Path(value).is_absolute():
        return "/".join(Path(value).parts[-2:])
    return value


def rounded(value: Any) -> Any:
    """Return JSON values with five digits of every number; None for what is not finite."""
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(v) for v in value]
    if isinstance(value, float):
        return float(f"{value:.5g}") if np.isfinite(value) else None
    return value
