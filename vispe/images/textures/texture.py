"""A sample without pixels: what is at any place of the plane, and how it is rendered in any pose.

The synthetic samples of `vispe.images.textures` are functions of the place, so a rotated picture is computed anew
and never interpolated. Lengths are in pixels of the unscaled picture, and the origin is the centre of the picture.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from vispe.errors import OptionError, ShapeError
from vispe.images.textures.checks import Size, both
from vispe.images.textures.waves import Places, Raster, Waves
from vispe.options import Number, Positive, checked, read_option

SIDE = 256  # pixels; pictures are computed in tiles of this side
_CHUNK = 1 << 13  # scattered places that are computed at a time


@dataclass(frozen=True, eq=False, kw_only=True)
class Texture(ABC):
    """A synthetic sample: grey level and class at any place, without noise of sampling. Immutable.

    Attributes:
        classes: names of the classes in the order of their numbers.
        period: (y, x) in pixels after which the texture repeats, before it is stretched; None if it does not.
        spacing: length of a pixel of the unscaled picture, in any unit; see `pixel`.
        stretch: factor by which the texture is elongated; 1 for isotropic ones. It does not change shares of area.
        direction: along which, in degrees counter-clockwise from the horizontal.
        detail: fine isotropic field that is added to the grey level, or None.
    """

    classes: tuple[str, ...]
    period: tuple[int, int] | None = None
    spacing: float = 1.0
    stretch: float = 1.0
    direction: float = 0.0
    detail: Waves | None = field(default=None, repr=False)

    @abstractmethod
    def _evaluate(self, places: Places) -> tuple[np.ndarray, np.ndarray]:
        """Return grey level, without detail, and class at places."""

    def at(self, points: np.ndarray | Sequence[Sequence[float]]) -> tuple[np.ndarray, np.ndarray]:
        """Return grey levels (n,) float64 and classes (n,) int64 at places of the sample.

        Args:
            points: (n, 2) as (y, x) in pixels from the centre of the unshifted picture.
        """
        where = np.asarray(points, dtype=np.float64)
        if where.ndim != 2 or where.shape[1] != 2:
            raise ShapeError(f"Points (n, 2) are needed, got {where.shape}.")
        where = where @ self.unstretched().T
        parts = [where[i : i + _CHUNK] for i in range(0, max(1, len(where)), _CHUNK)]
        grey, label = zip(*(self._shown(Places(part, self.period)) for part in parts), strict=True)
        return np.concatenate(grey), np.concatenate(label)

    @checked
    def pixel(self, scale: Positive = 1.0) -> float:
        """Return the length of a pixel of a picture rendered at `scale`, in the unit of `spacing`."""
        return self.spacing / scale

    @checked
    def render(
        self,
        size: int | tuple[int, int],
        *,
        angle: Number = 0.0,
        mirror: bool = False,
        shift: tuple[Number, Number] = (0.0, 0.0),
        scale: Positive = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """Return a picture and its classes, computed at the centre of every pixel; nothing is interpolated.

        The sample is magnified about its origin, shifted, mirrored left to right and turned, in this order, and what
        then lies within the frame is returned. A multiple of 90 degrees equals `torch.rot90` of the picture at 0 with
        the sides of its size swapped, and a mirror image its flip, bit for bit. A whole-pixel shift of a periodic
        texture of the size of the picture equals `torch.roll`.

        Takes 20 bytes per pixel for the results and, with up to a thousand waves, at most 32 MB beside them,
        whatever the size.

        Args:
            size: (h, w) in pixels, or one side of a square.
            angle: degrees, counter-clockwise.
            mirror: whether to mirror left to right, before turning.
            shift: (down, right) in pixels of the picture, before mirroring.
            scale: magnification.

        Returns:
            image (3, h, w) float32 with three equal channels, mostly in [0, 1] and never clipped; and classes (h, w)
            int64.

        Raises:
            ShapeError: a size without pixels.
            OptionError: an angle, shift or scale that is not a finite number, or a scale that is not positive.
        """
        h, w = _size(size)
        grey, label = np.empty((3, h, w), np.float32), np.empty((h, w), np.int64)
        turned = -angle if mirror else angle
        quarters = math.floor((turned + 45.0) / 90.0)
        rest = math.radians(turned - 90.0 * quarters)  # rendered; quarters and mirrors move pixels
        image, classes = (np.rot90(a[..., ::-1] if mirror else a, -quarters, (-2, -1)) for a in (grey, label))
        cos, sin = math.cos(rest), math.sin(rest)
        matrix = self.unstretched() @ np.array([[cos, sin], [-sin, cos]]) / scale
        offset = -self.unstretched() @ np.array(shift) / scale
        rows, cols = (np.arange(n) - (n - 1) / 2 for n in classes.shape)
        for top in range(0, len(rows), SIDE):
            for left in range(0, len(cols), SIDE):
                here = (slice(top, top + SIDE), slice(left, left + SIDE))
                raster = Raster(rows[here[0]], cols[here[1]], matrix, offset, self.period)
                image[:, *here], classes[here] = self._shown(raster)
        return torch.from_numpy(grey), torch.from_numpy(label)

    def _shown(self, places: Places) -> tuple[np.ndarray, np.ndarray]:
        grey, label = self._evaluate(places)
        return grey if self.detail is None else grey + self.detail.on(places), label

    def unstretched(self) -> np.ndarray:
        """Return the matrix (2, 2) from places of the sample to places before it was stretched."""
        if self.stretch == 1.0:
            return np.eye(2)
        angle = math.radians(self.direction)
        along = np.array([-math.sin(angle), math.cos(angle)])  # (y, x), y downwards
        return np.eye(2) + (1.0 / self.stretch - 1.0) * np.outer(along, along)


def _size(size: int | tuple[int, int]) -> tuple[int, int]:
    try:
        return both(read_option("size", size, Size))
    except OptionError as error:
        raise ShapeError(str(error)) from None
