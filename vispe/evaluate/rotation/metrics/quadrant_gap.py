"""The quadrant gap: scribbles in one corner of an image, accuracy in all four.

A classifier that learns from one corner and works worse in the others may have learnt where it is instead of what it
sees. Scribbles move to each corner in turn, so that differences of content average out, and the same number of pixels
spread everywhere is the control.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from torch import Tensor

from vispe.backbones.batching import FeatureFunction, batches, checked_labels, features_of
from vispe.errors import OptionError
from vispe.evaluate.rotation.helpers import Rows, features, question, scribbles
from vispe.evaluate.rotation.plan import Measured, Plan, Step, truths_of
from vispe.evaluate.rotation.record_key import FOUR_CORNERS, SPREAD, Key
from vispe.evaluate.rotation.records import Measurement
from vispe.evaluate.rotation.scribble_segmenter import TrainedSegmenter
from vispe.segment.metrics import mean_iou, without_borders

QUADRANTS = ("top left", "top right", "bottom left", "bottom right")

ScribbleSegmenter = Callable[[Tensor, np.ndarray], "np.ndarray | Tensor"]
"""One image (c, H, W) and scribbles (H, W), 0 where nothing is drawn -> labels (H, W)."""


def quadrant_gap(
    train: ScribbleSegmenter,
    images: Iterable[Tensor],
    truths: Sequence[object],
    n_classes: int,
    *,
    budget: int = 40,
    border: int = 1,
    seed: int = 0,
    first: int = 0,
) -> tuple[Measurement, ...]:
    """Measure mIoU in the three other quadrants minus mIoU in the one with the scribbles.

    Args:
        train: learns from an image and its scribbles and segments that image, such as `scribble_classifier(f)`.
        images: (c, H, W) each.
        truths: labels (H, W) of each image.
        n_classes: K.
        budget: scribbled pixels of each class, or all that the quadrant has.
        border: pixels along class borders that are neither scribbled on nor scored.
        seed: of the scribbles; every image and quadrant has its own draw.
        first: number of the first image in a larger list.

    Returns:
        'quadrant_gap' for 'four corners' (their mean, in which differences of content cancel) and for each of
        `QUADRANTS`, negative where position leaks. Controls: for each quadrant the same gap with the scribbles spread
        everywhere, which is due to content alone. 'accuracy' (mIoU) in the quadrants of the scribbles, in the others,
        and with the scribbles spread. NaN where a quadrant shows fewer than two classes. Scribbled pixels are not
        scored.
    """
    if budget < 1:
        raise OptionError(f"The scribbles need at least one pixel of each class, got budget={budget}.")
    scores: list[list[list[float]]] = []
    for number, batch in enumerate(batches(images)):
        truth = without_borders(truths_of(truths, number, batch), border)
        rngs = (np.random.default_rng([seed, first + number, k]) for k in range(5))
        areas = [*quadrants(truth.shape), np.ones(truth.shape, bool)]
        drawn = [scribbles(truth, area, budget, rng) for area, rng in zip(areas, rngs, strict=True)]
        scores.append([_scores(train, batch[0], truth, marks, n_classes) for marks in drawn])
    every = np.array(scores)
    return _rows(every[:, :4], every[:, 4])


def quadrants(shape: tuple[int, ...]) -> list[np.ndarray]:
    """Return masks (H, W) of the four quadrants, as `QUADRANTS`; the middle row or column of odd sides is in none.

    >>> quadrants((2, 3))[0].tolist()
    [[True, False, False], [False, False, False]]
    """
    h, w = shape
    row, col = np.arange(h)[:, None], np.arange(w)[None, :]
    top, bottom, left, right = row < h // 2, row >= h - h // 2, col < w // 2, col >= w - w // 2
    return [top & left, top & right, bottom & left, bottom & right]


def scribble_classifier(f: FeatureFunction) -> ScribbleSegmenter:
    """Return a segmenter by logistic regression on f's features, which knows nothing but what f gives.

    The map is enlarged to pixels bilinearly, standardised over the scribbled pixels, and classified with
    scikit-learn's balanced logistic regression.

    Args:
        f: images (b, c, H, W) -> maps (b, d, h, w).
    """

    def train(image: Tensor, marks: np.ndarray) -> np.ndarray:
        maps = features_of(f, image[None])[0]
        return TrainedSegmenter(f, [maps], [marks]).labels(maps, marks.shape)

    return train


def _scores(
    train: ScribbleSegmenter, image: Tensor, truth: np.ndarray, marks: np.ndarray, n_classes: int
) -> list[float]:
    """Return mIoU by quadrant after learning from scribbles; NaN when these show fewer than two classes."""
    if len(np.unique(marks[marks > 0])) < 2:
        return [float("nan")] * 4
    labels = checked_labels(train(image, marks), truth.shape, "The scribble segmenter returned")
    wanted = np.where(marks > 0, 0, truth)
    return [mean_iou(np.where(quarter, wanted, 0), labels, n_classes) for quarter in quadrants(truth.shape)]


def _rows(corner: np.ndarray, spread: np.ndarray) -> tuple[Measurement, ...]:
    """Make rows of mIoU by image, quadrant with scribbles, quadrant scored (n, 4, 4), and by image, quadrant (n, 4)."""
    own = np.diagonal(corner, axis1=1, axis2=2)
    others = (corner.sum(2) - own) / 3
    even = (spread.sum(1, keepdims=True) - spread) / 3 - spread
    gap = others - own
    rows = [Measurement.of(Key(FOUR_CORNERS, "quadrant_gap"), _mean_known(gap))]
    rows += [Measurement.of(Key(name, "quadrant_gap"), gap[:, k]) for k, name in enumerate(QUADRANTS)]
    rows += [
        Measurement.of(Key(name, "quadrant_gap", SPREAD), even[:, k], control=True)
        for k, name in enumerate(QUADRANTS)
    ]
    return (
        *rows,
        Measurement.of(Key(FOUR_CORNERS, "accuracy", "quadrant of the scribbles"), _mean_known(own)),
        Measurement.of(Key(FOUR_CORNERS, "accuracy", "other quadrants"), _mean_known(others)),
        Measurement.of(Key(SPREAD, "accuracy", SPREAD), spread.mean(1), control=True),
    )


def _mean_known(values: np.ndarray) -> np.ndarray:
    """Mean over the last axis of what is not NaN; NaN where nothing is."""
    known = np.isfinite(values)
    count = known.sum(-1)
    return np.where(count > 0, np.where(known, values, 0).sum(-1) / np.maximum(count, 1), np.nan)


@question("quadrant")
def quadrant(measured: Measured, plan: Plan, step: Step) -> Rows | None:
    """Train on each corner of images with a mask and score the others."""
    if step.fitted_truths is None or plan.n_classes is None:
        return None
    train = scribble_classifier(features(measured))
    options = {"budget": plan.budget, "seed": plan.seed, "first": step.first}
    return quadrant_gap(train, step.fitted, step.fitted_truths, plan.n_classes, **options)
