"""A metric against the angle, on polar axes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vispe.evaluate.rotation.figures.figure_labels import LIMITS, floor, images_of, mean, title_of
from vispe.evaluate.rotation.record_key import ANGLE
from vispe.evaluate.rotation.records import METRICS, Measurement
from vispe.evaluate.rotation.result import RotationResult
from vispe.utils.report import figure_style
from vispe.utils.report.figure_style import BLUE, FAINT, INK, PALE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOST = "#F2B38A"
"""Colour of the effect of rotation beyond resampling."""


def angle_rows(result: RotationResult, metric: str, part: str = "full") -> dict[float, Measurement]:
    """Return the rows at angles, by degrees in 0 to 360, in order."""
    names = (ANGLE, metric, part)
    rows = {r.key.amount[0] % 360: r for r in result.rows if (r.key.question, r.metric, r.part) == names}
    return dict(sorted(rows.items()))


def plot_polar(
    result: RotationResult, ax: Axes | None = None, *, metric: str = "error", part: str = "full"
) -> Axes:
    """Plot a metric by angle, with the effect of resampling alone in grey and the remaining effect in orange.

    0° is at the top, angles are counter-clockwise, and the centre is 0. If high values are good
    (consistency), grey is the loss from 1 due to resampling. Accuracy is below 1 even at 0°, so for accuracy
    orange is the loss relative to 0°.

    Args:
        result: with rows of `angle_equivariance`, `angle_consistency` or `across_poses`.
        ax: polar axes; a new figure by default.
        metric: 'error', 'miou', 'ari' or 'accuracy'.
        part: part of the plotted records, see `Measurement`.

    Raises:
        InputError: there are no such rows, or the axes are not polar.
    """
    rows = angle_rows(result, metric, part)
    figure_style.require_records(
        list(rows), f"rows of {metric!r} at angles", "angle_equivariance or angle_consistency"
    )
    ax = figure_style.axes(ax, 6.2, 6.2, polar=True)
    high = METRICS[metric].better == "high"
    theta = np.deg2rad(list(rows))
    value = np.array([mean(r) for r in rows.values()])
    floors = np.nan_to_num(np.array([floor(r) for r in rows.values()]), nan=1.0 if high else 0.0)
    gaps = np.diff(np.append(theta, theta[0] + 2 * np.pi)) if len(theta) > 1 else np.array([0.5])
    width = min(0.92 * float(gaps.min()), 0.5)
    finite = np.isfinite(value)
    at0 = metric == "accuracy" and 0.0 in rows
    start, end = (value, np.full_like(value, value[0]) if at0 else floors) if high else (floors, value)
    reach = np.where(finite, np.maximum(end - start, 0), 0)
    bar = {"width": width, "linewidth": 0}
    if high and (floors < 1).any():
        ax.bar(theta, 1 - floors, bottom=floors, color=PALE, label="lost by resampling alone", **bar)
    elif not high:
        ax.bar(theta, floors, color=PALE, label="resampling alone (floor)", **bar)
    ax.bar(theta, reach, bottom=np.where(finite, start, 0), color=LOST,
           label="lost against 0°" if at0 else "lost beyond it" if high else "beyond it (effect)", **bar)  # fmt: skip
    dots = {"color": BLUE, "markersize": 5, "clip_on": False, "zorder": 5}
    ax.plot(theta[finite], value[finite], "o", label=images_of(rows.values()), **dots)
    figure_style.error_bars(ax, theta, figure_style.intervals(r.summary() for r in rows.values()), color=BLUE)
    top = 1.0 if high else 1.12 * max(np.nanmax([*value, *floors]), LIMITS[0][0])
    ax.set_theta_zero_location("N")
    ax.set_ylim(0, top)
    ax.set_thetagrids(range(0, 360, 45))
    ax.set_rlabel_position(np.rad2deg(gaps[0]) / 2 if high else 0)  # an error of 0 at 0° leaves room
    ax.yaxis.set_major_locator(_few(4))
    ax.grid(color=FAINT, linewidth=0.8)
    ax.spines[:].set_visible(False)
    ax.tick_params(colors=INK, labelsize=9.5)
    figure_style.figure_title(ax, f"{title_of(metric)} by angle", _beyond(rows, at0))
    figure_style.legend(ax, loc="upper center", bbox_to_anchor=(0.5, -0.06), ncols=2)
    return ax


def _beyond(rows: dict[float, Measurement], at0: bool) -> str:
    """Return the range over angles, or the mean over resampled angles, of value and effect, as text."""
    values = {a: v for a, r in rows.items() if np.isfinite(v := mean(r))}
    if at0 and values:
        rest = figure_style.short_number(rows[0.0].summary().mean)
        return f"{rest} at 0°, {min(values.values()):.2f} to {max(values.values()):.2f}"
    tilted = [a for a in values if a % 90]
    if not tilted:
        return "only multiples of 90°, which are exact"
    effects = [e.mean for a in tilted if (e := rows[a].effect()) is not None]
    beyond = (
        ""
        if not effects
        else f", {figure_style.short_number(abs(float(np.mean(effects))))} beyond resampling"
    )
    average = figure_style.short_number(float(np.mean([values[a] for a in tilted])))
    return f"off multiples of 90°: {average} on average{beyond}"


def _few(n: int):
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(n)
