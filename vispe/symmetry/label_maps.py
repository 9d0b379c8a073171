"""Label maps under poses and turns, without new classes at the borders."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vispe.symmetry.warp import Canvas, rotate


def posed_labels(canvas: Canvas, labels: np.ndarray, degrees: float) -> np.ndarray:
    """Return the window of a label map that was turned, by nearest neighbour, (side, side)."""
    return _back(canvas.pose(_as_image(labels), degrees, "nearest"))


def round_trip_labels(canvas: Canvas, labels: np.ndarray, degrees: float) -> np.ndarray:
    """Return the window of a label map that was turned there and back, by nearest neighbour, (side, side)."""
    return _back(canvas.round_trip(_as_image(labels), degrees, "nearest"))


def turned_labels(labels: np.ndarray, degrees: float) -> np.ndarray:
    """Return a square label map turned about its centre, by nearest neighbour.

    >>> turned_labels(np.array([[1, 2], [3, 4]]), 90).tolist()
    [[2, 4], [1, 3]]
    """
    return _back(rotate(_as_image(labels), degrees, mode="nearest"))


def resampled_labels(labels: np.ndarray, degrees: float, seed: int = 0) -> np.ndarray:
    """Return a square label map as a perfect segmenter of the turned image would give it, turned back.

    Where a border runs between two pixels is not known from labels. So a turned pixel draws its class with the bilinear
    shares of those around it, which is right on average for borders anywhere between; then it is turned back by nearest
    neighbour. Nearest neighbours both ways would mostly find the same pixels again and hide the resampling.

    Args:
        labels: (n, n).
        degrees: counter-clockwise; multiples of 90 return the labels.
        seed: of the draws.
    """
    classes = np.unique(labels)
    layers = torch.from_numpy((classes[:, None, None] == labels).astype(np.float64))[None]
    below = rotate(layers, degrees, mode="bilinear")[0].cumsum(0).numpy()
    drawn = np.random.default_rng(seed).random(labels.shape)
    chosen = (below[:-1] <= drawn).sum(0)
    return turned_labels(classes[chosen], -degrees)


def _as_image(labels: np.ndarray) -> Tensor:
    return torch.from_numpy(labels.astype(np.float64))[None, None]


def _back(images: Tensor) -> np.ndarray:
    return images[0, 0].round().long().numpy()
