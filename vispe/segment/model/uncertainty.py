"""Uncertainty of a segmentation: 1 minus the margin between the two most probable classes of a pixel.

Related: areas with confidence intervals (`vispe.segment.classify.class_prior`), calibration of probabilities
(`vispe.segment.classify.calibration`), disagreement between poses (`vispe.segment.invariance_report`) and features
unlike those of the training images (`vispe.segment.classify.out_of_distribution`).
"""

from collections.abc import Sequence

import numpy as np

from vispe.segment.types import Prediction

_PIXELS = 1 << 17  # pixels per chunk


def most_probable(prob: np.ndarray, valid: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the most probable class and the uncertainty of each pixel.

    Args:
        prob: (K, h, w), class probabilities.
        valid: (h, w) bool, pixels with data.

    Returns:
        Labels (h, w) uint8, 1 to K, the first of equally probable classes and 0 where there is no data; uncertainty
        (h, w) float32, NaN where there is no data.
    """
    labels = np.empty(valid.shape, np.uint8)
    uncertainty = np.empty(valid.shape, np.float32)
    # bands of rows bound the temporary arrays
    rows = max(_PIXELS // valid.shape[1], 1)
    for top in range(0, len(valid), rows):
        part, valid_rows = prob[:, top : top + rows], valid[top : top + rows]
        # running maximum and runner-up over the classes, without sorting (K, rows, w)
        largest, label = part[0].copy(), np.ones(valid_rows.shape, np.uint8)
        second = np.full(valid_rows.shape, -np.inf, np.float32)
        for k in range(1, len(part)):
            np.maximum(second, np.minimum(largest, part[k]), out=second)
            label[part[k] > largest] = k + 1
            np.maximum(largest, part[k], out=largest)
        unsure = 1 - (largest - second)
        if not valid_rows.all():
            label[~valid_rows], unsure[~valid_rows] = 0, np.nan
        labels[top : top + rows], uncertainty[top : top + rows] = label, unsure
    return labels, uncertainty


def mean_uncertainty(results: Sequence[Prediction]) -> float:
    """Return the mean uncertainty of the pixels with data of all pages, 0 without any.

    Values are multiples of 2^-24, so the float64 sum of up to 2^29 pixels is exact in any order, as in blocks.
    """
    total = sum(float(np.nansum(page.uncertainty, dtype=np.float64)) for page in results)
    count = sum(int(np.isfinite(page.uncertainty).sum()) for page in results)
    return total / count if count else 0.0
