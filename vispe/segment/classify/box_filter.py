"""Smoothing of class probabilities, with the same numbers wherever an image is cut."""

import numpy as np


def smooth(prob: np.ndarray, valid: np.ndarray, radius: int) -> np.ndarray:
    """Average probabilities over squares of 2 radius + 1 px, over the pixels with data only.

    Each sum is taken afresh and in the same order, not carried from pixel to pixel: a piece of a page with a margin
    of `radius` gets the bits of the whole page, and no rest of a neighbour's 1 is left where all are 0.

    Args:
        prob: (K, h, w) float32, 0 where there is no data; overwritten.
        valid: (h, w) bool, pixels with data.
        radius: in pixels; beyond the border the image is reflected.

    Returns:
        `prob`.
    """
    from scipy.ndimage import correlate1d

    ones = np.ones(2 * radius + 1)

    def total(plane: np.ndarray) -> np.ndarray:
        return correlate1d(correlate1d(plane, ones, axis=0, mode="reflect"), ones, axis=1, mode="reflect")

    weight = np.maximum(total(valid.astype(np.float32)), 1)
    for k in range(len(prob)):
        prob[k] = np.where(valid, total(prob[k]) / weight, 0)
    return prob
