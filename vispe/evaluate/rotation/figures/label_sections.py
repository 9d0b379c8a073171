"""The sections of the report on labels: for each a paragraph for people who look through microscopes."""

from __future__ import annotations

from vispe.evaluate.rotation.figures import image_grids, record_figures
from vispe.evaluate.rotation.figures.polar import angle_rows
from vispe.evaluate.rotation.figures.section_helpers import (
    NAMES,
    POSES,
    drawn,
    first_image,
    rows_of,
    short_table,
)
from vispe.evaluate.rotation.record_key import ALL_PHASES, ANGLE, EVERY_POSE, FULL, OVER_POSES, RANDOM_PHASES
from vispe.evaluate.rotation.report import RotationReport
from vispe.report.html_page import Page


def labels(page: Page, report: RotationReport) -> None:
    """Consistency of labels."""
    result = report.result
    rows = rows_of(result, "miou") + rows_of(result, "ari")
    if not rows and not report.labels:
        return
    page.section("Labels in every pose")
    page.text(
        "The moved sample was segmented in the same way, and its labels moved back. mIoU compares them with those of "
        "the image as it stands: 1 says that every pixel kept its class, and values fall with every pixel that did "
        "not. No masks are needed for that, and it does not say that labels are right. ARI is the same question with 0 "
        "for chance."
    )
    if any(r.transform in POSES and r.metric == "miou" for r in rows):
        drawn(page, record_figures.plot_d4, report.result, f"Consistency by pose. {NAMES}", metric="miou")
    if report.labels:
        caption = f"Labels of {first_image(result)} in all poses, moved back, and the pixels that changed their class."
        page.figure(image_grids.plot_label_poses(report), caption)
    if angle_rows(result, "miou"):
        drawn(page, record_figures.plot_polar, report.result, "Consistency by angle.", metric="miou")
    moved = [r for r in rows if r.key.question in (RANDOM_PHASES, ALL_PHASES)]
    if moved:
        page.text("Shifted by parts of a patch:", soft=True)
        short_table(page, moved)


def accuracy(page: Page, report: RotationReport) -> None:
    """Accuracy and area over poses."""
    result = report.result
    rows = [r for r in result.rows if r.metric in OVER_POSES]
    areas = rows_of(result, "phase_spread") + rows_of(result, "phase_error")
    parts = [p for p in (FULL, EVERY_POSE) if angle_rows(result, "accuracy", p)]
    if not rows and not areas and not parts:
        return
    page.section("What the orientation of the sample changes")
    page.text(
        "The same disc of the sample was segmented at every angle. "
        + ("Against the masks, the worst pose is the accuracy that an unlucky orientation gives. " if rows else "")
        + ("Area fractions should not depend on how the sample lay: spread is largest minus smallest over angles, in "
           "percentage points." if areas else "")
    )  # fmt: skip
    for part in parts:
        words = "Accuracy by angle" + (f", {part}." if part != FULL else ".")
        drawn(page, record_figures.plot_polar, report.result, words, metric="accuracy", part=part)
    if rows or areas:
        short_table(page, [*rows, *areas])


def corners(page: Page, report: RotationReport) -> None:
    """The quadrant gap."""
    rows = rows_of(report.result, "quadrant_gap")
    if not rows:
        return
    page.section("Scribbles in one corner")
    page.text(
        "A classifier learnt from scribbles in one corner, in each of the four in turn, and was scored everywhere. "
        "Where it works worse in the other corners (below 0), it may have learnt where it is instead of what it sees. "
        "Scribbles all over the image are the control: their gaps are differences of the sample."
    )
    caption = "Accuracy elsewhere minus accuracy in that corner."
    drawn(page, record_figures.plot_quadrants, report.result, caption, (8.4, 4.0))
    short_table(page, [r for r in report.result.rows if r.metric == "accuracy" and r.key.question != ANGLE])


def scores(page: Page, report: RotationReport) -> None:
    """Class scores of whole images."""
    rows = rows_of(report.result, "argmax") + rows_of(report.result, "score_change")
    if rows:
        page.section("Class of the whole image")
        page.text(
            "How often the predicted class stays when the image is moved, and how much its scores change."
        )
        short_table(page, rows)
