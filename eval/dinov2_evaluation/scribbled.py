"""Few-scribble segmentation by one linear classifier of tokens, of filters, and of tokens alongside filters.

Scribbles, scored pixels and the classifier are those of `vispe.train.evaluate.mask_scores`; in addition, tokens and
filters, whose maps differ in resolution, can be combined.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from dinov2_evaluation.probe_images import Frame
from vispe.evaluate.rotation.helpers import scribbles
from vispe.evaluate.rotation.metrics.quadrant_gap import quadrants
from vispe.evaluate.rotation.scribble_segmenter import sample_at_pixels
from vispe.segment.metrics import mean_iou
from vispe.train.evaluate.mask_scores import FilterFeatures, finite_mean
from vispe.train.evaluate.model_pair import SIDES, ModelPair
from vispe.train.evaluate.probe_images import CentreWindows, Settings

ALONE = (*SIDES, "filters")
BESIDE = tuple(f"{side} + filters" for side in SIDES)


def scribbled(
    pair: ModelPair, frames: Sequence[Frame], size: int, settings: Settings, budget: int
) -> dict[str, Any]:
    """Return mIoU with scribbles all over a window, and what scribbles in one corner lose, image by image.

    Args:
        pair: teacher and student.
        frames: of one set.
        size: largest side of the middle window in pixels.
        settings: of the teacher.
        budget: scribbled pixels of each class.
    """
    filters = FilterFeatures(settings.mean, settings.std)
    images = CentreWindows([settings.normalized(f.image) for f in frames], settings.patch_size, size)
    truths = CentreWindows([f.truth for f in frames], settings.patch_size, size)
    n_classes = int(max(f.truth.max() for f in frames))
    own: dict[str, list[float]] = {name: [] for name in (*ALONE, *BESIDE)}
    corner: dict[str, list[float]] = {name: [] for name in ALONE}
    for number, image in enumerate(images):
        maps = pair.maps(image) | {"filters": filters(image[None])[0].double()}
        spread, *corners = drawn(truths[number].numpy(), number, budget)
        # scored on the pixels that no scribble covers, so that all scores are of the same pixels
        covered = np.any([marks > 0 for marks in (spread, *corners)], axis=0)
        expected = np.where(covered, 0, truths[number].numpy())
        for name in ALONE:
            best = learnt([maps[name]], spread, expected, n_classes)
            own[name].append(best)
            lost = [best - learnt([maps[name]], marks, expected, n_classes) for marks in corners]
            corner[name].append(finite_mean(np.array(lost)))
        for name, side in zip(BESIDE, SIDES, strict=True):
            own[name].append(learnt([maps[side], maps["filters"]], spread, expected, n_classes))
    return {"images": [f.name for f in frames], "classes": n_classes, "own": own, "corner": corner}


def drawn(truth: np.ndarray, number: int, budget: int) -> list[np.ndarray]:
    """Return scribbles all over an image, and in each of its corners, as `score_masks` draws them for its seed 0."""
    areas = [np.ones(truth.shape, bool), *quadrants(truth.shape)]
    return [
        scribbles(truth, area, budget, np.random.default_rng([0, number, k])) for k, area in enumerate(areas)
    ]


def learnt(maps: Sequence[Tensor], marks: np.ndarray, expected: np.ndarray, n_classes: int) -> float:
    """Return the mIoU that a classifier of these marks reaches; NaN when they show fewer than two classes."""
    if len(np.unique(marks[marks > 0])) < 2:
        return float("nan")
    return mean_iou(expected, labels(maps, marks), n_classes)


def labels(maps: Sequence[Tensor], marks: np.ndarray) -> np.ndarray:
    """Return the labels (H, W) of an image by a linear classifier that learns from some of its pixels.

    Of one map, the labels are those of `TrainedSegmenter`.

    Args:
        maps: (d, h, w) each, float64, of any resolution.
        marks: (H, W), the class of the scribbled pixels, else 0.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    samples = np.concatenate([sample_at_pixels(one, marks > 0) for one in maps], axis=1)
    scaler = StandardScaler().fit(samples)
    model = LogisticRegression(class_weight="balanced", max_iter=1000)
    model.fit(scaler.transform(samples), marks[marks > 0])
    # scores are linear in the features, so each map's share of them is enlarged, instead of the map
    weights = torch.from_numpy(model.coef_ / scaler.scale_)
    bias = torch.from_numpy(model.intercept_ - (model.coef_ / scaler.scale_) @ scaler.mean_)
    scores = bias[:, None, None].expand(-1, *marks.shape)
    for part, one in zip(weights.split([len(m) for m in maps], dim=1), maps, strict=True):
        share = torch.einsum("kd,dhw->khw", part, one)[None]
        scores = scores + interpolate(share, marks.shape, mode="bilinear", align_corners=False)[0]
    chosen = (scores[0] > 0).long() if len(scores) == 1 else scores.argmax(0)
    return model.classes_[chosen.numpy()].astype(np.int64)
