"""Comparison figure of several models: dependence on orientation and position, the most invariant first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vispe.errors import InputError
from vispe.evaluate.rotation.figures.figure_labels import LIMITS
from vispe.evaluate.rotation.record_key import ALL_ANGLES, D4_MEAN, FULL, POSITION_CODE, UNMOVED
from vispe.evaluate.rotation.records import METRICS, Measurement
from vispe.evaluate.rotation.result import RotationResult
from vispe.evaluate.rotation.verdict import MILD
from vispe.utils.report import figure_style
from vispe.utils.report.figure_style import BLUE, GREY, INK, ORANGE
from vispe.utils.report.statistics import Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = RotationResult | Mapping[str, Any] | Sequence[Measurement | Mapping[str, Any]]


def measurements(source: Rows) -> tuple[Measurement, ...]:
    """Return the measurements of a result or of its JSON values.

    Args:
        source: a result, the return value of its `to_dict`, or rows of either.

    Raises:
        InputError: a required key of a row is missing.
    """
    if isinstance(source, RotationResult):
        return source.rows
    rows = source.get("rows") if isinstance(source, Mapping) else source
    if rows is None:
        raise InputError(
            "plot_models: results of a model must have 'rows', got none. Pass the output of `to_dict`."
        )
    return tuple(row if isinstance(row, Measurement) else _measurement(row) for row in rows)


def plot_models(models: Mapping[str, Rows]) -> Figure:
    """Plot models by row, the most invariant first: error over D4, effect at other angles, R² of position.

    The first panel shows two errors per model: tokens permuted after the patch embedding (position code alone) and
    image transformed (including the patch kernel); the grey line between them is the effect of the patch kernel. Zones
    are those of the verdict. R² below 0 is drawn hollow at 0. Lines are 95 % intervals over images, for five images or
    more. Missing measurements are empty.

    Args:
        models: results by name.

    Raises:
        InputError: no model, or none with an error over D4.
    """
    tables = {name: _numbers(measurements(rows)) for name, rows in models.items()}
    figure_style.require_records(
        [t for t in tables.values() if t["full"] is not None], "error over D4", "equivariance"
    )
    order = sorted(tables, key=lambda name: _mean(tables[name]["full"], last=True))
    figure = figure_style.new_figure(11.5, 1.75 + 0.36 * len(order))
    left, middle, right = figure.subplots(1, 3, sharey=True, width_ratios=(1.7, 1, 1))
    y = np.arange(len(order))
    columns = {key: [tables[name][key] for name in order] for key in ("full", "position", "effect", "r2")}
    both = np.array([[_mean(a), _mean(b)] for a, b in zip(columns["position"], columns["full"], strict=True)])
    style_ = {"color": figure_style.PALE, "linewidth": 5, "zorder": 1, "label": "added by the patch kernel"}
    left.hlines(y, both[:, 0], both[:, 1], **style_)
    _dots(left, y + 0.1, columns["position"], ORANGE, "s", "position code alone")
    _dots(left, y - 0.1, columns["full"], BLUE, "o", "image transformed")
    _dots(middle, y, columns["effect"], BLUE, "o", "")
    _dots(right, y, columns["r2"], BLUE, "o", "", lowest=0)
    chance = METRICS["error"].chance or 0.0
    left.axvline(chance, color=GREY, linewidth=1, linestyle=(0, (1, 2)), zorder=0)
    left.set_xlim(0, 1.06 * max(chance, _furthest(columns["full"] + columns["position"])))
    ends = [_furthest(columns["effect"], low=low) for low in (True, False)]
    middle.set_xlim(min(0, 1.1 * ends[0]), 1.1 * max(MILD, ends[1]))
    right.set_xlim(0, 1)
    for ax in (left, right):
        _zones(ax)
    at = {"coords": ("data", "axes fraction"), "size": 8.5, "ha": "right", "va": "bottom"}
    figure_style.annotate(left, "unrelated", (chance, 0), (-3, 4), rotation=90, **at)
    titles = ("Error, rotations by 90° and reflections", "Effect at other angles", "Linear position")
    label = (
        "centred equivariance error over D4",
        "centred error minus resampling",
        "held-out R² of row and column",
    )
    for ax, title, under in zip((left, middle, right), titles, label, strict=True):
        ax.set_title(title, size=11, color=INK, loc="left", pad=22)
        ax.set_xlabel(under, color=INK, size=9.5)
        figure_style.clean_axes(ax, "x")
        ax.axvline(0, color=INK, linewidth=0.8)
    left.set_ylim(len(order) - 0.5, -0.5)
    left.set_yticks(y, order)
    for label in left.get_yticklabels():
        label.set_parse_math(False)
    style_ = {"ncols": 3, "frameon": False, "fontsize": 9.5, "labelcolor": INK}
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower left", **style_)
    return figure


def _numbers(rows: Sequence[Measurement]) -> dict[str, Summary | None]:
    """Return the plotted summaries of a model, None if not measured."""
    result = RotationResult(tuple(rows), tuple(map(str, range(len(rows[0].values) if rows else 0))))
    angles = result.find(ALL_ANGLES, "error")
    rows_by_name = {
        "full": result.find(D4_MEAN, "error"),
        "position": result.find(D4_MEAN, "error", POSITION_CODE),
        "r2": result.find(UNMOVED, "r2"),
    }
    summaries = {name: row and row.summary() for name, row in rows_by_name.items()}
    return {**summaries, "effect": angles and angles.effect()}


def _measurement(row: Mapping[str, Any]) -> Measurement:
    """Return a measurement from JSON values; None is NaN."""
    missing = [k for k in ("transform", "metric", "values") if k not in row]
    if missing:
        raise InputError(
            f"plot_models: rows need the keys {', '.join(missing)}, got {', '.join(map(str, row)) or 'none'}. Add them."
        )

    def array(values: Any) -> np.ndarray:
        return np.array([np.nan if v is None else v for v in values], dtype=np.float64)

    floors = {name: array(v) for name, v in (row.get("floors") or {}).items()}
    part, control = row.get("part", FULL), bool(row.get("control", False))
    return Measurement(row["transform"], row["metric"], array(row["values"]), part, control, floors)


def _mean(summary: Summary | None, last: bool = False) -> float:
    value = float("nan") if summary is None else summary.mean
    return float("inf") if last and not np.isfinite(value) else value


def _furthest(summaries: Sequence[Summary | None], low: bool = False) -> float:
    """Return the max (or min) of means and interval bounds; 0 without any."""
    values = np.array([v for s in summaries if s is not None for v in (s.mean, *(s.interval or ()))])
    values = values[np.isfinite(values)]
    return float(values.min(initial=0) if low else values.max(initial=0))


def _dots(
    ax: Axes,
    y: np.ndarray,
    summaries: Sequence[Summary | None],
    color: str,
    marker: str,
    label: str,
    lowest: float = -np.inf,
) -> None:
    """Plot means and intervals; means below `lowest` are drawn hollow there."""
    x = np.array([_mean(s) for s in summaries])
    figure_style.error_bars(
        ax, y, np.maximum(figure_style.intervals(summaries), lowest), across=True, color=color
    )
    style = {"color": color, "markersize": 6, "zorder": 5, "clip_on": False}
    ax.plot(np.maximum(x, lowest), y, marker, label=label, **style)
    if (x < lowest).any():
        ax.plot(np.full((x < lowest).sum(), lowest), y[x < lowest], marker, markerfacecolor="white", **style)
    for height in y[~np.isfinite(x)] if not label else ():
        figure_style.annotate(ax, "not measured", (0, height), (6, 0), size=8.5, va="center", color=GREY)


def _zones(ax: Axes) -> None:
    """Draw the limits of the verdict with labels above the axes, the first one right-aligned."""
    low = 0.0
    for end, word in LIMITS:
        if np.isfinite(end):
            ax.axvline(end, color=GREY, linewidth=1, linestyle=figure_style.DASHED, zorder=0)
        position_, away, side = (end, -3, "right") if low == 0 else (low, 4, "left")
        figure_style.annotate(
            ax, word, (position_, 1), (away, 5), ("data", "axes fraction"), size=8.5, ha=side
        )
        low = end
