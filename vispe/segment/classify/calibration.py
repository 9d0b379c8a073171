"""Calibration of class probabilities: cross-validation over scribbles, and temperature scaling.

Pixels of one scribble are correlated: a classifier trained on some of them is overconfident on the others. So complete
scribbles are held out: connected labelled pixels of one class, on one page. The probabilities of held-out
scribbles show how confident the classifier may be. One parameter, the temperature T, flattens probabilities
to p^(1/T) (Guo, Pleiss, Sun and Weinberger, "On calibration of modern neural networks", ICML 2017). As there
are few scribbles, a prior holds T near 1 unless the evidence is strong. T is never below 1, since users draw
scribbles where classes are obvious, which gives little information about boundaries. The temperature of an `ensemble`
is always 1; only its calibration error is measured.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vispe.segment.classify.class_prior import tempered
from vispe.segment.classify.pixel_classifier import PixelClassifier

FOLDS = 5
"""Number of cross-validation folds, or the number of scribbles of the class with the fewest."""

PIXELS = 4096
"""Upper bound of the labelled pixels used; of more, every n-th is taken."""

MAX_TEMPERATURE = 20
"""Upper bound of the temperature of a classifier."""

TREES_OF_FOLD = 16
"""Number of trees of an `ensemble` that is fitted for cross-validation."""

_WIDTH = 0.2  # standard deviation of the prior of log T
_BINS = 15  # confidence bins of the expected calibration error
_TINY = 1e-6  # lower bound of probabilities, before the logarithm


def label_scribbles(indices: np.ndarray, classes: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Number the scribbles of labelled pixels: 8-connected components of one class.

    Args:
        indices: (n,) integers, ascending: (page * h + y) * w + x.
        classes: (n,) class of each pixel.
        shape: (h, w) of a page.

    Returns:
        (n,) scribble numbers from 0.

    Example:
        >>> label_scribbles(np.array([0, 1, 4, 8]), np.array([1, 1, 1, 1]), (2, 5)).tolist()  # 11..1 above ...1.
        [0, 0, 1, 1]
    """
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    height, width = shape
    row, column = np.divmod(indices, width)
    pairs = []
    # edges of the pixel graph: each pixel and its right, lower left, lower and lower right neighbours
    for down, right in ((0, 1), (1, -1), (1, 0), (1, 1)):
        inside = (column + right >= 0) & (column + right < width) & (row % height + down < height)
        subset = np.flatnonzero(inside)
        neighbours = indices[subset] + down * width + right
        match = np.minimum(np.searchsorted(indices, neighbours), len(indices) - 1)
        linked = (indices[match] == neighbours) & (classes[match] == classes[subset])
        pairs.append((subset[linked], match[linked]))
    # connected components of the pixel graph are the scribbles
    first, second = (np.concatenate([pair[i] for pair in pairs]) for i in (0, 1))
    graph = coo_matrix((np.ones(len(first), bool), (first, second)), shape=(len(indices), len(indices)))
    return connected_components(graph, directed=False)[1]


