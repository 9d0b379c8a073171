"""Section of the HTML report on trust: whether the map depends on the pose of the sample."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vispe.segment.invariance_report.verdict_text import format_points
from vispe.utils.report.html_page import Page


def trust_section(page: Page, folder: Path, images: Sequence[Mapping[str, Any]], shown: int) -> None:
    """Add verdict, spreads and figure of each image with a trust report; a no-op without one.

    Args:
        page: HTML report.
        folder: results folder with the figures.
        images: records.
        shown: upper bound of figures.
    """
    images = [record for record in images if "trust" in record]
    if not images:
        return
    page.section("Trust: does rotating the sample change the answer?")
    page.text(
        "Each image was also segmented rotated, mirrored and shifted. Spread: largest minus smallest fraction of "
        "the class in the map over these poses, in percentage points (pp). Floor: the change due to the measurement "
        "itself. The 95 % interval of an estimated fraction accounts for misclassified pixels, the spread only for the "
        "pose: an invariant map can still be wrong, so a small spread does not narrow the interval."
    )
    rows = [["image", "class", "in the map", "dependence", "spread, pp", "floor, pp", "pixels that agree"]]
    for record in images:
        record_of_trust, name = record["trust"], Path(record["image"]).name
        name += f", page {record_of_trust['page']}" if record["pages"] > 1 else ""
        for class_name, facts in record_of_trust["classes"].items():
            fraction = "no data" if facts["fraction"] is None else f"{100 * facts['fraction']:.1f} %"
            spread, floor = record_of_trust["spread_pp"][class_name], record_of_trust["floor_pp"][class_name]
            row = [name, class_name, fraction, facts["dependence"], _points(spread), _points(floor)]
            rows.append(
                [
                    *row,
                    "no data"
                    if record_of_trust["agreement"] is None
                    else f"{100 * record_of_trust['agreement']:.1f} %",
                ]
            )
    page.table(rows, left=(0, 1))
    for record in images[:shown]:
        name = Path(record["image"]).name
        page.text(f"{name}: {record['trust']['verdict']}")
        figure = folder / Path(record["files"]["trust"]).name
        if figure.is_file():
            page.image(figure.read_bytes(), f"{name}: fractions and map by pose")


def _points(value: float | None) -> str:
    return "no data" if value is None else format_points(value)
