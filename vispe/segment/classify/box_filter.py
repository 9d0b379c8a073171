"""Smoothing of class probabilities; results are bitwise independent of the pieces into which an image is cut."""

import numpy as np


def smooth(prob: np.ndarray, valid: np.ndarray, radius: int) -> np.ndarray:
    """Average probabilities over squares of 2 radius + 1 px, over the pixels with data only.

    Each sum is computed from scratch in a fixed order, without a running sum: a piece of a page with a margin
    of `radius` has exactly the values of the complete page, and no rounding residue remains where all values are 0.

    Args:
        prob: (K, h, w) float32, 0 where there is no data; overwritten.
        valid: (h, w) bool, pixels with data.
        radius: radius in pixels; borders are reflected.

    Returns:
        `prob`.
    """
    from scipy.ndimage import correlate1d

    ones = np.ones(2 * radius + 1)

    def total(plane: np.ndarray) -> np.ndarray:
        return correlate1d(correlate1d(plane, ones, axis=0, mode="reflect"), ones, axis=1, mode="reflect")

    # number of valid pixels in the window, at least 1
    weight = np.maximum(total(valid.astype(np.float32)), 1)
    for k in range(len(prob)):
        prob[k] = np.where(valid, total(prob[k]) / weight, 0)
    return prob
