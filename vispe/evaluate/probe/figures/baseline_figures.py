"""Figures of debiasing methods: remaining position, and cost.

matplotlib is imported on first use.
"""

from typing import TYPE_CHECKING

import numpy as np

from vispe.evaluate.probe.baseline_table import BaselineTable
from vispe.evaluate.probe.figures.r2_axes import WORDS, r2_axis, r2_dots
from vispe.utils.report.figure_style import BLUE, GREY, INK, ORANGE, new_axes, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_probe_baselines(table: BaselineTable, target: str | None = None, ax: "Axes | None" = None) -> "Axes":
    """Plot held-out R² before and after every debiasing method: a dot per image, and the median as line and text.

    Values are clipped at -1; the diamond is the shuffled control.

    Args:
        table: return value of `probe_baselines`.
        target: one of `table.targets`; the headline by default.
        ax: axes; a new figure by default.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    ax = new_axes(ax, (6.4, 0.5 * len(table.rows) + 1.2))
    name = target or table.targets[0]
    k = table.targets.index(name)
    for y, row in enumerate(reversed(table.rows)):
        if not row.known:
            ax.text(0, y, "  not available, see the notes", va="center", size=9, color=GREY)
            continue
        colour = ORANGE if row.key == "none" else BLUE
        middle = float(np.median(row.r2[k]))
        ax.barh(y, max(middle, 0), height=0.62, color=colour, alpha=0.35, linewidth=0)
        ax.vlines(max(middle, -1), y - 0.31, y + 0.31, color=colour, linewidth=1.8)
        r2_dots(ax, y, row.r2[k], colour, row.shuffled[k], size=10)
    ax.text(1.04, len(table.rows) - 0.45, "median", va="center", size=8.5, color=GREY)
    ax.axvline(0, color=INK, linewidth=0.8)
    ax.set_ylim(-0.6, len(table.rows) - 0.4)
    ax.set_yticks(range(len(table.rows)), [row.name for row in reversed(table.rows)])
    ax.set_title(f"Held-out R²: {WORDS[name]}", size=10.5, loc="left", color=INK)
    r2_axis(ax, "x")
    ax.set_xlim(right=1.0)
    return ax


def baselines_figure(table: BaselineTable) -> "Figure":
    """Return a figure of all methods: headline target, distance to the centre if it was probed, and cost."""
    names = [table.targets[0], *(["radial"] if "radial" in table.targets[1:] else [])]
    figure = new_figure(12, 0.5 * len(table.rows) + 1.5)
    axes = figure.subplots(1, len(names) + 1, width_ratios=[1] * len(names) + [0.75])
    for j, name in enumerate(names):
        plot_probe_baselines(table, name, axes[j])
        if j:
            axes[j].set_yticklabels([])
    cost = axes[-1]
    heads = ("effective\nrank", "cosine to\noriginal", "forward\npasses")
    cost.set(xlim=(0, 3), ylim=axes[0].get_ylim())
    cost.axis("off")
    for x, head in enumerate(heads):
        cost.text(x + 0.9, len(table.rows) - 0.25, head, ha="right", va="bottom", size=9.5, color=INK)
    for y, row in enumerate(reversed(table.rows)):
        numbers = [f"{np.median(row.rank):.1f}", f"{np.median(row.cosine):.2f}"] if row.known else ["-", "-"]
        for x, cell in enumerate([*numbers, str(row.passes)]):
            cost.text(x + 0.9, y, cell, ha="right", va="center", size=10, color=INK)
    return figure
