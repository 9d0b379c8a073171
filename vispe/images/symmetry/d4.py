"""The symmetry group D4 of the square, acting exactly (without interpolation) on images and token grids.

D4 has eight elements: rotation by k x 90 degrees (counter-clockwise, as `torch.rot90`), optionally after a horizontal
flip. An element acts on the last two axes, so the same call works for pixels (c, H, W) and tokens (c, h, w); for
non-square inputs, odd k swaps height and width.
"""

from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from vispe.errors import OptionError, ShapeError, UnknownName, did_you_mean
from vispe.utils.options import checked

Array = TypeVar("Array", Tensor, np.ndarray)


@dataclass(frozen=True)
class Element:
    """One symmetry of the square: horizontal flip if `flip`, then rotation.

    Attributes:
        turns: rotation in steps of 90 degrees counter-clockwise, 0 to 3.
        flip: whether to flip horizontally first.

    Raises:
        OptionError: `turns` is not 0, 1, 2 or 3.

    Example:
        >>> Element(1).apply(np.array([[1, 2], [3, 4]])).tolist()
        [[2, 4], [1, 3]]
        >>> Element(1).after(Element(0, flip=True)).name
        'transpose'
    """

    turns: int
    flip: bool = False

    def __post_init__(self) -> None:
        if self.turns not in (0, 1, 2, 3):
            raise OptionError(f"Element: turns must be 0, 1, 2 or 3 (x 90 degrees), got turns={self.turns}.")

    @property
    def name(self) -> str:
        """Name of the element, as accepted by `element`."""
        return _NAMES[self.turns, self.flip]

    @property
    def inverse(self) -> "Element":
        """The inverse element; reflections are their own inverse."""
        return self if self.flip else Element(-self.turns % 4)

    def after(self, first: "Element") -> "Element":
        """Return the composition: `first`, then this element."""
        # a flip reverses the direction of a preceding rotation
        turns = -first.turns if self.flip else first.turns
        return Element((self.turns + turns) % 4, self.flip != first.flip)

    def apply(self, values: Array) -> Array:
        """Return an image, token grid or label map (..., h, w) transformed; (..., w, h) for odd `turns`.

        Raises:
            ShapeError: `values` has fewer than 2 axes.
        """
        if values.ndim < 2:
            raise ShapeError(f"{self.name} acts on the last two axes, got shape {tuple(values.shape)}.")
        # flip first, then rotate; copy, as NumPy returns a view with negative strides
        if isinstance(values, np.ndarray):
            return np.rot90(values[..., ::-1] if self.flip else values, self.turns, (-2, -1)).copy()
        return torch.rot90(values.flip(-1) if self.flip else values, self.turns, (-2, -1))

    def undo(self, values: Array) -> Array:
        """Return `values` transformed by the inverse element."""
        return self.inverse.apply(values)

    def index(self, shape: tuple[int, int]) -> Tensor:
        """Return the row-major permutation (h·w,) with `apply(v).flatten() == v.flatten()[index]`."""
        h, w = shape
        # transform an array of indices instead of values
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
        UnknownName: `name` is not an element of D4.

    Example:
        >>> element("rot90").inverse.name
        'rot270'
    """
    known = {g.name: g for g in D4}
    if name not in known:
        raise UnknownName(
            f"Unknown element {name!r} of D4.{did_you_mean(name, known)} Use one of {', '.join(known)}."
        )
    return known[name]


@checked
def fit_to_patches(
    image: Tensor, patch_size: int, how: Literal["auto", "crop", "pad"] = "auto", *, resample: bool = False
) -> tuple[Tensor, str]:
    """Crop or pad both sides to multiples of the patch size without moving the centre, so that all poses share patches.

    Cropping at the top left would move the centre by up to half a patch, so that even an equivariant model fails. Each
    side is treated separately: an even remainder is cropped by equal margins; an odd one is padded by equal margins of
    reflected pixels, which requires an odd patch size. With an even patch size and an odd side neither is possible:
    `resample` then first averages neighbouring pixels along that side, which shortens it by one about the same centre.

    Args:
        image: (..., H, W).
        patch_size: patch size in pixels.
        how: 'crop', 'pad', or 'auto': crop if the remainder is even, else pad.
        resample: allow averaging of neighbouring pixels.

    Returns:
        The image, and a sentence that describes the changes ('' if there are none).

    Raises:
        OptionError: `how` is unknown, or a remainder cannot be treated symmetrically.
        ShapeError: the image is smaller than a patch, or too small to be reflected.

    Example:
        >>> image, words = fit_to_patches(torch.zeros(3, 18, 16), 8)
        >>> tuple(image.shape), words
        ((3, 16, 16), 'The height was cropped from 18 to 16 px by equal margins.')
    """
    if patch_size < 1 or image.ndim < 2:
        raise ShapeError(
            f"fit_to_patches needs an image (..., H, W) and patch >= 1, got {tuple(image.shape)} "
            f"and patch_size={patch_size}."
        )
    remarks = []
    for axis, side_name in ((-2, "height"), (-1, "width")):
        image, change = _fit_axis(image, axis, patch_size, how, resample)
        remarks += [f"the {side_name} was {change}"] if change else []
    return image, (", ".join(remarks) + ".").capitalize() if remarks else ""


def _fit_axis(image: Tensor, axis: int, patch_size: int, how: str, resample: bool) -> tuple[Tensor, str]:
    """Return the image with one axis fitted, and a description of the change."""
    side, description = image.shape[axis], ""
    if side % patch_size == 0 and side:
        return image, ""
    # the mean of neighbours has side - 1 pixels with the same centre
    if resample and side % 2 and patch_size % 2 == 0:
        image = (image.narrow(axis, 0, side - 1) + image.narrow(axis, 1, side - 1)) / 2
        description, side = f"resampled from {side} to {side - 1} px, ", side - 1
    remainder, missing = side % patch_size, -side % patch_size
    if remainder == 0 and side:
        return image, description.removesuffix(", ")
    # equal margins need an even remainder
    if how in ("auto", "crop") and remainder % 2 == 0 and side > patch_size:
        cropped = image.narrow(axis, remainder // 2, side - remainder)
        return cropped, f"{description}cropped from {side} to {side - remainder} px by equal margins"
    # equal margins need an even number of missing pixels
    if how in ("auto", "pad") and missing % 2 == 0:
        half = missing // 2
        if half >= side:
            raise ShapeError(
                f"A side of {side} px cannot be padded by {half} reflected px to fill patches of {patch_size} px. "
                "Use a larger image."
            )
        # reflect indices at both ends without repeating the border pixel
        index = torch.arange(-half, side + half, device=image.device).abs()
        index = side - 1 - (side - 1 - index).abs()
        return image.index_select(axis, index), f"{description}mirrored from {side} to {side + missing} px"
    sizes = f"a side of {side} px and patches of {patch_size} px (remainder {remainder}, {missing} missing)"
    if remainder % 2 and missing % 2:
        raise OptionError(
            f"{sizes} cannot be centred by whole pixels. Use resample=True or crop the image to an even side."
        )
    raise OptionError(f"{sizes} cannot be fitted about the same centre with how={how!r}. Use how='auto'.")
