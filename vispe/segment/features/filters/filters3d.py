"""Filters of Z stacks: features of the volume in addition to those of the slice.

For every Gaussian scale six more values per pixel and channel, computed in the volume: the smoothed grey
level, the gradient magnitude, the three eigenvalues of the Hessian and the local standard deviation. A scale
of 2 px means 2 px along y and x, and the same distance along z: for a slice spacing of 4 px, sigma is half a
slice. The features are equivariant to rotations by 90° and reflections of the slice, and invariant to a
reversal of the stack. As in `vispe.segment.features.filters.filters2d` each region of a slice gets the numbers of the
complete slice, borders reflect, and pixels without data have no weight. Only the slices within the kernel
radius are read, piece by piece, so memory does not grow with the stack.
"""

from copy import copy
from math import pi, sqrt

import numpy as np
import torch
from torch import Tensor

from vispe.errors import InputError, counted
from vispe.images.read import Micrograph
from vispe.segment.features.filters.filters2d import Filters
from vispe.segment.features.filters.smoothing import Axis, smooth_rows, smoothing
from vispe.segment.features.tiles import Region

SIGMAS_3D = (1.0, 2.0, 4.0)
"""Scales of the 3D filters, in pixels along y and x."""

KINDS_3D = ("gaussian3d", "gradient3d", "hessian3d_large", "hessian3d_middle", "hessian3d_small", "std3d")

_STRIP = 64  # rows smoothed along z and differentiated per step


class Stack:
    """Volumes formed by the pages of an image: a single volume, or one volume per time point.

    Args:
        image: a Z stack; pages of an unknown axis count as slices.
        pages: (z, h, w, c) float32, its normalised pages.

    Attributes:
        step: distance between slices, in pixels.
        notes: messages for the user.

    Raises:
        InputError: the image has one page, is a time series, or has page axes that do not form complete
            volumes.
    """

    def __init__(self, image: Micrograph, pages: np.ndarray) -> None:
        self.pages, self.valid = pages, image.valid
        axes = image.page_axes or ((("Z", len(pages)),) if len(pages) > 1 else ())
        letters = [letter for letter, _ in axes]
        name, advice = image.path.name, "Omit filters_3d"
        if not axes:
            raise InputError(f"{image.path} has one page, but 3D filters need a Z stack. {advice}.")
        if "Z" not in letters and (len(axes) > 1 or letters[0] not in "IQ"):
            reason = f"its page axes are {' and '.join(letters)}"
            if letters == ["T"]:
                reason = f"it is a time series of {counted(len(pages), 'frame')}"
            raise InputError(
                f"{image.path} has no Z axis ({reason}), which 3D filters need. {advice}, or specify the axes, for "
                "example axes=ZYX."
            )
        depth = letters.index("Z") if "Z" in letters else 0
        # page numbers on the grid of page axes, with Z last: one row per volume
        numbers = np.arange(len(pages)).reshape([n for _, n in axes])
        self._lines = np.moveaxis(numbers, depth, -1).reshape(-1, axes[depth][1])
        notes = [] if "Z" in letters else [f"the pages of {name} are interpreted as slices along Z."]
        self.step = 1.0
        if image.z_step is None or image.pixel_size is None:
            notes.append(f"the slice distance of {name} is unknown: 3D filters assume cubic voxels.")
        else:
            self.step = image.z_step / sqrt(image.pixel_size[0] * image.pixel_size[1])
            notes.append(
                f"the slice spacing of {name} is {image.z_step:.4g} microns, {self.step:.3g} times the pixel size: 3D "
                "filters take this into account."
            )
        self.notes = tuple(notes)

    def line(self, number: int) -> tuple[np.ndarray, int]:
        """Return the page numbers (z,) of the volume that contains a page, and the index of the page among them."""
        row, index = np.argwhere(self._lines == number)[0]
        return self._lines[row], int(index)


