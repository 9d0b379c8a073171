"""Whether probabilities mean what they say: cross-validation over strokes, and a temperature.

Pixels of one stroke are alike. A classifier that has seen some of them is sure of the others, so strokes are left out
as a whole: connected labelled pixels of one class, on one page. Probabilities of strokes that a classifier has not seen
tell how sure it may be. They are flattened by one number, the temperature T, to p^(1/T) (Guo, Pleiss, Sun and
Weinberger, "On calibration of modern neural networks", ICML 2017). There are few strokes, so T stays near 1 unless they
speak clearly; and it is never below 1, since strokes are drawn where a class is plain to see and say little of borders.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vispe.segment.classify.class_prior import tempered
from vispe.segment.classify.pixel_classifier import PixelClassifier
from vispe.segment.model.file_checks import HOTTEST

FOLDS = 5
"""Parts that the strokes are divided into, or as many as the class with the fewest strokes has."""

PIXELS = 4096
"""Labelled pixels that take part; of more, every n-th."""

_WIDTH = 0.2  # standard deviation of log T before any stroke has been seen
_BINS = 15  # of the expected calibration error
_TINY = 1e-6  # probabilities below count as this


def strokes(places: np.ndarray, classes: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Number the strokes of labelled pixels: those of one class that touch, corners included.

    Args:
        places: (n,) whole numbers, ascending: (page * h + y) * w + x.
        classes: (n,) of each.
        shape: (h, w) of a page.

    Returns:
        (n,) numbers from 0.

    Example:
        >>> strokes(np.array([0, 1, 4, 8]), np.array([1, 1, 1, 1]), (2, 5)).tolist()  # 11..1 above ...1.
        [0, 0, 1, 1]
    """
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    height, width = shape
    row, column = np.divmod(places, width)
    pairs = []
    for down, right in ((0, 1), (1, -1), (1, 0), (1, 1)):
        inside = (column + right >= 0) & (column + right < width) & (row % height + down < height)
        own = np.flatnonzero(inside)
        wanted = places[own] + down * width + right
        at = np.minimum(np.searchsorted(places, wanted), len(places) - 1)
        same = (places[at] == wanted) & (classes[at] == classes[own])
        pairs.append((own[same], at[same]))
    first, second = (np.concatenate([pair[i] for pair in pairs]) for i in (0, 1))
    graph = coo_matrix((np.ones(len(first), bool), (first, second)), shape=(len(places), len(places)))
    return connected_components(graph, directed=False)[1]


def joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Number the strokes of several images, or pages, one after the other."""
    starts = np.cumsum([0, *(part.max(initial=-1) + 1 for part in parts)])
    return np.concatenate([part + start for part, start in zip(parts, starts, strict=False)])


def calibrate(
    classifier: PixelClassifier,
    features: np.ndarray,
    classes: np.ndarray,
    of: np.ndarray,
    seed: int = 0,
    names: Sequence[str] = (),
) -> dict[str, Any]:
    """Set the temperature of a fitted classifier, and say what was found.

    Args:
        classifier: fitted to the labelled pixels.
        features: (n, f) of these.
        classes: (n,) 1..K.
        of: (n,) number of the stroke of each.
        seed: of forests and boosting.
        names: class names.

    Returns:
        JSON-able: 'temperature', 'strokes' by class name, 'folds', 'expected_calibration_error' and the same 'before'
        the temperature, of strokes left out, each class counting alike; 'left_out', the share of their pixels that is
        recognised, as 'recall' by class name and its mean, 'balanced_accuracy'. With fewer than two strokes of a class
        the temperature is 1, the errors are None, and 'reason' says so.
    """
    drawn = np.unique(classes)
    counts = {int(k): len(np.unique(of[classes == k])) for k in drawn}
    named = {str(names[k - 1]) if names else str(k): n for k, n in counts.items()}
    facts: dict[str, Any] = {"temperature": 1.0, "strokes": named, "folds": min(FOLDS, *counts.values())}
    if facts["folds"] < 2:
        few = next(name for name, n in named.items() if n < 2)
        reason = f"class {few!r} has one stroke only, and two are needed to leave one out"
        return {**facts, "folds": 0, "expected_calibration_error": None, "before": None, "reason": reason}
    step = -(-len(classes) // PIXELS)
    fold = _folds(classes, of, facts["folds"])
    kept = _thinned(classes, of, step)
    features, classes, fold = features[kept], classes[kept], fold[kept]
    prob = np.zeros((len(classes), classifier.n_classes), np.float32)
    for number in range(facts["folds"]):
        rest, own = fold != number, fold == number
        one = PixelClassifier(classifier.kind, classifier.n_classes, seed=seed)
        prob[own] = one.fit(features[rest], classes[rest]).probabilities(features[own])
    weight = 1 / np.bincount(classes)[classes] / len(drawn)
    right = prob.argmax(1) + 1 == classes
    recall = {str(names[k - 1]) if names else str(k): float(right[classes == k].mean()) for k in drawn}
    temperature = _temperature(prob, classes, weight, sum(counts.values()))
    classifier.temperature = temperature
    return {
        **facts,
        "temperature": temperature,
        "expected_calibration_error": calibration_error(tempered(prob.T, temperature).T, classes, weight),
        "before": calibration_error(prob, classes, weight),
        "left_out": {"balanced_accuracy": float(np.mean(list(recall.values()))), "recall": recall},
    }


def advice(facts: Mapping[str, Any]) -> str | None:
    """Say in a sentence that there were too few strokes; None where there were enough."""
    if "reason" not in facts:
        return None
    return f"probabilities were not calibrated: {facts['reason']}; draw at least two apart from each other."


def calibration_error(prob: np.ndarray, classes: np.ndarray, weight: np.ndarray) -> float:
    """Return the expected calibration error: how far the share of right answers is from what was said.

    Args:
        prob: (n, K).
        classes: (n,) 1..K, the truth.
        weight: (n,) of each, summing to 1.

    Example:
        >>> half = np.full((2, 2), 0.5)
        >>> calibration_error(half, np.array([1, 2]), np.array([0.5, 0.5]))
        0.0
    """
    said, right = prob.max(1).astype(np.float64), prob.argmax(1) + 1 == classes
    place = np.minimum((said * _BINS).astype(int), _BINS - 1)
    return float(np.abs(np.bincount(place, weight * (said - right), minlength=_BINS)).sum())


def _thinned(classes: np.ndarray, of: np.ndarray, step: int) -> np.ndarray:
    """Choose every n-th labelled pixel, and one of each stroke at least -> (m,) ascending."""
    first = np.unique(of, return_index=True)[1]
    return np.unique(np.concatenate([np.arange(0, len(classes), step), first]))


def _folds(classes: np.ndarray, of: np.ndarray, count: int) -> np.ndarray:
    """Deal the strokes of each class, the largest first, to the fold that has the fewest pixels of it -> (n,)."""
    sizes = np.bincount(of)
    first = np.unique(of, return_index=True)[1]
    fold = np.zeros(len(sizes), np.int64)
    for k in np.unique(classes):
        own = np.flatnonzero(classes[first] == k)
        load = np.zeros(count, np.int64)
        for stroke in own[np.argsort(-sizes[own], kind="stable")]:
            fold[stroke] = load.argmin()
            load[fold[stroke]] += sizes[stroke]
    return fold[of]


def _temperature(prob: np.ndarray, classes: np.ndarray, weight: np.ndarray, count: int) -> float:
    """Find the temperature with which left-out strokes are most probable, each stroke counting once."""
    from scipy.optimize import minimize_scalar

    log = np.log(np.maximum(prob.astype(np.float64), _TINY))
    rows = np.arange(len(log))

    def cost(heat: float) -> float:
        scores = log * np.exp(-heat)
        scores -= scores.max(1, keepdims=True)
        own = scores[rows, classes - 1] - np.log(np.exp(scores).sum(1))
        # pixels of a stroke are no independent witnesses: all of them together weigh like as many as there are strokes
        return -count * float((weight * own).sum()) + heat**2 / (2 * _WIDTH**2)

    found = minimize_scalar(cost, bounds=(0, np.log(HOTTEST)), method="bounded", options={"xatol": 1e-4})
    return round(float(np.exp(found.x)), 3)
