"""Figure of `small_retrofit.py`: each dot is a seed; on the grey side of a dashed line the target is missed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import small_retrofit_metrics as measure
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vispe.utils.report.figure_style import BLUE, GREY, INK, ORANGE, new_figure

WORDS = {"own": "images that anyone can make", "pool": "the same and an unlabelled pool"}
FLOOR = -1.0  # R² below is drawn here: negative values are not informative
BEFORE, BLANKED = "teacher", "teacher, channels blanked"
COLUMNS = (
    ("position read from patches\n(held-out R²)", 0.05, "most"),
    ("cosine to the\nblanked teacher", 0.9, "least"),
    ("effective rank,\nshare of the teacher's", 0.5, "least"),
    ("mIoU lost with scribbles in one\ncorner, beyond what filters lose", 0.02, "most"),
)


def draw(report: Mapping[str, Any]) -> Figure:
    """Draw what was measured on teachers and students, a row for each of them and a column for each criterion."""
    rows = [r for r in report["rows"] if r["student"] != "teacher"]
    lines: list[tuple[str, str | None, list[list[float | None]]]] = []
    for data in dict.fromkeys(r["data"] for r in rows):
        data_rows = [r for r in rows if r["data"] == data]
        lines.append((f"learnt from {WORDS[data]}", None, []))
        first = [r for r in data_rows if r["student"] == data_rows[0]["student"]]
        lines += [
            (name, ORANGE if name == BEFORE else GREY, [_teacher(r, name) for r in first])
            for name in (BEFORE, BLANKED)
        ]
        for student in dict.fromkeys(r["student"] for r in data_rows):
            values = [_student(r) for r in data_rows if r["student"] == student]
            lines.append((student, BLUE, values))
    figure = new_figure(11.5, 1.2 + 0.36 * len(lines))
    axes = figure.subplots(1, len(COLUMNS), sharey=True, width_ratios=(1.3, 1, 1, 1.2))
    for number, ax in enumerate(axes):
        _column(ax, number, lines)
    axes[0].set_yticks(range(len(lines)), [label for label, _, _ in lines])
    for text, (_, color, _) in zip(axes[0].get_yticklabels(), lines, strict=True):
        text.set(color=INK if color is None else color, fontweight="bold" if color is None else "normal")
    axes[0].set_ylim(len(lines) - 0.4, -0.6)
    return figure


def _column(ax: Axes, number: int, lines: Sequence[tuple[str, str | None, list[list[float | None]]]]) -> None:
    title, limit, sense = COLUMNS[number]
    everything = [limit, 1.0] if number in (1, 2) else [limit, 0.0]
    for place, (_, color, seeds) in enumerate(lines):
        if color is None:
            continue
        result = [s[number] for s in seeds if s[number] is not None]
        values = np.array(result, float).clip(FLOOR) if number == 0 else np.array(result, float)
        everything += values.tolist()
        ax.axhline(place, color=GREY, lw=0.4, alpha=0.5, zorder=0)
        ax.plot(values, np.full(len(values), place), "o", ms=6, mew=0, alpha=0.65, color=color)
        if len(values):
            ax.plot([values.mean()] * 2, [place - 0.28, place + 0.28], color=color, lw=2)
    low, high = min(everything), max(everything)
    room = 0.06 * (high - low)
    low, high = low - room, high + room
    ax.axvspan(limit, high, color=GREY, alpha=0.14, lw=0) if sense == "most" else ax.axvspan(
        low, limit, color=GREY, alpha=0.14, lw=0
    )
    ax.axvline(limit, color=INK, lw=1, ls="--")
    ax.set_xlim(low, high)
    ax.set_title(title, fontsize=9, color=INK)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)
    if number == 0:
        ax.set_xticks([-1, -0.5, 0, 0.5, 1], ["≤ -1", "-0.5", "0", "0.5", "1"])


def _teacher(row: Mapping[str, Any], name: str) -> list[float | None]:
    """Return the values of a teacher, as it is or with its channels at 0, from the row of a student of it."""
    key = "before" if name == BEFORE else "blanked"
    near = row["likeness"]["synthetic"]
    rank = 1.0 if key == "before" else near["rank blanked"] / near["rank teacher"]
    beyond = row["segmentation"]["beyond_filters"][key] if row["segmentation"] else None
    return [row[f"{measure.SIZES[0]} px"][key]["r2"], None, rank, beyond]


def _student(row: Mapping[str, Any]) -> list[float | None]:
    result = row["criteria"]
    return [result["R² after"], result["cosine"], result["rank"], result["corner"]]
