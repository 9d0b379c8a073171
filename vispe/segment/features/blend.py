"""Blending of the class probabilities of overlapping tiles."""

import numpy as np

from vispe.segment.features.tiles import Region

_CACHED = 1 << 14  # pixels whose probabilities fit into the CPU cache


def window(height: int, width: int) -> np.ndarray:
    """Return the blending weight of each pixel of a tile.

    A raised cosine along each axis, sin²(pi (i + 1/2) / n): largest in the centre, where a pixel has most
    context, small at the border, and positive everywhere, so that sums can be normalised.

    Returns:
        (height, width) float32.
    """
    rows, columns = (np.sin(np.pi * (np.arange(n) + 0.5) / n) ** 2 for n in (height, width))
    return np.outer(rows, columns).astype(np.float32)


class Blend:
    """Weighted average of the class probabilities of tiles, with a count of pixels where tiles disagree.

    Args:
        height: height of the page in pixels.
        width: width of the page in pixels.
        n_classes: K.
    """

    def __init__(self, height: int, width: int, n_classes: int) -> None:
        self._sum = np.zeros((n_classes, height, width), np.float32)
        self._weight = np.zeros((height, width), np.float32)
        self._first = np.zeros((height, width), np.uint8)
        self._twice = np.zeros((height, width), bool)
        self._differ = np.zeros((height, width), bool)

    def add(self, region: Region, prob: np.ndarray, weight: np.ndarray | None) -> None:
        """Add probabilities (rows, columns, K) of a region, weighted by `weight` (rows, columns) or 1."""
        # temporary arrays of a few rows remain in the CPU cache
        rows = max(_CACHED // region.shape[1], 1)
        for top in range(0, region.shape[0], rows):
            part = slice(top, min(top + rows, region.shape[0]))
            index = slice(region.top + part.start, region.top + part.stop), slice(region.left, region.right)
            self._add_rows(index, prob[part], np.float32(1) if weight is None else weight[part])

    def _add_rows(
        self, index: tuple[slice, slice], prob: np.ndarray, weight: np.ndarray | np.float32
    ) -> None:
        classes, largest = np.ones(prob.shape[:2], np.uint8), prob[..., 0]
        for k in range(1, prob.shape[-1]):  # several times as fast as argmax over a short axis
            classes = np.where(prob[..., k] > largest, np.uint8(k + 1), classes)
            largest = np.maximum(largest, prob[..., k])
        first = self._first[index]
        # pixels that an earlier tile has already set: overlap, and possibly disagreement
        is_set = first > 0
        self._twice[index] |= is_set
        self._differ[index] |= is_set & (first != classes)
        self._first[index] = np.where(is_set, first, classes)
        # weighted sum; normalised by the sum of weights in `result`
        for k in range(prob.shape[-1]):
            self._sum[(k, *index)] += prob[..., k] * weight
        self._weight[index] += weight

    def result(self) -> np.ndarray:
        """Return the blended probabilities (K, h, w), float32; call once, the sums are overwritten."""
        self._sum /= np.maximum(self._weight, np.finfo(np.float32).tiny)
        return self._sum

    @property
    def overlap_masks(self) -> tuple[np.ndarray, np.ndarray]:
        """Two masks (h, w) bool: pixels in several tiles, and those for which two tiles predict different classes."""
        return self._twice, self._differ

    @property
    def overlap_pixels(self) -> int:
        """Number of pixels covered by more than one tile."""
        return int(self._twice.sum())

    @property
    def disagreeing_pixels(self) -> int:
        """Number of pixels for which two tiles predict different classes."""
        return int(self._differ.sum())
