"""Accuracy and phase fractions for arbitrary orientations of the sample.

The same disc of the sample is evaluated at every angle. The segmenter is not modified; report it for both training
sets, the original pose only and all poses.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
from torch import Tensor

from vispe.backbones.batching import Segmenter, labels_of
from vispe.errors import OptionError, counted
from vispe.evaluate.rotation.comparison import Pair, compared
from vispe.evaluate.rotation.helpers import (
    Found,
    at_angles,
    canvas_of,
    question,
    segmenter_for,
    trainings,
    under,
)
from vispe.evaluate.rotation.plan import ANGLES, ImageBatch, Measured, RotationPlan, truth_of_image
from vispe.evaluate.rotation.record_key import ALL_POSES, ANGLE, FULL, Key
from vispe.evaluate.rotation.records import Measurement
from vispe.images.symmetry.label_maps import rotated_window_labels, round_trip_window_labels
from vispe.images.symmetry.warp import Canvas
from vispe.segment.metrics import class_percentages, mean_iou, without_borders


def across_poses(
    s: Segmenter,
    images: Iterable[Tensor],
    n_classes: int,
    truths: Sequence[object] | None = None,
    *,
    angles: Sequence[float] = ANGLES,
    margin: int = 8,
    side: int | None = None,
    how: Literal["crop", "disc"] = "crop",
    border: int = 1,
    names: Sequence[str] | None = None,
    part: str = FULL,
) -> tuple[Measurement, ...]:
    """Measure accuracy and phase fractions over angles, on the same disc of the sample.

    Args:
        s: image (c, side, side) -> labels (side, side).
        images: (c, H, W) each.
        n_classes: K.
        truths: labels (H, W) of each image; None measures phase fractions only.
        angles: degrees.
        margin: pixels excluded at the border of the disc, and divisor of the window side: the patch size of the model.
        side: side of the window in pixels; the largest by default.
        how: 'crop': only pixels of the image; 'disc': pixels outside of the image are mirrored.
        border: pixels along class borders of the rotated truth that are ignored.
        names: names of the classes; 'class 1' ... by default.
        part: part of the records of accuracy, see `Measurement`.

    Returns:
        'accuracy' at each angle with the floor 'truth turned' (truth rotated forth and back against truth); for 'all
        poses' its mean, worst, spread (best minus worst) and standard deviation; and for each class, by name,
        'phase_spread': max minus min area fraction over angles, and 'phase_error': the largest signed deviation over
        angles from the true fraction on labelled pixels, both in percentage points.

    Raises:
        OptionError: the number of names differs from `n_classes`, or there are no angles.
        InputError: truths are missing, there are no images, an image has values that are not finite, or labels are
            not non-negative integers.
        ShapeError: an image is not (c, H, W) or too small for the window, or its labels have another size.

    Example:
        >>> import torch
        >>> bright = lambda image: 1 + (image[0] > 0.5).long()
        >>> image = torch.rand(1, 48, 48)
        >>> rows = across_poses(bright, [image], 2, [bright(image)], angles=[0, 90], border=0)
        >>> [(row.transform, row.values.tolist()) for row in rows if row.metric == 'accuracy'][:2]
        [('0°', [1.0]), ('90°', [1.0])]
    """
    names = [f"class {k + 1}" for k in range(n_classes)] if names is None else list(names)
    if len(names) != n_classes or len(angles) == 0:
        raise OptionError(
            f"across_poses: expected {n_classes} names and at least one angle, got {len(names)} names and "
            f"{counted(len(angles), 'angle')}. Pass one name per class."
        )
    area: list[np.ndarray] = []
    # deviation of the area fractions from the truth, on labelled pixels
    deviation: list[np.ndarray] = []

    def pairs(batch: Tensor) -> Iterator[Pair]:
        canvas = Canvas.fit(tuple(batch.shape[-2:]), margin, side, how)
        disc = canvas.pixels().numpy()
        truth = None if truths is None else truth_of_image(truths, len(area), batch)
        if truth is not None:
            truth = truth[: canvas.source[0], : canvas.source[1]]
            still = rotated_window_labels(canvas, truth, 0)
            true_area = class_percentages(np.where(disc, still, 0), n_classes)
            deviation.append(np.empty((len(angles), n_classes)))
        area.append(np.empty((len(angles), n_classes)))
        for k, angle in enumerate(angles):
            labels = np.where(disc, labels_of(s, canvas.pose(batch, angle)[0]), 0)
            area[-1][k] = class_percentages(labels, n_classes)
            if truth is not None:
                rotated = rotated_window_labels(canvas, truth, angle)
                labelled = np.where(rotated > 0, labels, 0)
                deviation[-1][k] = class_percentages(labelled, n_classes) - true_area
                yield (k, "value"), [without_borders(rotated, border)], [labels]
                trip = np.where(disc, round_trip_window_labels(canvas, truth, angle), 0)
                yield (k, "floor"), [without_borders(still, border)], [trip]

    values = compared(images, pairs, {"accuracy": partial(mean_iou, n_classes=n_classes)})
    rows = [] if truths is None else _accuracy_rows(values, angles, part)
    return (*rows, *_area_rows(np.array(area), None if truths is None else np.array(deviation), names))


def _accuracy_rows(
    values: Mapping[tuple[Any, str], np.ndarray], angles: Sequence[float], part: str
) -> list[Measurement]:
    """Return the records of accuracy at each angle, and of its statistics over angles."""
    accuracy, floors = (
        np.stack([values[(k, name), "accuracy"] for k in range(len(angles))], 1)
        for name in ("value", "floor")
    )
    over = {
        "accuracy_mean": accuracy.mean(1),
        "accuracy_worst": accuracy.min(1),
        "accuracy_spread": np.ptp(accuracy, axis=1),
        "accuracy_std": accuracy.std(1),
    }
    rows = [Measurement.of(Key(ALL_POSES, m, part), v) for m, v in over.items()]
    return rows + [
        Measurement.of(
            Key(ANGLE, "accuracy", part, (a,)), accuracy[:, k], floors={"truth turned": floors[:, k]}
        )
        for k, a in enumerate(angles)
    ]


def _area_rows(area: np.ndarray, deviation: np.ndarray | None, names: Sequence[str]) -> list[Measurement]:
    """Return the records of area fractions (n, angles, K) and of their deviations from the truth, in per cent."""
    rows = []
    for k, name in enumerate(names):
        rows.append(Measurement.of(Key(ALL_POSES, "phase_spread", name), np.ptp(area[:, :, k], axis=1)))
        if deviation is not None:
            signed = deviation[:, :, k]
            worst = np.take_along_axis(signed, np.abs(signed).argmax(1)[:, None], 1)[:, 0]
            rows.append(Measurement.of(Key(ALL_POSES, "phase_error", name), worst))
    return rows


@question("poses")
def poses(measured: Measured, plan: RotationPlan, step: ImageBatch) -> Found:
    """Evaluate each image at all angles of the plan, for every training set of its segmenter."""
    pieces: Found = {}
    for training, elements in trainings(measured):
        for n, image in enumerate(step.whole):
            rows = None
            canvas = canvas_of(step, image, plan)
            s = canvas and segmenter_for(measured, plan, step, n, elements, canvas)
            if s is not None:
                truths = None if step.truths is None else [step.truths[n]]
                options = {"margin": plan.step, "names": plan.names, **at_angles(plan, canvas)}
                rows = across_poses(s, [image], plan.n_classes or 1, truths, **options)
            pieces.setdefault(training, []).append((1, under(rows, training)))
    return pieces
