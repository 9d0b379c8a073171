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
from vispe.utils.report.result import Drawing, Note, Section


def labels(report: RotationReport) -> Section | None:
    """Consistency of labels."""
    result = report.result
    rows = rows_of(result, "miou") + rows_of(result, "ari")
    if not rows and not report.labels:
        return None
    poses = any(r.transform in POSES and r.metric == "miou" for r in rows)
    moved = [r for r in rows if r.key.question in (RANDOM_PHASES, ALL_PHASES)]
    caption = f"Labels of {first_image(result)} in all poses, undone, and the pixels whose class changed."
    return Section(
        "Labels in every pose",
        "The transformed image was segmented in the same way, and the transform was undone on the labels. mIoU "
        "compares them with the labels of the original image: 1 means that the class of every pixel is unchanged. No "
        "masks are needed, and the value does not imply that labels are correct. The chance level of ARI is 0.",
        drawn(record_figures.plot_d4, result, f"Consistency by pose. {NAMES}", metric="miou")
        if poses
        else None,
        Drawing(image_grids.plot_label_poses(report), caption) if report.labels else None,
        drawn(record_figures.plot_polar, result, "Consistency by angle.", metric="miou")
        if angle_rows(result, "miou")
        else None,
        Note("Shifted by fractions of a patch:") if moved else None,
        short_table(moved),
    )


def accuracy(report: RotationReport) -> Section | None:
    """Accuracy and area over poses."""
    result = report.result
    rows = [r for r in result.rows if r.metric in OVER_POSES]
    areas = rows_of(result, "phase_spread") + rows_of(result, "phase_error")
    parts = [p for p in (FULL, EVERY_POSE) if angle_rows(result, "accuracy", p)]
    if not rows and not areas and not parts:
        return None
    captions = {p: "Accuracy by angle" + (f", {p}." if p != FULL else ".") for p in parts}
    return Section(
        "Effect of the orientation of the sample",
        "The same disc of the sample was segmented at every angle. "
        + ("Compared with the masks, the worst pose is the least favourable orientation. " if rows else "")
        + ("Area fractions should not depend on the orientation: spread is max minus min over angles, in percentage "
           "points." if areas else ""),
        *(drawn(record_figures.plot_polar, result, c, metric="accuracy", part=p) for p, c in captions.items()),
        short_table([*rows, *areas]),
    )  # fmt: skip


def corners(report: RotationReport) -> Section | None:
    """The quadrant gap."""
    result = report.result
    if not rows_of(result, "quadrant_gap"):
        return None
    caption = "Accuracy elsewhere minus accuracy in that corner."
    return Section(
        "Scribbles in one corner",
        "A classifier was trained on scribbles in one quadrant, each of the four in turn, and evaluated in all. A "
        "lower accuracy in the other quadrants (below 0) suggests that it learnt position instead of content. "
        "Scribbles in the full image are the control: their gaps are due to the sample.",
        drawn(record_figures.plot_quadrants, result, caption, (8.4, 4.0)),
        short_table(rows_of(result, "accuracy", lambda r: r.key.question != ANGLE)),
    )


def scores(report: RotationReport) -> Section | None:
    """Class scores of whole images."""
    rows = rows_of(report.result, "argmax") + rows_of(report.result, "score_change")
    if not rows:
        return None
    words = "How often the predicted class is unchanged when the image is transformed, and the change of its scores."
    return Section("Class of the whole image", words, short_table(rows))
