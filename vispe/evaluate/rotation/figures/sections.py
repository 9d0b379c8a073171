"""Sections of the report on features, with explanations for microscopists.

A section is a function of the report that returns None if the records for it are missing.
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
from vispe.utils.report.result import Drawing, Section


def rotated(report: RotationReport) -> Section | None:
    """Rotations by 90 degrees and reflections of features."""
    result = report.result
    poses = [r for r in result.rows if (r.metric, r.part) == ("error", FULL) and r.transform in POSES]
    if not poses and not report.poses:
        return None
    position_code = (
        "A model splits the image into patches. Orange: patches were permuted but not rotated, so the change is "
        "due to the position code. Blue: patches were rotated as well, which also affects the patch kernel, the "
        "weights of the patch embedding. Both are differences of features that may partly cancel, so orange can be "
        "above blue."
    )
    caption = (
        f"Features of {first_image(result)} as colours (first three principal components) in all poses, with the "
        "pose undone, and their difference from those of the original image. The colour axes are the same."
    )
    return Section(
        "Rotations by 90° and reflections",
        "Rotations by 90° and reflections permute pixels without resampling, so every difference is due to the model. "
        "The error is the norm of the difference relative to the variation of the features over the image. "
        + SCALE,
        None if result.find(D4_MEAN, "error", POSITION_CODE) is None else position_code,
        drawn(record_figures.plot_d4, result, f"Error by pose. {NAMES}") if poses else None,
        Drawing(image_grids.plot_poses(report), caption) if report.poses else None,
    )


def angles(report: RotationReport) -> Section | None:
    """Features at any angle."""
    if not angle_rows(report.result, "error"):
        return None
    return Section(
        "Rotations by any angle",
        "Other angles need interpolation, which changes features by itself. The grey part is this effect, measured on "
        "the same images; it is an upper bound. Only the remainder can be due to the model. A square patch grid "
        "samples a rotated image differently, so even an ideal model has some orange here.",
        drawn(record_figures.plot_polar, report.result, "Error by angle; the centre of the circle is 0."),
    )


def layers(report: RotationReport) -> Section | None:
    """After every block."""
    if all(r.key.layer is None for r in report.result.rows):
        return None
    return Section(
        "Block by block",
        "The curves show in which blocks orientation and position enter: high values from the start are due to the "
        "patch embedding or an additive position code, increasing values to attention. R² measures how well the "
        "position of a patch can be decoded from its features (1: exactly, 0 or less: not at all).",
        drawn(record_figures.plot_layers, report.result, "Error and linear position after every block."),
    )


def shifted(report: RotationReport) -> Section | None:
    """Shifts of the image."""
    if not record_figures.shift_rows(report.result):
        return None
    return Section(
        "Shifts",
        "A shift by an integer number of patches moves the same patches to other positions: changes are due to the "
        "position code and to borders. A shift by a fraction of a patch changes the content of every patch, which "
        "affects every model with patches. Rolled around: cyclic shift, with a seam; window moved: two windows of a "
        "larger image, compared in their overlap.",
        drawn(record_figures.plot_translation, report.result, "Error by shift; the axis is not to scale."),
    )


def position(report: RotationReport) -> Section | None:
    """Decodable position and fingerprint."""
    rows = rows_of(report.result, "r2", lambda r: r.key.layer is None)
    if not rows and report.fingerprint is None:
        return None
    section = Section(
        "Position in the frame",
        "If the position of a patch in the frame can be decoded from its features, a classifier may learn position "
        "instead of content. R² is 1 if row and column are decoded exactly, and 0 or less if they cannot be decoded; "
        "for shuffled positions it must be 0 or less. In layered samples position is informative, so a high value is "
        "expected there.",
        short_table(rows),
    )
    if report.fingerprint is not None:
        caption = (
            "Fingerprint: the first principal components of the mean map with their fractions of its variance, and the "
            "R² of row and column from single channels."
        )
        section.parts += [
            "Content averages out in the mean feature map of many different images. A remaining pattern is fixed to "
            "the frame: the fingerprint of the position code.",
            Drawing(image_grids.plot_fingerprint(report.fingerprint), caption),
        ]
    return section


def motion(report: RotationReport) -> Section | None:
    """Lie derivatives."""
    rows = rows_of(report.result, "lie")
    if not rows:
        return None
    return Section(
        "Infinitesimal motions",
        "Rate of change of the features under a motion of the image, beyond the motion of the features themselves, "
        "relative to their variation over the image: per radian for rotation, per pixel for shifts. 0 is best.",
        short_table(rows),
    )


SECTIONS: tuple[Callable[[RotationReport], Section | None], ...] = (
    rotated, angles, layers, shifted, position, motion, labels, accuracy, corners, scores,
)  # fmt: skip
"""In the order of the page."""
