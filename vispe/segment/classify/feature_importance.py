"""Permutation importance of groups of features (Breiman, "Random Forests", Machine Learning 45, 2001).

The values of a group are permuted among the labelled pixels, and the probability of the drawn class is averaged over
the classes. The more it decreases, the more the classifier depends on the group. Correlated groups share their
importance: each of them can replace the other.
"""

import re
from collections.abc import Sequence

import numpy as np

from vispe.segment.classify.pixel_classifier import PixelClassifier

PIXELS = 2048
"""Upper bound of the labelled pixels used; of more, every n-th is taken."""


def feature_groups(names: Sequence[str], width: int, model: str | None) -> dict[str, np.ndarray]:
    """Group the columns of a feature matrix: filters of all channels by kind and scale, and all columns of the model.

    Args:
        names: names of the filters, which are the first columns.
        width: number of columns.
        model: name of the group of all further columns.

    Returns:
        Indices of the columns by name of the group.

    >>> {name: index.tolist() for name, index in feature_groups(["c0.std_2", "c1.std_2"], 4, "vispe_micro").items()}
    {'std, 2 px': [0, 1], 'vispe_micro': [2, 3]}
    """
    groups: dict[str, list[int]] = {}
    for column, name in enumerate(names):
        # c1.hessian_large_4 -> hessian_large, 4 px
        kind, _, scale = re.sub(r"^c\d+\.", "", name).rpartition("_")
        groups.setdefault(f"{kind}, {scale} px" if kind else scale, []).append(column)
    if width > len(names):
        groups[model or "model"] = list(range(len(names), width))
    return {name: np.array(columns) for name, columns in groups.items()}


def feature_importance(
    classifier: PixelClassifier,
    features: np.ndarray,
    classes: np.ndarray,
    groups: dict[str, np.ndarray],
    seed: int,
) -> dict[str, float]:
    """Return the decrease of the mean probability of the labelled class by group, the largest first.

    Args:
        classifier: fitted.
        features: (n, f) float32 of the labelled pixels.
        classes: (n,) int, 1..K.
        groups: columns of each group.
        seed: seed of the permutations.
    """
    step = -(-len(features) // PIXELS)
    features, classes = features[::step].copy(), classes[::step]
    order = np.random.default_rng(seed).permutation(len(features))
    # every class counts equally, however much of it is labelled
    weight = 1 / np.bincount(classes)[classes] / len(np.unique(classes))

    def score() -> float:
        return float(weight @ classifier.probabilities(features)[np.arange(len(classes)), classes - 1])

    before, drops = score(), {}
    for name, columns in groups.items():
        stored = features[:, columns]
        features[:, columns] = stored[order]
        drops[name] = round(before - score(), 4)
        features[:, columns] = stored
    return dict(sorted(drops.items(), key=lambda item: -item[1]))
