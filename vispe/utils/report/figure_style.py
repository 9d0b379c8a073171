"""Common style of all figures: colours, fonts, titles, axes and error bars.

matplotlib is imported on first use.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vispe.errors import InputError, require
from vispe.utils.report.statistics import Summary
from vispe.utils.report.table import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREY, INK = "#0072B2", "#D55E00", "#8A949E", "#22282E"
FAINT, SHADE, PALE, SOFT = "#E3E6E8", "#EEF1F3", "#C3CAD1", "#5D6771"
"""Colours of grid lines, background areas, secondary bars and annotations."""

DASHED = (0, (4, 3))


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of a size in inches, not registered with pyplot.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    require("matplotlib", "cli", "drawing a measurement")
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=130, facecolor="white", layout="constrained")


def axes(ax: Axes | None, width: float, height: float, *, polar: bool = False) -> Axes:
    """Return `ax`, or the axes of a new figure.

    Raises:
        InputError: `ax` is not polar although `polar`, or vice versa.
        MissingExtra: matplotlib is not installed.
    """
    if ax is None:
        require("matplotlib", "cli", "drawing a measurement")
        from matplotlib import pyplot  # pyplot figures are displayed by notebooks

        figure = pyplot.figure(figsize=(width, height), dpi=130, facecolor="white", layout="constrained")
        return figure.add_subplot(projection="polar" if polar else None)
    if (ax.name == "polar") != polar:
        expected = "polar axes: figure.add_subplot(projection='polar')" if polar else "plain axes"
        raise InputError(f"ax must be {expected}, got axes of type {ax.name!r}.")
    return ax


def new_axes(ax: Axes | None, size: tuple[float, float]) -> Axes:
    """Return `ax`, or the axes of a new figure of `size` (width, height) in inches."""
    return axes(ax, *size)


def require_records(rows: Sequence[Any], what: str, how: str) -> None:
    """Raise `InputError` if there are no records to draw."""
    if not rows:
        raise InputError(f"The result has no {what} to draw. Measure them with {how}.")


def short_number(value: float) -> str:
    """Return a number as text for figures: two decimals, scientific notation for tiny numbers, '-' for NaN.

    >>> short_number(0.123), short_number(9.1e-7), short_number(float("nan"))
    ('0.12', '9e-7', '-')
    """
    return number(value, 2).replace("e-0", "e-")


def clean_axes(ax: Axes, grid: str = "") -> None:
    """Remove spines and tick marks; draw a faint grid along 'x' or 'y'."""
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0, labelsize=9.5, colors=INK)
    if grid:
        ax.grid(axis=grid, color=FAINT, linewidth=0.8)
        ax.set_axisbelow(True)


def hide_axes(ax: Axes) -> None:
    """Remove spines, ticks and tick labels, as for images."""
    ax.set_xticks([])
    ax.set_yticks([])
    ax.spines[:].set_visible(False)


def figure_title(ax: Axes, words: str, under: str = "") -> None:
    """Write a left-aligned title with an optional grey subtitle; both are plain text, without mathtext."""
    low = 26 if ax.name == "polar" else 6  # points; above the top tick label of polar axes
    ax.set_title(words, size=11.5, color=INK, loc="left", pad=low + 13 * bool(under), parse_math=False)
    if under:
        annotate(ax, under, (0, 1), (0, low), "axes fraction", size=9.5, parse_math=False)


def annotate(
    ax: Axes,
    words: str,
    at: tuple[float, float],
    offset: tuple[float, float],
    coords: Any = "data",
    **look: Any,
) -> None:
    """Write a grey annotation `offset` points from `at`, a position in `coords` (matplotlib's `xycoords`)."""
    look = {"size": 9, "color": SOFT, **look}
    ax.annotate(words, at, offset, xycoords=coords, textcoords="offset points", **look)


def legend(ax: Axes, **place: Any) -> None:
    """Draw a frameless legend if there are labelled artists."""
    handles, labels = ax.get_legend_handles_labels()
    if handles:
        ax.legend(handles, labels, frameon=False, fontsize=9.5, labelcolor=INK, **place)


def finish_axes(ax: Axes, words: str, under: str = "", *, low: float = -0.08, columns: int = 2) -> None:
    """Write the title of a plot, clean its axes, and draw its legend below them, at y = `low` in axes coordinates."""
    figure_title(ax, words, under)
    clean_axes(ax, "y")
    legend(ax, loc="upper center", bbox_to_anchor=(0.5, low), ncols=columns)


def scale(image: Any, axes: Sequence[Axes], words: str, **place: Any) -> None:
    """Draw a horizontal colour bar of an image below the axes."""
    bar = image.figure.colorbar(image, ax=list(axes), location="bottom", pad=0.03, **place)
    bar.set_label(words, size=9.5, color=INK)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, labelsize=9, colors=INK)


def intervals(summaries: Iterable[Summary | None]) -> np.ndarray:
    """Return intervals (n, 2), NaN for summaries without an interval."""
    nan = (float("nan"), float("nan"))
    bounds = [nan if s is None or s.interval is None else s.interval for s in summaries]
    return np.array(bounds).reshape(-1, 2)


def error_bars(ax: Axes, x: Any, low_high: np.ndarray, *, across: bool = False, color: str = INK) -> None:
    """Draw intervals (n, 2) as error bars without caps, vertical or horizontal (`across`); NaN is skipped."""
    finite = np.isfinite(low_high).all(1)
    if finite.any():
        lines = ax.hlines if across else ax.vlines
        lines(np.asarray(x, dtype=float)[finite], *low_high[finite].T, color=color, linewidth=1.3, zorder=4)
