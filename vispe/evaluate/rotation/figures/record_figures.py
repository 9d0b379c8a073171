"""Figures of records: by pose, by block, by shift, and by quadrant; re-exports the other figures.

Each is a single axes. Axes of errors start at 0. NaN values are omitted; intervals need five images.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vispe.evaluate.rotation import record_key
from vispe.evaluate.rotation.figures.figure_labels import LIMITS, images_of, mean, parts_of, title_of
from vispe.evaluate.rotation.figures.image_grids import plot_fingerprint as plot_fingerprint
from vispe.evaluate.rotation.figures.image_grids import plot_label_poses as plot_label_poses
from vispe.evaluate.rotation.figures.image_grids import plot_poses as plot_poses
from vispe.evaluate.rotation.figures.model_comparison import plot_models as plot_models
from vispe.evaluate.rotation.figures.polar import plot_polar as plot_polar
from vispe.evaluate.rotation.metrics.quadrant_gap import QUADRANTS
from vispe.evaluate.rotation.records import METRICS, Measurement
from vispe.evaluate.rotation.result import RotationResult
from vispe.evaluate.rotation.verdict import EXACT
from vispe.images.symmetry.d4 import D4
from vispe.utils.report import figure_style
from vispe.utils.report.figure_style import BLUE, GREY, INK, ORANGE

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_d4(result: RotationResult, ax: Axes | None = None, *, metric: str = "error") -> Axes:
    """Plot a metric for the seven exact poses, of the transformed image and of permuted tokens, with controls as lines.

    Args:
        result: with rows of `equivariance` and `position_equivariance`, or of `consistency`.
        ax: where to draw; a new figure by default.
        metric: 'error', or 'miou' and 'ari' for labels.

    Raises:
        InputError: there are no such rows.
    """
    poses = [g.name for g in D4[1:]]
    parts = [p for p in parts_of(metric) if any(result.find(g, metric, p[0]) for g in poses)]
    figure_style.require_records(
        parts, f"rows of {metric!r} at the poses of D4", "equivariance or consistency"
    )
    ax = figure_style.axes(ax, 8.4, 4.4)
    width = 0.8 / len(parts)
    for k, (part, words, colour) in enumerate(parts):
        rows = [result.find(g, metric, part) for g in poses]
        x = np.arange(len(poses)) + (k - (len(parts) - 1) / 2) * width
        values = np.array([mean(r) for r in rows])
        average = mean(result.find(record_key.D4_MEAN, metric, part))
        label = f"{words}: {figure_style.short_number(average)}" if np.isfinite(average) else words
        label += " (exact)" if metric == "error" and average < EXACT else ""
        ax.bar(x, values, 0.92 * width, color=colour, alpha=0.85, linewidth=0, label=label)
        figure_style.error_bars(
            ax, x, figure_style.intervals(None if r is None else r.summary() for r in rows)
        )
    lines = _control_lines(result, metric)
    for y, words in lines:
        ax.axhline(y, color=GREY, linewidth=1, linestyle=figure_style.DASHED, zorder=0)
        figure_style.annotate(ax, words, (1, y), (6, 0), ("axes fraction", "data"), va="center")
    heights = [bar.get_height() for bar in ax.patches]
    top = np.nanmax([LIMITS[1][0], *heights, *(y for y, _ in lines)])
    ax.set_ylim(0, 1.05 if METRICS[metric].better == "high" else 1.08 * top)
    ax.set_xticks(range(len(poses)), poses)
    finite = [h for h in heights if np.isfinite(h)]
    if metric == "error" and finite and max(finite) < EXACT:
        ax.text(3, 0.1 * ax.get_ylim()[1], "exact at every pose", size=11, color=INK, ha="center")
    rows = [r for p in parts for g in poses if (r := result.find(g, metric, p[0]))]
    figure_style.finish_axes(ax, f"{title_of(metric)} by pose", images_of(rows))
    return ax


def plot_layers(result: RotationResult, ax: Axes | None = None) -> Axes:
    """Plot error over D4 and held-out R² of position after every block, with the limits of the verdict.

    Error and R² have the same limits and share an axis, which starts at 0; R² below 0 is drawn hollow at 0.

    Args:
        result: with rows of `layer_curve`; those of permuted tokens are named 'layer 3, position code'.
        ax: where to draw; a new figure by default.

    Raises:
        InputError: there are no such rows.
    """
    series: dict[tuple[str, str], dict[int, Measurement]] = {}
    for row in result.rows:
        if row.key.layer is not None and row.metric in ("error", "r2"):
            series.setdefault((row.metric, row.key.part), {})[row.key.layer] = row
    figure_style.require_records(list(series), "rows after blocks", "layer_curve")
    ax = figure_style.axes(ax, 8.4, 4.4)
    styles = {
        ("error", record_key.FULL): ("error, image transformed", BLUE, "o-"),
        ("error", record_key.POSITION_CODE): ("error, position code alone", ORANGE, "s-"),
        ("r2", record_key.FULL): ("R² of row and column", INK, "^--"),
    }
    top, last = 1.0, 0
    for name, (words, colour, style) in styles.items():
        rows = series.get(name, {})
        if not rows:
            continue
        x = np.array(sorted(rows))
        y = np.array([mean(rows[k]) for k in x])
        band = figure_style.intervals(rows[k].summary() for k in x)
        ax.fill_between(x, *np.maximum(band, 0).T, color=colour, alpha=0.15, linewidth=0)
        ax.plot(x, np.maximum(y, 0), style, color=colour, markersize=5, linewidth=1.6, label=words, zorder=3)
        if (y < 0).any():
            ax.plot(x[y < 0], 0 * x[y < 0], style[0], color=colour, markersize=5, markerfacecolor="white", zorder=4,
                    clip_on=False)  # fmt: skip
        top, last = max(top, np.nanmax([*y, *band.ravel(), 0])), max(last, int(x[-1]))
    _limits(ax)
    ax.set_ylim(0, 1.05 * top)
    ax.set_xticks(range(0, last + 1, 1 + last // 16))
    ax.set_xlabel("after block", color=INK)
    ax.tick_params(axis="x", pad=8)  # below the marks at 0
    under = images_of(r for rows in series.values() for r in rows.values()).replace("lines", "shaded")
    figure_style.finish_axes(ax, "Error and position by block", under, low=-0.14, columns=3)
    return ax


def plot_translation(
    result: RotationResult, ax: Axes | None = None, *, patch_size: int | None = None
) -> Axes:
    """Plot the centred error by shift in pixels, for rolls and moved windows, with integer patches marked.

    Shifts are ordered, not to scale; shifts of equal length, such as down, right and both, are separate dots, with a
    line through their mean.

    Args:
        result: with rows of `roll_equivariance` or `crop_shift`.
        ax: where to draw; a new figure by default.
        patch_size: patch size in pixels; by default the setting 'patch' of the result.

    Raises:
        InputError: there are no such rows.
    """
    series: dict[str, list[Measurement]] = {}
    for row in shift_rows(result):
        series.setdefault(row.key.question, []).append(row)
    figure_style.require_records(list(series), "rows of shifts", "roll_equivariance or crop_shift")
    ax = figure_style.axes(ax, 8.4, 4.4)
    patch_size = result.settings.get("patch") if patch_size is None else patch_size
    lengths = sorted({_length(row) for rows in series.values() for row in rows})
    integer = [k for k, d in enumerate(lengths) if patch_size and d % patch_size == 0]
    ax.bar(integer, [1] * len(integer), 0.9, transform=ax.get_xaxis_transform(), color=figure_style.SHADE, linewidth=0,
           label="whole patches", zorder=0)  # fmt: skip
    styles = {
        record_key.ROLL: ("rolled around", BLUE, "o"),
        record_key.CROP_SHIFT: ("window moved", ORANGE, "s"),
    }
    tops = [LIMITS[1][0]]
    for k, (name, rows) in enumerate(series.items()):
        words, colour, marker = styles[name]
        x = np.array([lengths.index(_length(row)) for row in rows])
        y = np.array([mean(row) for row in rows])
        bounds = figure_style.intervals(row.summary() for row in rows)
        x_offset = x + 0.12 * (k - (len(series) - 1) / 2)
        ax.plot(x_offset, y, marker, color=colour, markersize=5, zorder=3)
        ax.plot([], [], f"{marker}-", color=colour, markersize=5, linewidth=1.2, label=words)
        figure_style.error_bars(ax, x_offset, bounds, color=colour)
        steps = np.unique(x)
        middle = [float(np.mean(y[x == s])) for s in steps]
        ax.plot(steps, middle, color=colour, linewidth=1.2, alpha=0.6)
        tops += [*y, *bounds.ravel()]
    ax.set_ylim(0, 1.1 * np.nanmax(tops))
    ax.set_xlim(-0.6, len(lengths) - 0.4)
    every = 1 + len(lengths) // 25
    ax.set_xticks(range(0, len(lengths), every), [str(d) for d in lengths[::every]])
    ax.set_xlabel("shift, pixels", color=INK)
    under = images_of(row for rows in series.values() for row in rows)
    figure_style.finish_axes(ax, f"{title_of('error')} by shift", under, low=-0.14, columns=3)
    return ax


def plot_quadrants(result: RotationResult, ax: Axes | None = None) -> Axes:
    """Plot the quadrant gap for scribbles in each quadrant, and for scribbles in the full image.

    Args:
        result: with rows of `quadrant_gap`.
        ax: where to draw; a new figure by default.

    Raises:
        InputError: there are no such rows.
    """
    names = [record_key.FOUR_CORNERS, *QUADRANTS]
    parts = [
        (record_key.FULL, "scribbles in that corner", BLUE),
        (record_key.SPREAD, "scribbles everywhere", GREY),
    ]
    table = [[result.find(n, "quadrant_gap", p) for n in names] for p, *_ in parts]
    figure_style.require_records(
        [r for rows in table for r in rows if r], "rows of the quadrant gap", "quadrant_gap"
    )
    ax = figure_style.axes(ax, 8.4, 4.0)
    reach = [0.1]
    for k, ((_, words, colour), rows) in enumerate(zip(parts, table, strict=True)):
        x = np.array([0.0, *(1.4 + np.arange(4))]) + 0.4 * (k - 0.5) + 0.2 * (np.arange(5) == 0) * (1 - 2 * k)
        values = np.array([mean(r) for r in rows])
        bands = figure_style.intervals(None if r is None else r.summary() for r in rows)
        ax.bar(x, values, 0.37, color=colour, alpha=0.85, linewidth=0, label=words)
        figure_style.error_bars(ax, x, bands)
        reach += [*np.abs(values), *np.abs(bands).ravel()]
    ax.axhline(0, color=INK, linewidth=0.8)
    top = 1.15 * np.nanmax(reach)
    ax.set_ylim(-top, top)
    ax.set_xticks([0, *(1.4 + np.arange(4))], ["mean of four", *QUADRANTS])
    ax.set_ylabel("mIoU elsewhere - there", color=INK)
    words = "Quadrant gap: worse elsewhere (below 0) where position leaks"
    figure_style.finish_axes(ax, words, images_of(r for rows in table for r in rows if r))
    return ax


def shift_rows(result: RotationResult) -> list[Measurement]:
    """Return the rows of the centred error at shifts."""
    return [
        r
        for r in result.rows
        if r.key.question in (record_key.ROLL, record_key.CROP_SHIFT)
        and (r.metric, r.part) == ("error", record_key.FULL)
    ]


def _length(row: Measurement) -> float:
    return max(map(abs, row.key.amount))


def _control_lines(result: RotationResult, metric: str) -> list[tuple[float, str]]:
    """Return heights and labels of the controls, and of unrelated maps."""
    if metric != "error":
        return []
    finite = [
        (mean(result.find(record_key.IDENTICAL, metric)), "identity"),
        (mean(result.find(record_key.D4_MEAN, metric, record_key.RANDOM)), "random\nweights"),
    ]
    chance = METRICS[metric].chance
    return [(y, w) for y, w in [*finite, (chance or float("nan"), "unrelated")] if np.isfinite(y)]


def _limits(ax: Axes) -> None:
    """Draw the limits of the verdict as dashed lines with labels at the right."""
    low = 0.0
    for end, word in LIMITS:
        if np.isfinite(end):
            ax.axhline(end, color=GREY, linewidth=0.9, linestyle=figure_style.DASHED, zorder=0)
        middle = (low + end) / 2 if np.isfinite(end) else 1.5 * low
        figure_style.annotate(ax, word, (1, middle), (4, 0), ("axes fraction", "data"), va="center")
        low = end
