"""Class priors of a page, and the area fractions that follow from them.

Classifiers are fitted as if all classes were equally frequent, so that no class wins by being drawn more. Taken as they
are, their probabilities give a rare class far too many pixels. The frequencies of a page can be estimated from the
probabilities alone, without labels of that page, by expectation and maximisation (Saerens, Latinne and Decaestecker,
"Adjusting the outputs of a classifier to new a priori probabilities", Neural Computation 14, 2002): weigh the
probabilities by the frequencies, take their means for the next frequencies, and so on.

Everything is computed from counts of coarse probabilities. Counts are whole numbers, so that their order does not
matter: a page that is read in pieces, or turned, has the prior of the whole page to the last bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

PRIORS = ("sqrt", "em", "uniform")
"""What probabilities are weighed by before the largest one is taken, the default first: the square root of the
estimated frequencies, the frequencies themselves, or nothing."""

SPREAD = 3.5
"""Half the interval of a fraction, in units of the share of the page that is in doubt.

95 % of the true fractions of synthetic micrographs lie within it (`eval/segment/prior.py`)."""

_FLOOR = 1e-3  # least frequency: a class of which the classifier is quite sure is never ruled out
_STEPS, _TOLERANCE = 500, 1e-5
_LEAST = 1e-3  # share of a page that is in doubt where nothing seems to be
_MOST = 1 << 17  # different codes; above, they are made coarser
_FEW = 1 << 14  # different codes that frequencies are estimated from
_PIXELS = 1 << 17  # pixels that are coded at once
_TOGETHER = 5  # codes that fit into one number, beside the rank of a pixel
_SHIFT = 19  # bits of a float32 that a code leaves out: 4 of the mantissa stay
_BASE = (127 - 15 << 4) - 1  # code 0 is for all below 2^-15


@dataclass(frozen=True, eq=False)
class Counts:
    """How many pixels have which class probabilities, in steps of about 6 %.

    Attributes:
        codes: (n, K) uint8, ascending row by row.
        counts: (n,) int64.
        level: times that the steps were doubled.
    """

    codes: np.ndarray
    counts: np.ndarray
    level: int = 0

    def probabilities(self) -> np.ndarray:
        """Return the probabilities (n, K) float64 in the middle of each step; rows sum to 1."""
        middle = (self.codes.astype(np.uint32) << self.level << _SHIFT) + (_BASE << _SHIFT)
        middle += np.uint32(1 << (_SHIFT + self.level - 1))
        values = np.where(self.codes > 0, middle.view(np.float32), 0).astype(np.float64)
        return values / values.sum(1, keepdims=True)


def count(prob: np.ndarray) -> Counts:
    """Count the probabilities of pixels.

    Args:
        prob: (K, ...) float32; pixels where all are 0 hold no data and do not count.

    Example:
        >>> found = count(np.array([[0.9, 0.9, 0.2, 0], [0.1, 0.1, 0.8, 0]], np.float32))
        >>> found.counts.tolist(), found.probabilities().round(2).tolist()
        ([1, 2], [[0.2, 0.8], [0.9, 0.1]])
    """
    flat = prob.reshape(len(prob), -1)
    parts = [_coded(flat[:, start : start + _PIXELS]) for start in range(0, max(flat.shape[1], 1), _PIXELS)]
    return merge(parts)


def merge(parts: Sequence[Counts]) -> Counts:
    """Add up counts; their order makes no difference.

    Steps are doubled until there are few enough different codes. The codes of a part are among those of the whole, so
    no part is coarser than the whole must be.
    """
    whole = parts[0]
    for part in parts[1:]:
        level = max(whole.level, part.level)
        codes = np.concatenate([_coarser(whole, level).codes, _coarser(part, level).codes])
        whole = _fewer(_summed(codes, np.concatenate([whole.counts, part.counts]), level))
    return _fewer(whole)


def estimate(found: Counts) -> np.ndarray:
    """Estimate the frequency of each class by expectation and maximisation -> (K,) float64 that sum to 1.

    Args:
        found: probabilities of a classifier that takes all classes for equally frequent.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> grey = np.where(rng.random(100_000) < 0.03, 2, 0) + rng.normal(size=100_000)
        >>> likely = 1 / (1 + np.exp(2 - 2 * grey))  # of two classes at 0 and at 2, equally frequent
        >>> float((likely > 0.5).mean().round(2))
        0.18
        >>> estimate(count(np.stack([1 - likely, likely]).astype(np.float32))).round(2).tolist()
        [0.97, 0.03]
    """
    found = _fewer(found, _FEW)
    prob = found.probabilities()
    total = found.counts.sum()
    known = prob.max(0, initial=0) > 0
    if not total:
        return np.full(prob.shape[1], 1 / prob.shape[1])
    prior, weight = known / known.sum(), found.counts / total
    for _ in range(_STEPS):
        # frequencies are the means of the probabilities that they lead to
        means = (weight[:, None] * posterior(prob, prior)).sum(0)
        moved = np.abs(means - prior).max()
        prior = means
        if moved < _TOLERANCE:
            break
    prior = np.maximum(prior, _FLOOR) * known
    return prior / prior.sum()


def weights(prior: np.ndarray, how: str) -> np.ndarray | None:
    """Return what probabilities are multiplied by (K,) float32, the largest 1; None for nothing.

    Args:
        prior: (K,) frequencies.
        how: one of `PRIORS`.
    """
    if how == "uniform":
        return None
    found = np.sqrt(prior) if how == "sqrt" else prior
    return (found / found.max()).astype(np.float32)


def reweigh(prob: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Multiply probabilities (K, ...) float32 by weights (K,) and let them sum to 1 again, in place.

    Pixels where all are 0 stay so.

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
    """Raise probabilities (K, ...) float32 to the power 1 / T and let them sum to 1 again; none stays none.

    Example:
        >>> tempered(np.array([[0.9], [0.1]], np.float32), 2).ravel().round(2).tolist()
        [0.75, 0.25]
    """
    if temperature == 1:
        return prob
    found = prob ** np.float32(1 / temperature)
    total = found.sum(0)
    return found / np.where(total > 0, total, 1)


def posterior(prob: np.ndarray, prior: np.ndarray) -> np.ndarray:
    """Weigh probabilities (n, K) by frequencies (K,); rows sum to 1."""
    found = prob * prior
    return found / np.maximum(found.sum(1, keepdims=True), np.finfo(np.float64).tiny)


def areas(found: Counts, prior: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the pixels of each class under a prior, and how many are in doubt, each (K,) float64.

    A pixel counts for its most probable class. With the probability q of a class it is in doubt by q (1 - q).
    """
    likely = posterior(found.probabilities(), prior)
    best = likely == likely.max(1, keepdims=True)
    counts = found.counts[:, None]
    return (counts * (best / best.sum(1, keepdims=True))).sum(0), (counts * likely * (1 - likely)).sum(0)


