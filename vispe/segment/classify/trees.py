"""Extremely randomised trees of the `ensemble` classifier.

Geurts, Ernst and Wehenkel, "Extremely randomized trees", Machine Learning 63, 2006; scikit-learn's implementation. Each
split tests a random threshold of a few random features. The trees depend on the set of labelled pixels and not on their
order, so the labels of a rotated image result in the same trees.
"""

from typing import Any

import numpy as np

TREES = 100
"""Number of trees."""

PIXELS = 50_000
"""Upper bound of the labelled pixels that trees are fitted to; classes with more are subsampled evenly."""

_LEAF = 2  # labelled pixels in a leaf, at least
_WEIGHT = 2.0**32  # total weight of a class


def build_trees(seed: int, count: int = TREES) -> Any:
    """Return an unfitted scikit-learn estimator of `count` trees."""
    from sklearn.ensemble import ExtraTreesClassifier

    # one thread: with more, trees are summed in completion order, which is not deterministic
    return ExtraTreesClassifier(count, min_samples_leaf=_LEAF, random_state=seed, n_jobs=1)


def fit_trees(trees: Any, features: np.ndarray, classes: np.ndarray) -> None:
    """Fit trees to labelled pixels, with equal total weight for each class.

    Args:
        trees: result of `build_trees`.
        features: (n, f) float32, finite.
        classes: (n,) int.
    """
    index = _subset(features, classes)
    features, classes = features[index], classes[index]
    # integer weights: their sums are exact, so that the order of the pixels does not affect any split
    weight = np.rint(_WEIGHT / np.bincount(classes).clip(1))[classes]
    trees.fit(features, classes, sample_weight=weight)


def _subset(features: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """Return the indices of at most `PIXELS` labelled pixels, evenly spaced in the order of their features."""
    if len(classes) <= PIXELS:
        return np.arange(len(classes))
    most = PIXELS // len(np.unique(classes))
    # sorted by the features instead of by position, which changes if the image is rotated
    order = np.argsort(features.sum(1, dtype=np.float64), kind="stable")
    parts = []
    for k in np.unique(classes):
        own = order[classes[order] == k]
        parts.append(own[np.linspace(0, len(own) - 1, min(most, len(own))).round().astype(np.int64)])
    return np.sort(np.concatenate(parts))
