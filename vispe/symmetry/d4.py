"""The symmetries of the square, acting on images and token grids by moving values, never by interpolation.

D4 has eight elements: a quarter turn k times (counter-clockwise, as `torch.rot90`), with or without a mirror image
before it. An element acts on the last two axes, so the same call serves pixels (c, H, W) and tokens (c, h, w); on a
side ratio other than 1 the odd turns swap height and width.
"""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from vispe.errors import OptionError, ShapeError, UnknownName, did_you_mean

Array = TypeVar("Array", Tensor, np.ndarray)


@dataclass(frozen=True)
class Element:
    """One symmetry of the square: mirror left and right if `flip`, then turn.

    Attributes:
        turns: quarter turns counter-clockwise, 0 to 3.
        flip: whether left and right are swapped first.

    >>> Element(1).apply(np.array([[1, 2], [3, 4]])).tolist()
    [[2, 4], [1, 3]]
    >>> Element(1).after(Element(0, flip=True)).name
    'transpose'
    """

    turns: int
    flip: bool = False

    def __post_init__(self) -> None:
        if self.turns not in (0, 1, 2, 3):
            raise OptionError(f"An element of D4 has 0 to 3 quarter turns, got turns={self.turns}.")

    @property
    def name(self) -> str:
        """Its name, as `element` reads it."""
        return _NAMES[self.turns, self.flip]

    @property
    def inverse(self) -> "Element":
        """The element that undoes this one; a mirroring undoes itself."""
        return self if self.flip else Element(-self.turns % 4)

    def after(self, first: "Element") -> "Element":
        """Return the element that does `first`, then this one."""
        turned = -first.turns if self.flip else first.turns
        return Element((self.turns + turned) % 4, self.flip != first.flip)

    def apply(self, values: Array) -> Array:
        """Return an image, token grid or label map (..., h, w) as the element moves it; (..., w, h) for odd turns."""
        if values.ndim < 2:
            raise ShapeError(f"{self.name} acts on the last two axes, got the shape {tuple(values.shape)}.")
        if isinstance(values, np.ndarray):
            return np.rot90(values[..., ::-1] if self.flip else values, self.turns, (-2, -1)).copy()
        return torch.rot90(values.flip(-1) if self.flip else values, self.turns, (-2, -1))

    def undo(self, values: Array) -> Array:
        """Return what `apply` was given."""
        return self.inverse.apply(values)

    def index(self, shape: tuple[int, int]) -> Tensor:
        """Return the row-major permutation (h·w,) with `apply(v).flatten() == v.flatten()[index]`."""
        h, w = shape
        return self.apply(torch.arange(h * w).reshape(h, w)).flatten()


_NAMES = {
    (0, False): "identity",
    (1, False): "rot90",
    (2, False): "rot180",
    (3, False): "rot270",
    (0, True): "hflip",
    (1, True): "transpose",
    (2, True): "vflip",
    (3, True): "antitranspose",
}

D4 = tuple(Element(*key) for key in _NAMES)
"""All eight elements, the identity first."""

IDENTITY = D4[0]


def element(name: str) -> Element:
    """Return the element of D4 called `name`, such as 'rot90' or 'vflip'.

    Raises:
        UnknownName: there is no such element.

    >>> element("rot90").inverse.name
    'rot270'
    """
    known = {g.name: g for g in D4}
    if name not in known:
        raise UnknownName(
            f"There is no element {name!r} of D4.{did_you_mean(name, known)} They are {', '.join(known)}."
        )
    return known[name]


def fit_to_patches(
    image: Tensor, patch: int, how: str = "auto", *, resample: bool = False
) -> tuple[Tensor, str]:
    """Make both sides multiples of the patch without moving the centre, so that every pose sees the same patches.

    Cropping at the top left moves the centre by up to half a patch, and a perfect model then looks broken. Each side
    is treated alone: an even remainder is cropped by equal margins; an odd one is padded by equal margins of mirrored
    pixels, which works when the patch is odd. With an even patch and an odd side neither is possible: `resample` then
    first averages neighbouring pixels along that side, which shortens it by one about the same centre.

    Args:
        image: (..., H, W).
        patch: side of a patch in pixels.
        how: 'crop', 'pad', or 'auto': crop where the remainder allows it, else pad.
        resample: allow the average of neighbours.

    Returns:
        The image, and one sentence on what was done to it ('' when nothing was).

    Raises:
        OptionError: an unknown `how`, or a remainder that it cannot treat symmetrically.
        ShapeError: the image is smaller than a patch, or too small to be mirrored.

    >>> image, words = fit_to_patches(torch.zeros(3, 18, 16), 8)
    >>> tuple(image.shape), words
    ((3, 16, 16), 'The height was cropped from 18 to 16 px by equal margins.')
    """
    if how not in ("auto", "crop", "pad"):
        raise OptionError(f"how={how!r} is not 'auto', 'crop' or 'pad'.")
    if patch < 1 or image.ndim < 2:
        raise ShapeError(
            f"fit_to_patches needs an image (..., H, W) and a patch of 1 or more pixels, got {tuple(image.shape)} "
            f"and patch={patch}."
        )
    remarks = []
    for axis, word in ((-2, "height"), (-1, "width")):
        image, done = _fit_axis(image, axis, patch, how, resample)
        remarks += [f"the {word} was {done}"] if done else []
    return image, (", ".join(remarks) + ".").capitalize() if remarks else ""


def _fit_axis(image: Tensor, axis: int, patch: int, how: str, resample: bool) -> tuple[Tensor, str]:
    """Fit one axis; returns the image and what was done."""
    side, said = image.shape[axis], ""
    if side % patch == 0 and side:
        return image, ""
    if resample and side % 2 and patch % 2 == 0:
        image = (image.narrow(axis, 0, side - 1) + image.narrow(axis, 1, side - 1)) / 2
        said, side = f"resampled from {side} to {side - 1} px, ", side - 1
    rest, missing = side % patch, -side % patch
    if rest == 0 and side:
        return image, said.removesuffix(", ")
    if how in ("auto", "crop") and rest % 2 == 0 and side > patch:
        cut = image.narrow(axis, rest // 2, side - rest)
        return cut, f"{said}cropped from {side} to {side - rest} px by equal margins"
    if how in ("auto", "pad") and missing % 2 == 0:
        half = missing // 2
        if half >= side:
            raise ShapeError(
                f"A side of {side} px cannot be mirrored by {half} px to fill patches of {patch} px; "
                "give a larger image."
            )
        index = torch.arange(-half, side + half, device=image.device).abs()
        index = side - 1 - (side - 1 - index).abs()
        return image.index_select(axis, index), f"{said}mirrored from {side} to {side + missing} px"
    sizes = f"a side of {side} px and patches of {patch} px (remainder {rest}, {missing} missing)"
    if rest % 2 and missing % 2:
        raise OptionError(
            f"{sizes} cannot be centred by whole pixels; allow resample=True or cut the image to an even side."
        )
    raise OptionError(f"{sizes} cannot be fitted with how={how!r} about the same centre; use how='auto'.")
