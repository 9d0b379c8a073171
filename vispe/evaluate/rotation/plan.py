"""What is measured and with which settings, and the images of one step, fitted to the patches of the model."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vispe.backbones.batching import FeatureFunction, Segmenter, checked_labels
from vispe.errors import InputError, ShapeError
from vispe.symmetry.d4 import fit_to_patches
from vispe.symmetry.warp import Canvas

Shift = tuple[int, int]

ANGLES = tuple(range(0, 360, 15))
"""The 24 poses that are measured by default, in degrees."""

GROUPS = {
    "d4": "features under quarter turns and mirroring, with the share of the position code, and controls",
    "angles": "features at any angle, beside what resampling alone does",
    "shift": "features of shifted images",
    "lie": "features under infinitely small motions",
    "position": "how well the place in the image is read from the features",
    "layers": "error and readable position after every block",
    "fingerprint": "the pattern that stays when many images are averaged",
    "clusters": "clusters of the features under quarter turns and mirroring",
    "quadrant": "accuracy away from the corner that was scribbled on (needs masks)",
    "segmentation": "labels under turns, mirroring and shifts",
    "poses": "area fractions, and accuracy with masks, over angles",
}
"""What can be measured, by name, in the order of the results."""

OF_LABELS = ("segmentation", "poses")
QUICK = ("d4", "angles", "position", "fingerprint", "clusters", "segmentation", "poses")
QUICK_ANGLES = (0.0, 45.0, 90.0, 180.0, 270.0)


@dataclass(frozen=True)
class Plan:
    """Settings of a measurement; `asdict` of it is JSON-able.

    Attributes:
        groups: names of `GROUPS`.
        angles: degrees.
        patch: side of a patch in pixels; None for a segmenter without patches.
        size: largest side in pixels of the window from the middle of each image; None for the whole image.
        exact: the model takes images of `size` only.
        shifts: (dy, dx) in pixels of rolls and crop shifts.
        n_classes: K; None without labels.
        names: of the classes.
        batch_size: images that the model sees at once.
        clusters: number of clusters.
        budget: scribbled pixels of each class.
        probe_masks: random choices of tokens for readable position.
        phases: random shifts within a patch for labels.
        seed: of all draws.
    """

    groups: tuple[str, ...]
    angles: tuple[float, ...] = tuple(float(a) for a in ANGLES)
    patch: int | None = None
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
        """What sides of windows are multiples of, and by how much labels are shifted at most, in pixels."""
        return self.patch or 8

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {k: [list(s) for s in v] if k == "shifts" else v for k, v in asdict(self).items()}


@dataclass(frozen=True, eq=False)
class Measured:
    """What is measured: features, labels, or both.

    Attributes:
        f: images (b, c, H, W) -> maps (b, d, h, w), or None.
        segmenter: image (c, H, W) -> labels (H, W), or None: then one is trained on each image with a mask.
        twin: a copy of the model with random weights and the names of what it kept, or None.
    """

    f: FeatureFunction | None
    segmenter: Segmenter | None
    twin: tuple[nn.Module, Sequence[str]] | None = None


@dataclass(eq=False)
class Step:
    """A few consecutive images, on which everything is measured before the next ones are read.

    Attributes:
        first: number of the first one.
        whole: images (c, H, W) as they are.
        fitted: their middle, both sides multiples of the patch.
        truths: labels (H, W) of the whole images, or None.
        fitted_truths: labels of the fitted ones, or None.
        notes: what was done.
    """

    first: int
    whole: list[Tensor]
    fitted: list[Tensor] = field(default_factory=list)
    truths: list[np.ndarray] | None = None
    fitted_truths: list[np.ndarray] | None = None
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, images: Sequence[Tensor], truths: Sequence[Any] | None, numbers: range, plan: Plan) -> "Step":
        """Read the images of these numbers, and their truths, and fit them."""
        step = cls(numbers.start, [images[n] for n in numbers])
        if truths is not None:
            step.truths = [truths_of(truths, n, x) for n, x in zip(numbers, step.whole, strict=True)]
            step.fitted_truths = []
        for k, image in enumerate(step.whole):
            fitted, note = fitted_image(image, plan.patch, plan.size)
            if plan.exact and set(fitted.shape[-2:]) != {plan.size}:
                raise InputError(
                    f"The model takes images of {plan.size} x {plan.size} px only, and image {numbers[k]} has "
                    f"{image.shape[-2]} x {image.shape[-1]} px; give larger images, or build the model for their size "
                    "with --img-size."
                )
            step.fitted.append(fitted)
            step.notes += [f"Images of {image.shape[-2]} x {image.shape[-1]} px: {note}"] if note else []
            if step.truths is not None and step.fitted_truths is not None:
                truth = torch.from_numpy(step.truths[k])
                step.fitted_truths.append(fitted_image(truth, plan.patch, plan.size)[0].numpy())
        return step

    def shapes(self) -> list[slice]:
        """Return runs of images of one size."""
        cuts = [k for k in range(1, len(self.whole)) if self.whole[k].shape != self.whole[k - 1].shape]
        ends = [0, *cuts, len(self.whole)]
        return [slice(a, b) for a, b in pairwise(ends)]


def fitted_image(image: Tensor, patch: int | None, size: int | None) -> tuple[Tensor, str]:
    """Return the middle of an image (..., H, W), both sides multiples of the patch, and what was done to it.

    Nothing is resized. It is cut once, before any pose, so poses turn about the middle of what is left, and it does not
    matter where the middle is no whole number of pixels: then one pixel more goes at the bottom or right.
    """
    shape = tuple(image.shape[-2:])
    if patch is not None and min(*shape, size or patch) < patch:
        raise ShapeError(
            f"Images of {shape} px, of which {size or 'all'} px a side are used, are smaller than one patch of {patch} "
            "px; give larger ones."
        )
    remarks = []
    for axis in (-2, -1):
        side = image.shape[axis]
        wanted = side if size is None else min(side, size)
        image = image.narrow(axis, (side - wanted) // 2, wanted)
    if tuple(image.shape[-2:]) != shape:
        remarks.append(f"the middle {image.shape[-2]} x {image.shape[-1]} px were used.")
    if patch is None:
        return image, " ".join(remarks)
    for axis, word in ((-2, "row"), (-1, "column")):
        side = image.shape[axis]
        if side % patch % 2:
            image = image.narrow(axis, 0, side - 1)
            remarks.append(f"the last {word} was left out.")
    image, done = fit_to_patches(image, patch, "crop")
    return image, " ".join([*remarks, *([done[0].lower() + done[1:]] if done else [])])


def canvas_for(shape: tuple[int, int], plan: Plan) -> Canvas | None:
    """Return the window that is measured at every angle; None when the image is too small for one.

    Windows of an image without invented pixels come first, then windows that mirror what lies outside.
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
    """Return the word for `how` that gives this canvas."""
    return "disc" if canvas.invented else "crop"


def truths_of(truths: Sequence[object], number: int, image: Tensor) -> np.ndarray:
    """Return the truth of an image as int64 (H, W), or say that it is missing or does not fit."""
    if number >= len(truths):
        raise InputError(
            f"Image {number} has no truth: there are {len(truths)}; give one for each image, in order."
        )
    return checked_labels(truths[number], tuple(image.shape[-2:]), f"The truth of image {number} has")
