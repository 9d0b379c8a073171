"""Guided filter, which aligns class probabilities with the edges of the image.

He, Sun and Tang, "Guided Image Filtering", IEEE TPAMI 35 (2013): in every window the probability of a class is modelled
as linear in the grey level, by least squares with a penalty. Specks without counterpart in the image are averaged away,
and boundaries move to image edges.
"""

import numpy as np

RADIUS = 4
"""Radius of the square windows in pixels."""

PENALTY = 1e-3
"""Regularisation: variance of the grey levels in [0, 1] below which a window is treated as flat."""


def clean(prob: np.ndarray, grey: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """Filter probabilities with the image as guide, over the pixels with data only.

    Bitwise equivariant: filtering a rotated or mirrored image gives exactly the rotated or mirrored result.

    Args:
        prob: (K, h, w) float32, 0 where there is no data; overwritten.
        grey: (h, w) grey levels in [0, 1].
        valid: (h, w) bool, pixels with data.

    Returns:
        `prob`, normalised to sum 1 where there is data.
    """
    guide = np.where(valid, grey, 0).astype(np.float64)
    weight = np.maximum(_sums(valid.astype(np.float64)), 1)

    def mean(plane: np.ndarray) -> np.ndarray:
        return _sums(plane) / weight

    level = mean(guide)
    variance = mean(guide * guide) - level * level + PENALTY
    total = np.zeros(valid.shape)
    for k in range(len(prob)):
        plane = prob[k].astype(np.float64)
        average = mean(plane)
        # least-squares line of the window: slope a and offset b of the paper, equations 5 and 6
        slope = (mean(guide * plane) - level * average) / variance
        offset = average - slope * level
        # average the lines of all windows that contain the pixel (equation 8)
        filtered = mean(np.where(valid, slope, 0)) * guide + mean(np.where(valid, offset, 0))
        prob[k] = np.where(valid, np.maximum(filtered, 0), 0)
        total += prob[k]
    prob /= np.where(total > 0, total, 1).astype(np.float32)
    return prob


def _sums(plane: np.ndarray) -> np.ndarray:
    """Sum over windows with reflected borders, in an order that is equivariant to rotations by 90 degrees."""
    from scipy.ndimage import correlate1d

    ones = np.ones(2 * RADIUS + 1)
    rows, columns = (correlate1d(plane, ones, axis=axis, mode="reflect") for axis in (0, 1))
    return (
        correlate1d(rows, ones, axis=1, mode="reflect") + correlate1d(columns, ones, axis=0, mode="reflect")
    ) / 2
