"""The sections of the report: for each kind of measurement a paragraph for people who look through microscopes.

A section is a function of the page and the report that adds nothing when its rows were not measured.
"""

from __future__ import annotations

from collections.abc import Callable

from vispe.evaluate.rotation.figures import image_grids, record_figures
from vispe.evaluate.rotation.figures.label_sections import accuracy, corners, labels, scores
from vispe.evaluate.rotation.figures.polar import angle_rows
from vispe.evaluate.rotation.figures.section_helpers import (
    NAMES,
    POSES,
    drawn,
    first_image,
    rows_of,
    short_table,
)
from vispe.evaluate.rotation.record_key import D4_MEAN, FULL, POSITION_CODE
from vispe.evaluate.rotation.report import RotationReport
from vispe.evaluate.rotation.verdict import SCALE
from vispe.report.html_page import Page


def turned(page: Page, report: RotationReport) -> None:
    """Quarter turns and mirror images of features."""
    result = report.result
    poses = [r for r in result.rows if (r.metric, r.part) == ("error", FULL) and r.transform in POSES]
    if not poses and not report.poses:
        return
    page.section("Turned by quarters and mirrored")
    page.text(
        "Quarter turns and mirror images move pixels and change none, so every difference is due to the model. The "
        "error is the size of the difference against how much the features vary over the image. " + SCALE
    )
    if result.find(D4_MEAN, "error", POSITION_CODE) is not None:
        page.text(
            "A model cuts the image into patches. Orange: patches were rearranged but not turned themselves, so what "
            "changes is due to the way the model encodes positions. Blue turns the patches too, which the patch kernel "
            "reads, the weights that see another thing in a turned patch. The two changes are differences of features: "
            "they may partly cancel, so orange can be above blue."
        )
    if poses:
        drawn(page, record_figures.plot_d4, report.result, f"Error by pose. {NAMES}")
    if report.poses:
        caption = (
            f"Features of {first_image(result)} as colours (their first three principal components) in all poses, "
            "moved back, and where they differ from those of the image as it stands. The same colours for all poses."
        )
        page.figure(image_grids.plot_poses(report), caption)


def angles(page: Page, report: RotationReport) -> None:
    """Features at any angle."""
    if not angle_rows(report.result, "error"):
        return
    page.section("Turned by any angle")
    page.text(
        "At other angles new pixels are computed between the old ones, which changes features by itself. The grey part "
        "is what this does, measured on the same images; it is an upper bound. Only what lies beyond it can be due to "
        "the model. Square patches cut a tilted sample in another way, so even a perfect model keeps some orange here."
    )
    drawn(page, record_figures.plot_polar, report.result, "Error by angle; the centre of the circle is 0.")


def layers(page: Page, report: RotationReport) -> None:
    """After every block."""
    if all(r.key.layer is None for r in report.result.rows):
        return
    page.section("Block by block")
    page.text(
        "A model works in blocks, one after another. The curves tell where orientation and position come in: high from "
        "the start is due to the patches or to a position code that is added to them, rising is due to attention. R² "
        "tells how well the place of a patch can be read from its features (1: exactly, 0 or less: not at all)."
    )
    drawn(page, record_figures.plot_layers, report.result, "Error and readable position after every block.")


def shifted(page: Page, report: RotationReport) -> None:
    """Shifts of the image."""
    if not record_figures.shift_rows(report.result):
        return
    page.section("Shifted")
    page.text(
        "A sample may lie a little further right. A shift by whole patches brings the same patches to other places: "
        "what changes is due to the position code, and to borders. A shift by part of a patch cuts the sample in "
        "another way, and every model with patches changes there. Rolled around: what leaves at one side comes in at "
        "the other, with a seam; window moved: two windows of a larger image, compared where both look."
    )
    drawn(page, record_figures.plot_translation, report.result, "Error by shift; the axis is not to scale.")


def position(page: Page, report: RotationReport) -> None:
    """Readable position and fingerprint."""
    rows = rows_of(report.result, "r2", lambda r: r.key.layer is None)
    if not rows and report.fingerprint is None:
        return
    page.section("Position in the frame")
    page.text(
        "If the place of a patch in the frame can be read from its features, a classifier may learn the place instead "
        "of the sample. R² is 1 where row and column are read exactly, 0 or less where they are not; with places "
        "shuffled it has to be 0 or less. In layered samples the place does tell something: there a high value is no "
        "fault."
    )
    if rows:
        short_table(page, rows)
    if report.fingerprint is not None:
        page.text(
            "The mean of the features of many different images has no content left: what it still shows is a pattern "
            "that is fixed to the frame, the fingerprint of the position code."
        )
        caption = (
            "Fingerprint: the first principal components of the mean map with their shares of its variance, and how "
            "well single channels tell row and column."
        )
        page.figure(image_grids.plot_fingerprint(report.fingerprint), caption)


def motion(page: Page, report: RotationReport) -> None:
    """Lie derivatives."""
    rows = rows_of(report.result, "lie")
    if rows:
        page.section("The smallest motions")
        page.text(
            "How fast features change when the image begins to move, beyond moving along with it, against how much "
            "they vary over the image: per radian for rotation, per pixel for shifts. 0 is best."
        )
        short_table(page, rows)


SECTIONS: tuple[Callable[[Page, RotationReport], None], ...] = (
    turned, angles, layers, shifted, position, motion, labels, accuracy, corners, scores,
)  # fmt: skip
"""In the order of the page."""
