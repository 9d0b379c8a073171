"""Shared helpers of the figures of records: means and floors, titles, and parts."""

from __future__ import annotations

from collections.abc import Iterable

from vispe.errors import counted
from vispe.evaluate.rotation.record_key import EVERY_POSE, FITTED_ONCE, FULL, POSITION_CODE
from vispe.evaluate.rotation.records import METRICS, Measurement
from vispe.evaluate.rotation.verdict import INVARIANT, MILD
from vispe.utils.report.figure_style import BLUE, GREY, ORANGE
from vispe.utils.report.table import capitalize

LIMITS = ((INVARIANT, "invariant"), (MILD, "mild"), (float("inf"), "strong"))
"""Upper bounds of the zones of the verdict, and their names."""


def mean(row: Measurement | None) -> float:
    """Return the mean over images; NaN if the record is missing or has no number."""
    return float("nan") if row is None else row.summary().mean


def floor(row: Measurement) -> float:
    """Return the mean floor over images; NaN without one."""
    return float("nan") if row.floor_mean is None else row.floor_mean


def images_of(rows: Iterable[Measurement]) -> str:
    """Return a label such as '1 image' or 'mean of 7 images, lines: 95 % interval'."""
    n = max((row.summary().n for row in rows), default=0)
    if n < 2:
        return counted(n, "image")
    return f"mean of {counted(n, 'image')}" + ("" if n < 5 else ", lines: 95 % interval")


def title_of(metric: str) -> str:
    """Return the capitalised name of a metric, mIoU unchanged."""
    words = METRICS[metric].title
    return words if words.startswith("mIoU") else capitalize(words)


def parts_of(metric: str) -> tuple[tuple[str, str, str], ...]:
    """Return the parts of a metric that are plotted together: (part, label, colour)."""
    if metric == "error":
        return ((FULL, "image transformed", BLUE), (POSITION_CODE, "position code alone", ORANGE))
    return (
        (FULL, "labels", BLUE),
        (EVERY_POSE, f"labels, {EVERY_POSE}", ORANGE),
        (FITTED_ONCE, "clusters of features", GREY),
    )
