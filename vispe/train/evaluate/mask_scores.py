"""Linear segmentation on features before and after a retrofit, with classical filters as the baseline.

Every feature source has the same classifier (balanced logistic regression), training pixels and scored pixels, so
differences are due to the features. Three scores per image:

- `own`: mIoU with scribbles spread over the image.
- `corner`: loss of mIoU if all scribbles are in one corner. Differences of content between corners affect
  filters as well, so only the loss in excess of that of the filters is due to position.
- `others`: mIoU after training on the masks of other images.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vispe.backbones.batching import FeatureFunction, features_of
from vispe.evaluate.rotation.helpers import scribbles
from vispe.evaluate.rotation.metrics.quadrant_gap import quadrants
from vispe.evaluate.rotation.plan import truth_of_image
from vispe.evaluate.rotation.scribble_segmenter import TrainedSegmenter, sample_at_pixels
from vispe.segment.features.filters.filters2d import Filters
from vispe.segment.metrics import confusion, mean_iou, miou
from vispe.utils.report.table import json_list


@dataclass(frozen=True, eq=False)
class MaskScores:
    """mIoU by feature source, for each image; NaN if undefined.

    Attributes:
        own: scribbles spread over the image, scored on all other pixels, (n,) by source.
        corner: `own` minus the mIoU with scribbles in one corner, mean over the corners with two or more classes, (n,)
            by source. Scored on pixels without scribbles.
        others: trained on random pixels of the masks of the other half of the images, (n,) by source; {} for a single
            image.
        pooled: `others` over the pixels of all images, by source.
        n_classes: K.
        budget: labelled pixels per class.
    """

    own: Mapping[str, np.ndarray]
    corner: Mapping[str, np.ndarray]
    others: Mapping[str, np.ndarray]
    pooled: Mapping[str, float]
    n_classes: int
    budget: int

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values: means and the values of every image."""
        values: dict[str, Any] = {"n_classes": self.n_classes, "budget": self.budget}
        for key in ("own", "corner", "others"):
            values[key] = {
                name: {"mean": json_list([finite_mean(v)])[0], "per_image": json_list(v)}
                for name, v in getattr(self, key).items()
            }
        return values | {"others_pooled": dict(self.pooled)}


class FilterFeatures:
    """The classical filters of `vispe segment` as a feature function: images (b, 3, H, W) -> maps (b, 26, H, W).

    Args:
        mean: (3, 1, 1), mean of the normalisation, which is inverted.
        std: (3, 1, 1), standard deviation of the normalisation.
    """

    patch = 1

    def __init__(self, mean: Tensor, std: Tensor) -> None:
        self._mean, self._std, self._filters = mean, std, Filters()

    def __call__(self, images: Tensor) -> Tensor:
        """Return the filter maps of normalised images; colours are averaged to grey."""
        grey = (images * self._std + self._mean).mean(1)
        maps = [self._filters(channel.cpu().numpy()[..., None].astype(np.float32)) for channel in grey]
        return torch.from_numpy(np.stack(maps)).permute(0, 3, 1, 2)


