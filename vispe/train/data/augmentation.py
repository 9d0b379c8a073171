"""From a picture of any size to the window that a model sees, with label-preserving changes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from vispe.errors import OptionError

Resize = int | Literal["cover", "none"]
_OF_THE_LOSS = ("place", "curriculum", "place_teacher")


@dataclass(frozen=True, kw_only=True)
class Augment:
    """What is changed at random in each row; nothing by default.

    Values stay in [0, 1]: what exceeds it is cut. Grey pictures stay grey.

    >>> Augment(pose=True, noise=0.05).roll
    0

    Attributes:
        pose: turn by a multiple of 90 degrees and mirror, each of the 8 poses as often.
        roll: side of a patch in pixels; shift by a whole number of patches along both axes, what leaves on one side
            coming back on the other. 0 leaves it out.
        brightness: largest change of all values, up or down.
        contrast: largest change c of the contrast: differences from the mean are multiplied by 1 - c to 1 + c.
        noise: largest standard deviation of added Gaussian noise, the same in all channels.
        place: side in patches of the canvases on which a student is compared with itself (`loss.place` of a retrofit),
            the row being the content; one smaller than the row shows a part of it. 0 leaves it out. Rows do not change.
        curriculum: share of the run over which the canvas grows from the size of the row to `place`.
        place_teacher: 'none', both placements are anywhere and learn from each other; or 'best', one is in the middle
            of the canvas, and the other learns from it.

    Raises:
        OptionError: a value out of its range, or `roll` or `place` that is no whole number.
    """

    pose: bool = False
    roll: int = 0
    brightness: float = 0.0
    contrast: float = 0.0
    noise: float = 0.0
    place: int = 0
    curriculum: float = 0.0
    place_teacher: Literal["none", "best"] = "none"

    def __post_init__(self) -> None:
        for name, what in (("roll", "side of a patch in pixels"), ("place", "side of a canvas in patches")):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise OptionError(f"{name}={value!r} is not the {what}; give 0 or more.")
        for name in ("brightness", "contrast", "noise", "curriculum"):
            if not 0 <= getattr(self, name) <= 1:
                raise OptionError(f"{name}={getattr(self, name)!r} is not between 0 and 1.")
        if self.place_teacher not in ("none", "best"):
            raise OptionError(f"place_teacher={self.place_teacher!r} is not none or best.")

    def of_rows(self) -> dict[str, Any]:
        """Return what changes the rows themselves, as JSON; placements are drawn by the loss that compares them."""
        return {name: value for name, value in asdict(self).items() if name not in _OF_THE_LOSS}


def posed(picture: Tensor, pose: int) -> Tensor:
    """Return a picture (3, h, w) in one of 8 poses: turned by `pose % 4` quarters, and mirrored from 4 on."""
    turned = torch.rot90(picture, pose % 4, (1, 2))
    return turned.flip(2) if pose >= 4 else turned


def scale(shape: tuple[int, int], size: tuple[int, int], resize: Resize) -> float:
    """Return the factor that a picture is resized by; above 1 it is too small.

    >>> scale((100, 200), (50, 50), "cover"), scale((100, 200), (50, 50), "none"), scale((100, 200), (50, 50), 60)
    (0.5, 1.0, 0.6)

    Args:
        shape: of the picture.
        size: of the window.
        resize: 'cover', to the smallest size that covers the window; the shortest side in pixels; or 'none', which
            resizes only what is smaller than the window.
    """
    cover = max(n / have for n, have in zip(size, shape, strict=True))
    if resize == "cover":
        return cover
    return max(1.0, cover) if resize == "none" else resize / min(shape)


def window(picture: Tensor, size: tuple[int, int], resize: Resize, at: tuple[float, float]) -> Tensor:
    """Return the window (3, *size) of a picture (3, h, w), after resizing it with antialiasing.

    Args:
        picture: in [0, 1]; of any size.
        size: height and width in pixels.
        resize: 'cover', the shortest side in pixels, or 'none'.
        at: where the window lies, in [0, 1) along both axes; 0 is the first place.
    """
    h, w = picture.shape[-2:]
    # rounding must not leave the picture smaller than the window
    factor = scale((h, w), size, resize)
    large = tuple(max(n, round(have * factor)) for n, have in zip(size, (h, w), strict=True))
    if large != (h, w):
        # grey pictures are one channel that is shown three times: it is resized once
        grey = picture.stride(0) == 0 or picture.shape[0] == 1
        source = picture[:1] if grey else picture
        small = F.interpolate(source[None], large, mode="bilinear", antialias=True, align_corners=False)[0]
        picture = small.expand(3, -1, -1)
    top, left = (int(u * (have - n + 1)) for u, have, n in zip(at, large, size, strict=True))
    return picture[:, top : top + size[0], left : left + size[1]]


def changed(picture: Tensor, augment: Augment, draws: np.ndarray, generator: np.random.Generator) -> Tensor:
    """Return a window (3, h, w) rolled, brighter or darker, with other contrast and noise; the pose is not touched.

    Args:
        picture: in [0, 1].
        augment: which changes, and how large at most.
        draws: five numbers in [0, 1).
        generator: of the noise.
    """
    down, right, brighter, contrast, noise = draws.tolist()
    if augment.roll:
        h, w = (n // augment.roll for n in picture.shape[-2:])
        shifts = (augment.roll * int(down * h), augment.roll * int(right * w))
        picture = picture.roll(shifts, (1, 2))
    if augment.contrast:
        # torch's mean depends on the number of threads
        mean = float(picture.numpy().mean(dtype=np.float64))
        picture = mean + (picture - mean) * (1 + augment.contrast * (2 * contrast - 1))
    if augment.brightness:
        picture = picture + augment.brightness * (2 * brighter - 1)
    if augment.noise:
        field = generator.standard_normal(picture.shape[-2:], np.float32)
        picture = picture + torch.from_numpy(field) * (augment.noise * noise)
    return picture.clamp(0, 1)
