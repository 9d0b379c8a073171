"""Markdown table of students: published numbers, teacher, blanked teacher and each student, met or missed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dinov2_evaluation.targets import UNSEEN, others, targets
from vispe.train.evaluate.criteria import Criterion
from vispe.utils.report.table import markdown_table

PUBLISHED = {"noise": (0.89, -0.83), "textures": (0.71, 0.32), "micrographs": (0.83, -0.23)}
"""R² before and after in the literature (arXiv 2603.16840 and its notebooks, ViT-S/14 with `alibi2d`, 118,000
photographs): other images and other sizes, so only the order of magnitude can be compared."""


LIKENESS = {
    "cosine_blanked": "cosine to the blanked teacher",
    "cosine_centred": "cosine less the mean over patches",
}
COLUMNS = {"filters": "filters", "teacher": "before", "blanked": "blanked"}


def markdown(reports: Sequence[Mapping[str, Any]]) -> str:
    """Return a table for each teacher and set of blanked channels: a column for each student.

    Args:
        reports: contents of the files of results.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for report in reports:
        settings = [report["teacher"], report["student"]["blanked"], report["extent"]]
        groups.setdefault(json.dumps(settings), []).append(report)
    return "\n\n".join(_table(group) for group in groups.values()) + "\n"


def _table(reports: Sequence[Mapping[str, Any]]) -> str:
    table = [["", "asked", "published", *COLUMNS, *(_name(r) for r in reports)]]
    met = [{c.key: c for c in targets(report["rows"])} for report in reports]
    groups: dict[str, list[str]] = {}
    for key in dict.fromkeys(key for by in met for key in by):
        groups.setdefault(key.rstrip("0123456789 "), []).append(key)  # all sizes in one line
    for plain, keys in groups.items():
        first = next(number for number, by in enumerate(met) if keys[0] in by)
        what, kind = [*plain.split(), ""][:2]
        one, known = met[first][keys[0]], [others(reports[first]["rows"], key) for key in keys]
        # with scribbles the limit is what the teacher reaches
        requested = {"corner": "at most the teacher's", "miou": "at least the teacher's"}.get(
            what, one.limit_text
        )
        published = " → ".join(_number(v, 2) for v in PUBLISHED[kind]) if what == "r2" else ""
        cells = [one.title.partition(" px")[0].rstrip("0123456789 ,"), requested, published]
        cells += [_numbers([k.get(side) for k in known]) for side in COLUMNS.values()]
        table.append([*cells, *(_judged([by[key] for key in keys if key in by]) for by in met)])
    table += _unlimited(reports)
    counts = (
        f"{_name(r)}: {sum(c.met for c in by.values())} of {len(by)}"
        for r, by in zip(reports, met, strict=True)
    )
    sizes = " and ".join(map(str, reports[0]["extent"]["sizes"]))
    met = ", ".join(counts)
    return f"{markdown_table(table)}\n\nTwo numbers in a cell are those at {sizes} px. Targets met: {met}."


def _judged(result: Sequence[Criterion]) -> str:
    """Return the numbers of a target at all sizes, and whether they meet its limit."""
    words = ["met" if c.met else "missed" for c in result]
    verdict = words[0] if len(set(words)) == 1 else " / ".join(words)
    return f"{_numbers([c.value for c in result])} {verdict}" if result else ""


def _unlimited(reports: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return lines of what has no limit: likeness less what all patches share, the pool, and rotated images."""
    lines = []
    for kind in (*UNSEEN, "pool"):
        own = [[r for r in report["rows"] if r.get("kind") == kind] for report in reports]
        if not any(own):
            continue
        gap = [""] * (1 + len(COLUMNS))
        for key, words in LIKENESS.items() if kind == "pool" else list(LIKENESS.items())[1:]:
            cells = [_numbers([float(np.mean(row[key])) for row in rows]) for rows in own]
            lines.append([f"{words}, {kind}", "", *gap, *cells])
        shares = [
            [np.array(r["rank"]["after"]) / np.array(r["rank_placeless"]) for r in rows] for rows in own
        ]
        cells = [_numbers([float(np.median(share)) for share in each]) for each in shares]
        words = "effective rank, share of the blanked teacher's without what a position has in all images"
        lines.append([f"{words}, {kind}", "", *gap, *cells])
        constant = _numbers([float(np.mean(row["cosine_constant"])) for row in next(filter(None, own))])
        lines.append(
            [f"cosine of what is the same in all patches, {kind}", "", *gap[1:], constant, *[""] * len(own)]
        )
    rotated = [[r["error"] for r in report["rows"] if r["question"] == "turned"] for report in reports]
    known = [_numbers([_mean(e.get(side)) for e in rotated[0]]) for side in COLUMNS.values()]
    cells = [_numbers([_mean(e["after"]) for e in errors]) for errors in rotated]
    return [*lines, ["D4 error (0 the same, 1.41 unrelated)", "", "", *known, *cells]]


def _mean(values: Sequence[float] | None) -> float | None:
    return None if values is None else float(np.mean(values))


def _numbers(values: Sequence[float | None]) -> str:
    return " / ".join(_number(v) for v in values if v is not None)


def _name(report: Mapping[str, Any]) -> str:
    return report["student"]["name"] + (" (quick: few images)" if report["quick"] else "")


def _number(value: float, digits: int = 3) -> str:
    return f"{value:.{digits}f}".replace("-", "\N{MINUS SIGN}")
