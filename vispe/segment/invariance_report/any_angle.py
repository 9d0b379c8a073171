"""Angles that are not quarter turns: new pixels between the old ones, and what these change by themselves."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from vispe.segment.invariance_report.result import Posed
from vispe.segment.metrics import shares
from vispe.symmetry.label_maps import resampled_labels, turned_labels
from vispe.symmetry.warp import Canvas

MARGIN = 8
"""Pixels off the rim of the disc, and what the side of the window is a multiple of."""


def at_angles(
    page: np.ndarray,
    valid: np.ndarray,
    labels_of: Callable[[np.ndarray, np.ndarray], np.ndarray],
    angles: Sequence[float],
    n_classes: int,
) -> tuple[list[Posed], list[Posed], list[str]]:
    """Compare the inscribed disc at each angle with the disc unturned, and measure floors.

    Args:
        page: (h, w, c) float32 in [0, 1].
        valid: (h, w) bool.
        labels_of: page and valid -> labels, 0 = no data.
        angles: degrees, counter-clockwise.
        n_classes: K.

    Returns:
        A pose for each angle; for each the two controls 'labels turned' (what resampling does to the labels) and 'round
        trip' (the picture turned there and back); and notes.
    """
    canvas = Canvas.fit(valid.shape, MARGIN, how="disc")
    image = torch.from_numpy(np.moveaxis(np.where(valid[..., None], page, 0), -1, 0).copy())[None]
    data = torch.from_numpy(valid.astype(np.float32))[None, None]
    disc = canvas.pixels().numpy()

    def found(turned: Tensor, known: Tensor) -> np.ndarray:
        shown = np.ascontiguousarray(turned[0].clamp(0, 1).permute(1, 2, 0).numpy())
        return np.where(disc, labels_of(shown, known[0, 0].numpy() > 0.5), 0)

    whole = found(canvas.pose(image, 0), canvas.pose(data, 0))
    poses, controls = [], []
    for angle in angles:
        name = f"{angle:g}°"
        there = found(canvas.pose(image, angle), canvas.pose(data, angle, "nearest"))
        back = found(canvas.round_trip(image, angle), canvas.round_trip(data, angle, "nearest"))
        drawn = np.where(disc, resampled_labels(whole, angle), 0)
        poses.append(_compared(name, whole, there, turned_labels(there, -angle), n_classes))
        controls.append(_compared(f"{name}, labels turned", whole, drawn, drawn, n_classes))
        controls.append(_compared(f"{name}, round trip", whole, back, back, n_classes))
    h, w = valid.shape
    side = canvas.side
    note = f"angles are compared on a disc of {side - 2 * MARGIN} px in the middle of {h} x {w} px."
    return poses, controls, [note]


def _compared(name: str, still: np.ndarray, found: np.ndarray, aligned: np.ndarray, n_classes: int) -> Posed:
    """Compare fractions of labels as they were `found` on the disc, and pixels as they were brought back."""
    both = (still > 0) & (aligned > 0)
    agreement = float((still == aligned)[both].mean()) if both.any() else float("nan")
    pixels = int((still > 0).sum())
    return Posed(name, "angles", shares(found, n_classes), shares(still, n_classes), agreement, pixels)
