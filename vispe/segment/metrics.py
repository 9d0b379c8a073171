"""Scores of a label map against ground truth, and their summary over images.

Classes are 1..K and 0 means no data; a pixel that is 0 in either map is ignored.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vispe.errors import InputError, ShapeError

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
        InputError: values outside 0..K, not K names, or no pixel to score.
    """
    pred, truth, valid, names = _checked(pred, truth, n_classes, ignore, names)
    k = n_classes
    # joint histogram (K, K): rows ground truth, columns prediction
    counts = _pairs(truth[valid], pred[valid], k, k)
    total = _some(int(counts.sum()))
    hits, in_truth, in_pred = np.diag(counts), counts.sum(1), counts.sum(0)
    union = in_truth + in_pred - hits
    # classes in neither map are excluded from the means
    present = union > 0
    iou, dice = _ratio(hits, union), _ratio(2 * hits, in_truth + in_pred)
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
            "truth": _by_name(names, list(in_truth / total)),
            "pred": _by_name(names, list(in_pred / total)),
        },
        "phase_fraction_error_pp": _by_name(names, list(error)),
        "phase_fraction_mean_abs_error_pp": float(np.abs(error[present]).mean()),
        "phase_fraction_max_abs_error_pp": float(np.abs(error).max()),
        "confusion": counts.tolist(),
    }


def match_clusters(pred: np.ndarray, truth: np.ndarray, n_classes: int) -> dict[int, int]:
    """Assign clusters to classes one to one so that the mean IoU is maximal (Hungarian method).

    Args:
        pred: cluster numbers from 1, 0 = no data; any number of clusters.
        truth: the same shape, 1..n_classes, 0 = no ground truth.
        n_classes: number of classes in the truth.

    Returns:
        {cluster: class} for the clusters 1..max(pred).  Clusters beyond the number of classes get the numbers
        n_classes + 1, ... in their order, which match no class.

    Raises:
        ShapeError: shapes differ.
        InputError: values outside the range of classes.
    """
    k = int(pred.max(initial=0))
    pred, truth, valid, _ = _checked(pred, truth, max(k, n_classes), None, None)
    if int(truth.max(initial=0)) > n_classes:
        raise InputError(f"the ground truth contains class {int(truth.max())}, but n_classes={n_classes}.")
    counts = _pairs(truth[valid], pred[valid], n_classes, k)
    union = counts.sum(1)[:, None] + counts.sum(0)[None, :] - counts
    # (classes, clusters); absent pairs have IoU 0
    iou = counts / np.maximum(union, 1)
    from scipy.optimize import linear_sum_assignment

    class_index, cluster_index = linear_sum_assignment(iou, maximize=True)
    mapping = {int(c) + 1: int(r) + 1 for r, c in zip(class_index, cluster_index, strict=True)}
    # clusters beyond the number of classes get new numbers
    extra = n_classes
    for cluster in range(1, k + 1):
        if cluster not in mapping:
            extra += 1
            mapping[cluster] = extra
    return dict(sorted(mapping.items()))


def apply_mapping(values: np.ndarray, mapping: Mapping[int, int]) -> np.ndarray:
    """Map cluster numbers to class numbers (`match_clusters`), same shape, int32; 0 stays 0.

    Raises:
        InputError: a cluster without a class.
    """
    table = np.zeros(max(mapping, default=0) + 1, np.int32)
    table[list(mapping)] = list(mapping.values())
    if int(values.max(initial=0)) >= len(table):
        raise InputError(
            f"the label map contains cluster {int(values.max())}, but the mapping ends at {len(table) - 1}."
        )
    return table[values]


def adjusted_rand(pred: np.ndarray, truth: np.ndarray, *, ignore: np.ndarray | None = None) -> float:
    """Return the adjusted Rand index of two label maps, independent of their numbering: 1 if equal, about 0 if random.

    Pixels that are 0 in either map, or marked in `ignore`, are excluded.

    Raises:
        ShapeError: shapes differ.
        InputError: negative values, or no pixel to score.
    """
    highest = int(max(pred.max(initial=0), truth.max(initial=0)))
    pred, truth, valid, _ = _checked(pred, truth, highest, ignore, None)
    _some(int(valid.sum()))
    return adjusted_rand_index(truth * valid, pred * valid)


def summarize(
    results: Sequence[Mapping[str, Any]], key: str, seed: int = 0, *, higher_is_better: bool = True
) -> dict[str, Any]:
    """Summarise one score over images.

    Args:
        results: one dict of `scores` for each image.
        key: the score; dots reach into nested dicts: 'miou', 'iou.matrix'.  Images where it is None are
            excluded.
        seed: seed of the bootstrap.
        higher_is_better: whether the worst image is the lowest (True) or the furthest from 0 (False, for
            errors).

    Returns:
        'n' images, 'mean', 'median', 'std' (sample standard deviation), 'worst', and 'ci95': the [low, high]
        95 % percentile bootstrap interval of the mean over images (10 000 resamples).  'std' and 'ci95' are None
        for one image, where the spread is undefined, and all but 'n' are None if no image has the score.

    Raises:
        InputError: an image has no such key.
    """
    values = np.array([v for v in (_lookup(r, key) for r in results) if v is not None], np.float64)
    n = len(values)
    if n == 0:
        return {"n": 0, "mean": None, "median": None, "std": None, "worst": None, "ci95": None}
    interval = None
    if n > 1:
        # bootstrap over images: resampled means (10 000,)
        draws = np.random.default_rng(seed).integers(0, n, (10_000, n))
        interval = np.percentile(values[draws].mean(1), [2.5, 97.5]).tolist()
    worst = values.min() if higher_is_better else values[np.abs(values).argmax()]
    return {
        "n": n,
        "mean": float(values.mean()),
        "median": float(np.median(values)),
        "std": float(values.std(ddof=1)) if n > 1 else None,
        "worst": float(worst),
        "ci95": interval,
    }


