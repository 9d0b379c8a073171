"""Class priors of a page, and the resulting area fractions.

Classifiers are fitted as if all classes were equally frequent, so that the number of labels of a class does not matter.
Used directly, their probabilities give a rare class far too many pixels. The class frequencies of a page can be
estimated from the probabilities alone, without labels of that page, by expectation maximisation (Saerens, Latinne and
Decaestecker, "Adjusting the outputs of a classifier to new a priori probabilities", Neural Computation 14, 2002):
reweight the probabilities by the frequencies, use their means as the next frequencies, and iterate.

Everything is computed from a histogram of quantised probabilities (`vispe.segment.classify.probability_histogram`), so
a page that is read in pieces, or rotated, has a bitwise identical prior.
"""

from typing import Literal, get_args

import numpy as np

from vispe.segment.classify.probability_histogram import Counts, coarsened

Prior = Literal["sqrt", "em", "uniform"]
PRIORS: tuple[Prior, ...] = get_args(Prior)
"""Weights of the probabilities before the argmax, the default first: the square root of the estimated frequencies,
the frequencies, or none."""

SPREADS = {"ensemble": 1.1, "logistic": 1.8, "forest": 1.3}
"""Half width of the interval of a fraction, in units of the doubt of `area_estimate`, by kind of classifier.

Chosen on public micrographs with ground truth, where `eval/segment/ensemble.py` measures coverage and width. `boosting`
is too overconfident for intervals: half of those measured missed the ground truth."""

_FLOOR = 1e-3  # lower bound of a frequency, so that no class is ruled out
_STEPS, _TOLERANCE = 500, 1e-5
_LEAST = 0.0035  # smallest half width of an interval
_FEW = 1 << 14  # upper bound of distinct codes for the estimate of frequencies


def estimate(counts: Counts) -> np.ndarray:
    """Estimate the class frequencies by expectation maximisation; return (K,) float64 that sum to 1.

    Args:
        counts: histogram of the probabilities of a classifier trained with equal class weights.

    Example:
        >>> from vispe.segment.classify.probability_histogram import count
        >>> rng = np.random.default_rng(0)
        >>> grey = np.where(rng.random(100_000) < 0.03, 2, 0) + rng.normal(size=100_000)
        >>> likely = 1 / (1 + np.exp(2 - 2 * grey))  # of two classes at 0 and at 2, equally frequent
        >>> float((likely > 0.5).mean().round(2))
        0.18
        >>> estimate(count(np.stack([1 - likely, likely]).astype(np.float32))).round(2).tolist()
        [0.97, 0.03]
    """
    counts = coarsened(counts, _FEW)
    prob = counts.probabilities()
    total = counts.counts.sum()
    present = prob.max(0, initial=0) > 0
    if not total:
        return np.full(prob.shape[1], 1 / prob.shape[1])
    prior, weight = present / present.sum(), counts.counts / total
    for _ in range(_STEPS):
        # E step and M step in one: the next frequencies are the means of the reweighted probabilities
        means = (weight[:, None] * posterior(prob, prior)).sum(0)
        change = np.abs(means - prior).max()
        prior = means
        if change < _TOLERANCE:
            break
    prior = np.maximum(prior, _FLOOR) * present
    return prior / prior.sum()


def weights(prior: np.ndarray, how: str) -> np.ndarray | None:
    """Return the factors of the probabilities, (K,) float32 with maximum 1; None for no reweighting.

    Args:
        prior: (K,) frequencies.
        how: one of `PRIORS`.
    """
    if how == "uniform":
        return None
    factors = np.sqrt(prior) if how == "sqrt" else prior
    return (factors / factors.max()).astype(np.float32)


def reweigh(prob: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Multiply probabilities (K, ...) float32 by weights (K,) and renormalise them, in place.

    Pixels where all are 0 remain 0.

    Example:
        >>> reweigh(np.array([[0.5], [0.5]], np.float32), np.array([1, 0.25], np.float32)).ravel().tolist()
        [0.800000011920929, 0.20000000298023224]
    """
    total = np.zeros(prob.shape[1:], np.float32)
    for plane, factor in zip(prob, weight, strict=True):
        plane *= factor
        total += plane
    total[total == 0] = 1
    for plane in prob:
        plane /= total
    return prob


def tempered(prob: np.ndarray, temperature: float) -> np.ndarray:
    """Raise probabilities (K, ...) float32 to the power 1 / T and renormalise; pixels where all are 0 remain 0.

    Example:
        >>> tempered(np.array([[0.9], [0.1]], np.float32), 2).ravel().round(2).tolist()
        [0.75, 0.25]
    """
    if temperature == 1:
        return prob
    powers = prob ** np.float32(1 / temperature)
    total = powers.sum(0)
    return powers / np.where(total > 0, total, 1)


def posterior(prob: np.ndarray, prior: np.ndarray) -> np.ndarray:
    """Multiply probabilities (n, K) by frequencies (K,) and renormalise the rows."""
    joint = prob * prior
    return joint / np.maximum(joint.sum(1, keepdims=True), np.finfo(np.float64).tiny)


def areas(histogram: Counts, prior: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the pixels of each class under a prior, and the uncertain pixels, each (K,) float64.

    A pixel counts for its most probable class. A class with probability q contributes q (1 - q) uncertain pixels.
    """
    likely = posterior(histogram.probabilities(), prior)
    best = likely == likely.max(1, keepdims=True)
    counts = histogram.counts[:, None]
    return (counts * (best / best.sum(1, keepdims=True))).sum(0), (counts * likely * (1 - likely)).sum(0)


def area_estimate(histogram: Counts, prior: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Estimate the pixels of each class, and their doubt, each (K,) float64.

    The estimate is the mean of the areas under the estimated frequencies and under their square root: the frequencies
    are themselves uncertain, and too extreme if classes are hard to separate. The doubt is the sum of the uncertain
    pixels and of half the change of the area by the frequencies.

    Args:
        histogram: histogram of the probabilities.
        prior: (K,) estimated frequencies.
    """
    under_prior, uncertain = areas(histogram, prior)
    root = np.sqrt(prior)
    under_root, _ = areas(histogram, root / root.sum())
    unweighed, _ = areas(histogram, np.full_like(prior, 1 / len(prior)))
    return (under_prior + under_root) / 2, uncertain + np.abs(under_prior - unweighed) / 2


def interval(fraction: float, doubt: float, kind: str = "ensemble") -> tuple[float, float]:
    """Return the 95 % interval (low, high) of an area fraction of this image.

    Errors of neighbouring pixels are correlated, and the number of pixels carries no information about them. So the
    interval does not shrink with the size of the image: its half width is proportional to the doubt, plus a constant.

    Args:
        fraction: fraction of the pixels, from 0 to 1.
        doubt: doubt of `area_estimate`, as a fraction of the pixels.
        kind: kind of classifier, a key of `SPREADS`.

    Example:
        >>> [round(end, 4) for end in interval(0.2, 0.01)]
        [0.1855, 0.2145]
    """
    half = SPREADS[kind] * doubt + _LEAST
    return max(fraction - half, 0.0), min(fraction + half, 1.0)
