"""Sections of the report on features, with explanations for microscopists.

A section is a function of the page and the report, which adds nothing if the records for it are missing.
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


def rotated(page: Page, report: RotationReport) -> None:
    """Rotations by 90 degrees and reflections of features."""
    result = report.result
    poses = [r for r in result.rows if (r.metric, r.part) == ("error", FULL) and r.transform in POSES]
    if not poses and not report.poses:
        return
    page.section("Rotations by 90° and reflections")
    page.text(
        "Rotations by 90° and reflections permute pixels without resampling, so every difference is due to the model. "
        "The error is the norm of the difference relative to the variation of the features over the image. "
        + SCALE
    )
    if result.find(D4_MEAN, "error", POSITION_CODE) is not None:
        page.text(
            "A model splits the image into patches. Orange: patches were permuted but not rotated, so the change is "
            "due to the position code. Blue: patches were rotated as well, which also affects the patch kernel, the "
            "weights of the patch embedding. Both are differences of features that may partly cancel, so orange can be "
            "above blue."
        )
    if poses:
        drawn(page, record_figures.plot_d4, report.result, f"Error by pose. {NAMES}")
    if report.poses:
        caption = (
            f"Features of {first_image(result)} as colours (first three principal components) in all poses, with the "
            "pose undone, and their difference from those of the original image. The colour axes are the same."
        )
        page.figure(image_grids.plot_poses(report), caption)


def angles(page: Page, report: RotationReport) -> None:
    """Features at any angle."""
    if not angle_rows(report.result, "error"):
        return
    page.section("Rotations by any angle")
    page.text(
        "Other angles need interpolation, which changes features by itself. The grey part is this effect, measured on "
        "the same images; it is an upper bound. Only the remainder can be due to the model. A square patch grid "
        "samples a rotated image differently, so even an ideal model has some orange here."
    )
    drawn(page, record_figures.plot_polar, report.result, "Error by angle; the centre of the circle is 0.")


def layers(page: Page, report: RotationReport) -> None:
    """After every block."""
    if all(r.key.layer is None for r in report.result.rows):
        return
    page.section("Block by block")
    page.text(
        "The curves show in which blocks orientation and position enter: high values from the start are due to the "
        "patch embedding or an additive position code, increasing values to attention. R² measures how well the "
        "position of a patch can be decoded from its features (1: exactly, 0 or less: not at all)."
    )
    drawn(page, record_figures.plot_layers, report.result, "Error and linear position after every block.")


def shifted(page: Page, report: RotationReport) -> None:
    """Shifts of the image."""
    if not record_figures.shift_rows(report.result):
        return
    page.section("Shifts")
    page.text(
        "A shift by an integer number of patches moves the same patches to other positions: changes are due to the "
        "position code and to borders. A shift by a fraction of a patch changes the content of every patch, which "
        "affects every model with patches. Rolled around: cyclic shift, with a seam; window moved: two windows of a "
        "larger image, compared in their overlap."
    )
    drawn(page, record_figures.plot_translation, report.result, "Error by shift; the axis is not to scale.")


def position(page: Page, report: RotationReport) -> None:
    """Decodable position and fingerprint."""
    rows = rows_of(report.result, "r2", lambda r: r.key.layer is None)
    if not rows and report.fingerprint is None:
        return
    page.section("Position in the frame")
    page.text(
        "If the position of a patch in the frame can be decoded from its features, a classifier may learn position "
        "instead of content. R² is 1 if row and column are decoded exactly, and 0 or less if they cannot be decoded; "
        "for shuffled positions it must be 0 or less. In layered samples position is informative, so a high value is "
        "expected there."
    )
    if rows:
        short_table(page, rows)
    if report.fingerprint is not None:
        page.text(
            "Content averages out in the mean feature map of many different images. A remaining pattern is fixed to "
            "the frame: the fingerprint of the position code."
        )
        caption = (
            "Fingerprint: the first principal components of the mean map with their fractions of its variance, and the "
            "R² of row and column from single channels."
        )
        page.figure(image_grids.plot_fingerprint(report.fingerprint), caption)


def motion(page: Page, report: RotationReport) -> None:
    """Lie derivatives."""
    rows = rows_of(report.result, "lie")
    if rows:
        page.section("Infinitesimal motions")
        page.text(
            "Rate of change of the features under a motion of the image, beyond the motion of the features themselves, "
            "relative to their variation over the image: per radian for rotation, per pixel for shifts. 0 is best."
        )
        short_table(page, rows)


SECTIONS: tuple[Callable[[Page, RotationReport], None], ...] = (
    rotated, angles, layers, shifted, position, motion, labels, accuracy, corners, scores,
)  # fmt: skip
"""In the order of the page."""