def concatenate_ids(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate the scribble numbers of several images or pages, with offsets that keep them distinct."""
    starts = np.cumsum([0, *(part.max(initial=-1) + 1 for part in parts)])
    return np.concatenate([part + start for part, start in zip(parts, starts, strict=False)])


def calibrate(
    classifier: PixelClassifier,
    features: np.ndarray,
    classes: np.ndarray,
    of: np.ndarray,
    seed: int = 0,
    names: Sequence[str] = (),
    scale: tuple[int, float] | None = None,
) -> dict[str, Any]:
    """Fit the temperature of a fitted classifier, and measure its errors, by cross-validation over scribbles.

    Args:
        classifier: fitted to the labelled pixels; its `temperature` is set.
        features: (n, f), features of the labelled pixels.
        classes: (n,) 1..K.
        of: (n,) scribble number of each pixel.
        seed: seed of trees and boosting.
        names: class names.
        scale: as in `PixelClassifier.fit`.

    Returns:
        JSON-able: 'temperature', 'strokes' (scribbles by class name), 'folds', 'expected_calibration_error'
        on held-out scribbles with equal weight for each class, and 'before', the same error without scaling;
        'left_out', the 'recall' of held-out pixels by class name and its mean, 'balanced_accuracy'. With
        fewer than two scribbles of a class the temperature is 1, the errors are None, and 'reason' explains
        why.
    """
    labelled_classes = np.unique(classes)
    counts = {int(k): len(np.unique(of[classes == k])) for k in labelled_classes}
    counts_by_name = {str(names[k - 1]) if names else str(k): n for k, n in counts.items()}
    facts: dict[str, Any] = {
        "temperature": 1.0,
        "strokes": counts_by_name,
        "folds": min(FOLDS, *counts.values()),
    }
    if facts["folds"] < 2:
        lacking = next(name for name, n in counts_by_name.items() if n < 2)
        reason = f"class {lacking!r} has one scribble, but cross-validation needs at least two"
        return {**facts, "folds": 0, "expected_calibration_error": None, "before": None, "reason": reason}
    step = -(-len(classes) // PIXELS)
    fold = _folds(classes, of, facts["folds"])
    subset = _thinned(classes, of, step)
    features, classes, fold = features[subset], classes[subset], fold[subset]
    prob = np.zeros((len(classes), classifier.n_classes), np.float32)
    for number in range(facts["folds"]):
        training, held_out = fold != number, fold == number
        fold_classifier = PixelClassifier(
            classifier.kind, classifier.n_classes, seed=seed, trees=TREES_OF_FOLD
        )
        fold_classifier.fit(features[training], classes[training], scale=scale)
        prob[held_out] = fold_classifier.probabilities(features[held_out])
    # equal total weight for each labelled class
    weight = 1 / np.bincount(classes)[classes] / len(labelled_classes)
    right = prob.argmax(1) + 1 == classes
    recall = {
        str(names[k - 1]) if names else str(k): float(right[classes == k].mean()) for k in labelled_classes
    }
    # the mean of two classifiers is not overconfident, and a temperature fitted to few scribbles reduced its accuracy
    is_mean = classifier.kind == "ensemble"
    temperature = 1.0 if is_mean else _temperature(prob, classes, weight, sum(counts.values()))
    classifier.temperature = temperature
    return {
        **facts,
        "temperature": temperature,
        "expected_calibration_error": calibration_error(tempered(prob.T, temperature).T, classes, weight),
        "before": calibration_error(prob, classes, weight),
        "left_out": {"balanced_accuracy": float(np.mean(list(recall.values()))), "recall": recall},
    }


def calibration_note(facts: Mapping[str, Any]) -> str | None:
    """Return a note if there are too few scribbles for calibration, otherwise None."""
    if "reason" not in facts:
        return None
    return f"probabilities were not calibrated: {facts['reason']}. Draw at least two separate ones."


def calibration_error(prob: np.ndarray, classes: np.ndarray, weight: np.ndarray) -> float:
    """Return the expected calibration error: mean difference between confidence and accuracy over confidence bins.

    Args:
        prob: (n, K).
        classes: (n,) 1..K, the true classes.
        weight: (n,) weight of each pixel, summing to 1.

    Example:
        >>> half = np.full((2, 2), 0.5)
        >>> calibration_error(half, np.array([1, 2]), np.array([0.5, 0.5]))
        0.0
    """
    confidence, right = prob.max(1).astype(np.float64), prob.argmax(1) + 1 == classes
    # equally wide bins of confidence: absolute value of the weighted sum of (confidence - accuracy) per bin
    bin_index = np.minimum((confidence * _BINS).astype(int), _BINS - 1)
    return float(np.abs(np.bincount(bin_index, weight * (confidence - right), minlength=_BINS)).sum())


def _thinned(classes: np.ndarray, of: np.ndarray, step: int) -> np.ndarray:
    """Return the indices (m,), ascending, of every n-th labelled pixel and of at least one pixel per scribble."""
    first = np.unique(of, return_index=True)[1]
    return np.unique(np.concatenate([np.arange(0, len(classes), step), first]))


def _folds(classes: np.ndarray, of: np.ndarray, count: int) -> np.ndarray:
    """Assign scribbles, the largest first, to the fold with the fewest pixels of their class; return folds (n,)."""
    sizes = np.bincount(of)
    first = np.unique(of, return_index=True)[1]
    fold = np.zeros(len(sizes), np.int64)
    for k in np.unique(classes):
        scribbles_of_class = np.flatnonzero(classes[first] == k)
        load = np.zeros(count, np.int64)
        for scribble in scribbles_of_class[np.argsort(-sizes[scribbles_of_class], kind="stable")]:
            fold[scribble] = load.argmin()
            load[fold[scribble]] += sizes[scribble]
    return fold[of]


def _temperature(prob: np.ndarray, classes: np.ndarray, weight: np.ndarray, count: int) -> float:
    """Return the maximum a posteriori temperature of held-out scribbles, each scribble counted once."""
    from scipy.optimize import minimize_scalar

    log = np.log(np.maximum(prob.astype(np.float64), _TINY))
    pixel_index = np.arange(len(log))

    def cost(log_temperature: float) -> float:
        scores = log * np.exp(-log_temperature)
        scores -= scores.max(1, keepdims=True)
        log_likelihood = scores[pixel_index, classes - 1] - np.log(np.exp(scores).sum(1))
        # pixels of a scribble are dependent observations: the log likelihood counts as many as there are scribbles
        return -count * float((weight * log_likelihood).sum()) + log_temperature**2 / (2 * _WIDTH**2)

    optimum = minimize_scalar(
        cost, bounds=(0, np.log(MAX_TEMPERATURE)), method="bounded", options={"xatol": 1e-4}
    )
    return round(float(np.exp(optimum.x)), 3)
