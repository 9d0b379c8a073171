"""Post-processing of a page: from class probabilities to labels and uncertainty."""

import numpy as np

from vispe.segment.classify.class_prior import PRIORS, reweigh, weights
from vispe.segment.classify.guided_filter import clean
from vispe.segment.model.uncertainty import most_probable
from vispe.segment.types import PostProcessing


def finalize(
    prob: np.ndarray,
    valid: np.ndarray,
    post: PostProcessing,
    prior: np.ndarray | None,
    grey: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, bool]:
    """Reweight, filter and smooth the probabilities (K, h, w) of a page in place, then take the most probable class.

    A part of a page has the result of the complete page if it has the margin of `PostProcessing.smooth`, but
    `PostProcessing.clean` and `PostProcessing.min_area` need the complete page.

    Args:
        prob: output of the classifier.
        valid: (h, w) bool, pixels with data.
        post: post-processing.
        prior: (K,) class frequencies of the complete page; None skips the reweighting.
        grey: (h, w) grey levels in [0, 1], for `PostProcessing.clean`.

    Returns:
        Labels (h, w) uint8 and uncertainty (h, w) float32, as in `Prediction`, and whether a connected component has
        `PostProcessing.min_area` pixels.
    """
    # reweight by the estimated frequencies of the page, relative to the balanced training
    weight = None if prior is None else weights(prior, post.prior or PRIORS[0])
    if weight is not None:
        reweigh(prob, weight)
    if post.clean and grey is not None:
        clean(prob, grey, valid)
    if post.smooth:
        smooth(prob, valid, post.smooth)
    labels, uncertainty = most_probable(prob, valid)
    has_large_component = True
    if post.min_area > 1:
        labels, has_large_component = _drop_small(labels, post.min_area)
    return labels, uncertainty, has_large_component


def no_large_component(post: PostProcessing) -> str:
    """Return the note for a page whose connected components are all smaller than `PostProcessing.min_area`."""
    return f"no connected component has min_area={post.min_area} pixels, so min_area has no effect."


def _drop_small(labels: np.ndarray, least: int) -> tuple[np.ndarray, bool]:
    """Replace connected components (8-connected) below `least` pixels by the class of the nearest larger one.

    Returns:
        The labels, and whether a larger component exists; without one the labels are unchanged.
    """
    from scipy.ndimage import distance_transform_edt
    from skimage.measure import label

    patches = label(labels, background=0, connectivity=2)
    counts = np.bincount(patches.ravel())
    small = (counts[patches] < least) & (labels > 0)
    keep = (labels > 0) & ~small
    if not small.any() or not keep.any():
        return labels, bool(keep.any()) or not labels.any()
    # index of the nearest pixel of a large component, for every pixel
    nearest = distance_transform_edt(~keep, return_distances=False, return_indices=True)
    return np.where(small, labels[tuple(nearest)], labels), True


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
