"""Section of the HTML report about trust: whether the map depends on how the sample lies."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vispe.report.html_page import Page
from vispe.segment.invariance_report.verdict_text import points


def trust_section(page: Page, folder: Path, images: Sequence[Mapping[str, Any]], shown: int) -> None:
    """Add verdict, spreads and figure of each image with a trust report; nothing without one.

    Args:
        page: to add to.
        folder: of the results, with the figures.
        images: records.
        shown: number of figures at most.
    """
    images = [record for record in images if "trust" in record]
    if not images:
        return
    page.section("Trust: does rotating the sample change the answer?")
    page.text(
        "Each image was segmented rotated, mirrored and shifted as well. Spread: largest minus smallest fraction of "
        "the class in the map over these poses, in percentage points (pp). Floor: the change that the measurement "
        "itself makes. The 95 % interval of an estimated fraction is about wrong pixels, the spread only about the "
        "pose: a map that no pose changes can still be wrong, so a small spread does not narrow the interval."
    )
    rows = [["image", "class", "in the map", "dependence", "spread, pp", "floor, pp", "pixels that agree"]]
    for record in images:
        found, name = record["trust"], Path(record["image"]).name
        name += f", page {found['page']}" if record["pages"] > 1 else ""
        for own, facts in found["classes"].items():
            share = "no data" if facts["fraction"] is None else f"{100 * facts['fraction']:.1f} %"
            spread, floor = found["spread_pp"][own], found["floor_pp"][own]
            row = [name, own, share, facts["dependence"], _points(spread), _points(floor)]
            rows.append(
                [*row, "no data" if found["agreement"] is None else f"{100 * found['agreement']:.1f} %"]
            )
    page.table(rows, left=(0, 1))
    for record in images[:shown]:
        name = Path(record["image"]).name
        page.text(f"{name}: {record['trust']['verdict']}")
        figure = folder / Path(record["files"]["trust"]).name
        if figure.is_file():
            page.picture(figure.read_bytes(), f"{name}: fractions and map by pose")


def _points(value: float | None) -> str:
    return "no data" if value is None else points(value)
