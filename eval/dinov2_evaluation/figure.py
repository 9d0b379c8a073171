"""Figure of students: teacher orange, blanked teacher grey, students blue; limits are dashed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dinov2_evaluation.targets import others, targets
from vispe.train.evaluate.criteria import Criterion
from vispe.utils.report.figure_style import BLUE, GREY, INK, ORANGE, new_figure

FLOOR = -1.0  # R² below is drawn here: negative values are not informative
PANELS = (
    ("r2", "held-out R² of position"),
    ("cosine", "cosine to the blanked teacher"),
    ("rank before", "effective rank,\nrelative to the teacher"),
    ("corner", "mIoU lost with scribbles\nin one corner"),
    ("miou", "mIoU of few scribbles"),
)
"""Beginnings of the keys of targets, and titles."""

SIDES = (
    ("filters", GREY, "|", "filters"),
    ("before", ORANGE, "o", "teacher"),
    ("blanked", GREY, "o", "blanked teacher"),
)
MARKS = "osD^vP"


def draw(reports: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw every number that has a limit: a panel for each kind of number, a mark for each student."""
    result = [{c.key: c for c in targets(report["rows"])} for report in reports]
    keys = list(dict.fromkeys(key for by in result for key in by))
    panels = [(title, own) for start, title in PANELS if (own := [k for k in keys if k.startswith(start)])]
    figure = new_figure(14, 3.6)
    axes = np.atleast_1d(figure.subplots(1, len(panels)))
    for ax, (title, own) in zip(axes, panels, strict=True):
        _panel(ax, own, reports, result)
        ax.set_title(title, fontsize=10, color=INK)
    figure.legend(
        *axes[0].get_legend_handles_labels(), frameon=False, fontsize=9, ncols=8, loc="outside lower center"
    )
    return figure


def _panel(
    ax: Axes,
    keys: Sequence[str],
    reports: Sequence[Mapping[str, Any]],
    result: Sequence[Mapping[str, Criterion]],
) -> None:
    labelled: set[str] = set()

    def dot(value: float, place: float, color: str, mark: str, label: str) -> None:
        shown = max(value, FLOOR) if keys[0].startswith("r2") else value
        ax.plot(
            shown,
            place,
            mark,
            color=color,
            ms=6,
            mew=2 if mark == "|" else 0,
            alpha=0.8,
            label="" if label in labelled else label,
        )
        labelled.add(label)

    for place, key in enumerate(keys):
        ax.axhline(place, color=GREY, lw=0.4, alpha=0.5, zorder=0)
        for number, by in enumerate(result):
            if key not in by:
                continue
            known = others(reports[number]["rows"], key)
            for side, color, mark, label in SIDES:
                if side in known:
                    dot(known[side], place, color, mark, label)
            if not known:
                ax.plot([by[key].limit] * 2, [place - 0.4, place + 0.4], color=INK, lw=1, ls="--")
            name = reports[number]["student"]["name"] + (" (quick)" if reports[number]["quick"] else "")
            dot(by[key].value, place, BLUE, MARKS[number % len(MARKS)], name)
    if keys[0].startswith("r2"):
        ax.axvline(result[0][keys[0]].limit, color=INK, lw=1, ls="--")
        ax.set_xlim(FLOOR - 0.08, 1.05)
        ax.set_xticks([-1, -0.5, 0, 0.5, 1], ["≤ -1", "-0.5", "0", "0.5", "1"])
    ax.set_yticks(range(len(keys)), [_short(key) for key in keys], fontsize=8)
    ax.set_ylim(len(keys) - 0.4, -0.6)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)


def _short(key: str) -> str:
    """Return the label of a target below the title of its panel."""
    plain = {"corner": "tokens alone", "miou": "tokens alone", "miou beside": "alongside filters"}
    kind, size = key.split()[-2:] if key not in plain else ("", "")
    return plain.get(key, f"{kind} {size} px")
