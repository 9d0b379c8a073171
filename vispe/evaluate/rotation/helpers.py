"""What the questions share: the table that they enter, segmenters of an image, windows, and rows by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from vispe.backbones.batching import FeatureFunction, Segmenter
from vispe.errors import OptionError
from vispe.evaluate.rotation.distributed import Piece
from vispe.evaluate.rotation.plan import Measured, Plan, Step, canvas_for, how_of
from vispe.evaluate.rotation.record_key import EVERY_POSE
from vispe.evaluate.rotation.records import Measurement
from vispe.evaluate.rotation.scribble_segmenter import TrainedSegmenter
from vispe.segment.metrics import without_borders
from vispe.symmetry.d4 import D4, IDENTITY, Element
from vispe.symmetry.label_maps import posed_labels
from vispe.symmetry.warp import Canvas

Rows = tuple[Measurement, ...]

Elements = Sequence[Element] | None

Found = dict[str, list[Piece]]
"""Rows of one step under names that are the same in all steps."""

Answer = Callable[[Measured, Plan, Step], "Rows | Found | None"]
"""Rows of all images of a step, or in pieces by name; None where these images have no such rows."""

QUESTIONS: dict[str, Answer] = {}


def question(name: str) -> Callable[[Answer], Answer]:
    """Return a decorator that enters the answer to a question into the table."""

    def enter(answer: Answer) -> Answer:
        QUESTIONS[name] = answer
        return answer

    return enter


def segmenter_for(
    measured: Measured, plan: Plan, step: Step, n: int, elements: Elements, canvas: Canvas | None = None
) -> Segmenter | None:
    """Return the segmenter of image n of a step, or one that was trained on its own truth.

    Args:
        measured: what is measured.
        plan: settings.
        step: images.
        n: number within the step.
        elements: poses that it learns from; None takes the segmenter as it is.
        canvas: window at pose 0 that it learns from; default the fitted image.

    Returns:
        None when the image shows fewer than two classes.
    """
    if elements is None or measured.f is None:
        return measured.segmenter
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
    return TrainedSegmenter.of_image(measured.f, image, marks, elements)


def trainings(measured: Measured) -> tuple[tuple[str, Elements], ...]:
    """Return how segmenters are trained, as rows name it, and the poses that they learn from."""
    return (("", None),) if measured.segmenter else (("", (IDENTITY,)), (EVERY_POSE, D4))


def under(rows: Rows | None, training: str) -> Rows | None:
    """Return the rows under the name of a training."""
    return rows and tuple(row.about(training=training) for row in rows)


def canvas_of(step: Step, image: Tensor, plan: Plan) -> Canvas | None:
    """Return the window of an image (c, H, W) that every angle shows; None, and a note, when it is too small."""
    canvas = canvas_for(tuple(image.shape[-2:]), plan)
    if canvas is None:
        step.notes.append(
            f"{size_of(image)} are too small to be turned by any angle: they were left out there."
        )
    elif canvas.invented:
        step.notes.append(
            f"{size_of(image)} are too small to be turned without gaps: mirrored pixels fill these, and only the "
            "inscribed disc counts. For arbitrary angles larger images are better."
        )
    return canvas


def at_angles(plan: Plan, canvas: Canvas) -> dict[str, Any]:
    """Return the arguments of a question that is asked at every angle."""
    return {"angles": plan.angles, "side": canvas.side, "how": how_of(canvas)}


def features(measured: Measured) -> FeatureFunction:
    """Return the feature function, or say that there is none."""
    if measured.f is None:
        raise OptionError("Features were asked for, but only a segmenter was given.")
    return measured.f


def size_of(image: Tensor) -> str:
    """Return the size of an image in words."""
    return f"Images of {image.shape[-2]} x {image.shape[-1]} px"


def scribbles(truth: np.ndarray, area: np.ndarray, budget: int, rng: np.random.Generator) -> np.ndarray:
    """Return a map (H, W) with `budget` pixels of each class drawn at random inside `area`, else 0.

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
