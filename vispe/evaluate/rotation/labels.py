"""Label maps under motion, and the numbers that compare two of them.

Labels are whole numbers: 1..K are classes, 0 is no data and does not count.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from vispe.backbones.batches import checked_labels
from vispe.errors import InputError, ShapeError


def confusion(first: np.ndarray, second: np.ndarray, n_classes: int) -> np.ndarray:
    """Return the counts (K, K) of class pairs over the pixels with data in both maps; rows are `first`."""
    if first.shape != second.shape:
        raise ShapeError(f"Two label maps of one shape are compared, got {first.shape} and {second.shape}.")
    highest = int(max(first.max(initial=0), second.max(initial=0)))
    if highest > n_classes:
        raise InputError(f"A label map holds class {highest}, but n_classes={n_classes}.")
    both = (first > 0) & (second > 0)
    code = (first[both] - 1) * n_classes + second[both] - 1
    return np.bincount(code, minlength=n_classes**2).reshape(n_classes, n_classes)


def mean_iou(first: np.ndarray, second: np.ndarray, n_classes: int) -> float:
    """Return the mean over the classes in either map of intersection over union; NaN without common pixels."""
    counts = confusion(first, second, n_classes)
    hits = np.diag(counts)
    union = counts.sum(0) + counts.sum(1) - hits
    return float((hits[union > 0] / union[union > 0]).mean()) if (union > 0).any() else float("nan")


def rand_index(first: np.ndarray, second: np.ndarray) -> float:
    """Return the adjusted Rand index over the pixels with data in both maps; NaN without any."""
    from sklearn.metrics import adjusted_rand_score

    both = (first > 0) & (second > 0)
    return float(adjusted_rand_score(first[both], second[both])) if both.any() else float("nan")


def shares(labels: np.ndarray, n_classes: int) -> np.ndarray:
    """Return the area share of each class among the pixels with data, in per cent, (K,)."""
    counts = np.bincount(labels.ravel(), minlength=n_classes + 1)[1 : n_classes + 1]
    return 100.0 * counts / counts.sum() if counts.sum() else np.full(n_classes, np.nan)


def without_borders(labels: np.ndarray, pixels: int = 1) -> np.ndarray:
    """Return labels with 0 wherever another class lies within `pixels` in the 8-neighbourhood.

    Turned truth is uncertain there, since its pixels were moved to the nearest one. No data is not a class.
    """
    from scipy.ndimage import maximum_filter, minimum_filter

    if pixels < 0:
        raise InputError(f"The ignored border has 0 or more pixels, got {pixels}.")
    size = 2 * pixels + 1
    top = maximum_filter(labels, size, mode="nearest")
    low = minimum_filter(np.where(labels > 0, labels, labels.max(initial=0) + 1), size, mode="nearest")
    return np.where((labels > 0) & (top == low), labels, 0)


def truths_of(truths: Sequence[object], number: int, image: Tensor) -> np.ndarray:
    """Return the truth of an image as int64 (H, W), or say that it is missing or does not fit."""
    if number >= len(truths):
        raise InputError(
            f"Image {number} has no truth: there are {len(truths)}; give one for each image, in order."
        )
    return checked_labels(truths[number], tuple(image.shape[-2:]), f"The truth of image {number} has")
