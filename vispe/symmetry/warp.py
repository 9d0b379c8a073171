"""Rotation by any angle about the exact centre, the part of an image that every pose shows, and blur that matches it.

The centre of n pixels is (n-1)/2, between two pixels when n is even. Positive angles turn counter-clockwise, as
`torch.rot90`; multiples of 90 degrees move values and interpolate nothing.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import grid_sample

from vispe.errors import OptionError, ShapeError, require

Mode = Literal["bicubic", "bilinear", "nearest"]
_RINGS = 16  # between frequency 0 and half a cycle per pixel
_EXACT = {0: (1.0, 0.0), 1: (0.0, 1.0), 2: (-1.0, 0.0), 3: (0.0, -1.0)}


def rotate(
    images: Tensor,
    degrees: float,
    size: tuple[int, int] | None = None,
    *,
    mode: Mode = "bicubic",
    padding: Literal["reflection", "border"] = "reflection",
) -> Tensor:
    """Rotate images about their centre and look at a centred window of the result.

    Args:
        images: (b, c, H, W), floating point.
        degrees: counter-clockwise.
        size: window (h, w) in pixels; default the size of the images.
        mode: interpolation.
        padding: what lies outside: mirrored pixels, or the border's.

    Returns:
        (b, c, h, w). Where the window fits by whole pixels, multiples of 90 degrees equal `torch.rot90` exactly.

    Raises:
        ShapeError: the images are not (b, c, H, W) with at least 2 pixels a side.
        OptionError: an unknown mode.

    >>> rotate(torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]]), 90)[0, 0].tolist()
    [[2.0, 4.0], [1.0, 3.0]]
    """
    if images.ndim != 4 or not images.is_floating_point() or min(images.shape[-2:]) < 2:
        raise ShapeError(
            f"rotate needs floating-point images (b, c, H, W) of at least 2x2 pixels, got {tuple(images.shape)} "
            f"{images.dtype}."
        )
    if mode not in ("bicubic", "bilinear", "nearest"):
        raise OptionError(f"mode={mode!r} is not 'bicubic', 'bilinear' or 'nearest'.")
    h, w = size or tuple(images.shape[-2:])
    turns = int(degrees // 90) % 4 if degrees % 90 == 0 else None
    if turns is not None:
        turned = torch.rot90(images, turns, (-2, -1))
        spare = (turned.shape[-2] - h, turned.shape[-1] - w)
        if min(spare) >= 0 and spare[0] % 2 == 0 and spare[1] % 2 == 0:
            top, left = spare[0] // 2, spare[1] // 2
            return turned[..., top : top + h, left : left + w].contiguous()
    grid = sampling_grid(tuple(images.shape[-2:]), degrees, (h, w), images)
    grid = grid.expand(len(images), -1, -1, -1)
    return grid_sample(images, grid, mode=mode, padding_mode=padding, align_corners=True)


def sampling_grid(source: tuple[int, int], degrees: float, size: tuple[int, int], like: Tensor) -> Tensor:
    """Return where each pixel of the window looks, (1, h, w, 2) as (x, y) in -1..1 between the corners' centres.

    Args:
        source: (H, W) of the images.
        degrees: counter-clockwise; multiples of 90 give whole pixels.
        size: window (h, w).
        like: gives dtype and device; angles are formed in float64.
    """
    angle = math.radians(degrees)
    cos, sin = _EXACT[int(degrees // 90) % 4] if degrees % 90 == 0 else (math.cos(angle), math.sin(angle))
    # offsets from the centre, down and right
    v, u = (torch.arange(n, dtype=torch.float64, device=like.device) - (n - 1) / 2 for n in size)
    v, u = v[:, None], u[None, :]
    x = (cos * u - sin * v) * (2 / (source[1] - 1))
    y = (sin * u + cos * v) * (2 / (source[0] - 1))
    return torch.stack([x, y], -1)[None].to(like.dtype)


@dataclass(frozen=True)
class Canvas:
    """A square window whose content stays the same piece of the sample at every angle.

    Attributes:
        source: (H, W) that is used of each image; at most one row and one column less than it has, so that window and
            image have their centre in common. They are dropped once, before any pose.
        side: of the window in pixels, a multiple of the patch.
        patch: side of a patch in pixels.
        invented: whether some pixels of the window lie outside the image at some angle and are mirrored.

    >>> canvas = Canvas.fit((100, 120), patch=8)
    >>> canvas.side, canvas.pose(torch.zeros(1, 3, 100, 120), 30).shape
    (64, torch.Size([1, 3, 64, 64]))
    """

    source: tuple[int, int]
    side: int
    patch: int
    invented: bool

    @classmethod
    def fit(
        cls,
        shape: tuple[int, int],
        patch: int,
        side: int | None = None,
        how: Literal["crop", "disc"] = "crop",
    ) -> "Canvas":
        """Choose the window.

        Args:
            shape: (H, W) of the image.
            patch: side of a patch in pixels.
            side: of the window; default the largest that `how` allows.
            how: 'crop': the image is at least √2 times larger, so that no pixel is invented. 'disc': the window is as
                large as the image; what lies outside is mirrored, and only the inscribed disc counts.

        Raises:
            OptionError: an unknown `how`, or a side that is no multiple of the patch.
            ShapeError: the image is too small.
        """
        if how not in ("crop", "disc"):
            raise OptionError(f"how={how!r} is not 'crop' or 'disc'.")
        # after a row or column is dropped, in the worst case
        short = min(shape) - 1
        most = short + 1 if how == "disc" else int((short - 1 - 4) / math.sqrt(2)) + 1
        if side is None:
            side = most // patch * patch
        if side < 3 * patch or side % patch:
            raise ShapeError(
                f"A window of {side} px is no multiple of the patch of {patch} px with at least 3 patches a side "
                f"(image {tuple(shape)} px, how={how!r}); give a larger image, or how='disc'."
            )
        source = tuple(s - (s - side) % 2 for s in shape)
        # bicubic reads two more pixels on either side
        reach = (side - 1) * math.sqrt(2) + 4
        if min(source) < side or (how == "crop" and reach > min(source) - 1):
            raise ShapeError(
                f"An image of {tuple(shape)} px cannot show a window of {side} px at every angle with how={how!r}; "
                f"the largest is about {max(most, 0)} px."
            )
        return cls((source[0], source[1]), side, patch, reach > min(source) - 1)

    @property
    def grid(self) -> int:
        """Tokens along a side."""
        return self.side // self.patch

    def pose(self, images: Tensor, degrees: float, mode: Mode = "bicubic") -> Tensor:
        """Return the window of images (b, c, H, W) that were turned, (b, c, side, side)."""
        return rotate(self._used(images), degrees, (self.side, self.side), mode=mode)

    def round_trip(self, images: Tensor, degrees: float, mode: Mode = "bicubic") -> Tensor:
        """Return the window after turning there and back: what resampling alone does to it."""
        there = rotate(self._used(images), degrees, mode=mode)
        if degrees % 90 == 0:  # moved and moved back
            return self.pose(images, 0)
        return rotate(there, -degrees, (self.side, self.side), mode=mode)

    def tokens(self) -> Tensor:
        """Return the tokens that count at every angle, (grid, grid) bool: within (side-1)/2 - patch of the centre."""
        return _disc(self.grid, self.patch, self._radius())

    def pixels(self) -> Tensor:
        """Return the pixels of the same disc, (side, side) bool."""
        return _disc(self.side, 1, self._radius())

    def _radius(self) -> float:
        return (self.side - 1) / 2 - self.patch

    def _used(self, images: Tensor) -> Tensor:
        h, w = self.source
        if images.shape[-2] - h not in (0, 1) or images.shape[-1] - w not in (0, 1):
            raise ShapeError(
                f"This window belongs to images of {self.source} px, got {tuple(images.shape[-2:])}; fit another."
            )
        return images[..., :h, :w]


def blurred_as(image: Tensor, posed: Tensor) -> Tensor:
    """Return `image` low-passed to the power spectrum of its rotated version, unrotated.

    What a model makes of the blur of resampling shows here without any turn. The gain falls with spatial frequency
    and is at most 1: the isotonic fit of sqrt(P_posed/P_image), both averaged over rings of equal frequency under a
    round window, which shows both the same sample. It is applied to the image mirrored at its frame, without a seam.

    Args:
        image: (b, c, n, n).
        posed: the same windows after rotation.

    Raises:
        MissingExtra: scikit-learn, which makes the isotonic fit, is not installed.
    """
    require("sklearn", "cli", "the blur control of arbitrary angles")
    # the round window shows the same sample in both
    n = image.shape[-1]
    offset = torch.arange(n, dtype=torch.float64, device=image.device) - (n - 1) / 2
    radius = torch.hypot(offset[:, None], offset[None, :]) * (2 / n)
    window = torch.where(radius < 1, (1 + torch.cos(torch.pi * radius)) / 2, torch.zeros_like(radius))
    # the gain is the falling ratio of amplitudes, one value a ring of equal frequency
    frequency = torch.fft.fftfreq(n, dtype=torch.float64, device=image.device)
    ring = (torch.hypot(frequency[:, None], frequency[None, :]) * 2 * _RINGS).long()
    before, after = (_ring_power(x.double(), window, ring) for x in (image, posed))
    gain = torch.stack([_falling(b, a) for b, a in zip(before, after, strict=True)]).to(image.device)
    # mirrored at the frame, the periodic image of the transform has no seam
    mirrored = torch.cat([image, image.flip(-1)], -1)
    mirrored = torch.cat([mirrored, mirrored.flip(-2)], -2)
    # rings are known at their middle, between which the gain is interpolated
    fine = torch.fft.fftfreq(2 * n, dtype=torch.float64, device=image.device)
    at = torch.hypot(fine[:, None], fine[None, :]) * 2 * _RINGS - 0.5
    low = at.floor().long().clamp(0, gain.shape[-1] - 1)
    high = (at.floor().long() + 1).clamp(0, gain.shape[-1] - 1)
    share = (at - at.floor()).clamp(0, 1)
    full = gain[:, low] * (1 - share) + gain[:, high] * share
    out = torch.fft.ifft2(torch.fft.fft2(mirrored) * full[:, None].to(image.dtype)).real
    return out[..., :n, :n].contiguous()


def _ring_power(x: Tensor, window: Tensor, ring: Tensor) -> Tensor:
    """Power by ring, summed over channels, (b, rings)."""
    weight = window / window.sum()
    centred = x - (x * weight).sum((-2, -1), keepdim=True)
    power = torch.fft.fft2(centred * window).abs().square().sum(1).flatten(1)
    sums = torch.zeros(len(x), int(ring.max()) + 1, dtype=x.dtype, device=x.device)
    return sums.index_add(1, ring.flatten(), power)


def _falling(before: Tensor, after: Tensor) -> Tensor:
    """Gain by ring, falling from at most 1; rings count by their power, so empty ones decide nothing."""
    from sklearn.isotonic import IsotonicRegression

    power = before.cpu().numpy()
    if power.sum() == 0:
        return torch.ones_like(before, device="cpu")
    ratio = after.cpu().numpy() / power.clip(min=power.max() * 1e-12)
    fit = IsotonicRegression(y_min=0, y_max=1, increasing=False)
    fitted = fit.fit_transform(range(len(power)), ratio, sample_weight=power.clip(min=power.max() * 1e-12))
    return torch.from_numpy(fitted).double().sqrt()


def _disc(n: int, patch: int, radius: float) -> Tensor:
    """Cells (n, n) of `patch` pixels whose centre lies within `radius` pixels of the centre."""
    offset = (torch.arange(n, dtype=torch.float64) - (n - 1) / 2) * patch
    return torch.hypot(offset[:, None], offset[None, :]) <= radius
