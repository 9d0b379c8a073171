"""Shared parts of the figures of the probe: names of targets, and axes of R²."""

from typing import TYPE_CHECKING

import numpy as np

from vispe.utils.report.figure_style import INK, clean_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WORDS = {
    "lr+ud": "column and row",
    "lr": "column",
    "ud": "row",
    "diag": "diagonal",
    "radial": "distance to the centre",
    "raster": "reading order",
}


def r2_axis(ax: "Axes", which: str) -> None:
    """Clip an axis of R² at -1, and mark the clipped tick."""
    low = max(min(-0.25, getattr(ax.dataLim, f"{which}0")) - 0.05, -1.05)
    ax.set(**{f"{which}lim": (low, 1.03)})
    ticks = [t for t in (-1, -0.5, 0, 0.5, 1) if t >= low]
    getattr(ax, f"set_{which}ticks")(ticks, ["≤ -1" if t == -1 else f"{t:g}" for t in ticks])
    if which == "y":
        ax.set_ylabel("held-out R²", color=INK)
    clean_axes(ax)


def r2_dots(
    ax: "Axes", y: float, values: np.ndarray, colour: str, control: np.ndarray | None, size: float
) -> None:
    """Plot the scores of a row as dots, their median as text, and the median of the control as a diamond.

    Scores are clipped at -1.
    """
    jitter = np.linspace(-0.2, 0.2, len(values)) if len(values) > 1 else np.zeros(1)
    ax.scatter(np.maximum(values, -1), y + jitter, s=size, color=colour, linewidth=0)
    if control is not None:
        median = max(float(np.median(control)), -1)
        ax.plot(median, y, marker="D", markersize=5, color="white", markeredgecolor=INK, markeredgewidth=0.9)
    ax.text(1.04, y, f"{np.median(values):.2f}", va="center", size=10, color=INK)