def _checked(
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


def _some(count: int) -> int:
    if not count:
        raise InputError("no pixel to score: all pixels lack data or ground truth, or are ignored.")
    return count


def _pairs(rows: np.ndarray, columns: np.ndarray, n_rows: int, n_columns: int) -> np.ndarray:
    """Return the joint histogram (n_rows, n_columns) of two lists of classes (n,), counted from 1."""
    # row-major code of each pair, counted at once
    codes = (rows.astype(np.int64) - 1) * n_columns + (columns.astype(np.int64) - 1)
    return np.bincount(codes, minlength=n_rows * n_columns).reshape(n_rows, n_columns)


def _boundary_f1(
    pred: np.ndarray, truth: np.ndarray, valid: np.ndarray, k: int, tolerance: float
) -> list[float | None]:
    from scipy.ndimage import distance_transform_edt

    # per class, for prediction and ground truth: [boundary pixels, boundary pixels with a match]
    tally = np.zeros((k, 2, 2), np.int64)
    for page_pred, page_truth, page_valid in zip(pred, truth, valid, strict=True):
        edges = [_boundary(page_pred), _boundary(page_truth)]
        for c in range(k):
            edges_of_class = [
                edge & (page == c + 1) for edge, page in zip(edges, (page_pred, page_truth), strict=True)
            ]
            for side in (0, 1):
                counted = edges_of_class[side] & page_valid
                tally[c, side, 0] += counted.sum()
                if counted.any() and edges_of_class[1 - side].any():
                    # distance in pixels from each pixel to the nearest boundary pixel of the other map
                    near = distance_transform_edt(~edges_of_class[1 - side]) <= tolerance
                    tally[c, side, 1] += (counted & near).sum()
    return [_f1(*tally[c, 0], *tally[c, 1]) for c in range(k)]


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


def _f1(n_pred: int, hit_pred: int, n_truth: int, hit_truth: int) -> float | None:
    if n_pred + n_truth == 0:
        return None
    precision = hit_pred / n_pred if n_pred else 0.0
    recall = hit_truth / n_truth if n_truth else 0.0
    return float(2 * precision * recall / (precision + recall)) if precision + recall else 0.0


def _ratio(top: np.ndarray, bottom: np.ndarray) -> list[float | None]:
    return [float(t / b) if b else None for t, b in zip(top, bottom, strict=True)]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return float(np.mean(known)) if known else None


def _by_name(names: Sequence[str], values: Sequence[float | None]) -> dict[str, float | None]:
    return {name: None if v is None else float(v) for name, v in zip(names, values, strict=True)}


def _lookup(result: Mapping[str, Any], key: str) -> float | None:
    node: Any = result
    rest = key
    while isinstance(node, Mapping):
        if rest in node:  # names may contain dots
            return node[rest]
        first, _, rest = rest.partition(".")
        node = node.get(first)
    raise InputError(f"unknown score {key!r}. Available scores: {', '.join(map(str, result))}.")


def confusion(first: np.ndarray, second: np.ndarray, n_classes: int) -> np.ndarray:
    """Return the counts (K, K) of class pairs over the pixels with data in both maps; rows are `first`."""
    if first.shape != second.shape:
        raise ShapeError(f"label maps must have equal shapes, got {first.shape} and {second.shape}.")
    for labels in (first, second):
        _check_classes(labels, n_classes)
    both = (first > 0) & (second > 0)
    return _pairs(first[both], second[both], n_classes, n_classes)


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


def adjusted_rand_index(first: np.ndarray, second: np.ndarray) -> float:
    """Return the adjusted Rand index over the pixels with data in both maps; NaN without any."""
    from sklearn.metrics import adjusted_rand_score

    both = (first > 0) & (second > 0)
    return float(adjusted_rand_score(first[both], second[both])) if both.any() else float("nan")


def class_percentages(labels: np.ndarray, n_classes: int) -> np.ndarray:
    """Return the area of each class in percent of the pixels with data, (K,); NaN without any.

    Raises:
        InputError: a class above K.
    """
    _check_classes(labels, n_classes)
    counts = np.bincount(labels.ravel(), minlength=n_classes + 1)[1:]
    return 100.0 * counts / counts.sum() if counts.sum() else np.full(n_classes, np.nan)


def _check_classes(labels: np.ndarray, n_classes: int) -> None:
    highest = int(labels.max(initial=0))
    if highest > n_classes:
        raise InputError(f"a label map contains class {highest}, but n_classes={n_classes}.")


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
