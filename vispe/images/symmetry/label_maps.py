"""Rotation of label maps without spurious classes at borders."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vispe.images.symmetry.warp import Canvas, rotate


def rotated_window_labels(canvas: Canvas, labels: np.ndarray, degrees: float) -> np.ndarray:
    """Return the window of a rotated label map (side, side), by nearest-neighbour interpolation."""
    return _as_labels(canvas.pose(_as_image(labels), degrees, "nearest"))


def round_trip_window_labels(canvas: Canvas, labels: np.ndarray, degrees: float) -> np.ndarray:
    """Return the window of a label map rotated forth and back (side, side), by nearest-neighbour interpolation."""
    return _as_labels(canvas.round_trip(_as_image(labels), degrees, "nearest"))


def rotated_labels(labels: np.ndarray, degrees: float) -> np.ndarray:
    """Return a square label map rotated about its centre, by nearest-neighbour interpolation.

    >>> rotated_labels(np.array([[1, 2], [3, 4]]), 90).tolist()
    [[2, 4], [1, 3]]
    """
    return _as_labels(rotate(_as_image(labels), degrees, mode="nearest"))


def resampled_labels(labels: np.ndarray, degrees: float, seed: int = 0) -> np.ndarray:
    """Return a square label map as a perfect segmenter would predict it on the rotated image, rotated back.

    Labels do not determine the sub-pixel position of a border. Therefore each rotated pixel samples its class with the
    bilinear weights of its neighbours as probabilities, which is unbiased for borders anywhere between pixels; the
    result is rotated back by nearest-neighbour interpolation. Nearest neighbours in both directions would mostly return
    the original pixels and hide the effect of resampling.

    Args:
        labels: (n, n).
        degrees: counter-clockwise; multiples of 90 return the labels unchanged.
        seed: random seed.
    """
    # one layer per class, rotated with bilinear weights
    classes = np.unique(labels)
    one_hot = torch.from_numpy((classes[:, None, None] == labels).astype(np.float64))[None]
    # cumulative class probabilities (classes, n, n), sampled by inversion
    cumulative = rotate(one_hot, degrees, mode="bilinear")[0].cumsum(0).numpy()
    uniform = np.random.default_rng(seed).random(labels.shape)
    class_index = (cumulative[:-1] <= uniform).sum(0)
    return rotated_labels(classes[class_index], -degrees)


def _as_image(labels: np.ndarray) -> Tensor:
    return torch.from_numpy(labels.astype(np.float64))[None, None]


def _as_labels(images: Tensor) -> np.ndarray:
    return images[0, 0].round().long().numpy()
