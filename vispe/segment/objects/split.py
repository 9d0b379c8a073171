"""Splitting of a connected component at its necks."""

from collections.abc import Sequence

import numpy as np

NECK = 0.75
"""A neck narrower than this fraction of the narrower of the two parts it connects is cut."""

_SOFT = 1.0  # pixels: narrower necks are treated as boundary noise


def split(mask: np.ndarray, prob: np.ndarray, spacing: Sequence[float] | None = None) -> np.ndarray:
    """Split a component at its necks by a watershed on the distance to its border times the probability.

    Probabilities are lower where two objects meet, which attracts the cut.  A neck is cut where
    (d_neck + 1) < 0.75 (d_part + 1), with d half the width in pixels: the rule is nearly scale invariant.

    Args:
        mask: (h, w) or (z, h, w) bool, one connected component.
        prob: probability of its class, same shape, from 0 to 1; clamped to at least one half.
        spacing: size of a pixel along each axis, relative to the geometric mean of those along the last two axes.

    Returns:
        int32 of the shape of `mask`: 0 outside, 1..n the parts.

    Example:
        >>> two = np.zeros((12, 24), bool)
        >>> two[1:11, 1:11] = two[1:11, 13:23] = two[5:7, 11:13] = True
        >>> int(split(two, np.ones(two.shape)).max())
        2
    """
    from scipy.ndimage import distance_transform_edt
    from skimage.measure import label
    from skimage.morphology import local_maxima, reconstruction
    from skimage.segmentation import watershed

    # pad, so that pixels beyond the box are outside of the component
    padded = np.pad(mask, 1)
    # pixels reassigned by min_area have a low probability of their class, which must not cause a cut
    likely = np.maximum(np.pad(prob, 1), 0.5)
    depth = distance_transform_edt(padded, sampling=spacing) * likely
    # in log space, height differences are ratios of widths
    height = np.log(depth + _SOFT)
    flat = reconstruction(height + np.log(NECK), height, footprint=np.ones((3,) * mask.ndim))
    tops = local_maxima(flat, connectivity=mask.ndim) & padded
    markers = label(tops, connectivity=mask.ndim)
    if markers.max() < 2:
        return mask.astype(np.int32)
    inner = (slice(1, -1),) * mask.ndim
    cut = watershed(-height, markers, connectivity=mask.ndim, mask=padded)
    return cut[inner].astype(np.int32)
