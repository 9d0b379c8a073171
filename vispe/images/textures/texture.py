"""Base class of synthetic samples, which are defined at any position of the plane and rendered in any pose.

The samples of `vispe.images.textures` are functions of position, so rotated images are evaluated, never interpolated.
Lengths are in pixels of the unscaled image, and the origin is the centre of the image.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from vispe.errors import ShapeError
from vispe.images.textures.checks import Size, both
from vispe.images.textures.waves import Places, Raster, Waves
from vispe.utils.options import FiniteFloat, PositiveFloat, checked

SIDE = 256  # pixels; images are rendered in tiles of this side
_CHUNK = 1 << 13  # scattered points per chunk


@dataclass(frozen=True, eq=False, kw_only=True)
class Texture(ABC):
    """Synthetic sample: grey level and class at any position, without sampling noise. Immutable.

    Attributes:
        classes: names of the classes in the order of their numbers.
        period: (y, x) in pixels after which the texture repeats, before stretching; None if it is not periodic.
        spacing: length of a pixel of the unscaled image, in any unit; see `pixel`.
        stretch: elongation factor; 1 for isotropic textures. Area fractions do not depend on it.
        direction: direction of the elongation in degrees, counter-clockwise from the horizontal.
        detail: fine isotropic field that is added to the grey level, or None.
    """

    classes: tuple[str, ...]
    period: tuple[int, int] | None = None
    spacing: float = 1.0
    stretch: float = 1.0
    direction: float = 0.0
    detail: Waves | None = field(default=None, repr=False)

    @abstractmethod
    def _evaluate(self, coordinates: Places) -> tuple[np.ndarray, np.ndarray]:
        """Return grey level (without detail) and class at positions."""

    def at(self, points: np.ndarray | Sequence[Sequence[float]]) -> tuple[np.ndarray, np.ndarray]:
        """Return grey levels (n,) float64 and classes (n,) int64 at points of the sample.

        Args:
            points: (n, 2) as (y, x) in pixels from the centre of the unshifted image.

        Raises:
            ShapeError: not (n, 2).
        """
        positions = np.asarray(points, dtype=np.float64)
        if positions.ndim != 2 or positions.shape[1] != 2:
            raise ShapeError(f"points must have the shape (n, 2), got {positions.shape}.")
        positions = positions @ self.unstretched().T
        parts = [positions[i : i + _CHUNK] for i in range(0, max(1, len(positions)), _CHUNK)]
        grey, label = zip(*(self._shown(Places(part, self.period)) for part in parts), strict=True)
        return np.concatenate(grey), np.concatenate(label)

    @checked
    def pixel(self, scale: PositiveFloat = 1.0) -> float:
        """Return the length of a pixel of an image rendered at `scale`, in the unit of `spacing`."""
        return self.spacing / scale

    @checked
    def render(
        self,
        size: Size,
        *,
        angle: FiniteFloat = 0.0,
        mirror: bool = False,
        shift: tuple[FiniteFloat, FiniteFloat] = (0.0, 0.0),
        scale: PositiveFloat = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """Return an image and its classes, evaluated at the centre of every pixel without interpolation.

        The sample is scaled about its origin, shifted, mirrored left to right and rotated, in this order, and cropped
        to the frame. Rotation by a multiple of 90 degrees equals `torch.rot90` of the image at 0 degrees with height
        and width swapped, and mirroring equals a flip, bit for bit. An integer shift of a periodic texture whose
        period is the size of the image equals `torch.roll`.

        Needs 20 bytes per pixel for the results and, with up to a thousand waves, at most 32 MB in addition,
        regardless of the size.

        Args:
            size: (h, w) in pixels, or the side of a square.
            angle: degrees, counter-clockwise.
            mirror: whether to mirror left to right, before rotation.
            shift: (down, right) in pixels of the image, before mirroring.
            scale: magnification.

        Returns:
            image (3, h, w) float32 with three equal channels, mostly in [0, 1] and never clipped; and classes (h, w)
            int64.

        Raises:
            OptionError: a size without pixels; an angle, shift or scale that is not finite; or a scale that is not
                positive.

        Example:
            >>> from vispe.images.textures import voronoi
            >>> image, classes = voronoi(0).render((64, 96), angle=90)
            >>> tuple(image.shape), tuple(classes.shape)
            ((3, 64, 96), (64, 96))
        """
        h, w = both(size)
        grey, label = np.empty((3, h, w), np.float32), np.empty((h, w), np.int64)
        rotation = -angle if mirror else angle
        quarters = math.floor((rotation + 45.0) / 90.0)
        # evaluated; quarter turns and mirroring permute pixels
        rest = math.radians(rotation - 90.0 * quarters)
        image, classes = (np.rot90(a[..., ::-1] if mirror else a, -quarters, (-2, -1)) for a in (grey, label))
        cos, sin = math.cos(rest), math.sin(rest)
        matrix = self.unstretched() @ np.array([[cos, sin], [-sin, cos]]) / scale
        offset = -self.unstretched() @ np.array(shift) / scale
        rows, cols = (np.arange(n) - (n - 1) / 2 for n in classes.shape)
        for top in range(0, len(rows), SIDE):
            for left in range(0, len(cols), SIDE):
                tile = (slice(top, top + SIDE), slice(left, left + SIDE))
                raster = Raster(rows[tile[0]], cols[tile[1]], matrix, offset, self.period)
                image[:, *tile], classes[tile] = self._shown(raster)
        return torch.from_numpy(grey), torch.from_numpy(label)

    def _shown(self, coordinates: Places) -> tuple[np.ndarray, np.ndarray]:
        grey, label = self._evaluate(coordinates)
        return grey if self.detail is None else grey + self.detail.on(coordinates), label

    def unstretched(self) -> np.ndarray:
        """Return the matrix (2, 2) from positions in the sample to positions before stretching."""
        if self.stretch == 1.0:
            return np.eye(2)
        angle = math.radians(self.direction)
        along = np.array([-math.sin(angle), math.cos(angle)])  # (y, x), y downwards
        return np.eye(2) + (1.0 / self.stretch - 1.0) * np.outer(along, along)
