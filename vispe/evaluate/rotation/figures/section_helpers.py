"""Shared helpers of the sections of the report."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from vispe.evaluate.rotation.figures.polar import plot_polar
from vispe.evaluate.rotation.records import METRICS, Measurement, RotationResult
from vispe.report import figure_style
from vispe.report.html_page import Page
from vispe.symmetry.d4 import D4

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


def drawn(
    page: Page,
    plot: Callable[..., Any],
    result: RotationResult,
    caption: str,
    size: tuple[float, float] = (8.4, 4.4),
    **options: Any,
) -> None:
    """Plot in a new figure and add it to the page."""
    polar = plot is plot_polar
    figure = figure_style.new_figure(*((6.2, 6.2) if polar else size))
    plot(result, figure.add_subplot(projection="polar" if polar else None), **options)
    page.figure(figure, caption)


def short_table(page: Page, rows: Iterable[Measurement]) -> None:
    """Add a table of records with means and intervals to the page, if there are any."""
    rows = list(rows)
    if not rows:
        return
    table = [["", "metric", "of", "mean", "95 % interval"]]
    for row in rows:
        summary = row.summary()
        bounds = (
            "" if summary.interval is None else " to ".join(map(figure_style.short_number, summary.interval))
        )
        table.append(
            [
                row.transform,
                METRICS[row.metric].title,
                row.part,
                figure_style.short_number(summary.mean),
                bounds,
            ]
        )
    page.table(table, left=(0, 1, 2), quiet=[k for k, row in enumerate(rows) if row.control])


def first_image(result: RotationResult) -> str:
    """Return the name of the example image."""
    return result.images[0] if result.images else "the first image"
