"""Sections of the report on labels, with explanations for microscopists."""

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
        "The transformed image was segmented in the same way, and the transform was undone on the labels. mIoU "
        "compares them with the labels of the original image: 1 means that the class of every pixel is unchanged. No "
        "masks are needed, and the value does not imply that labels are correct. The chance level of ARI is 0."
    )
    if any(r.transform in POSES and r.metric == "miou" for r in rows):
        drawn(page, record_figures.plot_d4, report.result, f"Consistency by pose. {NAMES}", metric="miou")
    if report.labels:
        caption = f"Labels of {first_image(result)} in all poses, undone, and the pixels whose class changed."
        page.figure(image_grids.plot_label_poses(report), caption)
    if angle_rows(result, "miou"):
        drawn(page, record_figures.plot_polar, report.result, "Consistency by angle.", metric="miou")
    moved = [r for r in rows if r.key.question in (RANDOM_PHASES, ALL_PHASES)]
    if moved:
        page.text("Shifted by fractions of a patch:", soft=True)
        short_table(page, moved)


def accuracy(page: Page, report: RotationReport) -> None:
    """Accuracy and area over poses."""
    result = report.result
    rows = [r for r in result.rows if r.metric in OVER_POSES]
    areas = rows_of(result, "phase_spread") + rows_of(result, "phase_error")
    parts = [p for p in (FULL, EVERY_POSE) if angle_rows(result, "accuracy", p)]
    if not rows and not areas and not parts:
        return
    page.section("Effect of the orientation of the sample")
    page.text(
        "The same disc of the sample was segmented at every angle. "
        + ("Compared with the masks, the worst pose is the least favourable orientation. " if rows else "")
        + ("Area fractions should not depend on the orientation: spread is max minus min over angles, in percentage "
           "points." if areas else "")
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
        "A classifier was trained on scribbles in one quadrant, each of the four in turn, and evaluated in all. A "
        "lower accuracy in the other quadrants (below 0) suggests that it learnt position instead of content. "
        "Scribbles in the full image are the control: their gaps are due to the sample."
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
            "How often the predicted class is unchanged when the image is transformed, and the change of its scores."
        )
        short_table(page, rows)
