"""Shared helpers of the metrics of `vispe rotate`: registry, segmenters, windows, and names of records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from vispe.backbones.batching import FeatureFunction, Segmenter
from vispe.errors import OptionError
from vispe.evaluate.rotation.distributed import Piece
from vispe.evaluate.rotation.plan import ImageBatch, Measured, RotationPlan, canvas_for, how_of
from vispe.evaluate.rotation.record_key import EVERY_POSE
from vispe.evaluate.rotation.records import Measurement
from vispe.evaluate.rotation.scribble_segmenter import TrainedSegmenter
from vispe.images.symmetry.d4 import D4, IDENTITY, Element
from vispe.images.symmetry.label_maps import rotated_window_labels
from vispe.images.symmetry.warp import Canvas
from vispe.segment.metrics import without_borders

Rows = tuple[Measurement, ...]

Elements = Sequence[Element] | None

Found = dict[str, list[Piece]]
"""Records of one step, by names that are the same in all steps."""

Answer = Callable[[Measured, RotationPlan, ImageBatch], "Rows | Found | None"]
"""Returns the records of all images of a step, or pieces by name; None if these images have no such records."""

QUESTIONS: dict[str, Answer] = {}


def question(name: str) -> Callable[[Answer], Answer]:
    """Return a decorator that registers a metric."""

    def enter(answer: Answer) -> Answer:
        QUESTIONS[name] = answer
        return answer

    return enter


def segmenter_for(
    measured: Measured,
    plan: RotationPlan,
    step: ImageBatch,
    n: int,
    elements: Elements,
    canvas: Canvas | None = None,
) -> Segmenter | None:
    """Return the segmenter for image n of a step, or one trained on the truth of that image.

    Args:
        measured: feature function and segmenter.
        plan: settings.
        step: images.
        n: index within the step.
        elements: training poses; None returns the given segmenter.
        canvas: training window at angle 0; the cropped image by default.

    Returns:
        None if the image shows fewer than two classes.
    """
    if elements is None or measured.f is None:
        return measured.segmenter
    if step.truths is None or step.fitted_truths is None:
        return None
    image, truth = step.fitted[n], step.fitted_truths[n]
    if canvas is not None:
        image = canvas.pose(step.whole[n][None], 0)[0]
        h, w = canvas.source
        truth = rotated_window_labels(canvas, step.truths[n][:h, :w], 0)
    rng = np.random.default_rng([plan.seed, step.first + n, 7])
    marks = scribbles(without_borders(truth), np.ones(truth.shape, bool), plan.budget, rng)
    if len(np.unique(marks[marks > 0])) < 2:
        step.notes.append(
            f"Image {step.first} has fewer than two classes, so no classifier was trained on it."
        )
        return None
    return TrainedSegmenter.of_image(measured.f, image, marks, elements)


def trainings(measured: Measured) -> tuple[tuple[str, Elements], ...]:
    """Return the names of the training sets of segmenters, and their poses."""
    return (("", None),) if measured.segmenter else (("", (IDENTITY,)), (EVERY_POSE, D4))


def under(rows: Rows | None, training: str) -> Rows | None:
    """Return the records with the name of a training set."""
    return rows and tuple(row.about(training=training) for row in rows)


def canvas_of(step: ImageBatch, image: Tensor, plan: RotationPlan) -> Canvas | None:
    """Return the window of an image (c, H, W) for all angles; None, with a note, if it is too small."""
    canvas = canvas_for(tuple(image.shape[-2:]), plan)
    if canvas is None:
        step.notes.append(f"{size_of(image)} are too small for arbitrary angles and were skipped there.")
    elif canvas.invented:
        step.notes.append(
            f"{size_of(image)} are too small to be rotated without padding: mirrored pixels are used, and only the "
            "inscribed disc is evaluated. Larger images are better for arbitrary angles."
        )
    return canvas


def at_angles(plan: RotationPlan, canvas: Canvas) -> dict[str, Any]:
    """Return the arguments of metrics at all angles."""
    return {"angles": plan.angles, "side": canvas.side, "how": how_of(canvas)}


def features(measured: Measured) -> FeatureFunction:
    """Return the feature function.

    Raises:
        OptionError: there is only a segmenter.
    """
    if measured.f is None:
        raise OptionError("measure: this metric needs features, got f=None. Pass a feature function.")
    return measured.f


def size_of(image: Tensor) -> str:
    """Return the size of an image as text."""
    return f"Images of {image.shape[-2]} x {image.shape[-1]} px"


def scribbles(truth: np.ndarray, area: np.ndarray, budget: int, rng: np.random.Generator) -> np.ndarray:
    """Return a map (H, W) with `budget` random pixels per class inside `area`, and 0 elsewhere.

    >>> truth = np.array([[1, 1, 2], [1, 2, 2]])
    >>> int((scribbles(truth, truth > 0, 1, np.random.default_rng(0)) > 0).sum())
    2
    """
    marks = np.zeros(truth.size, np.int64)
    inside = np.where(area, truth, 0).ravel()
    for k in np.unique(inside[inside > 0]):
        where = np.flatnonzero(inside == k)
        marks[rng.choice(where, min(budget, len(where)), replace=False)] = k
    return marks.reshape(truth.shape)
