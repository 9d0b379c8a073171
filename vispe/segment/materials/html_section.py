"""Section of the HTML report on stereological measures."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vispe.segment.materials.image_record import table_row
from vispe.utils.report.html_page import Page


def materials_section(page: Page, images: Sequence[Mapping[str, Any]]) -> None:
    """Add the measures of each image (means over the pages of a stack); a no-op without them."""
    images = [record for record in images if record.get("materials")]
    if not images:
        return
    page.section("Materials numbers")
    rows = [["image", "of", "mean intercept", "ASTM grain size", "boundary per area", "S_V", "elongation"]]
    for record in images:
        measures = table_row(record["materials"])
        unit = measures.pop("unit").replace("um", "µm")
        for name, numbers in measures.items():
            row = [Path(record["image"]).name, name.removeprefix("class.")]
            row.append(_with_interval(numbers, "mean_intercept", unit))
            row.append(_with_interval(numbers, "grain_size_number", ""))
            row.append(_with_interval(numbers, "boundary_per_area", f"/{unit}"))
            row.append(_with_interval(numbers, "surface_per_volume", f"/{unit}"))
            ratio = numbers["elongation"]
            rows.append([*row, "none" if ratio is None else f"{ratio:.2f}"])
    page.table(rows, left=(0, 1))
    page.text(
        "With 95 % intervals from blocks of the page; means over the pages of a stack have none. 'none' in a cell: "
        "the map has too few boundaries of the class, or the pixel size is unknown. Angles in the tables: degrees "
        "counter-clockwise from the horizontal axis.",
        soft=True,
    )


def _with_interval(numbers: Mapping[str, Any], key: str, unit: str) -> str:
    value, low, high = numbers[key], numbers.get(f"{key}_low"), numbers.get(f"{key}_high")
    if value is None:
        return "none"
    interval = "" if low is None else f" ({low:.3g} to {high:.3g})"
    return f"{value:.3g}{interval} {unit}".rstrip()
