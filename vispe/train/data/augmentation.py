"""Resizing, cropping and label-preserving augmentation of images."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from vispe.utils.options import NonNegativeInt, Options, UnitInterval

Resize = int | Literal["cover", "none"]
_OF_THE_LOSS = ("place", "curriculum", "place_teacher")


@dataclass(frozen=True, kw_only=True)
class Augment(Options):
    """Random augmentation of each image; disabled by default.

    Values are clipped to [0, 1]. Grey images remain grey.

    >>> Augment(pose=True, noise=0.05).roll
    0

    Attributes:
        pose: rotation by a multiple of 90 degrees and mirroring; the 8 poses have equal probability.
        roll: patch size in pixels; cyclic shift by an integer number of patches along both axes. 0 disables it.
        brightness: largest offset of all values, up or down.
        contrast: largest change c of the contrast: differences from the mean are multiplied by 1 - c to 1 + c.
        noise: largest standard deviation of additive Gaussian noise, equal in all channels.
        place: side in patches of the canvas on which two placements of an image are compared (`loss.place` of a
            retrofit); a canvas smaller than the image shows a part of it. 0 disables it. The images do not change.
        curriculum: fraction of the run over which the canvas grows from the size of the image to `place`.
        place_teacher: 'none': both placements are random, and each is the target of the other; or 'best': one
            placement is at the centre of the canvas, and is the target of the other.

    Raises:
        OptionError: a value is out of range, or `roll` or `place` is not an integer.
    """

    pose: bool = False
    roll: NonNegativeInt = 0
    brightness: UnitInterval = 0.0
    contrast: UnitInterval = 0.0
    noise: UnitInterval = 0.0
    place: NonNegativeInt = 0
    curriculum: UnitInterval = 0.0
    place_teacher: Literal["none", "best"] = "none"

    def of_rows(self) -> dict[str, Any]:
        """Return the settings that change the images, as JSON; the loss of placements samples them separately."""
        return {name: value for name, value in asdict(self).items() if name not in _OF_THE_LOSS}


def apply_pose(image: Tensor, pose: int) -> Tensor:
    """Return an image (3, h, w) in one of 8 poses: rotated by `pose % 4` times 90 degrees, and mirrored from 4."""
    rotated = torch.rot90(image, pose % 4, (1, 2))
    return rotated.flip(2) if pose >= 4 else rotated


def scale(shape: tuple[int, int], size: tuple[int, int], resize: Resize) -> float:
    """Return the resize factor of an image; above 1 the image is too small.

    >>> scale((100, 200), (50, 50), "cover"), scale((100, 200), (50, 50), "none"), scale((100, 200), (50, 50), 60)
    (0.5, 1.0, 0.6)

    Args:
        shape: height and width of the image.
        size: height and width of the window.
        resize: 'cover', the smallest size that covers the window; the shorter side in pixels; or 'none', which resizes
            only images smaller than the window.
    """
    cover = max(n / available for n, available in zip(size, shape, strict=True))
    if resize == "cover":
        return cover
    return max(1.0, cover) if resize == "none" else resize / min(shape)


def window(image: Tensor, size: tuple[int, int], resize: Resize, at: tuple[float, float]) -> Tensor:
    """Return the window (3, *size) of an image (3, h, w), after resizing with antialiasing.

    Args:
        image: values in [0, 1], of any size.
        size: height and width of the window in pixels.
        resize: 'cover', the shorter side in pixels, or 'none'.
        at: relative position of the window, in [0, 1) along both axes; 0 is the first possible position.
    """
    h, w = image.shape[-2:]
    # rounding must not make the image smaller than the window
    factor = scale((h, w), size, resize)
    large = tuple(max(n, round(available * factor)) for n, available in zip(size, (h, w), strict=True))
    if large != (h, w):
        # grey images are one expanded channel, which is resized once
        grey = image.stride(0) == 0 or image.shape[0] == 1
        source = image[:1] if grey else image
        small = F.interpolate(source[None], large, mode="bilinear", antialias=True, align_corners=False)[0]
        image = small.expand(3, -1, -1)
    # u < 1, so all available - n + 1 offsets are equally likely
    top, left = (int(u * (available - n + 1)) for u, available, n in zip(at, large, size, strict=True))
    return image[:, top : top + size[0], left : left + size[1]]


def perturb(image: Tensor, augment: Augment, draws: np.ndarray, generator: np.random.Generator) -> Tensor:
    """Return a window (3, h, w) with random roll, contrast, brightness and noise; the pose is not changed.

    Args:
        image: window with values in [0, 1].
        augment: upper bounds of the changes.
        draws: five random numbers in [0, 1).
        generator: random generator of the noise.
    """
    down, right, brighter, contrast, noise = draws.tolist()
    if augment.roll:
        # by complete patches, so that the content of a patch does not change
        h, w = (n // augment.roll for n in image.shape[-2:])
        shifts = (augment.roll * int(down * h), augment.roll * int(right * w))
        image = image.roll(shifts, (1, 2))
    if augment.contrast:
        # numpy, since the mean of torch depends on the number of threads
        mean = float(image.numpy().mean(dtype=np.float64))
        image = mean + (image - mean) * (1 + augment.contrast * (2 * contrast - 1))
    if augment.brightness:
        image = image + augment.brightness * (2 * brighter - 1)
    if augment.noise:
        # one grey field for all channels, with a random amplitude up to `augment.noise`
        field = generator.standard_normal(image.shape[-2:], np.float32)
        image = image + torch.from_numpy(field) * (augment.noise * noise)
    return image.clamp(0, 1)
