"""What the questions share: segmenters of an image, poses, and rows under fixed names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from vispe.backbones.batches import FeatureFunction, Segmenter
from vispe.errors import OptionError
from vispe.evaluate.rotation.plan import Measured, Plan, Step, canvas_for
from vispe.evaluate.rotation.processes import Piece
from vispe.evaluate.rotation.rows import Measurement
from vispe.evaluate.rotation.trained import TrainedSegmenter
from vispe.segment.metrics import without_borders
from vispe.symmetry.d4 import D4, IDENTITY, Element
from vispe.symmetry.labels import posed_labels
from vispe.symmetry.warp import Canvas

Rows = tuple[Measurement, ...]

Elements = Sequence[Element] | None

EVERY_POSE = "trained on all poses"

Found = dict[str, list[Piece]]
"""Rows of one step under names that are the same in all steps."""


def segmenter_for(
    what: Measured, plan: Plan, step: Step, n: int, elements: Elements, canvas: Canvas | None = None
) -> Segmenter | None:
    """Return the segmenter of image n of a step, or one that was trained on its own truth.

    Args:
        what: what is measured.
        plan: settings.
        step: images.
        n: number within the step.
        elements: poses that it learns from; None takes the segmenter as it is.
        canvas: window at pose 0 that it learns from; default the fitted image.

    Returns:
        None when the image shows fewer than two classes.
    """
    if elements is None or what.f is None:
        return what.segmenter
    if step.truths is None or step.fitted_truths is None:
        return None
    image, truth = step.fitted[n], step.fitted_truths[n]
    if canvas is not None:
        image = canvas.pose(step.whole[n][None], 0)[0]
        h, w = canvas.source
        truth = posed_labels(canvas, step.truths[n][:h, :w], 0)
    rng = np.random.default_rng([plan.seed, step.first + n, 7])
    marks = scribbles(without_borders(truth), np.ones(truth.shape, bool), plan.budget, rng)
    if len(np.unique(marks[marks > 0])) < 2:
        step.notes.append(
            f"Image {step.first} shows fewer than two classes: no classifier was trained on it."
        )
        return None
    return TrainedSegmenter.of_image(what.f, image, marks, elements)


def _trainings(what: Measured) -> tuple[tuple[str, Elements], ...]:
    """Names of rows, and the poses that a segmenter is trained on."""
    return (("full", None),) if what.segmenter else (("full", (IDENTITY,)), (EVERY_POSE, D4))


def _under(rows: Rows, part: str) -> Rows:
    """Rows of accuracy under the name of the training; rows of a class keep its name."""
    if part == "full":
        return rows
    return tuple(replace(r, part=part if r.part == "full" else f"{r.part}, {part}") for r in rows)


def _on_canvas(
    step: Step, part: slice, plan: Plan, measured: Callable[[list[Tensor], Canvas], Rows | None]
) -> Piece:
    """Measure images of one size on the window that every angle shows, or say that they are too small."""
    images = step.whole[part]
    h, w = images[0].shape[-2:]
    canvas = canvas_for((h, w), plan)
    if canvas is None:
        step.notes.append(
            f"{_words(images[0])} are too small to be turned by any angle: they were left out there."
        )
        return len(images), None
    if canvas.invented:
        step.notes.append(
            f"{_words(images[0])} are too small to be turned without gaps: mirrored pixels fill these, and only the "
            "inscribed disc counts. For arbitrary angles larger images are better."
        )
    return len(images), measured(images, canvas)


def _features(what: Measured) -> FeatureFunction:
    if what.f is None:
        raise OptionError("Features were asked for, but only a segmenter was given.")
    return what.f


def _words(image: Tensor) -> str:
    return f"Images of {image.shape[-2]} x {image.shape[-1]} px"


def scribbles(truth: np.ndarray, area: np.ndarray, budget: int, rng: np.random.Generator) -> np.ndarray:
    """Return a map (H, W) with `budget` pixels of each class drawn at random inside `area`, else 0."""
    marks = np.zeros(truth.size, np.int64)
    inside = np.where(area, truth, 0).ravel()
    for k in np.unique(inside[inside > 0]):
        where = np.flatnonzero(inside == k)
        marks[rng.choice(where, min(budget, len(where)), replace=False)] = k
    return marks.reshape(truth.shape)
