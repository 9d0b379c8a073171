"""The trust report of one image of a run: measured, drawn and written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vispe.images.write import write_png
from vispe.segment.draw import uncertainty_image
from vispe.segment.run.predict import Prediction, within_memory
from vispe.segment.run.report import Clock
from vispe.segment.trust.figure import plot_trust, rendered
from vispe.segment.trust.measure import RUNS, trust_page
from vispe.segment.trust.result import Trust

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

    from vispe.images.read import Micrograph
    from vispe.segment.run.batch import Batch

__all__ = ["RUNS", "trust_image"]


def trust_image(
    run: Batch,
    path: Path,
    micrograph: Micrograph,
    pages: np.ndarray,
    results: list[Prediction],
    notes: list[str],
    total: int,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Measure the middle page of an image in every pose, and write the figure and the map of disagreement.

    Args:
        run: the batch, for its model, its settings and the folder of this image's files.
        path: the image file.
        micrograph: its contents.
        pages: (z, h, w, c) float32, normalised.
        results: the prediction of each page as it stands.
        notes: gets what the user should know.
        total: predictions of this image, these here among them, for the progress.

    Returns:
        The record for the report, and the files by kind.
    """
    clock, middle, features = Clock(), len(pages) // 2, run.features
    page, valid, tile = pages[middle], micrograph.valid[middle], features.tile

    def measure() -> (
        Trust
    ):  # once more from the start where memory ran out, for all poses need the same tiles
        still = results[middle] if features.tile == tile else None
        return trust_page(page, valid, lambda p, v: run.page(p, v, total), run.model.names, still=still)

    found = within_memory(features, measure, run.note)
    run.watch.step((RUNS - len(found.poses) - len(found.controls)) / total)  # shifts that do not fit
    title = path.name if len(pages) == 1 else f"{path.name}, page {middle}"
    if len(pages) > 1:
        notes.append(
            f"the trust report of {path.name} is that of page {middle} of {len(pages)} (counted from 0)."
        )
    notes += found.notes
    files = {kind: run.place / f"{path.stem}_{kind}.png" for kind in ("trust", "disagreement")}
    shown = uncertainty_image(found.disagreement)
    write_png(files["disagreement"], shown, run.force, micrograph=micrograph)
    write_png(files["trust"], rendered(plot_trust(found, page, run.model.colors, title)), run.force)
    record = {"page": middle, **found.to_dict(), "seconds": round(clock(), 3)}
    return record, {kind: str(file) for kind, file in files.items()}
