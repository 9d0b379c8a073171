"""Histogram of quantised class probabilities.

Counts are integers, so the order of summation does not matter: a page that is read in pieces, or rotated, has a bitwise
identical histogram.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_MOST = 1 << 17  # upper bound of distinct codes; above, the quantisation is coarsened
_PIXELS = 1 << 19  # pixels quantised per chunk: merging histograms takes longer than counting
_TOGETHER, _WITH_RANK = 8, 5  # codes that fit into an uint64: alone, and with the rank of a pixel
_SHIFT = 19  # dropped bits of a float32: 4 bits of the mantissa remain
_BASE = (127 - 15 << 4) - 1  # code 0 represents all values below 2^-15


@dataclass(frozen=True, eq=False)
class Counts:
    """Histogram of class probabilities, in steps of about 6 %.

    Attributes:
        codes: (n, K) uint8, distinct quantised probabilities, in lexicographic order.
        counts: (n,) int64, number of pixels with each code.
        level: number of times that the steps were doubled.
    """

    codes: np.ndarray
    counts: np.ndarray
    level: int = 0

    def probabilities(self) -> np.ndarray:
        """Return the probabilities (n, K) float64 at the centre of each step; rows sum to 1."""
        # stored as (K, n): sums over few classes are several times as fast
        codes = np.ascontiguousarray(self.codes.T)
        middle = (codes.astype(np.uint32) << self.level << _SHIFT) + (_BASE << _SHIFT)
        middle += np.uint32(1 << (_SHIFT + self.level - 1))
        values = np.where(codes > 0, middle.view(np.float32), 0).astype(np.float64)
        return (values / values.sum(0)).T


def count(prob: np.ndarray) -> Counts:
    """Return the histogram of the probabilities of pixels.

    Args:
        prob: (K, ...) float32; pixels where all are 0 have no data and are ignored.

    Example:
        >>> histogram = count(np.array([[0.9, 0.9, 0.2, 0], [0.1, 0.1, 0.8, 0]], np.float32))
        >>> histogram.counts.tolist(), histogram.probabilities().round(2).tolist()
        ([1, 2], [[0.2, 0.8], [0.9, 0.1]])
    """
    flat = prob.reshape(len(prob), -1)
    parts = [_coded(flat[:, start : start + _PIXELS]) for start in range(0, max(flat.shape[1], 1), _PIXELS)]
    return merge(parts)


def merge(parts: Sequence[Counts]) -> Counts:
    """Add up histograms, independently of their order.

    Steps are doubled until there are few enough distinct codes. The codes of a part are a subset of those of the sum,
    so no part is coarser than the sum.
    """
    total = parts[0]
    for part in parts[1:]:
        level = max(total.level, part.level)
        codes = np.concatenate([_coarser(total, level).codes, _coarser(part, level).codes])
        total = coarsened(_summed(codes, np.concatenate([total.counts, part.counts]), level))
    return coarsened(total)


def _coded(prob: np.ndarray) -> Counts:
    """Return the histogram of the probabilities (K, n) of a few pixels."""
    bits = np.ascontiguousarray(prob, np.float32).view(np.uint32) >> _SHIFT
    codes = (np.maximum(bits, _BASE) - _BASE).astype(np.uint8)
    data = codes.any(0)
    return coarsened(_summed((codes if data.all() else codes[:, data]).T, None, 0))


def _summed(codes: np.ndarray, counts: np.ndarray | None, level: int) -> Counts:
    """Add up the counts of equal codes (n, K); without counts each code counts once."""
    # sorting one integer per pixel takes a twentieth of the time of sorting rows
    n, classes = codes.shape
    if classes <= _TOGETHER:
        # short integers sort faster
        short = np.uint16 if classes <= 2 else np.uint32 if classes <= 4 else np.uint64
        keys, sums = _unique_totals(_packed(codes, np.zeros(n, short)), counts)
        shifts = np.arange(8 * classes - 8, -1, -8).astype(short)
        return Counts((keys[:, None] >> shifts).astype(np.uint8), sums, level)
    # of more classes, the codes of several are an integer, prefixed by the rank of the earlier ones
    rank, first, index = np.zeros(n, np.uint64), np.zeros(0, np.int64), np.zeros(0, np.int64)
    for start in range(0, classes, _WITH_RANK):
        keys = _packed(codes[:, start : start + _WITH_RANK], rank)
        _, first, index = np.unique(keys, return_index=True, return_inverse=True)
        rank = index.astype(np.uint64)
    return Counts(codes[first], _totals(index, counts, len(first)), level)


def _packed(codes: np.ndarray, prefix: np.ndarray) -> np.ndarray:
    """Return the codes (n, k) as one integer (n,), after the bits of a prefix (n,), an unsigned integer."""
    for column in codes.T:
        prefix = prefix << prefix.dtype.type(8) | column
    return prefix


def _unique_totals(keys: np.ndarray, counts: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct keys, ascending, and the sum of the counts of each."""
    if counts is None:
        return np.unique(keys, return_counts=True)
    keys, index = np.unique(keys, return_inverse=True)
    return keys, _totals(index, counts, len(keys))


def _totals(index: np.ndarray, counts: np.ndarray | None, size: int) -> np.ndarray:
    """Sum integers by index; return (size,) int64."""
    if counts is None:
        return np.bincount(index, minlength=size)
    sums = np.zeros(size, np.int64)
    np.add.at(sums, index, counts)
    return sums


def _coarser(counts: Counts, level: int) -> Counts:
    """Double the steps up to a level; equal codes are not merged."""
    return Counts(counts.codes >> (level - counts.level), counts.counts, level)


def coarsened(counts: Counts, most: int = _MOST) -> Counts:
    """Double the steps until there are at most `most` codes."""
    while len(counts.counts) > most and counts.level < 7:
        coarse = _coarser(counts, counts.level + 1)
        counts = _summed(coarse.codes, coarse.counts, coarse.level)
    return counts
