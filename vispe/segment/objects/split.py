"""Cutting a connected patch at its necks."""

from collections.abc import Sequence

import numpy as np

NECK = 0.75
"""A neck narrower than this share of the narrower of the two parts that it connects is cut."""
_SOFT = 1.0  # pixels: below about this width a neck is noise of the border


def split(mask: np.ndarray, prob: np.ndarray, spacing: Sequence[float] | None = None) -> np.ndarray:
    """Cut a patch at its necks by a watershed on the distance to its border times the probability.

    Probabilities are lower where two objects meet, so they move the cut there.  A neck is cut where
    (d_neck + 1) < 0.75 (d_part + 1), with d half the width in pixels: the rule is nearly the same at every size.

    Args:
        mask: (h, w) or (z, h, w) bool, one connected patch.
        prob: of its class, same shape, from 0 to 1; below one half it counts as that.
        spacing: size of a pixel along each axis, in pixels along the last axis.

    Returns:
        int32 of the shape of `mask`: 0 outside, 1..n the parts.

    >>> two = np.zeros((12, 24), bool)
    >>> two[1:11, 1:11] = two[1:11, 13:23] = two[5:7, 11:13] = True
    >>> int(split(two, np.ones(two.shape)).max())
    2
    """
    from scipy.ndimage import distance_transform_edt
    from skimage.measure import label
    from skimage.morphology import local_maxima, reconstruction
    from skimage.segmentation import watershed

    # the border of the crop is outside of the patch
    padded = np.pad(mask, 1)
    # pixels that a small patch left behind have the class at a low probability: no reason for a cut
    likely = np.maximum(np.pad(prob, 1), 0.5)
    depth = distance_transform_edt(padded, sampling=spacing) * likely
    # on logarithms, a height is a ratio of widths
    height = np.log(depth + _SOFT)
    flat = reconstruction(height + np.log(NECK), height, footprint=np.ones((3,) * mask.ndim))
    tops = local_maxima(flat, connectivity=mask.ndim) & padded
    markers = label(tops, connectivity=mask.ndim)
    if markers.max() < 2:
        return mask.astype(np.int32)
    inner = (slice(1, -1),) * mask.ndim
    cut = watershed(-height, markers, connectivity=mask.ndim, mask=padded)
    return cut[inner].astype(np.int32)
