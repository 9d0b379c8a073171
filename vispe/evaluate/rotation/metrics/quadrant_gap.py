"""Quadrant gap: train on scribbles in one quadrant of an image, evaluate in all four.

A classifier that is less accurate in the other quadrants may have learnt position instead of content. Each
quadrant is used for training once, so that differences of content average out. The control is trained on the
same number of pixels from the full image.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from torch import Tensor

from vispe.backbones.batching import FeatureFunction, batches, checked_labels, features_of
from vispe.evaluate.rotation.helpers import Rows, features, question, scribbles
from vispe.evaluate.rotation.plan import ImageBatch, Measured, RotationPlan, truth_of_image
from vispe.evaluate.rotation.record_key import FOUR_CORNERS, SPREAD, Key
from vispe.evaluate.rotation.records import Measurement
from vispe.evaluate.rotation.scribble_segmenter import TrainedSegmenter
from vispe.segment.metrics import mean_iou, without_borders
from vispe.utils.options import PositiveInt, checked

QUADRANTS = ("top left", "top right", "bottom left", "bottom right")

ScribbleSegmenter = Callable[[Tensor, np.ndarray], "np.ndarray | Tensor"]
"""One image (c, H, W) and scribbles (H, W), 0 where nothing is drawn -> labels (H, W)."""


@checked
def quadrant_gap(
    train: ScribbleSegmenter,
    images: Iterable[Tensor],
    truths: Sequence[object],
    n_classes: int,
    *,
    budget: PositiveInt = 40,
    border: int = 1,
    seed: int = 0,
    first: int = 0,
) -> tuple[Measurement, ...]:
    """Measure mIoU in the three other quadrants minus mIoU in the annotated one.

    Args:
        train: trains on an image and its scribbles and segments that image, such as `scribble_classifier(f)`.
        images: (c, H, W) each.
        truths: labels (H, W) of each image.
        n_classes: K.
        budget: scribbled pixels per class, or all pixels of the quadrant.
        border: pixels along class borders that are neither annotated nor evaluated.
        seed: random seed of the scribbles; random numbers depend on the image and the quadrant.
        first: index of the first image in a larger list.

    Returns:
        'quadrant_gap' for 'four corners' (their mean, in which differences of content cancel) and for each of
        `QUADRANTS`, negative if position leaks. Controls: for each quadrant the same gap for scribbles in the full
        image, which is due to content only. 'accuracy' (mIoU) in the annotated quadrants, in the others, and for
        scribbles in the full image. NaN if a quadrant has fewer than two classes. Scribbled pixels are not evaluated.

    Raises:
        OptionError: `budget` is below 1.
        InputError: truths are missing, there are no images, an image has values that are not finite, or labels are
            not non-negative integers.
        ShapeError: an image is not (c, H, W), or its labels have another size.

    Example:
        >>> import torch
        >>> image = torch.rand(1, 16, 16)
        >>> truth = 1 + (image[0] > 0.5).long()
        >>> rows = quadrant_gap(scribble_classifier(lambda images: images), [image], [truth], 2, border=0)
        >>> rows[0].transform, rows[0].metric
        ('four corners', 'quadrant_gap')
    """
    scores: list[list[list[float]]] = []
    for number, batch in enumerate(batches(images)):
        truth = without_borders(truth_of_image(truths, number, batch), border)
        rngs = (np.random.default_rng([seed, first + number, k]) for k in range(5))
        areas = [*quadrants(truth.shape), np.ones(truth.shape, bool)]
        scribbles_per_area = [
            scribbles(truth, area, budget, rng) for area, rng in zip(areas, rngs, strict=True)
        ]
        scores.append([_scores(train, batch[0], truth, marks, n_classes) for marks in scribbles_per_area])
    every = np.array(scores)
    return _rows(every[:, :4], every[:, 4])


def quadrants(shape: tuple[int, ...]) -> list[np.ndarray]:
    """Return masks (H, W) of the four `QUADRANTS`; the central row or column of odd sides is excluded.

    >>> quadrants((2, 3))[0].tolist()
    [[True, False, False], [False, False, False]]
    """
    h, w = shape
    row, col = np.arange(h)[:, None], np.arange(w)[None, :]
    top, bottom, left, right = row < h // 2, row >= h - h // 2, col < w // 2, col >= w - w // 2
    return [top & left, top & right, bottom & left, bottom & right]


def scribble_classifier(f: FeatureFunction) -> ScribbleSegmenter:
    """Return a segmenter by logistic regression on the features of f.

    The map is upsampled bilinearly to pixels, standardised over the scribbled pixels, and classified by the balanced
    logistic regression of scikit-learn.

    Args:
        f: images (b, c, H, W) -> maps (b, d, h, w).

    Raises:
        ShapeError: the segmenter is called on an image for which f does not return one map.
        InputError: a map has values that are not finite.

    Example:
        >>> import torch
        >>> image = torch.zeros(1, 8, 8)
        >>> image[..., 4:] = 1
        >>> marks = np.zeros((8, 8), int)
        >>> marks[0, 0], marks[0, 7] = 1, 2
        >>> scribble_classifier(lambda images: images)(image, marks)[3].tolist()
        [1, 1, 1, 1, 2, 2, 2, 2]
    """

    def train(image: Tensor, marks: np.ndarray) -> np.ndarray:
        maps = features_of(f, image[None])[0]
        return TrainedSegmenter(f, [maps], [marks]).labels(maps, marks.shape)

    return train


def _scores(
    train: ScribbleSegmenter, image: Tensor, truth: np.ndarray, marks: np.ndarray, n_classes: int
) -> list[float]:
    """Return mIoU by quadrant after training on scribbles; NaN if these have fewer than two classes."""
    if len(np.unique(marks[marks > 0])) < 2:
        return [float("nan")] * 4
    labels = checked_labels(train(image, marks), truth.shape, "The scribble segmenter returned")
    unmarked = np.where(marks > 0, 0, truth)
    return [mean_iou(np.where(quarter, unmarked, 0), labels, n_classes) for quarter in quadrants(truth.shape)]


def _rows(corner: np.ndarray, spread: np.ndarray) -> tuple[Measurement, ...]:
    """Return records from mIoU (n, annotated quadrant, evaluated quadrant) and, for spread scribbles, (n, quadrant)."""
    same_quadrant = np.diagonal(corner, axis1=1, axis2=2)
    others = (corner.sum(2) - same_quadrant) / 3
    even = (spread.sum(1, keepdims=True) - spread) / 3 - spread
    gap = others - same_quadrant
    rows = [Measurement.of(Key(FOUR_CORNERS, "quadrant_gap"), _mean_known(gap))]
    rows += [Measurement.of(Key(name, "quadrant_gap"), gap[:, k]) for k, name in enumerate(QUADRANTS)]
    rows += [
        Measurement.of(Key(name, "quadrant_gap", SPREAD), even[:, k], control=True)
        for k, name in enumerate(QUADRANTS)
    ]
    return (
        *rows,
        Measurement.of(
            Key(FOUR_CORNERS, "accuracy", "quadrant of the scribbles"), _mean_known(same_quadrant)
        ),
        Measurement.of(Key(FOUR_CORNERS, "accuracy", "other quadrants"), _mean_known(others)),
        Measurement.of(Key(SPREAD, "accuracy", SPREAD), spread.mean(1), control=True),
    )


def _mean_known(values: np.ndarray) -> np.ndarray:
    """Return the mean over the last axis ignoring NaN; NaN if all are NaN."""
    known = np.isfinite(values)
    count = known.sum(-1)
    return np.where(count > 0, np.where(known, values, 0).sum(-1) / np.maximum(count, 1), np.nan)


@question("quadrant")
def quadrant(measured: Measured, plan: RotationPlan, step: ImageBatch) -> Rows | None:
    """Train on each quadrant of images with a mask and evaluate the others."""
    if step.fitted_truths is None or plan.n_classes is None:
        return None
    train = scribble_classifier(features(measured))
    options = {"budget": plan.budget, "seed": plan.seed, "first": step.first}
    return quadrant_gap(train, step.fitted, step.fitted_truths, plan.n_classes, **options)