def score_masks(
    sources: Mapping[str, FeatureFunction],
    images: Sequence[Tensor],
    truths: Sequence[Any],
    n_classes: int,
    *,
    budget: int = 100,
    seed: int = 0,
    progress: Callable[[float], None] = lambda share: None,
) -> MaskScores:
    """Score linear segmentation on each feature source.

    Memory: the maps of one image, and `budget` feature vectors per class and image.

    Args:
        sources: functions from images (b, c, H, W) to maps (b, d, h, w), by name.
        images: (c, H, W) each, read twice if there are several.
        truths: labels (H, W) of each image, 1..K and 0 for ignored pixels.
        n_classes: K.
        budget: labelled pixels per class, or all if there are fewer.
        seed: seed of the scribbles; they differ between images, but not between sources.
        progress: called after every image with the completed fraction.
    """
    spread_scores, corner_losses, samples = ({name: [] for name in sources} for _ in range(3))
    labels_of_samples: list[np.ndarray] = []
    rounds = 2 if len(images) > 1 else 1
    for number, image in enumerate(images):
        truth = truth_of_image(truths, number, image)
        # a sample of scribbles for the full image, and one for each corner
        areas = [np.ones(truth.shape, bool), *quadrants(truth.shape)]
        scribble_maps = [
            scribbles(truth, area, budget, np.random.default_rng([seed, number, k]))
            for k, area in enumerate(areas)
        ]
        # all scores use the same pixels, those without any scribble
        scored = np.where(np.any([marks > 0 for marks in scribble_maps], axis=0), 0, truth)
        spread, *corners = scribble_maps
        labels_of_samples.append(spread[spread > 0])
        for name, f in sources.items():
            maps = features_of(f, image[None])[0]
            samples[name].append(sample_at_pixels(maps, spread > 0))
            best = _miou(f, maps, spread, scored, n_classes)
            losses = [best - _miou(f, maps, marks, scored, n_classes) for marks in corners]
            spread_scores[name].append(best)
            corner_losses[name].append(finite_mean(np.array(losses)))
        progress((number + 1) / len(images) / rounds)
    others, pooled = {}, {}
    if len(images) > 1:
        others, pooled = _others(sources, images, truths, n_classes, samples, labels_of_samples, progress)
    return MaskScores(_arrays(spread_scores), _arrays(corner_losses), others, pooled, n_classes, budget)


def finite_mean(values: np.ndarray) -> float:
    """Return the mean of the finite values; NaN if there are none.

    >>> finite_mean(np.array([1.0, np.nan, 3.0]))
    2.0
    """
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else float("nan")


def _miou(f: FeatureFunction, maps: Tensor, marks: np.ndarray, truth: np.ndarray, n_classes: int) -> float:
    """Return the mIoU of a classifier trained on `marks`; NaN for fewer than two classes."""
    if len(np.unique(marks[marks > 0])) < 2:
        return float("nan")
    labels = TrainedSegmenter(f, [maps], [marks]).labels(maps, marks.shape)
    return mean_iou(truth, labels, n_classes)


def _others(
    sources: Mapping[str, FeatureFunction],
    images: Sequence[Tensor],
    truths: Sequence[Any],
    n_classes: int,
    samples: Mapping[str, list[np.ndarray]],
    labels_of_samples: Sequence[np.ndarray],
    progress: Callable[[float], None],
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Two-fold cross-validation: train on the images with even (odd) indices, and score the others."""
    learners: dict[str, list[TrainedSegmenter | None]] = {}
    for name, f in sources.items():
        # learner 0 is trained on images 1, 3, ... and scores 0, 2, ..., and vice versa
        halves = ((samples[name][half::2], labels_of_samples[half::2]) for half in (1, 0))
        learners[name] = [
            _learner(f, np.concatenate(features), np.concatenate(labels)) for features, labels in halves
        ]
    values: dict[str, list[float]] = {name: [] for name in sources}
    counts = {name: np.zeros((n_classes, n_classes), np.int64) for name in sources}
    for number, image in enumerate(images):
        truth = truth_of_image(truths, number, image)
        for name, f in sources.items():
            learner = learners[name][number % 2]
            if learner is None:
                values[name].append(float("nan"))
                continue
            matrix = confusion(truth, learner.labels(features_of(f, image[None])[0], truth.shape), n_classes)
            values[name].append(miou(matrix))
            counts[name] += matrix
        progress(0.5 + (number + 1) / len(images) / 2)
    return _arrays(values), {name: miou(count) for name, count in counts.items()}


def _learner(f: FeatureFunction, samples: np.ndarray, classes: np.ndarray) -> TrainedSegmenter | None:
    """Return a segmenter trained on samples (n, d) and their classes (n,); None for fewer than two classes."""
    if len(np.unique(classes)) < 2:
        return None
    # samples as a map (d, 1, n), since interpolation at pixel centres returns them unchanged
    return TrainedSegmenter(f, [torch.from_numpy(samples.T[:, None])], [classes[None]])


def _arrays(values: Mapping[str, Sequence[float]]) -> dict[str, np.ndarray]:
    return {name: np.array(numbers) for name, numbers in values.items()}
