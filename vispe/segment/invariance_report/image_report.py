"""The trust report of one image of a run: measured, drawn and written."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vispe.images.write import write_png
from vispe.segment.invariance_report.figure import plot_trust, rendered
from vispe.segment.invariance_report.pose_comparison import RUNS, trust_page
from vispe.segment.invariance_report.result import Trust
from vispe.segment.overlays import uncertainty_image
from vispe.segment.run.image_pipeline import Grey
from vispe.segment.run.prediction import Prediction, Segmenter, within_memory
from vispe.segment.run.run_report import Clock

__all__ = ["RUNS", "Written", "trust_image"]


@dataclass(frozen=True)
class Written:
    """What there is of a trust report in a run.

    Attributes:
        record: for the report of the run.
        files: by kind.
        notes: what the user should know.
    """

    record: dict[str, Any]
    files: dict[str, Path]
    notes: list[str]


def trust_image(
    path: Path,
    grey: Grey,
    still: list[Prediction],
    by: Segmenter,
    folder: Path,
    *,
    step: Callable[[float], None],
    note: Callable[[str], None],
    force: bool,
) -> Written:
    """Measure the middle page of an image in every pose, and write the figure and the map of disagreement.

    Args:
        path: the image file.
        grey: its contents.
        still: the prediction of each page as it stands.
        by: what segments a page.
        folder: where the files go.
        step: called with the share of a prediction that each piece is.
        note: called when memory runs out and less of it is used.
        force: overwrite.
    """
    clock, features, names = Clock(), by.features, by.model.names
    middle = len(grey.pages) // 2
    page, valid, tile = grey.pages[middle], grey.image.valid[middle], features.tile

    # where memory runs out this starts again, the picture as it stands included: all poses need the same tiles
    def measure() -> Trust:
        known = still[middle] if features.tile == tile else None
        return trust_page(page, valid, lambda p, v: by.page(p, v, step), names, still=known)

    trust = within_memory(features, measure, note)
    # shifts that do not fit
    step(RUNS - len(trust.poses) - len(trust.controls))
    title, notes = path.name, []
    if len(grey.pages) > 1:
        title = f"{path.name}, page {middle}"
        notes = [
            f"the trust report of {path.name} is that of page {middle} of {len(grey.pages)} (counted from 0)."
        ]
    files = {kind: folder / f"{path.stem}_{kind}.png" for kind in ("trust", "disagreement")}
    shown = uncertainty_image(trust.disagreement)
    write_png(files["disagreement"], shown, force, micrograph=grey.image)
    write_png(files["trust"], rendered(plot_trust(trust, page, by.model.colors, title)), force)
    record = {"page": middle, **trust.to_dict(), "seconds": round(clock(), 3)}
    return Written(record, files, [*notes, *trust.notes])
