"""Figures of the report of a retrofit: orange before, grey ablated teacher or filters, blue after."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from vispe.errors import InputError
from vispe.evaluate.rotation.metrics.fingerprint import Fingerprint
from vispe.utils.report.figure_style import BLUE, GREY, INK, ORANGE, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from vispe.train.evaluate.result import RetrofitReport

COLORS = {"before": ORANGE, "blanked": GREY, "after": BLUE, "filters": GREY}
_FLOOR = -1.0  # lower limit of R² in figures: negative values carry no information


def position_figure(report: RetrofitReport) -> Figure:
    """Plot held-out R² by kind of images, for the teacher, the ablated teacher and the student."""
    kinds = list(report.before.probes)
    figure = new_figure(2.2 + 2.0 * len(kinds), 3.4)
    ax = figure.add_subplot()
    groups: dict[str, dict[str, np.ndarray]] = {}
    levels: list[float] = []
    for kind in kinds:
        probes = {name: side.probes[kind] for name, side in report.sides.items()}
        groups["your images" if kind == "images" else kind] = {
            name: np.median(probe.rows[0].r2_heldout, axis=1).clip(_FLOOR) for name, probe in probes.items()
        }
        levels += [max(_FLOOR, probe.headline) for probe in probes.values()]
    _strips(ax, groups, levels)
    ax.axhline(0, color=INK, lw=0.8)
    ax.set(ylim=(_FLOOR - 0.08, 1.05), ylabel="held-out R²")
    if any((v <= _FLOOR).any() for rows in groups.values() for v in rows.values()):
        ax.set_yticks([-1, -0.5, 0, 0.5, 1], ["≤ -1", "-0.5", "0", "0.5", "1"])
    return figure


def fingerprint_figure(first: Fingerprint, second: Fingerprint) -> Figure:
    """Plot the first component of both mean maps with a common colour scale."""
    figure = new_figure(6.2, 3.0)
    limit = float(max(np.abs(first.components[0]).max(), np.abs(second.components[0]).max())) or 1.0
    axes = figure.subplots(1, 2)
    shown = None
    for ax, name, pattern in zip(axes, ("before", "after"), (first, second), strict=True):
        shown = ax.imshow(pattern.components[0], cmap="PuOr", vmin=-limit, vmax=limit)
        ax.set_title(f"{name}, SNR {pattern.snr:.3g}", color=COLORS[name], fontsize=10)
        ax.set(xticks=[], yticks=[])
    figure.colorbar(shown, ax=axes, shrink=0.8)
    return figure


def similarity_figure(report: RetrofitReport) -> Figure:
    """Plot cosines and effective ranks by image."""
    figure = new_figure(7.2, 3.2)
    left, right = figure.subplots(1, 2)
    cosines = {"to the teacher": {"after": report.cosine}, "to the target": {"after": report.cosine_blanked}}
    _strips(left, cosines, np.median, legend=False)
    low = float(min(report.cosine.min(), report.cosine_blanked.min()))
    left.set(ylim=(min(0.0, low - 0.05), 1.05), ylabel="cosine of the student's features")
    _strips(right, {"": {name: side.rank for name, side in report.sides.items()}}, np.median)
    right.set(ylim=(0, None), ylabel="effective rank")
    return figure


def masks_figure(report: RetrofitReport) -> Figure:
    """Plot mIoU by image for features before and after and for filters, and the loss with corner scribbles.

    Raises:
        InputError: the report has no segmentation.
    """
    scores = report.segmentation
    if scores is None:
        raise InputError("masks_figure: the report has no segmentation. Evaluate with masks.")
    figure = new_figure(8.4, 3.2)
    left, right = figure.subplots(1, 2, width_ratios=(2 if scores.others else 1, 1))
    groups = {"spread scribbles": scores.own} | ({"other masks": scores.others} if scores.others else {})
    _strips(left, groups, np.mean)
    left.set(ylim=(None, 1.02), ylabel="mIoU")
    _strips(right, {"corner scribbles": scores.corner}, np.mean, legend=False)
    right.axhline(0, color=INK, lw=0.8)
    right.set(ylabel="mIoU lost")
    return figure


def _strips(
    ax: Axes,
    groups: Mapping[str, Mapping[str, np.ndarray]],
    middle: Callable[[np.ndarray], float] | Sequence[float],
    legend: bool = True,
) -> None:
    """Plot one dot per image for each name of a group, and a line at their `middle` (a function or levels)."""
    labelled: set[str] = set()
    ticks: list[float] = []
    levels = None if callable(middle) else iter(middle)
    x = 0.0
    for rows in groups.values():
        ticks.append(x + (len(rows) - 1) / 2)
        for name, values in rows.items():
            finite = values[np.isfinite(values)]
            # spread the images of a strip horizontally; a single one is centred
            spread = np.linspace(-0.2, 0.2, len(finite)) if len(finite) > 1 else np.zeros(len(finite))
            label = name if name not in labelled else None
            labelled.add(name)
            ax.plot(x + spread, finite, "o", ms=4, alpha=0.6, mew=0, color=COLORS[name], label=label)
            level = next(levels) if levels is not None else middle(finite) if len(finite) else np.nan
            if np.isfinite(level):
                ax.plot([x - 0.32, x + 0.32], [level, level], color=COLORS[name], lw=2.5)
            x += 1
        x += 0.8
    ax.set_xticks(ticks, list(groups))
    ax.tick_params(axis="x", length=0)
    ax.spines[["top", "right"]].set_visible(False)
    if legend:
        ax.legend(frameon=False, fontsize=9, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
