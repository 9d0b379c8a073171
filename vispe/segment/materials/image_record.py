"""Stereological measures of an image in a run: record, table of curves, row of the report."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from vispe.segment.materials.statistics import measure
from vispe.utils.files import write_csv

TABLE = "_materials.csv"
"""Suffix of the table of curves."""

_INTERVALS = ("mean_intercept", "grain_size_number", "boundary_per_area", "surface_per_volume")


def measure_image(
    name: str,
    pages: Iterable[np.ndarray],
    names: Sequence[str],
    pixel_size: tuple[float, float] | None,
    target: Path,
    force: bool,
) -> tuple[dict[str, Any], list[str]]:
    """Measure every page of an image and write the table of curves.

    Args:
        name: name of the image file.
        pages: label maps (h, w), 1..K; 0 = no data.
        names: K class names.
        pixel_size: microns (y, x); None if unknown.
        target: the table.
        force: overwrite.

    Returns:
        The record: 'unit', and 'pages' with the result of `measure` for each, or None for a page without data; notes.
    """
    records, curve_rows = [], []
    for number, labels in enumerate(pages):
        if not labels.any():
            records.append(None)
            continue
        record, curves = measure(labels, names, pixel_size)
        records.append(record)
        curve_rows += [{"page": number, **curve} for curve in curves]
    write_csv(target, curve_rows, force)
    notes = []
    if pixel_size is None:
        notes.append(
            f"the pixel size of {name} is unknown: materials numbers are in px, without an ASTM grain size "
            "number."
        )
    return {"unit": "px" if pixel_size is None else "um", "pages": records}, notes


def table_row(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of `report.csv`: the numbers of a single page with intervals, else means over pages."""
    pages = [page for page in record["pages"] if page is not None]
    row: dict[str, Any] = {"unit": record["unit"]}
    if not pages:
        return row
    for name in ("patches", *pages[0]["classes"]):
        each = [page["patches"] if name == "patches" else page["classes"][name] for page in pages]
        columns: dict[str, Any] = {}
        for key in _INTERVALS:
            columns[key] = _mean([one[key] for one in each])
            if len(record["pages"]) == 1:
                columns[f"{key}_low"], columns[f"{key}_high"] = each[0][f"{key}_ci95"] or (None, None)
        columns["elongation"] = _mean([one["elongation"]["ratio"] for one in each])
        row[name if name == "patches" else f"class.{name}"] = columns
    return row


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
