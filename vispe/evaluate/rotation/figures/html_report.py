"""HTML report of `vispe rotate`: verdict, recommendation, headlines, figures, and all records."""

from __future__ import annotations

from collections.abc import Sequence

from vispe.errors import counted
from vispe.evaluate.rotation.figures.section_helpers import quiet_rows
from vispe.evaluate.rotation.figures.sections import SECTIONS
from vispe.evaluate.rotation.record_key import FULL
from vispe.evaluate.rotation.records import METRICS, Measurement
from vispe.evaluate.rotation.report import RotationReport
from vispe.evaluate.rotation.verdict import INVARIANT, MILD
from vispe.utils.report.html_page import Page
from vispe.utils.report.result import Note, Rows, Section, report_page, settings_section
from vispe.utils.report.statistics import MIN_IMAGES
from vispe.utils.report.table import interval, number

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
    result, headlines = report.result, report.headlines
    n = len(result.images)
    intervals = "quantify the variation of the mean over similar images"
    words = (
        f"Intervals {intervals}; they need {MIN_IMAGES} images."
        if n < MIN_IMAGES
        else f"Intervals (95 %, bootstrap over images) {intervals}."
    )
    note = Note(f"{counted(n, 'image')}. {words}")
    sections = [Section("", result.remedy, _INTRO, note), _summary(headlines)]
    sections += [section(report) for section in SECTIONS]
    sections.append(
        Section(
            "All records",
            _table(result.rows, folded=f"All {counted(len(result.rows), 'row')}") if result.rows else None,
            Rows(_by_image(result.images, headlines), folded="The headline for each image")
            if headlines
            else None,
        )
    )
    limits = Note(
        f"An error or an R² below {INVARIANT:g} is called invariant, below {MILD:g} mild, otherwise strong; these "
        "limits are our choice. The error of a pose g is sqrt(Σ|F_g - F|² / Σ|F - mean of F|²), where F are the "
        "features of the image and F_g those of the transformed image with g undone; sums are over positions and "
        "channels."
    )
    sections.append(settings_section(result.notes, result.settings, limits))
    verdict = report.verdict or f"{counted(len(result.rows), 'row')} measured"
    return report_page(report.subject, "Rotation report", verdict, report.tone, sections)


def _summary(headlines: Sequence[Measurement]) -> Section | None:
    if not headlines:
        return None
    floor = Note(_FLOOR if any(row.floors for row in headlines) else "")
    controls = Note(_CONTROLS if any(row.control for row in headlines) else "")
    return Section("Summary", _table(headlines), floor, controls)


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


def _table(rows: Sequence[Measurement], folded: str = "") -> Rows:
    return Rows([list(HEAD), *map(cells, rows)], (0, 1, 2), quiet_rows(rows), folded)


def _by_image(images: Sequence[str], rows: Sequence[Measurement]) -> list[list[str]]:
    """Return a table with one row per image and one column per record."""
    parts = ("" if r.part == FULL else f", {r.part}" for r in rows)
    heads = [f"{r.transform}, {METRICS[r.metric].title}{part}" for r, part in zip(rows, parts, strict=True)]
    lines = ([name, *(number(r.values[k]) for r in rows)] for k, name in enumerate(images))
    return [["image", *heads], *lines]