class Filters3D(Filters):
    """`Filters` of a page, followed by those of the surrounding volume.

    Args:
        sigmas: scales in a page, in pixels.
        device: torch device of the sums.
        sigmas_3d: scales in the volume, in pixels along y and x.
    """

    _stack: Stack | None = None
    _number = 0

    def __init__(
        self, sigmas: tuple[float, ...], device: str = "cpu", sigmas_3d: tuple[float, ...] = SIGMAS_3D
    ) -> None:
        super().__init__(sigmas, device)
        self.sigmas_3d = sigmas_3d

    def within(self, stack: Stack, number: int) -> "Filters3D":
        """Return these filters for one page of a stack."""
        filters = copy(self)
        filters._stack, filters._number = stack, number
        return filters

    @property
    def reach(self) -> int:
        """Margin in pixels around a region that its features depend on."""
        return max(super().reach, *(_halo(s) for s in self.sigmas_3d))

    def names(self, channels: int = 1) -> list[str]:
        """Return the name of every output channel, in order, for an image of `channels` channels."""
        one = [f"{kind}_{sigma:g}" for sigma in self.sigmas_3d for kind in KINDS_3D]
        more = one if channels == 1 else [f"c{c}.{name}" for c in range(channels) for name in one]
        return super().names(channels) + more

    def planes(self, page: np.ndarray, region: Region | None = None, again: bool = False) -> np.ndarray:
        """Return the features (f, rows, columns) float32 of a region of the page; only those in 2D are cached.

        Raises:
            InputError: `within` was not called, so that the stack is unknown.
        """
        if self._stack is None:
            raise InputError(
                "3D filters need the neighbouring slices, which are not available here. Use vispe segment or vispe "
                "apply on a Z stack in a TIFF file, or train without filters_3d."
            )
        flat = super().planes(page, region, again)
        region = region or Region(0, page.shape[0], 0, page.shape[1])
        count = len(KINDS_3D) * len(self.sigmas_3d)
        deep = torch.empty((page.shape[2] * count, *region.shape), device=self.device)
        for channel in range(page.shape[2]):
            for number, sigma in enumerate(self.sigmas_3d):
                start = channel * count + len(KINDS_3D) * number
                self._scale(self._stack, channel, sigma, region, deep[start : start + len(KINDS_3D)])
        return np.concatenate([flat, deep.cpu().numpy()])

    def _scale(self, stack: Stack, channel: int, sigma: float, region: Region, out: Tensor) -> None:
        """Fill `out` (6, rows, columns) with the features of one channel at one scale."""
        line, index = stack.line(self._number)
        height, width = stack.valid.shape[1:]
        # weights (3, slices) of the smoothed slice and its two neighbours; sigma in units of slices
        first, last, along_z = smoothing(index - 1, index + 2, sigma / stack.step, Axis(0, len(line)))
        numbers = line[first:last]
        halo = _halo(sigma)
        top, bottom = max(region.top - halo, 0), min(region.bottom + halo, height)
        left, right = max(region.left - halo, 0), min(region.right + halo, width)
        complete = bool(stack.valid[numbers, top:bottom, left:right].all())
        moments = 2 if complete else 3
        shape = (moments, 3, bottom - top, right - left)
        # (moments, 3 slices, rows, columns): smooth along z first, then along x, then along y
        stacked = torch.empty(shape, dtype=torch.float64, device=self.device)
        along_z = along_z.to(self.device)
        for start in range(top, bottom, _STRIP):
            part = slice(start, min(start + _STRIP, bottom)), slice(left, right)
            valid = stack.valid[(numbers, *part)]
            grey = np.where(valid, stack.pages[(numbers, *part, channel)], 0).astype(np.float64)
            values = torch.from_numpy(grey).to(self.device)
            moments_of_strip = [values, values * values]
            if not complete:
                moments_of_strip.append(torch.from_numpy(valid.astype(np.float64)).to(self.device))
            for moment, planes in zip(stacked, moments_of_strip, strict=True):
                moment[:, start - top : start - top + planes.shape[1]] = torch.tensordot(along_z, planes, 1)
        rows, columns = Axis(top, height), Axis(left, width)
        # rows of all moments and slices in one matrix product
        smooth = smooth_rows(stacked.flatten(0, 2), sigma, columns, region.left - 1, region.right + 1)
        smooth = smooth.view(moments * 3, bottom - top, -1)
        for start in range(region.top, region.bottom, _STRIP):
            stop = min(start + _STRIP, region.bottom)
            begin, end, matrix = smoothing(start - 1, stop + 1, sigma, rows)
            smoothed = (matrix.to(self.device) @ smooth[:, begin:end]).view(moments, 3, stop - start + 2, -1)
            if not complete:
                # normalised convolution: divide by the smoothed mask
                smoothed = smoothed[:2] / smoothed[2].clamp_min(torch.finfo(torch.float64).tiny)
            _features(smoothed[0], smoothed[1, 1], stack.step, out[:, start - region.top : stop - region.top])
        no_data = ~stack.valid[(self._number, *region.slices)]
        if no_data.any():
            out.masked_fill_(torch.from_numpy(no_data).to(self.device), 0)


