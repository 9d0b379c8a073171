"""What the figures of this package share: axes in one style, rows that are wanted, and means with intervals.

matplotlib is imported when something is drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vispe.errors import InputError, require
from vispe.evaluate.plots import BLUE, GREY, INK, ORANGE
from vispe.evaluate.rotation.groups import EVERY_POSE
from vispe.evaluate.rotation.result import METRICS, Measurement
from vispe.evaluate.rotation.statistics import Summary, summarise
from vispe.evaluate.rotation.verdict import INVARIANT, MILD

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FAINT = "#E3E6E8"
LIMITS = ((INVARIANT, "invariant"), (MILD, "mild"), (float("inf"), "strong"))
"""Ends of the zones of the verdict, and their names."""


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure in inches that belongs to no window.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    require("matplotlib", "cli", "drawing a measurement")
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=130, facecolor="white", layout="constrained")


def axes(ax: Axes | None, width: float, height: float, *, polar: bool = False) -> Axes:
    """Return `ax`, or the axes of a new figure.

    Raises:
        InputError: polar axes are needed, and others were given, or the other way round.
    """
    if ax is None:
        require("matplotlib", "cli", "drawing a measurement")
        from matplotlib import pyplot  # so that a notebook shows it

        figure = pyplot.figure(figsize=(width, height), dpi=130, facecolor="white", layout="constrained")
        return figure.add_subplot(projection="polar" if polar else None)
    if (ax.name == "polar") != polar:
        wanted = "polar axes: figure.add_subplot(projection='polar')" if polar else "plain axes"
        raise InputError(f"This picture is drawn on {wanted}; got axes of the kind {ax.name!r}.")
    return ax


def wanted(rows: Sequence[Any], what: str, how: str) -> None:
    """Raise `InputError` when there is no row to draw."""
    if not rows:
        raise InputError(f"The result has no {what} to draw; measure them with {how}.")


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


def short(value: float) -> str:
    """Return a number as a figure shows it: two decimals, powers of ten where it is tiny, '-' for NaN."""
    if not np.isfinite(value):
        return "-"
    return f"{value:.0e}".replace("e-0", "e-") if 0 < abs(value) < 5e-3 else f"{value:.2f}"


def parts_of(metric: str) -> tuple[tuple[str, str, str], ...]:
    """Return the parts of a metric that are drawn side by side: (part, words, colour)."""
    if metric == "error":
        return (("full", "image turned", BLUE), ("position code", "position code alone", ORANGE))
    return (
        ("full", "labels", BLUE),
        (EVERY_POSE, f"labels, {EVERY_POSE}", ORANGE),
        ("clusters fitted once", "clusters of features", GREY),
    )


def clean(ax: Axes, grid: str = "") -> None:
    """Take frame and ticks away; draw a faint grid along 'x' or 'y'."""
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0, labelsize=9.5, colors=INK)
    if grid:
        ax.grid(axis=grid, color=FAINT, linewidth=0.8)
        ax.set_axisbelow(True)


def heading(ax: Axes, words: str, under: str = "") -> None:
    """Write a title flush left, and a softer line under it; no markup is read in either."""
    low = 26 if ax.name == "polar" else 6  # above the angle that stands on top
    ax.set_title(words, size=11.5, color=INK, loc="left", pad=low + 13 * bool(under), parse_math=False)
    if under:
        ax.annotate(under, (0, 1), (0, low), xycoords="axes fraction", textcoords="offset points", size=9.5,
                    color="#5D6771", parse_math=False)  # fmt: skip


def key(ax: Axes, **place: Any) -> None:
    """Draw a legend without a frame of what has a label, where there is any."""
    handles, labels = ax.get_legend_handles_labels()
    if handles:
        ax.legend(handles, labels, frameon=False, fontsize=9.5, labelcolor=INK, **place)
