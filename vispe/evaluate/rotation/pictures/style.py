"""What the figures of this package share: axes in one style, rows that are wanted, and means with intervals.

matplotlib is imported when something is drawn.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from vispe.evaluate.rotation.rows import METRICS, Measurement
from vispe.evaluate.rotation.steps import EVERY_POSE
from vispe.evaluate.rotation.verdict import INVARIANT, MILD
from vispe.report.statistics import Summary, summarise
from vispe.report.style import BLUE, GREY, INK, ORANGE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LIMITS = ((INVARIANT, "invariant"), (MILD, "mild"), (float("inf"), "strong"))
"""Ends of the zones of the verdict, and their names."""


def mean(row: Measurement | None) -> float:
    """Return the mean over images; NaN where the row is missing or has no number."""
    return float("nan") if row is None else row.summary().mean


def floor(row: Measurement) -> float:
    """Return the mean floor over images; NaN without one."""
    return float("nan") if row.floor is None else summarise(row.floor).mean


def spans(found: Iterable[Summary | None]) -> np.ndarray:
    """Return intervals (n, 2), NaN where there is none because of too few images."""
    nan = (float("nan"), float("nan"))
    return np.array([nan if s is None or s.interval is None else s.interval for s in found]).reshape(-1, 2)


def whiskers(ax: Axes, x: Any, low_high: np.ndarray, *, across: bool = False, color: str = INK) -> None:
    """Draw intervals (n, 2) as lines without caps, upright or `across`; those that are NaN are left out."""
    known = np.isfinite(low_high).all(1)
    if known.any():
        lines = ax.hlines if across else ax.vlines
        lines(np.asarray(x, dtype=float)[known], *low_high[known].T, color=color, linewidth=1.3, zorder=4)


def images_of(rows: Iterable[Measurement]) -> str:
    """Return '1 image' or 'mean of 7 images', and whether there are intervals."""
    n = max((row.summary().n for row in rows), default=0)
    if n < 2:
        return f"{n} image{'s' * (n != 1)}"
    return f"mean of {n} images" + ("" if n < 5 else ", lines: 95 % interval")


def title_of(metric: str) -> str:
    """Return the name of a metric with a capital, but mIoU as it is."""
    words = METRICS[metric].title
    return words if words.startswith("mIoU") else words[0].upper() + words[1:]


def parts_of(metric: str) -> tuple[tuple[str, str, str], ...]:
    """Return the parts of a metric that are drawn side by side: (part, words, colour)."""
    if metric == "error":
        return (("full", "image turned", BLUE), ("position code", "position code alone", ORANGE))
    return (
        ("full", "labels", BLUE),
        (EVERY_POSE, f"labels, {EVERY_POSE}", ORANGE),
        ("clusters fitted once", "clusters of features", GREY),
    )
