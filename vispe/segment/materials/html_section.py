"""Section of the HTML report about materials numbers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vispe.report.html_page import Page
from vispe.segment.materials.image_record import table_row


def materials_section(page: Page, images: Sequence[Mapping[str, Any]]) -> None:
    """Add the materials numbers of each image, of stacks the means over pages; nothing without them."""
    images = [record for record in images if record.get("materials")]
    if not images:
        return
    page.section("Materials numbers")
    rows = [["image", "of", "mean intercept", "ASTM grain size", "boundary per area", "S_V", "elongation"]]
    for record in images:
        found = table_row(record["materials"])
        unit = found.pop("unit").replace("um", "µm")
        for name, numbers in found.items():
            row = [Path(record["image"]).name, name.removeprefix("class.")]
            row.append(_with_ends(numbers, "mean_intercept", unit))
            row.append(_with_ends(numbers, "grain_size_number", ""))
            row.append(_with_ends(numbers, "boundary_per_area", f"/{unit}"))
            row.append(_with_ends(numbers, "surface_per_volume", f"/{unit}"))
            ratio = numbers["elongation"]
            rows.append([*row, "none" if ratio is None else f"{ratio:.2f}"])
    page.table(rows, left=(0, 1))
    page.text(
        "With 95 % intervals from blocks of the page; means over the pages of a stack have none. A cell with 'none': "
        "the map has too few boundaries of the class, or the image has no pixel size. Angles in the tables: degrees "
        "counter-clockwise from the horizontal axis.",
        soft=True,
    )


def _with_ends(numbers: Mapping[str, Any], key: str, unit: str) -> str:
    value, low, high = numbers[key], numbers.get(f"{key}_low"), numbers.get(f"{key}_high")
    if value is None:
        return "none"
    between = "" if low is None else f" ({low:.3g} to {high:.3g})"
    return f"{value:.3g}{between} {unit}".rstrip()
