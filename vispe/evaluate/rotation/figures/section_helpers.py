"""Shared helpers of the sections of the report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from vispe.evaluate.rotation.figures.polar import plot_polar
from vispe.evaluate.rotation.records import METRICS, Measurement
from vispe.evaluate.rotation.result import RotationResult
from vispe.images.symmetry.d4 import D4
from vispe.utils.report import figure_style
from vispe.utils.report.result import Drawing, Rows

POSES = tuple(g.name for g in D4[1:])
NAMES = (
    "rot90, rot180 and rot270 are counter-clockwise rotations; hflip swaps left and right, vflip top and bottom; "
    "transpose and antitranspose reflect at the diagonals."
)
"""Explanation of the names of poses."""


def rows_of(
    result: RotationResult, metric: str, also: Callable[[Measurement], bool] = lambda r: True
) -> list[Measurement]:
    """Return the records of a metric for which `also` is true."""
    return [r for r in result.rows if r.metric == metric and also(r)]


def quiet_rows(rows: Iterable[Measurement]) -> list[int]:
    """Return the indices of the controls."""
    return [k for k, row in enumerate(rows) if row.control]


def drawn(
    plot: Callable[..., Any],
    result: RotationResult,
    caption: str,
    size: tuple[float, float] = (8.4, 4.4),
    **options: Any,
) -> Drawing:
    """Plot in a new figure."""
    polar = plot is plot_polar
    figure = figure_style.new_figure(*((6.2, 6.2) if polar else size))
    plot(result, figure.add_subplot(projection="polar" if polar else None), **options)
    return Drawing(figure, caption)


def short_table(rows: Sequence[Measurement]) -> Rows | None:
    """Return a table of records with means and intervals, None without records."""
    table = [["", "metric", "of", "mean", "95 % interval"]]
    for row in rows:
        summary = row.summary()
        bounds = " to ".join(map(figure_style.short_number, summary.interval or ()))
        mean = figure_style.short_number(summary.mean)
        table.append([row.transform, METRICS[row.metric].title, row.part, mean, bounds])
    return Rows(table, (0, 1, 2), quiet_rows(rows)) if rows else None


def first_image(result: RotationResult) -> str:
    """Return the name of the example image."""
    return result.images[0] if result.images else "the first image"
