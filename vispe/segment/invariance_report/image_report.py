"""Trust report of one image in a run: measurement, figure and files."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vispe.images.write import write_png
from vispe.segment.invariance_report.figure import plot_trust, rendered
from vispe.segment.invariance_report.pose_comparison import RUNS, measure_invariance
from vispe.segment.invariance_report.result import InvarianceReport
from vispe.segment.model.prediction import Segmenter, within_memory
from vispe.segment.overlays import uncertainty_image
from vispe.segment.types import ImageFacts, Prediction

__all__ = ["RUNS", "TrustFiles", "trust_image"]


@dataclass(frozen=True)
class TrustFiles:
    """Files and record of a trust report.

    Attributes:
        record: entry for the report of the run.
        files: paths of the written files, by kind.
        notes: messages for the user.
    """

    record: dict[str, Any]
    files: dict[str, Path]
    notes: list[str]


def trust_image(
    image: ImageFacts,
    number: int,
    grey: tuple[np.ndarray, np.ndarray],
    still: Prediction,
    by: Segmenter,
    target: Path,
    *,
    step: Callable[[float], None],
    note: Callable[[str], None],
    force: bool,
) -> TrustFiles:
    """Segment one page of an image in every pose, and write the figure and the map of disagreement.

    Args:
        image: the image.
        number: number of the page.
        grey: grey levels (h, w, c) of the page and its mask (h, w) of pixels with data.
        still: prediction of the unmodified page.
        by: model, features and post-processing.
        target: beginning of the paths of the written files.
        step: called with the fraction of a prediction that each piece covers.
        note: called when memory runs out and the tile is reduced.
        force: overwrite.
    """
    start, features, names, name = time.perf_counter(), by.features, by.model.names, image.path.name
    (page, valid), tile = grey, features.tile

    # restarted with the unmodified image after a reduction of the tile: all poses need equal tiles
    def measure() -> InvarianceReport:
        known = still if features.tile == tile else None
        return measure_invariance(page, valid, lambda p, v: by.page(p, v, step), names, still=known)

    trust = within_memory(features, measure, note)
    # progress of skipped shifts
    step(RUNS - len(trust.poses) - len(trust.controls))
    title, notes = name, []
    if image.n_pages > 1:
        title = f"{name}, page {number}"
        notes = [f"the trust report of {name} is that of page {number} of {image.n_pages} (from 0)."]
    files = {kind: target.with_name(f"{target.name}_{kind}.png") for kind in ("trust", "disagreement")}
    disagreement_image = uncertainty_image(trust.disagreement)
    write_png(files["disagreement"], disagreement_image, force, micrograph=image)
    write_png(files["trust"], rendered(plot_trust(trust, page, by.model.colors, title)), force)
    record = {"page": number, **trust.to_dict(), "seconds": round(time.perf_counter() - start, 3)}
    return TrustFiles(record, files, [*notes, *trust.notes])
