"""Rotation of images by any angle about the exact centre, and windows visible at all angles.

The centre of n pixels is (n-1)/2, between two pixels if n is even. Positive angles rotate counter-clockwise, as
`torch.rot90`; multiples of 90 degrees are exact, without interpolation.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import grid_sample

from vispe.errors import OptionError, ShapeError
from vispe.utils.options import checked

Mode = Literal["bicubic", "bilinear", "nearest"]
_EXACT = {0: (1.0, 0.0), 1: (0.0, 1.0), 2: (-1.0, 0.0), 3: (0.0, -1.0)}


@checked
def rotate(
    images: Tensor,
    degrees: float,
    size: tuple[int, int] | None = None,
    *,
    mode: Mode = "bicubic",
    padding: Literal["reflection", "border"] = "reflection",
) -> Tensor:
    """Rotate images about their centre and return a centred window of the result.

    Args:
        images: (b, c, H, W), floating point.
        degrees: counter-clockwise.
        size: window (h, w) in pixels; the size of the images by default.
        mode: interpolation.
        padding: values outside of the image: reflected, or those of the border.

    Returns:
        (b, c, h, w). If the window is centred on whole pixels, multiples of 90 degrees equal `torch.rot90` exactly.

    Raises:
        ShapeError: the images are not floating-point (b, c, H, W) with at least 2 pixels per side.
        OptionError: `mode` is unknown.

    Example:
        >>> rotate(torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]]), 90)[0, 0].tolist()
        [[2.0, 4.0], [1.0, 3.0]]
    """
    if images.ndim != 4 or not images.is_floating_point() or min(images.shape[-2:]) < 2:
        raise ShapeError(
            f"rotate needs floating-point images (b, c, H, W) of at least 2 x 2 pixels, got {tuple(images.shape)} "
            f"{images.dtype}."
        )
    h, w = size or tuple(images.shape[-2:])
    # exact path: multiples of 90 degrees whose centred window starts at a whole pixel
    turns = int(degrees // 90) % 4 if degrees % 90 == 0 else None
    if turns is not None:
        rotated = torch.rot90(images, turns, (-2, -1))
        margin = (rotated.shape[-2] - h, rotated.shape[-1] - w)
        if min(margin) >= 0 and margin[0] % 2 == 0 and margin[1] % 2 == 0:
            top, left = margin[0] // 2, margin[1] // 2
            return rotated[..., top : top + h, left : left + w].contiguous()
    grid = sampling_grid(tuple(images.shape[-2:]), degrees, (h, w), images)
    grid = grid.expand(len(images), -1, -1, -1)
    return grid_sample(images, grid, mode=mode, padding_mode=padding, align_corners=True)


def sampling_grid(source: tuple[int, int], degrees: float, size: tuple[int, int], like: Tensor) -> Tensor:
    """Return the sampling coordinates of `grid_sample`, (1, h, w, 2) as (x, y) in [-1, 1] (align_corners=True).

    Args:
        source: (H, W) of the images.
        degrees: counter-clockwise; multiples of 90 sample whole pixels.
        size: window (h, w).
        like: tensor with the dtype and device of the result; computed in float64.
    """
    angle = math.radians(degrees)
    cos, sin = _EXACT[int(degrees // 90) % 4] if degrees % 90 == 0 else (math.cos(angle), math.sin(angle))
    # offsets from the centre in pixels, v down and u right
    v, u = (torch.arange(n, dtype=torch.float64, device=like.device) - (n - 1) / 2 for n in size)
    v, u = v[:, None], u[None, :]
    x = (cos * u - sin * v) * (2 / (source[1] - 1))
    y = (sin * u + cos * v) * (2 / (source[0] - 1))
    return torch.stack([x, y], -1)[None].to(like.dtype)


@dataclass(frozen=True)
class Canvas:
    """A square window that shows the same part of the sample at every angle.

    Attributes:
        source: (H, W) of the used part of each image; at most one row and one column less than the image, so that
            window and image share their centre. These are cropped before any rotation.
        side: side of the window in pixels, a multiple of the patch size.
        patch_size: patch size in pixels.
        invented: whether some pixels of the window are outside of the image at some angle and are reflected.

    Raises:
        OptionError: `fit` is called with an unknown `how`.
        ShapeError: `fit` is called for an image that is too small, or `pose` with an image of another shape.

    Example:
        >>> canvas = Canvas.fit((100, 120), patch_size=8)
        >>> canvas.side, canvas.pose(torch.zeros(1, 3, 100, 120), 30).shape
        (64, torch.Size([1, 3, 64, 64]))
    """

    source: tuple[int, int]
    side: int
    patch_size: int
    invented: bool

    @classmethod
    def fit(
        cls,
        shape: tuple[int, int],
        patch_size: int,
        side: int | None = None,
        how: Literal["crop", "disc"] = "crop",
    ) -> "Canvas":
        """Return the window for images of a shape.

        Args:
            shape: (H, W) of the image.
            patch_size: patch size in pixels.
            side: side of the window; the largest that `how` allows by default.
            how: 'crop': the image is at least √2 times larger, so that all pixels are inside of it. 'disc': the window
                is as large as the image; pixels outside are reflected, and only the inscribed disc is evaluated.

        Raises:
            OptionError: `how` is unknown.
            ShapeError: the image is too small, or `side` is not a multiple of the patch size.
        """
        if how not in ("crop", "disc"):
            raise OptionError(f"how must be 'crop' or 'disc', got how={how!r}.")
        # in the worst case one row or column is cropped
        min_side = min(shape) - 1
        max_side = min_side + 1 if how == "disc" else int((min_side - 1 - 4) / math.sqrt(2)) + 1
        if side is None:
            side = max_side // patch_size * patch_size
        if side < 3 * patch_size or side % patch_size:
            raise ShapeError(
                f"The window must be a multiple of patch_size={patch_size} px with at least 3 patches per side, got "
                f"{side} px (image {tuple(shape)} px, how={how!r}). Use a larger image, or how='disc'."
            )
        source = tuple(s - (s - side) % 2 for s in shape)
        # diagonal of the window, plus the support of bicubic interpolation, 2 pixels on either side
        extent = (side - 1) * math.sqrt(2) + 4
        if min(source) < side or (how == "crop" and extent > min(source) - 1):
            raise ShapeError(
                f"An image of {tuple(shape)} px is too small for a window of {side} px at every angle, how={how!r}. "
                f"Use a side of at most about {max(max_side, 0)} px."
            )
        return cls((source[0], source[1]), side, patch_size, extent > min(source) - 1)

    @property
    def grid(self) -> int:
        """Number of tokens per side."""
        return self.side // self.patch_size

    def pose(self, images: Tensor, degrees: float, mode: Mode = "bicubic") -> Tensor:
        """Return the window of rotated images (b, c, H, W), (b, c, side, side)."""
        return rotate(self._cropped(images), degrees, (self.side, self.side), mode=mode)

    def round_trip(self, images: Tensor, degrees: float, mode: Mode = "bicubic") -> Tensor:
        """Return the window after rotation forth and back (b, c, side, side), which shows the effect of resampling."""
        # multiples of 90 degrees are exact, so the round trip is the identity
        if degrees % 90 == 0:
            return self.pose(images, 0)
        rotated = rotate(self._cropped(images), degrees, mode=mode)
        return rotate(rotated, -degrees, (self.side, self.side), mode=mode)

    def tokens(self) -> Tensor:
        """Return the tokens to evaluate at every angle, (grid, grid) bool: within (side-1)/2 - patch of the centre."""
        return _disc(self.grid, self.patch_size, self._radius())

    def pixels(self) -> Tensor:
        """Return the pixels of the same disc, (side, side) bool."""
        return _disc(self.side, 1, self._radius())

    def _radius(self) -> float:
        return (self.side - 1) / 2 - self.patch_size

    def _cropped(self, images: Tensor) -> Tensor:
        h, w = self.source
        if images.shape[-2] - h not in (0, 1) or images.shape[-1] - w not in (0, 1):
            raise ShapeError(
                f"Canvas was fitted to images of {self.source} px, got {tuple(images.shape[-2:])}. Fit another."
            )
        return images[..., :h, :w]


def _disc(n: int, patch_size: int, radius: float) -> Tensor:
    """Return the cells (n, n) of `patch_size` pixels whose centre is within `radius` pixels of the image centre."""
    offset = (torch.arange(n, dtype=torch.float64) - (n - 1) / 2) * patch_size
    return torch.hypot(offset[:, None], offset[None, :]) <= radius
