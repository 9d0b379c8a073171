"""One look for every figure: colours, fonts, headings, axes, and intervals as lines.

matplotlib is imported when something is drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vispe.errors import InputError, require
from vispe.report.statistics import Summary
from vispe.report.table import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREY, INK = "#0072B2", "#D55E00", "#8A949E", "#22282E"
FAINT, SHADE, PALE, SOFT = "#E3E6E8", "#EEF1F3", "#C3CAD1", "#5D6771"
"""Grid lines, areas in the background, quiet bars, and remarks."""

DASHED = (0, (4, 3))


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


def new(ax: Axes | None, size: tuple[float, float]) -> Axes:
    """Return the axes that were given, or those of a new figure of `size` (width, height) in inches."""
    return axes(ax, *size)


def wanted(rows: Sequence[Any], what: str, how: str) -> None:
    """Raise `InputError` when there is no row to draw."""
    if not rows:
        raise InputError(f"The result has no {what} to draw; measure them with {how}.")


def short(value: float) -> str:
    """Return a number as a figure shows it: two decimals, powers of ten where it is tiny, '-' for NaN.

    >>> short(0.123), short(9.1e-7), short(float("nan"))
    ('0.12', '9e-7', '-')
    """
    return number(value, 2).replace("e-0", "e-")


def clean(ax: Axes, grid: str = "") -> None:
    """Take frame and ticks away; draw a faint grid along 'x' or 'y'."""
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0, labelsize=9.5, colors=INK)
    if grid:
        ax.grid(axis=grid, color=FAINT, linewidth=0.8)
        ax.set_axisbelow(True)


def bare(ax: Axes) -> None:
    """Take frame, ticks and numbers away, as around a picture."""
    ax.set_xticks([])
    ax.set_yticks([])
    ax.spines[:].set_visible(False)


def heading(ax: Axes, words: str, under: str = "") -> None:
    """Write a title flush left, and a softer line under it; no markup is read in either."""
    low = 26 if ax.name == "polar" else 6  # above the angle that stands on top
    ax.set_title(words, size=11.5, color=INK, loc="left", pad=low + 13 * bool(under), parse_math=False)
    if under:
        remark(ax, under, (0, 1), (0, low), "axes fraction", size=9.5, parse_math=False)


def remark(
    ax: Axes,
    words: str,
    at: tuple[float, float],
    offset: tuple[float, float],
    coords: Any = "data",
    **look: Any,
) -> None:
    """Write soft words `offset` points away from a place, which `coords` measures as matplotlib's `xycoords`."""
    look = {"size": 9, "color": SOFT, **look}
    ax.annotate(words, at, offset, xycoords=coords, textcoords="offset points", **look)


def key(ax: Axes, **place: Any) -> None:
    """Draw a legend without a frame of what has a label, where there is any."""
    handles, labels = ax.get_legend_handles_labels()
    if handles:
        ax.legend(handles, labels, frameon=False, fontsize=9.5, labelcolor=INK, **place)


def finish(ax: Axes, words: str, under: str = "", *, low: float = -0.08, columns: int = 2) -> None:
    """Write the heading of a plot with upright values, clean its axes, and draw its legend `low` below them."""
    heading(ax, words, under)
    clean(ax, "y")
    key(ax, loc="upper center", bbox_to_anchor=(0.5, low), ncols=columns)


def scale(image: Any, axes: Sequence[Axes], words: str, **place: Any) -> None:
    """Draw the colours of an image as a bar below axes."""
    bar = image.figure.colorbar(image, ax=list(axes), location="bottom", pad=0.03, **place)
    bar.set_label(words, size=9.5, color=INK)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, labelsize=9, colors=INK)


def spans(summaries: Iterable[Summary | None]) -> np.ndarray:
    """Return intervals (n, 2), NaN where there is none because of too few images."""
    nan = (float("nan"), float("nan"))
    ends = [nan if s is None or s.interval is None else s.interval for s in summaries]
    return np.array(ends).reshape(-1, 2)


def whiskers(ax: Axes, x: Any, low_high: np.ndarray, *, across: bool = False, color: str = INK) -> None:
    """Draw intervals (n, 2) as lines without caps, upright or `across`; those that are NaN are left out."""
    known = np.isfinite(low_high).all(1)
    if known.any():
        lines = ax.hlines if across else ax.vlines
        lines(np.asarray(x, dtype=float)[known], *low_high[known].T, color=color, linewidth=1.3, zorder=4)