def interval(share: float, doubt: float) -> tuple[float, float]:
    """Return the ends of the 95 % interval of an area fraction of this image.

    Errors of neighbouring pixels are alike, and the number of pixels says nothing about them. So the interval does not
    shrink with the size of a picture: it is as wide as the share of the pixels that are in doubt, times `SPREAD`.

    Args:
        share: of the pixels, from 0 to 1.
        doubt: share that is in doubt, as of `areas`.

    Example:
        >>> [round(end, 3) for end in interval(0.2, 0.01)]
        [0.162, 0.239]
    """
    half = SPREAD * (doubt + _LEAST)
    return max(share - half, 0.0), min(share + half, 1.0)


def _coded(prob: np.ndarray) -> Counts:
    """Count the probabilities (K, n) of a few pixels."""
    bits = np.ascontiguousarray(prob, np.float32).view(np.uint32) >> _SHIFT
    codes = (np.maximum(bits, _BASE) - _BASE).astype(np.uint8).T
    return _fewer(_summed(codes[codes.any(1)], None, 0))


def _summed(codes: np.ndarray, counts: np.ndarray | None, level: int) -> Counts:
    """Add up the counts of equal codes (n, K); without counts each is one."""
    if codes.shape[1] == 2:  # two classes need no sorting
        sums = _totals(codes[:, 0].astype(np.int64) << 8 | codes[:, 1], counts, 1 << 16)
        keys = np.flatnonzero(sums)
        return Counts(np.stack([keys >> 8, keys & 255], 1).astype(np.uint8), sums[keys], level)
    # numbers sort far faster than rows: five classes at a time, after the rank of those before them
    rank, first = np.zeros(len(codes), np.int64), np.zeros(0, np.int64)
    for start in range(0, codes.shape[1], _TOGETHER):
        for column in codes[:, start : start + _TOGETHER].T:
            rank = rank << 8 | column
        _, first, rank = np.unique(rank, return_index=True, return_inverse=True)
    return Counts(codes[first], _totals(rank, counts, len(first)), level)


def _totals(index: np.ndarray, counts: np.ndarray | None, size: int) -> np.ndarray:
    """Sum whole numbers by index -> (size,) int64."""
    if counts is None:
        return np.bincount(index, minlength=size)
    sums = np.zeros(size, np.int64)
    np.add.at(sums, index, counts)
    return sums


def _coarser(found: Counts, level: int) -> Counts:
    """Double the steps up to a level; equal codes are not added up."""
    return Counts(found.codes >> (level - found.level), found.counts, level)


def _fewer(found: Counts, most: int = _MOST) -> Counts:
    """Double the steps until there are few enough codes."""
    while len(found.counts) > most and found.level < 7:
        coarse = _coarser(found, found.level + 1)
        found = _summed(coarse.codes, coarse.counts, coarse.level)
    return found
