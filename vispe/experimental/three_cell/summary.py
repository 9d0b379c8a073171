"""Summary of three-cell scores over seeds: table, figure and HTML report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vispe.errors import OptionError
from vispe.utils.report.figure_style import BLUE, GREY, INK, ORANGE, clean_axes, new_figure
from vispe.utils.report.html_page import Page, Tone
from vispe.utils.report.result import Drawing, Note, Result, Rows, Section, report_page

if TYPE_CHECKING:
    from matplotlib.figure import Figure


PUBLISHED = ("distance", "orientation", "area", "vector_sum", "average")
OURS = ("distance_exact", "area_exact", "balanced")
BLIND = 2.0  # percentage points above the best constant answer, below which an encoding counts as blind
Row = dict[str, Any]


def summary(rows: Sequence[Row]) -> list[Row]:
    """Return mean and standard deviation over seeds per encoding, the best average first.

    Each entry has encoding, seeds, mean and std of all scores, mean majority scores, and mean CPU seconds.
    """
    means = [
        _summed([r for r in rows if r["encoding"] == encoding])
        for encoding in dict.fromkeys(r["encoding"] for r in rows)
    ]
    return sorted(means, key=lambda r: -r["mean"]["average"])


def _summed(rows: Sequence[Row]) -> Row:
    """Return the entry of one encoding in `summary`."""
    values = {k: np.array([r["scores"][k] for r in rows]) for k in (*PUBLISHED, *OURS)}
    return {
        "encoding": rows[0]["encoding"],
        "seeds": len(rows),
        "mean": {k: float(v.mean()) for k, v in values.items()},
        "std": {k: float(v.std(ddof=1)) if len(v) > 1 else 0.0 for k, v in values.items()},
        "majority": {k: float(np.mean([r["majority"][k] for r in rows])) for k in values},
        "cpu_s": float(np.mean([r["cpu_s"] for r in rows])),
    }


@dataclass(frozen=True)
class ThreeCellTable(Result):
    """Scores of all runs; `rows` are those of `compare`."""

    rows: Sequence[Row]

    @property
    def blind(self) -> list[str]:
        """Encodings at the level of the best constant answer."""
        means = summary(self.rows)
        return [r["encoding"] for r in means if r["mean"]["average"] < r["majority"]["average"] + BLIND]

    @property
    def verdict(self) -> str:
        """Verdict in one sentence: the best encoding."""
        means = summary(self.rows)
        if len(self.blind) == len(means):
            return f"No encoding beats the best constant answer ({means[0]['majority']['average']:.0f} %)."
        return f"Best: {means[0]['encoding']}, {means[0]['mean']['average']:.0f} % correct on average."

    def table(self) -> list[list[str]]:
        """Return `summary` as text in percent: header, encodings, and the best constant answer in the last row."""
        means, names = summary(self.rows), (*PUBLISHED, *OURS)
        lines = [["encoding", *(n.replace("_", " ") for n in names), "seeds", "CPU s"]]
        for r in means:
            cells = [
                f"{r['mean'][n]:.1f}" + (f" ± {r['std'][n]:.1f}" if r["seeds"] > 1 else "") for n in names
            ]
            lines.append([r["encoding"], *cells, str(r["seeds"]), f"{r['cpu_s']:.0f}"])
        constant = [f"{np.mean([r['majority'][n] for r in means]):.1f}" for n in names]
        return [*lines, ["(best constant answer)", *constant, "", ""]]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values: all runs."""
        return {"rows": list(self.rows)}


def report(rows: Sequence[Row]) -> Page:
    """Return the HTML report: best encoding, encodings at the level of a constant answer, table and figure."""
    scores = ThreeCellTable(rows)
    blind, lines = scores.blind, scores.table()
    intro = Section(
        "",
        "Each image has one red, one green and one blue cell on black. The model predicts whether green or blue is "
        "nearer to red, the orientation of the three, the larger of two areas, and whether their vector sum is outside "
        "of the grid. Without position the best prediction is constant, so compare with the last row, not with 50 %.",
        f"Within {BLIND:g} points of the constant answer: {', '.join(blind)}." if blind else None,
        Drawing(plot_table(rows), "Percent correct on test images, by task"),
    )
    note = (
        "Distance exact, area exact: both bits correct; balanced: balanced accuracy averaged over bits. ± is the "
        "standard deviation over seeds. The models are small and trained briefly: a low score means hard to learn with "
        "this recipe, not impossible."
    )
    sections = [intro, Section("ThreeCellTable", Rows(lines, quiet=(len(lines) - 2,)), Note(note))]
    tone: Tone = "bad" if len(blind) == len(lines) - 2 else "plain"
    return report_page("three cells", "What positions can be read", scores.verdict, tone, sections)


def plot_table(rows: Sequence[Row]) -> Figure:
    """Plot the published scores of all encodings: a dot per seed, the mean as text, the majority as a line.

    Raises:
        OptionError: there are no rows.
        MissingExtra: matplotlib is not installed.
    """
    means = summary(rows)
    if not means:
        raise OptionError("There are no three-cell scores to draw; train at least one model first.")
    names = ("average", *PUBLISHED[:-1])
    encodings = [r["encoding"] for r in means]
    high = 2.1 + 0.27 * len(means)
    figure = new_figure(12.5, high)
    figure.set_layout_engine(None)
    inch = 1 / high
    left = min(0.12 + 0.0052 * max(0, max(map(len, encodings)) - 12), 0.3)
    box = {"left": left, "right": 0.965, "top": 1 - 1.15 * inch, "bottom": 0.72 * inch, "wspace": 0.3}
    grid = figure.add_gridspec(1, len(names), **box)
    figure.text(0.02, 1 - 0.42 * inch, "Three-cell scores by encoding", size=14, weight="bold", color=INK)
    for i, name in enumerate(names):
        ax = figure.add_subplot(grid[i])
        constant = float(np.mean([r["majority"][name] for r in means]))
        ax.axvline(constant, color=GREY, linewidth=1, linestyle=(0, (4, 3)))
        for y, r in enumerate(means):
            values = [q["scores"][name] for q in rows if q["encoding"] == r["encoding"]]
            mean = r["mean"][name]
            colour = ORANGE if mean < constant + BLIND else BLUE
            ax.plot([constant, mean], [y, y], color=colour, linewidth=2.5, alpha=0.25, solid_capstyle="butt")
            ax.scatter(values, [y] * len(values), s=22, color=colour, alpha=0.75, linewidth=0, zorder=3)
            ax.text(103, y, f"{mean:.0f}", size=9, va="center", ha="left", color=colour, weight="bold")
        ax.set_xlim(min(45, constant - 5), 101)
        ax.set_ylim(len(means) - 0.4, -0.6)
        ax.set_yticks(range(len(means)), encodings if i == 0 else [])
        ax.set_xticks((50, 75, 100))
        weight, back = ("normal", "white") if i else ("bold", "#F6F7F9")
        ax.set_title(name.replace("_", " "), size=11, loc="left", color=INK, weight=weight)
        clean_axes(ax)
        ax.set_facecolor(back)
    seeds = sorted({r["seeds"] for r in means})
    count = str(seeds[0]) if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    figure.text(
        0.02, 0.16 * inch,
        f"Percent correct on test images; one dot per seed ({count}), the number is their mean.  Dashed: the best "
        "constant answer, the optimum without position; orange: within 2 points of it.",
        size=9, color=GREY,
    )  # fmt: skip
    return figure
