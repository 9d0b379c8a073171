"""HTML report of `vispe rotate`: verdict, recommendation, headlines, figures, and all records."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from vispe.evaluate.rotation.figures.sections import SECTIONS
from vispe.evaluate.rotation.record_key import D4_MEAN, FULL, UNMOVED
from vispe.evaluate.rotation.records import METRICS, Measurement
from vispe.evaluate.rotation.report import RotationReport
from vispe.evaluate.rotation.verdict import INVARIANT, MILD
from vispe.report.html_page import Page, Tone
from vispe.report.statistics import MIN_IMAGES
from vispe.report.table import capitalize, interval, number

HEAD = ("transform", "metric", "of", "mean", "95 % interval", "worst image", "floor", "effect", "images")

_INTRO = (
    "Micrographs usually have no canonical orientation, so the output of a model should not depend on it. The images "
    "were rotated, reflected and shifted, the transform was undone on the output, and both were compared."
)
_CONTROLS = "Grey rows are controls: they give the scale of a number and validate the measurement."
_FLOOR = (
    "Floor: effect of resampling the pixels alone. Effect: mean minus floor, which can be due to the model."
)


def rotation_page(report: RotationReport) -> Page:
    """Return the HTML report; `page.write(path)` writes the file.

    Args:
        report: the results. Sections without records are omitted.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    result = report.result
    words, tone = _verdict(report)
    page = Page(report.subject, "Rotation report", words, tone)
    page.text(result.remedy)
    page.text(_INTRO)
    n = len(result.images)
    intervals = "quantify the variation of the mean over similar images"
    words = (
        f"Intervals {intervals}; they need {MIN_IMAGES} images."
        if n < MIN_IMAGES
        else f"Intervals (95 %, bootstrap over images) {intervals}."
    )
    page.text(f"{n} image{'s' * (n != 1)}. {words}", soft=True)
    headlines = report.headlines
    if headlines:
        page.section("Summary")
        _table(page, headlines)
        page.text(_FLOOR if any(row.floors for row in headlines) else "", soft=True)
        page.text(_CONTROLS if any(row.control for row in headlines) else "", soft=True)
    for section in SECTIONS:
        section(page, report)
    page.section("All records")
    if result.rows:
        _table(page, result.rows, folded=f"All {len(result.rows)} rows")
    if headlines:
        page.table(_by_image(result.images, headlines), folded="The headline for each image")
    page.section("Settings and notes")
    for note in result.notes:
        page.text(note)
    if result.settings:
        page.table([["setting", "value"], *([k, _value(v)] for k, v in result.settings.items())], left=(0, 1))
    page.text(
        f"An error or an R² below {INVARIANT:g} is called invariant, below {MILD:g} mild, otherwise strong; these "
        "limits are our choice. The error of a pose g is sqrt(Σ|F_g - F|² / Σ|F - mean of F|²), where F are the "
        "features of the image and F_g those of the transformed image with g undone; sums are over positions and "
        "channels.",
        soft=True,
    )
    return page


def cells(row: Measurement) -> list[str]:
    """Return the cells of a record for the columns `HEAD`."""
    summary, effect = row.summary(), row.effect()
    return [
        row.transform,
        METRICS[row.metric].title,
        row.part,
        number(summary.mean),
        interval(summary.interval),
        number(summary.worst),
        number(row.floor_mean),
        number(effect and effect.mean),
        str(summary.n) + (f" of {summary.n + summary.missing}" if summary.missing else ""),
    ]


def _table(page: Page, rows: Sequence[Measurement], folded: str = "") -> None:
    quiet = [k for k, row in enumerate(rows) if row.control]
    page.table([list(HEAD), *map(cells, rows)], left=(0, 1, 2), quiet=quiet, folded=folded)


def _by_image(images: Sequence[str], rows: Sequence[Measurement]) -> list[list[str]]:
    """Return a table with one row per image and one column per record."""
    parts = ("" if r.part == FULL else f", {r.part}" for r in rows)
    heads = [f"{r.transform}, {METRICS[r.metric].title}{part}" for r, part in zip(rows, parts, strict=True)]
    lines = ([name, *(number(r.values[k]) for r in rows)] for k, name in enumerate(images))
    return [["image", *heads], *lines]


def _verdict(report: RotationReport) -> tuple[str, Tone]:
    """Return the verdict and its tone, that of the worst feature metric."""
    full, r2 = report.result.find(D4_MEAN, "error"), report.result.find(UNMOVED, "r2")
    values = [*([full.summary().mean] if full else []), *([r2.summary().median] if r2 else [])]
    worst = max(filter(np.isfinite, values), default=float("nan"))
    tone: Tone = "plain"
    if np.isfinite(worst):
        tone = "good" if worst < INVARIANT else "mild" if worst < MILD else "bad"
    words = report.verdict or f"{len(report.result.rows)} rows were measured"
    return capitalize(words), tone


def _value(value: Any) -> str:
    """Return a setting as text: strings unchanged, other values as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
