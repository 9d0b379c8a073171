"""Linear segmentation on features before and after a retrofit, with classical filters as the yardstick.

Every source of features gets the same classifier (balanced logistic regression), the same pixels to learn from and the
same pixels to be scored on, so differences are due to the features. Three questions are asked of every image:

- `own`: how good is it when scribbles are spread over the image?
- `corner`: how much of that is lost when all scribbles lie in one corner? Content differs between corners, and costs
  filters as well; a loss beyond that of the filters comes from position.
- `others`: how good is it when it learns from the masks of other images?
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
from vispe.evaluate.rotation.plan import truths_of
from vispe.evaluate.rotation.scribble_segmenter import TrainedSegmenter, at_pixels
from vispe.report.table import json_list
from vispe.segment.features.filters import Filters
from vispe.segment.metrics import confusion, mean_iou, miou


@dataclass(frozen=True, eq=False)
class MaskScores:
    """mIoU by source of features, for each image; NaN where an image cannot tell.

    Attributes:
        own: scribbles spread over the image, scored everywhere else, (n,) by source.
        corner: the same minus what scribbles in one corner reach, mean over the four corners that show two classes or
            more, (n,) by source. Scored on the pixels that no scribble covers.
        others: learnt from random pixels of the masks of the other half of the images, (n,) by source; {} where there
            is one image only.
        pooled: of `others`, over the pixels of all images together, by source.
        n_classes: K.
        budget: scribbled pixels of each class.
    """

    own: Mapping[str, np.ndarray]
    corner: Mapping[str, np.ndarray]
    others: Mapping[str, np.ndarray]
    pooled: Mapping[str, float]
    n_classes: int
    budget: int

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values: means and the value of every image."""
        values: dict[str, Any] = {"n_classes": self.n_classes, "budget": self.budget}
        for key in ("own", "corner", "others"):
            values[key] = {
                name: {"mean": json_list([mean_known(v)])[0], "per_image": json_list(v)}
                for name, v in getattr(self, key).items()
            }
        return values | {"others_pooled": dict(self.pooled)}


class FilterFeatures:
    """The classical filters of `vispe segment` as a feature function: images (b, 3, H, W) -> maps (b, 26, H, W).

    Args:
        mean: (3, 1, 1) that was taken from the images, which are brought back to [0, 1].
        std: (3, 1, 1) by which they were divided.
    """

    patch = 1

    def __init__(self, mean: Tensor, std: Tensor) -> None:
        self._mean, self._std, self._filters = mean, std, Filters()

    def __call__(self, images: Tensor) -> Tensor:
        """Images, normalised -> maps; colours are averaged to grey."""
        grey = (images * self._std + self._mean).mean(1)
        maps = [self._filters(one.cpu().numpy()[..., None].astype(np.float32)) for one in grey]
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
    """Score linear segmentation on each source of features.

    Memory: the maps of one image, and `budget` feature vectors of each class and image.

    Args:
        sources: images (b, c, H, W) -> maps (b, d, h, w), by name.
        images: (c, H, W) each, gone through twice when there are several.
        truths: labels (H, W) of each image, 1..K and 0 for what does not count.
        n_classes: K.
        budget: scribbled pixels of each class, or all that there are.
        seed: of the scribbles; every image has its own draw, the same for every source.
        progress: called after every image with the share that is done.
    """
    own, corner, samples = ({name: [] for name in sources} for _ in range(3))
    taught: list[np.ndarray] = []
    rounds = 2 if len(images) > 1 else 1
    for number, image in enumerate(images):
        truth = truths_of(truths, number, image)
        # one draw for the whole image, and one for each of its corners
        areas = [np.ones(truth.shape, bool), *quadrants(truth.shape)]
        drawn = [
            scribbles(truth, area, budget, np.random.default_rng([seed, number, k]))
            for k, area in enumerate(areas)
        ]
        # scored on the pixels that no scribble covers, so that all scores are of the same pixels
        wanted = np.where(np.any([marks > 0 for marks in drawn], axis=0), 0, truth)
        spread, *corners = drawn
        taught.append(spread[spread > 0])
        for name, f in sources.items():
            maps = features_of(f, image[None])[0]
            samples[name].append(at_pixels(maps, spread > 0))
            best = _learnt(f, maps, spread, wanted, n_classes)
            lost = [best - _learnt(f, maps, marks, wanted, n_classes) for marks in corners]
            own[name].append(best)
            corner[name].append(mean_known(np.array(lost)))
        progress((number + 1) / len(images) / rounds)
    others, pooled = {}, {}
    if len(images) > 1:
        others, pooled = _others(sources, images, truths, n_classes, samples, taught, progress)
    return MaskScores(_arrays(own), _arrays(corner), others, pooled, n_classes, budget)


def mean_known(values: np.ndarray) -> float:
    """Return the mean of the finite values; NaN where there are none.

    >>> mean_known(np.array([1.0, np.nan, 3.0]))
    2.0
    """
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else float("nan")


def _learnt(f: FeatureFunction, maps: Tensor, marks: np.ndarray, wanted: np.ndarray, n_classes: int) -> float:
    """Return the mIoU that a classifier of these marks reaches; NaN when they show fewer than two classes."""
    if len(np.unique(marks[marks > 0])) < 2:
        return float("nan")
    labels = TrainedSegmenter(f, [maps], [marks]).labels(maps, marks.shape)
    return mean_iou(wanted, labels, n_classes)


def _others(
    sources: Mapping[str, FeatureFunction],
    images: Sequence[Tensor],
    truths: Sequence[Any],
    n_classes: int,
    samples: Mapping[str, list[np.ndarray]],
    taught: Sequence[np.ndarray],
    progress: Callable[[float], None],
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Learn from the pixels of the images of one half (even, odd numbers), and score the other half."""
    learners: dict[str, list[TrainedSegmenter | None]] = {}
    for name, f in sources.items():
        # images 0, 2, ... are scored by what learnt from 1, 3, ..., and the other way round
        halves = ((samples[name][half::2], taught[half::2]) for half in (1, 0))
        learners[name] = [_learner(f, np.concatenate(rows), np.concatenate(marks)) for rows, marks in halves]
    values: dict[str, list[float]] = {name: [] for name in sources}
    counts = {name: np.zeros((n_classes, n_classes), np.int64) for name in sources}
    for number, image in enumerate(images):
        truth = truths_of(truths, number, image)
        for name, f in sources.items():
            learner = learners[name][number % 2]
            if learner is None:
                values[name].append(float("nan"))
                continue
            own = confusion(truth, learner.labels(features_of(f, image[None])[0], truth.shape), n_classes)
            values[name].append(miou(own))
            counts[name] += own
        progress(0.5 + (number + 1) / len(images) / 2)
    return _arrays(values), {name: miou(count) for name, count in counts.items()}


def _learner(f: FeatureFunction, samples: np.ndarray, classes: np.ndarray) -> TrainedSegmenter | None:
    """Return what learns from samples (n, d) and their classes (n,); None where these show fewer than two."""
    if len(np.unique(classes)) < 2:
        return None
    # the samples as a map of one row: read at the middles of its pixels, it gives them back
    return TrainedSegmenter(f, [torch.from_numpy(samples.T[:, None])], [classes[None]])


def _arrays(values: Mapping[str, Sequence[float]]) -> dict[str, np.ndarray]:
    return {name: np.array(numbers) for name, numbers in values.items()}
