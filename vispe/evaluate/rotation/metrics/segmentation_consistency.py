"""Consistency of segmentations under rotations, reflections and shifts of the image, without ground truth.

A segmenter takes one image (c, H, W) and returns labels (H, W): 1 to K are classes, 0 means no data. The same segmenter
is used at every pose; nothing is refitted. Memory: one image and its labels at two poses.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor

from vispe.backbones.batching import Segmenter, labels_of
from vispe.evaluate.rotation.comparison import Pair, compared, label_of, poses_of
from vispe.evaluate.rotation.helpers import (
    Found,
    at_angles,
    canvas_of,
    question,
    segmenter_for,
    trainings,
    under,
)
from vispe.evaluate.rotation.plan import ANGLES, ImageBatch, Measured, RotationPlan
from vispe.evaluate.rotation.record_key import ALL_PHASES, ANGLE, FULL, IDENTICAL, RANDOM_PHASES, Key
from vispe.evaluate.rotation.records import Measurement
from vispe.images.symmetry.d4 import D4, IDENTITY, Element
from vispe.images.symmetry.label_maps import resampled_labels, rotated_labels
from vispe.images.symmetry.warp import Canvas
from vispe.segment.metrics import adjusted_rand_index, mean_iou
from vispe.utils.interval import Interval
from vispe.utils.options import PositiveInt, checked


def consistency(
    s: Segmenter,
    images: Iterable[Tensor],
    n_classes: int,
    *,
    elements: Sequence[Element] = D4,
    part: str = FULL,
) -> tuple[Measurement, ...]:
    """Compare the labels of rotated and reflected images, with the pose undone, with the original labels (exact).

    Args:
        s: image (c, H, W) -> labels (H, W).
        images: (c, H, W) each.
        n_classes: K.
        elements: poses; the identity, evaluated twice, is a control.
        part: part of the records, see `Measurement`.

    Returns:
        mIoU over the classes in either map and adjusted Rand index, for each pose and averaged ('D4').

    Raises:
        OptionError: there is no pose besides the identity.
        InputError: there are no images, an image has values that are not finite, or labels are not non-negative
            integers.
        ShapeError: an image is not (c, H, W), or its labels have another size.

    Example:
        >>> bright = lambda image: 1 + (image[0] > 0.5).long()
        >>> consistency(bright, torch.rand(1, 3, 8, 8), 2)[0].values.tolist()
        [1.0]
    """
    poses = poses_of(elements, "Consistency")

    def pairs(batch: Tensor) -> Iterator[Pair]:
        still = labels_of(s, batch[0])
        for g in (IDENTITY, *poses):
            yield (g, part), [still], [g.undo(labels_of(s, g.apply(batch[0])))]

    values = compared(images, pairs, agreement(n_classes))
    rows: list[Measurement] = []
    for m in agreement(n_classes):
        identity_record = Measurement.of(Key(IDENTICAL, m, part), values[(IDENTITY, part), m], control=True)
        rows += [*pose_rows(values, poses, m, part), identity_record]
    return tuple(rows)


def agreement(n_classes: int) -> dict[str, Callable[[np.ndarray, np.ndarray], float]]:
    """Return the measures of two label maps: mIoU over the classes in either, and adjusted Rand index."""
    return {"miou": partial(mean_iou, n_classes=n_classes), "ari": adjusted_rand_index}


def pose_rows(
    values: Mapping[tuple[Any, str], np.ndarray], poses: Sequence[Element], metric: str, part: str
) -> list[Measurement]:
    """Return the records of a metric: mean over poses, and each pose; values are by (pose, part) and metric."""
    each = [values[(g, part), metric] for g in poses]
    mean = Measurement.of(Key(label_of(poses), metric, part), np.mean(each, 0))
    return [mean, *(Measurement.of(Key(g.name, metric, part), v) for g, v in zip(poses, each, strict=True))]


def angle_consistency(
    s: Segmenter,
    images: Iterable[Tensor],
    n_classes: int,
    *,
    angles: Sequence[float] = ANGLES,
    margin: int = 8,
    side: int | None = None,
    how: Literal["crop", "disc"] = "crop",
    part: str = FULL,
) -> tuple[Measurement, ...]:
    """Compare the labels at any angles, rotated back by nearest neighbour, with those at 0 on the same disc.

    Args:
        s: image (c, side, side) -> labels (side, side).
        images: (c, H, W) each.
        n_classes: K.
        angles: degrees.
        margin: pixels excluded at the border of the disc, and divisor of the window side: the patch size of the model.
        side: side of the window in pixels; the largest by default.
        how: 'crop': only pixels of the image; 'disc': pixels outside of the image are mirrored.
        part: part of the records, see `Measurement`.

    Returns:
        mIoU and adjusted Rand index at each angle, with two floors: 'labels turned', the effect of resampling labels,
        below 1 for thin phases; and 'round trip', the labels of the image rotated forth and back.

    Raises:
        OptionError: `how` is unknown.
        InputError: there are no images, an image has values that are not finite, or labels are not non-negative
            integers.
        ShapeError: an image is not (c, H, W) or too small for the window, or its labels have another size.

    Example:
        >>> bright = lambda image: 1 + (image[0] > 0.5).long()
        >>> rows = angle_consistency(bright, torch.rand(1, 1, 48, 48), 2, angles=[90])
        >>> [(row.transform, row.metric, row.values.tolist()) for row in rows]
        [('90°', 'miou', [1.0]), ('90°', 'ari', [1.0])]
    """

    def pairs(batch: Tensor) -> Iterator[Pair]:
        canvas = Canvas.fit(tuple(batch.shape[-2:]), margin, side, how)
        disc = canvas.pixels().numpy()
        unrotated = labels_of(s, canvas.pose(batch, 0)[0])
        still = [np.where(disc, unrotated, 0)]
        for angle in angles:
            back = rotated_labels(labels_of(s, canvas.pose(batch, angle)[0]), -angle)
            trip = unrotated if angle % 90 == 0 else labels_of(s, canvas.round_trip(batch, angle)[0])
            yield (angle, ""), still, [back]
            yield (angle, "labels turned"), still, [resampled_labels(unrotated, angle)]
            yield (angle, "round trip"), still, [trip]

    scores = agreement(n_classes)
    values = compared(images, pairs, scores)
    return tuple(
        Measurement.of(
            Key(ANGLE, m, part, (angle,)),
            values[(angle, ""), m],
            floors={name: values[(angle, name), m] for name in ("labels turned", "round trip")},
        )
        for m in scores
        for angle in sorted(set(angles))
    )


@checked
def phase_consistency(
    s: Segmenter,
    images: Iterable[Tensor],
    n_classes: int,
    patch_size: Annotated[int, Interval(least=2)],
    *,
    phases: PositiveInt | None = 8,
    seed: int = 0,
    part: str = FULL,
) -> tuple[Measurement, ...]:
    """Compare the labels of images rolled by a fraction of a patch, with the roll undone, with the original labels.

    Args:
        s: image (c, H, W) -> labels (H, W).
        images: (c, H, W) each.
        n_classes: K.
        patch_size: patch size in pixels; there are patch_size² phases.
        phases: number of random phases except (0, 0); None uses all of them.
        seed: random seed of the random phases.
        part: part of the records, see `Measurement`.

    Returns:
        mIoU and adjusted Rand index averaged over phases, 'roll, random phases'.

    Raises:
        OptionError: the patch size is below 2, or there are no phases.
        InputError: there are no images, an image has values that are not finite, or labels are not non-negative
            integers.
        ShapeError: an image is not (c, H, W), or its labels have another size.

    Example:
        >>> bright = lambda image: 1 + (image[0] > 0.5).long()
        >>> [row.summary().mean for row in phase_consistency(bright, torch.rand(1, 3, 8, 8), 2, 4)]
        [1.0, 1.0]
    """
    every = np.arange(1, patch_size**2)
    rng = np.random.default_rng(seed)
    sampled_phases = (
        every if phases is None or phases >= len(every) else np.sort(rng.choice(every, phases, replace=False))
    )

    def pairs(batch: Tensor) -> Iterator[Pair]:
        still = [labels_of(s, batch[0])]
        for phase in sampled_phases:
            dy, dx = divmod(int(phase), patch_size)
            moved = labels_of(s, torch.roll(batch[0], (dy, dx), (-2, -1)))
            yield phase, still, [np.roll(moved, (-dy, -dx), (0, 1))]

    scores = agreement(n_classes)
    values = compared(images, pairs, scores)
    kind = ALL_PHASES if len(sampled_phases) == len(every) else RANDOM_PHASES
    means = {m: sum(values[p, m] for p in sampled_phases) / len(sampled_phases) for m in scores}
    return tuple(Measurement.of(Key(kind, m, part), v) for m, v in means.items())


@question("segmentation")
def segmentation(measured: Measured, plan: RotationPlan, step: ImageBatch) -> Found:
    """Compare labels in the eight poses, and, for segmenters trained on the original pose, at angles and phases."""
    k = plan.n_classes or 1
    pieces: Found = {}
    for training, elements in trainings(measured):
        names = (f"{n} {training}" for n in ("D4", "angles", "phases"))
        rotated, angled, shifted = (pieces.setdefault(name, []) for name in names)
        for n, image in enumerate(step.fitted):
            s = segmenter_for(measured, plan, step, n, elements)
            rotated.append((1, None if s is None else under(consistency(s, [image], k), training)))
            if training:
                continue
            canvas = canvas_of(step, step.whole[n], plan)
            canvas_segmenter = canvas and segmenter_for(measured, plan, step, n, (IDENTITY,), canvas)
            rows = None
            if canvas_segmenter is not None:
                options = at_angles(plan, canvas)
                rows = angle_consistency(
                    canvas_segmenter, step.whole[n : n + 1], k, margin=plan.step, **options
                )
            angled.append((1, rows))
            rows = None
            if s is not None and plan.step > 1:
                rows = phase_consistency(s, [image], k, plan.step, phases=plan.phases, seed=plan.seed)
            shifted.append((1, rows))
    return pieces
