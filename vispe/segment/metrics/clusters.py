"""Comparison of label maps whose classes are numbered differently: clusters and classes."""

from collections.abc import Mapping

import numpy as np

from vispe.errors import InputError
from vispe.segment.metrics.ground_truth import check_maps, check_not_empty
from vispe.segment.metrics.overlap import joint_histogram


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
    pred, truth, valid, _ = check_maps(pred, truth, max(k, n_classes), None, None)
    if int(truth.max(initial=0)) > n_classes:
        raise InputError(f"the ground truth contains class {int(truth.max())}, but n_classes={n_classes}.")
    counts = joint_histogram(truth[valid], pred[valid], n_classes, k)
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
    table = np.full(max(mapping, default=0) + 1, -1, np.int32)
    table[[0, *mapping]] = [0, *mapping.values()]
    inside = (values >= 0) & (values < len(table))
    mapped = np.where(inside, table[np.where(inside, values, 0)], -1)
    if (mapped < 0).any():
        clusters = ", ".join(map(str, sorted(mapping))) or "none"
        raise InputError(
            f"the label map contains cluster {int(values[mapped < 0][0])}, but the mapping has {clusters}."
        )
    return mapped


def adjusted_rand(pred: np.ndarray, truth: np.ndarray, *, ignore: np.ndarray | None = None) -> float:
    """Return the adjusted Rand index of two label maps, independent of their numbering: 1 if equal, about 0 if random.

    Pixels that are 0 in either map, or marked in `ignore`, are excluded.

    Raises:
        ShapeError: shapes differ.
        InputError: negative values, or no pixel to score.
    """
    highest = int(max(pred.max(initial=0), truth.max(initial=0)))
    pred, truth, valid, _ = check_maps(pred, truth, highest, ignore, None)
    check_not_empty(valid)
    return adjusted_rand_index(truth * valid, pred * valid)


def adjusted_rand_index(first: np.ndarray, second: np.ndarray) -> float:
    """Return the adjusted Rand index over the pixels with data in both maps; NaN without any."""
    from sklearn.metrics import adjusted_rand_score

    both = (first > 0) & (second > 0)
    return float(adjusted_rand_score(first[both], second[both])) if both.any() else float("nan")
