"""Scores of a label map against ground truth.

Classes are 1..K and 0 means no data; a pixel that is 0 in either map is ignored.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from vispe.errors import InputError, ShapeError
from vispe.segment.metrics.overlap import ious, joint_histogram

Scores = dict[str, Any]


def scores(
    pred: np.ndarray,
    truth: np.ndarray,
    n_classes: int,
    *,
    ignore: np.ndarray | None = None,
    names: Sequence[str] | None = None,
    boundary_px: float = 2,
) -> Scores:
    """Compare a label map with the ground truth.

    Args:
        pred: (h, w) or (z, h, w) integers, 1..K, 0 = no data.
        truth: the same shape, 1..K, 0 = no ground truth.
        n_classes: K.
        ignore: bool, the same shape: pixels to exclude, such as scribbled ones.
        names: K class names; default 'class 1' ...
        boundary_px: tolerance in pixels for matching boundaries.

    Returns:
        A JSON-able dict.  Values by class name are None if neither map contains the class:

        - 'miou', 'mean_dice': means over the classes in either map; 'iou', 'dice': by class name.
        - 'pixel_accuracy'; 'balanced_accuracy': mean recall over the classes in the truth.
        - 'boundary_f1' by class name and 'mean_boundary_f1': F1 of the boundary pixels (those with a
          4-neighbour of another class); a boundary pixel matches if the other map has one within
          `boundary_px`; None if neither map has any.
        - 'phase_fraction': {'truth': ..., 'pred': ...} by class name; 'phase_fraction_error_pp': prediction
          minus truth in percentage points; 'phase_fraction_mean_abs_error_pp' and
          'phase_fraction_max_abs_error_pp' over the classes in either map.
        - 'confusion': K lists, rows are the ground truth; 'n_pixels': scored pixels; 'boundary_px'.

    Raises:
        ShapeError: shapes differ.
        InputError: values outside 0..K, not K names, a negative `boundary_px`, or no pixel to score.
    """
    if not boundary_px >= 0:  # also NaN
        raise InputError(f"boundary_px must be 0 or larger, got {boundary_px}.")
    pred, truth, valid, names = check_maps(pred, truth, n_classes, ignore, names)
    check_not_empty(valid)
    k = n_classes
    # joint histogram (K, K): rows ground truth, columns prediction
    counts = joint_histogram(truth[valid], pred[valid], k, k)
    total = int(counts.sum())
    hits, in_truth, in_pred = np.diag(counts), counts.sum(1), counts.sum(0)
    # classes in neither map are excluded from the means
    present = in_truth + in_pred > 0
    iou, dice = ious(counts), _ratio(2 * hits, in_truth + in_pred, empty=np.nan)
    recall = hits[in_truth > 0] / in_truth[in_truth > 0]
    f1 = _boundary_f1(pred, truth, valid, k, boundary_px)
    # percentage points of the scored area
    error = 100.0 * (in_pred - in_truth) / total
    return {
        "n_pixels": total,
        "miou": _mean(iou),
        "iou": _by_name(names, iou),
        "mean_dice": _mean(dice),
        "dice": _by_name(names, dice),
        "pixel_accuracy": float(hits.sum() / total),
        "balanced_accuracy": float(recall.mean()),
        "mean_boundary_f1": _mean(f1),
        "boundary_f1": _by_name(names, f1),
        "boundary_px": boundary_px,
        "phase_fraction": {
            "truth": _by_name(names, in_truth / total),
            "pred": _by_name(names, in_pred / total),
        },
        "phase_fraction_error_pp": _by_name(names, error),
        "phase_fraction_mean_abs_error_pp": float(np.abs(error[present]).mean()),
        "phase_fraction_max_abs_error_pp": float(np.abs(error).max()),
        "confusion": counts.tolist(),
    }


def check_maps(
    pred: np.ndarray, truth: np.ndarray, k: int, ignore: np.ndarray | None, names: Sequence[str] | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, Sequence[str]]:
    """Return both maps as (z, h, w), the mask of scored pixels (z, h, w), and the names."""
    for what, array in (("truth", truth), ("ignore", ignore)):
        if array is not None and array.shape != pred.shape:
            raise ShapeError(f"the prediction has shape {pred.shape}, but {what} has {array.shape}.")
    if pred.ndim not in (2, 3):
        raise ShapeError(f"label maps must have shape (h, w) or (z, h, w), got {pred.shape}.")
    for what, array in (("prediction", pred), ("truth", truth)):
        if array.dtype.kind not in "ui":
            raise InputError(f"the {what} has dtype {array.dtype}, but label maps must be integers.")
        low, high = int(array.min(initial=0)), int(array.max(initial=0))
        if low < 0 or high > k:
            outlier = low if low < 0 else high
            raise InputError(f"the {what} contains {outlier}, outside 0 to n_classes={k}.")
    names = [f"class {i + 1}" for i in range(k)] if names is None else list(names)
    if len(names) != k:
        raise InputError(f"got {len(names)} names for n_classes={k}. Pass one name per class.")
    valid = (pred > 0) & (truth > 0)
    if ignore is not None:
        valid &= ~ignore.astype(bool)
    if pred.ndim == 2:
        pred, truth, valid = pred[None], truth[None], valid[None]
    return pred, truth, valid, names


def check_not_empty(valid: np.ndarray) -> None:
    """Raise InputError if no pixel of a mask is to be scored."""
    if not valid.any():
        raise InputError("no pixel to score: all pixels lack data or ground truth, or are ignored.")


def _boundary_f1(
    pred: np.ndarray, truth: np.ndarray, valid: np.ndarray, k: int, tolerance: float
) -> np.ndarray:
    """Return the F1 of the boundary pixels of each class, (k,); NaN if neither map has any."""
    from scipy.ndimage import distance_transform_edt

    # per class, for prediction and ground truth: boundary pixels, and those with a match
    total, hits = np.zeros((2, k, 2), np.int64)
    for page_pred, page_truth, page_valid in zip(pred, truth, valid, strict=True):
        edges = [_boundary(page_pred), _boundary(page_truth)]
        for c in range(k):
            edges_of_class = [
                edge & (page == c + 1) for edge, page in zip(edges, (page_pred, page_truth), strict=True)
            ]
            for side in (0, 1):
                counted = edges_of_class[side] & page_valid
                total[c, side] += counted.sum()
                if counted.any() and edges_of_class[1 - side].any():
                    # distance in pixels from each pixel to the nearest boundary pixel of the other map
                    near = distance_transform_edt(~edges_of_class[1 - side]) <= tolerance
                    hits[c, side] += (counted & near).sum()
    precision, recall = _ratio(hits, total, empty=0).T
    f1 = _ratio(2 * precision * recall, precision + recall, empty=0)
    return np.where(total.sum(1) > 0, f1, np.nan)


def _boundary(page: np.ndarray) -> np.ndarray:
    """Return the mask (h, w) of pixels with a 4-neighbour of another class; no data (0) is not a class."""
    edge = np.zeros(page.shape, bool)
    for a, b in (
        ((slice(1, None),), (slice(None, -1),)),
        ((slice(None), slice(1, None)), (slice(None), slice(None, -1))),
    ):
        differ = (page[a] != page[b]) & (page[a] > 0) & (page[b] > 0)
        edge[a] |= differ
        edge[b] |= differ
    return edge


def _ratio(numerator: np.ndarray, denominator: np.ndarray, empty: float) -> np.ndarray:
    """Return quotients, `empty` where the denominator is 0."""
    out = np.full(np.shape(denominator), empty, np.float64)
    return np.divide(numerator, denominator, out=out, where=denominator > 0)


def _mean(values: np.ndarray) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None


def _by_name(names: Sequence[str], values: np.ndarray) -> dict[str, float | None]:
    return {name: None if np.isnan(v) else float(v) for name, v in zip(names, values, strict=True)}
