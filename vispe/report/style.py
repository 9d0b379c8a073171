"""One look for every figure: colours, fonts, headings and axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vispe.errors import InputError, require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREY, INK = "#0072B2", "#D55E00", "#8A949E", "#22282E"
FAINT = "#E3E6E8"


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


def short(value: float) -> str:
    """Return a number as a figure shows it: two decimals, powers of ten where it is tiny, '-' for NaN."""
    if not np.isfinite(value):
        return "-"
    return f"{value:.0e}".replace("e-0", "e-") if 0 < abs(value) < 5e-3 else f"{value:.2f}"


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


def new(ax: Axes | None, size: tuple[float, float]) -> Axes:
    """Return the axes that were given, or those of a new figure of `size` (width, height) in inches."""
    require("matplotlib", "cli", "drawing a probe")
    if ax is not None:
        return ax
    from matplotlib import pyplot  # so that a notebook shows it

    return pyplot.figure(figsize=size, dpi=130, layout="constrained").add_subplot()
