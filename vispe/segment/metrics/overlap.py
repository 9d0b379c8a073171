"""Confusion matrix and intersection over union of label maps, and the areas of their classes."""

import numpy as np

from vispe.errors import InputError, ShapeError


def confusion(first: np.ndarray, second: np.ndarray, n_classes: int) -> np.ndarray:
    """Return the counts (K, K) of class pairs over the pixels with data in both maps; rows are `first`."""
    if first.shape != second.shape:
        raise ShapeError(f"label maps must have equal shapes, got {first.shape} and {second.shape}.")
    for labels in (first, second):
        _check_classes(labels, n_classes)
    both = (first > 0) & (second > 0)
    return joint_histogram(first[both], second[both], n_classes, n_classes)


def mean_iou(first: np.ndarray, second: np.ndarray, n_classes: int) -> float:
    """Return the mean over the classes in either map of intersection over union; NaN without common pixels."""
    return miou(confusion(first, second, n_classes))


def ious(counts: np.ndarray) -> np.ndarray:
    """Return intersection over union of each class of a confusion matrix (K, K), (K,); NaN for a class in neither map.

    >>> ious(np.array([[3, 1, 0], [0, 4, 0], [0, 0, 0]]))
    array([0.75, 0.8 ,  nan])
    """
    hits = np.diag(counts)
    union = counts.sum(0) + counts.sum(1) - hits
    return np.divide(hits, union, out=np.full(len(hits), np.nan), where=union > 0)


def miou(counts: np.ndarray) -> float:
    """Return the mean IoU of a confusion matrix (K, K) over the classes in either map; NaN for an empty one."""
    known = ious(counts)
    known = known[~np.isnan(known)]
    return float(known.mean()) if len(known) else float("nan")


def class_percentages(labels: np.ndarray, n_classes: int) -> np.ndarray:
    """Return the area of each class in percent of the pixels with data, (K,); NaN without any.

    Raises:
        InputError: a class above K.
    """
    _check_classes(labels, n_classes)
    counts = np.bincount(labels.ravel(), minlength=n_classes + 1)[1:]
    return 100.0 * counts / counts.sum() if counts.sum() else np.full(n_classes, np.nan)


def without_borders(labels: np.ndarray, pixels: int = 1) -> np.ndarray:
    """Return labels with 0 wherever another class is within `pixels` in the 8-neighbourhood.

    Rotated ground truth is uncertain there because of nearest-neighbour resampling. No data (0) is not a class.

    Raises:
        InputError: `pixels` is negative.
    """
    from scipy.ndimage import maximum_filter, minimum_filter

    if pixels < 0:
        raise InputError(f"pixels must be 0 or larger, got {pixels}.")
    size = 2 * pixels + 1
    top = maximum_filter(labels, size, mode="nearest")
    # no data must not act as the smallest class
    low = minimum_filter(np.where(labels > 0, labels, labels.max(initial=0) + 1), size, mode="nearest")
    return np.where((labels > 0) & (top == low), labels, 0)


def joint_histogram(rows: np.ndarray, columns: np.ndarray, n_rows: int, n_columns: int) -> np.ndarray:
    """Return the joint histogram (n_rows, n_columns) of two lists of classes (n,), counted from 1."""
    # row-major code of each pair, counted at once
    codes = (rows.astype(np.int64) - 1) * n_columns + (columns.astype(np.int64) - 1)
    return np.bincount(codes, minlength=n_rows * n_columns).reshape(n_rows, n_columns)


def _check_classes(labels: np.ndarray, n_classes: int) -> None:
    highest = int(labels.max(initial=0))
    if highest > n_classes:
        raise InputError(f"a label map contains class {highest}, but n_classes={n_classes}.")
