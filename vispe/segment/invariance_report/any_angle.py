"""Rotations by arbitrary angles, with controls for the effect of resampling."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from vispe.images.symmetry.label_maps import resampled_labels, rotated_labels
from vispe.images.symmetry.warp import Canvas
from vispe.segment.invariance_report.pose_result import PoseResult
from vispe.segment.metrics import class_percentages

MARGIN = 8
"""Margin in pixels around the disc; the side of the window is a multiple of it."""


def compare_angles(
    page: np.ndarray,
    valid: np.ndarray,
    labels_of: Callable[[np.ndarray, np.ndarray], np.ndarray],
    angles: Sequence[float],
    n_classes: int,
) -> tuple[list[PoseResult], list[PoseResult], list[str]]:
    """Compare the inscribed disc at each angle with the unrotated disc, and measure the noise floor.

    Args:
        page: (h, w, c) float32 in [0, 1].
        valid: (h, w) bool, pixels with data.
        labels_of: maps page and valid to labels, 0 = no data.
        angles: degrees, counter-clockwise.
        n_classes: K.

    Returns:
        A pose for each angle; for each the two controls 'labels turned' (labels resampled by the rotation) and 'round
        trip' (image rotated forth and back); and notes.
    """
    canvas = Canvas.fit(valid.shape, MARGIN, how="disc")
    image = torch.from_numpy(np.moveaxis(np.where(valid[..., None], page, 0), -1, 0).copy())[None]
    data = torch.from_numpy(valid.astype(np.float32))[None, None]
    disc = canvas.pixels().numpy()

    def labels_on_disc(rotated: Tensor, data_rotated: Tensor) -> np.ndarray:
        page_rotated = np.ascontiguousarray(rotated[0].clamp(0, 1).permute(1, 2, 0).numpy())
        return np.where(disc, labels_of(page_rotated, data_rotated[0, 0].numpy() > 0.5), 0)

    # the reference uses the same window, without rotation
    reference = labels_on_disc(canvas.pose(image, 0), canvas.pose(data, 0))
    poses, controls = [], []
    for angle in angles:
        name = f"{angle:g}°"
        of_rotated = labels_on_disc(canvas.pose(image, angle), canvas.pose(data, angle, "nearest"))
        of_round_trip = labels_on_disc(
            canvas.round_trip(image, angle), canvas.round_trip(data, angle, "nearest")
        )
        # control: effect of resampling alone, on the labels of the unrotated image
        resampled = np.where(disc, resampled_labels(reference, angle), 0)
        poses.append(_compared(name, reference, of_rotated, rotated_labels(of_rotated, -angle), n_classes))
        controls.append(_compared(f"{name}, labels turned", reference, resampled, resampled, n_classes))
        controls.append(_compared(f"{name}, round trip", reference, of_round_trip, of_round_trip, n_classes))
    h, w = valid.shape
    side = canvas.side
    note = f"angles are compared on a disc of {side - 2 * MARGIN} px in the centre of {h} x {w} px."
    return poses, controls, [note]


def _compared(
    name: str, reference: np.ndarray, labels: np.ndarray, aligned: np.ndarray, n_classes: int
) -> PoseResult:
    """Compare area fractions of `labels` on the disc, and pixels of `aligned`, the labels rotated back."""
    both = (reference > 0) & (aligned > 0)
    agreement = float((reference == aligned)[both].mean()) if both.any() else float("nan")
    pixels = int((reference > 0).sum())
    return PoseResult(
        name,
        "angles",
        class_percentages(labels, n_classes),
        class_percentages(reference, n_classes),
        agreement,
        pixels,
    )