def _halo(sigma: float) -> int:
    """Return the margin around a region for a scale: the kernel radius plus one pixel for differences."""
    return Filters((sigma,)).reach


def _features(mean: Tensor, square: Tensor, step: float, out: Tensor) -> None:
    """Compute the six features of a scale.

    Args:
        mean: (3, rows + 2, columns + 2) float64, the slice and its two neighbours, with a margin of one pixel.
        square: (rows + 2, columns + 2) float64, smoothed squares of the slice.
        step: distance of slices in pixels.
        out: (6, rows, columns) float32, overwritten.
    """
    below, inner, above = mean
    centre = inner[1:-1, 1:-1]
    out[0] = centre
    # local standard deviation: E[x^2] - E[x]^2
    out[5] = (square[1:-1, 1:-1] - centre * centre).clamp_min(0).sqrt()
    # central differences; z in units of pixels
    gz = (above - below) / (2 * step)
    gy, gx = (inner[2:] - inner[:-2]) / 2, (inner[:, 2:] - inner[:, :-2]) / 2
    out[1] = (gz[1:-1, 1:-1].square() + (gy[:, 1:-1].square() + gx[1:-1].square())).sqrt()
    zz = (above + below - 2 * inner)[1:-1, 1:-1] / step**2
    yy = (inner[2:] + inner[:-2])[:, 1:-1] - 2 * centre
    xx = (inner[:, 2:] + inner[:, :-2])[1:-1] - 2 * centre
    # mixed derivatives of central differences
    xy = (gx[2:] - gx[:-2]) / 2
    yz, xz = ((gz[2:] - gz[:-2]) / 2)[:, 1:-1], ((gz[:, 2:] - gz[:, :-2]) / 2)[1:-1]
    out[2], out[3], out[4] = _eigenvalues(xx, yy, zz, xy, xz, yz)


def _eigenvalues(
    xx: Tensor, yy: Tensor, zz: Tensor, xy: Tensor, xz: Tensor, yz: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the eigenvalues of symmetric 3 x 3 matrices in descending order (trigonometric solution, Smith 1961)."""
    middle = ((xx + yy) + zz) / 3
    # deviatoric part, with p = sqrt(tr(A^2) / 6) and cos(3 angle) = det(A) / (2 p^3)
    a, b, c = xx - middle, yy - middle, zz - middle
    sixth = ((a * a + b * b) + c * c + 2 * (xy * xy + (xz * xz + yz * yz))) / 6
    size = sixth.sqrt()
    half = (a * (b * c - yz * yz) - xy * (xy * c - xz * yz) + xz * (xy * yz - b * xz)) / 2
    cosine = half / (sixth * size).clamp_min(torch.finfo(torch.float64).tiny)
    angle = cosine.clamp(-1, 1).acos() / 3
    large = middle + 2 * size * angle.cos()
    small = middle + 2 * size * (angle + 2 * pi / 3).cos()
    return large, 3 * middle - large - small, small
