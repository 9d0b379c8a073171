"""Sinusoids of the distances to all borders of the field."""

from __future__ import annotations

import torch
from torch import Tensor

from vispe.attention.precision import at_least_float32
from vispe.encodings.base import Additive
from vispe.encodings.parts.additive.fourier import ProgressiveBands
from vispe.encodings.parts.additive.waves import rates, waves
from vispe.encodings.parts.coords import padded
from vispe.encodings.registry import register
from vispe.errors import ShapeError, counted
from vispe.grid import Positions
from vispe.utils.options import PositiveFloat, PositiveInt


@register
class Border(ProgressiveBands, Additive):
    """Adds sinusoids of each token's distances to all borders of the field.

    [sin(u w_k), cos(u w_k)] for u = y, h - 1 - y, x, w - 1 - x, w_k = temperature ** (-k / K), k = 0 .. K - 1,
    K = floor(d / 8) (with one or three axes floor(d / 4), floor(d / 12)); after Takase and Okazaki, arXiv 1904.07418

    It encodes the position of the image border on purpose. No default of vispe uses it, and it is not suited for
    micrographs: the appearance of a sample does not depend on where the field of view ends, and features that
    encode the border have the very bias that `vispe retrofit` removes. It is intended for images framed by hand,
    and for measuring the effect of that information.

    Args:
        dim: width of the tokens, d; at least 4 per axis. Channels beyond 4 K per axis are 0.
        temperature: ratio of the longest to the shortest wavelength; the shortest is 2 pi patches.
        reveal: 'linear' or 'cosine' activates frequency bands during training, long wavelengths first (PINs, see
            `vispe.encodings.positions.set_progress`); 'none' uses all bands from the start.

    Shapes: pos.coords (1 or b, n, axes), axes 1 to 3 -> (1 or b, n, d) float32; prefix tokens get 0.
    New resolution: distances are in patches, from the borders of the new grid.   Cost: no parameters, O(n d).
    Invariant to: nothing; mirroring the image exchanges the channels of opposite sides.
    Raises: ShapeError if the width has less than 4 channels per axis of `pos`.
    Differs from the reference: it counts down along one axis, see `countdown`; distances to both ends of every axis
        are ours.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("border", dim=16)
        >>> encoding.table(Grid((2, 3)).positions()).shape
        torch.Size([1, 6, 16])
    """

    name = "border"
    paper = "Positional Encoding to Control Output Sequence Length, https://arxiv.org/abs/1904.07418"
    year = 2019
    ndim = (1, 2, 3)
    encodes = ("position",)
    formula = (
        r"\left[ \sin u \omega_k, \; \cos u \omega_k \right], \quad u \in \{ y, \, h - 1 - y, \, x, \, w "
        r"- 1 - x \}, \quad \omega_k = T^{-k/K}"
    )
    tested_options = ("temperature=20,reveal=linear",)

    dim: PositiveInt
    temperature: PositiveFloat = 10000.0

    def table(self, pos: Positions, image: Tensor | None = None) -> Tensor:
        """Return the table, (1 or b, n, d) in float32 or better, 0 for prefix tokens."""
        self._need_axes(pos)
        self._need_start(pos, "reads distances to both ends of the grid")
        table = pos.remember((self.name, self.dim, self.temperature), lambda: self._table(pos))
        count, sides = self.dim // (4 * pos.axes), 2 * pos.axes
        return padded(self.with_band_weights(table, count, copies=sides), self.dim)

    def _table(self, pos: Positions) -> Tensor:
        count = self.dim // (4 * pos.axes)
        if not count:
            raise ShapeError(
                f"border needs 4 channels for each of {counted(pos.axes, 'axis')}, got dim={self.dim}. Use a width of "
                f"{4 * pos.axes} or more."
            )
        near = at_least_float32(pos.coords)
        # distance to the last cell, n - 1 - coordinate in cells
        far = (pos.extent - pos.cell)[:, None] - near
        # both distances of an axis are adjacent
        distance = torch.stack([near, far], -1).flatten(-2)
        encoded = waves(distance[..., None] * rates(count, self.temperature, distance))
        # (b, n, 2 axes, 2 K) -> (b, n, 4 axes * K)
        return encoded.flatten(-2) * pos.spatial[..., None]
