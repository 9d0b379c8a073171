"""Metrics and settings of `vispe rotate`, and the images of one step, cropped to whole patches."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vispe.backbones.batching import FeatureFunction, Segmenter, checked_labels
from vispe.errors import InputError, ShapeError
from vispe.images.symmetry.d4 import fit_to_patches
from vispe.images.symmetry.warp import Canvas

Shift = tuple[int, int]

ANGLES = tuple(range(0, 360, 15))
"""The 24 default angles, in degrees."""

GROUPS = {
    "d4": "features under rotations by 90° and reflections, also of the position code alone, with controls",
    "angles": "features at any angle, with the effect of resampling alone",
    "shift": "features of shifted images",
    "lie": "features under infinitesimal motions (Lie derivative)",
    "position": "linear probe of position",
    "layers": "equivariance error and linear probe of position after every block",
    "fingerprint": "mean feature map over many images",
    "clusters": "clusters of the features under rotations by 90° and reflections",
    "quadrant": "accuracy outside of the annotated quadrant (needs masks)",
    "segmentation": "labels under rotations, reflections and shifts",
    "poses": "area fractions, and accuracy with masks, over angles",
}
"""Metrics by name, in the order of the results."""

OF_LABELS = ("segmentation", "poses")
QUICK = ("d4", "angles", "position", "fingerprint", "clusters", "segmentation", "poses")
QUICK_ANGLES = (0.0, 45.0, 90.0, 180.0, 270.0)


@dataclass(frozen=True)
class RotationPlan:
    """Settings of a measurement; `asdict` gives JSON values.

    Attributes:
        groups: names of `GROUPS`.
        angles: degrees.
        patch_size: patch size in pixels; None for a segmenter without patches.
        size: max side in pixels of the central window of each image; None for the full image.
        exact: the model accepts only images of `size`.
        shifts: (dy, dx) in pixels of rolls and crop shifts.
        n_classes: K; None without labels.
        names: names of the classes.
        batch_size: batch size.
        clusters: number of clusters.
        budget: scribbled pixels per class.
        probe_masks: number of random training masks of the linear probe.
        phases: number of random shifts within a patch for labels.
        seed: seed of all random numbers.
    """

    groups: tuple[str, ...]
    angles: tuple[float, ...] = tuple(float(a) for a in ANGLES)
    patch_size: int | None = None
    size: int | None = None
    exact: bool = False
    shifts: tuple[Shift, ...] = ()
    n_classes: int | None = None
    names: tuple[str, ...] = ()
    batch_size: int = 1
    clusters: int = 3
    budget: int = 100
    probe_masks: int = 4
    phases: int = 8
    seed: int = 0

    @property
    def step(self) -> int:
        """Divisor of window sides, and max shift of labels, in pixels."""
        return self.patch_size or 8

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        entries = asdict(self)
        entries["patch"] = entries.pop("patch_size")
        return entries | {"shifts": [list(shift) for shift in self.shifts]}


@dataclass(frozen=True, eq=False)
class Measured:
    """Feature function and segmenter under evaluation.

    Attributes:
        f: images (b, c, H, W) -> maps (b, d, h, w), or None.
        segmenter: image (c, H, W) -> labels (H, W), or None: a segmenter is then trained on each image with a
            mask.
        random_copy: a reinitialised copy of the model and the names of its unchanged parameters, or None.
    """

    f: FeatureFunction | None
    segmenter: Segmenter | None
    random_copy: tuple[nn.Module, Sequence[str]] | None = None


@dataclass(eq=False)
class ImageBatch:
    """A batch of consecutive images, on which all metrics are computed before the next ones are loaded.

    Attributes:
        first: index of the first image.
        whole: full images (c, H, W).
        fitted: central crops, both sides multiples of the patch size.
        truths: labels (H, W) of the full images, or None.
        fitted_truths: labels of the crops, or None.
        notes: remarks on crops and skipped metrics.
    """

    first: int
    whole: list[Tensor]
    fitted: list[Tensor] = field(default_factory=list)
    truths: list[np.ndarray] | None = None
    fitted_truths: list[np.ndarray] | None = None
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(
        cls, images: Sequence[Tensor], truths: Sequence[Any] | None, numbers: range, plan: RotationPlan
    ) -> "ImageBatch":
        """Load the images with these indices and their truths, and crop them."""
        step = cls(numbers.start, [images[n] for n in numbers])
        if truths is not None:
            step.truths = [truth_of_image(truths, n, x) for n, x in zip(numbers, step.whole, strict=True)]
            step.fitted_truths = []
        for k, image in enumerate(step.whole):
            fitted, note = center_crop(image, plan.patch_size, plan.size)
            if plan.exact and set(fitted.shape[-2:]) != {plan.size}:
                raise InputError(
                    f"measure: the model accepts only images of {plan.size} x {plan.size} px, got "
                    f"{image.shape[-2]} x {image.shape[-1]} px for image {numbers[k]}. Use larger images, or another "
                    "`img_size`."
                )
            step.fitted.append(fitted)
            step.notes += [f"Images of {image.shape[-2]} x {image.shape[-1]} px: {note}"] if note else []
            if step.truths is not None and step.fitted_truths is not None:
                truth = torch.from_numpy(step.truths[k])
                step.fitted_truths.append(center_crop(truth, plan.patch_size, plan.size)[0].numpy())
        return step

    def shapes(self) -> list[slice]:
        """Return slices of consecutive images of equal size."""
        cuts = [k for k in range(1, len(self.whole)) if self.whole[k].shape != self.whole[k - 1].shape]
        ends = [0, *cuts, len(self.whole)]
        return [slice(a, b) for a, b in pairwise(ends)]


def center_crop(image: Tensor, patch_size: int | None, size: int | None) -> tuple[Tensor, str]:
    """Return the central crop of an image (..., H, W), both sides multiples of the patch size, and a remark.

    The image is not resized. It is cropped once, before any pose, so that poses rotate about the centre of the crop. If
    the margin is odd, one more pixel is removed at the bottom or right.
    """
    shape = tuple(image.shape[-2:])
    if patch_size is not None and min(*shape, size or patch_size) < patch_size:
        raise ShapeError(
            f"measure: images must have at least one patch of {patch_size} px, got {shape} px with `size={size}`. Use "
            "larger images."
        )
    remarks = []
    for axis in (-2, -1):
        side = image.shape[axis]
        target_side = side if size is None else min(side, size)
        image = image.narrow(axis, (side - target_side) // 2, target_side)
    if tuple(image.shape[-2:]) != shape:
        remarks.append(f"the middle {image.shape[-2]} x {image.shape[-1]} px were used.")
    if patch_size is None:
        return image, " ".join(remarks)
    for axis, word in ((-2, "row"), (-1, "column")):
        side = image.shape[axis]
        if side % patch_size % 2:
            image = image.narrow(axis, 0, side - 1)
            remarks.append(f"the last {word} was removed.")
    image, done = fit_to_patches(image, patch_size, "crop")
    return image, " ".join([*remarks, *([done[0].lower() + done[1:]] if done else [])])


def canvas_for(shape: tuple[int, int], plan: RotationPlan) -> Canvas | None:
    """Return the window for all angles; None if the image is too small.

    Windows inside of the image for every angle are preferred to windows that need mirrored pixels.
    """
    step = plan.step
    for how in ("crop", "disc"):
        try:
            largest = Canvas.fit(shape, step, None, how).side
            side = largest if plan.size is None else min(largest, plan.size // step * step)
            if plan.exact and side != plan.size:
                continue
            return Canvas.fit(shape, step, side, how)
        except ShapeError:
            continue
    return None


def how_of(canvas: Canvas) -> Any:
    """Return the option `how` of this canvas."""
    return "disc" if canvas.invented else "crop"


def truth_of_image(truths: Sequence[object], number: int, image: Tensor) -> np.ndarray:
    """Return the truth of an image as int64 (H, W).

    Raises:
        InputError: the truth is missing, or its size differs from that of the image.
    """
    if number >= len(truths):
        raise InputError(
            f"measure: `truths` must have one entry per image, got {len(truths)} and image {number}. Pass one for each."
        )
    return checked_labels(truths[number], tuple(image.shape[-2:]), f"The truth of image {number} has")
