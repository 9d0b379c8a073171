"""How far the borders are: sinusoids of the distance to every side of the field."""

from __future__ import annotations

import torch
from torch import Tensor

from vispe.attention.precision import at_least_float32
from vispe.encodings.base import Additive
from vispe.encodings.parts.coords import padded
from vispe.encodings.parts.fourier import Revealed
from vispe.encodings.parts.waves import rates, waves
from vispe.encodings.registry import register
from vispe.errors import ShapeError
from vispe.grid import Positions
from vispe.options import Positive, Whole


@register
class Border(Revealed, Additive):
    """Adds to every token how far it is from each border of the field.

    [sin(u w_k), cos(u w_k)] for u = y, h - 1 - y, x, w - 1 - x, w_k = temperature ** (-k / K), k = 0 .. K - 1,
    K = floor(d / 8) (with one or three axes floor(d / 4), floor(d / 12)); after Takase and Okazaki, arXiv 1904.07418

    It tells a model where the edge of the picture is, on purpose. No default of vispe has it, and micrographs are no
    place for it: what a sample looks like does not depend on where the microscope cut it off, and features that
    know the border carry the very bias that `vispe retrofit` removes. It is meant for pictures framed by hand,
    and for measuring what that knowledge does.

    Args:
        dim: width of the tokens, d; at least 4 per axis. Channels beyond 4 K per axis are 0.
        temperature: ratio of the longest to the shortest wavelength; the shortest is 2 pi patches.
        reveal: 'linear' or 'cosine' opens the waves band by band while the model is trained, long ones first (PINs, see
            `vispe.encodings.positions.set_progress`); 'none' has all of them from the start.

    Shapes: pos.coords (1 or b, n, axes), axes 1 to 3 -> (1 or b, n, d) float32; prefix tokens get 0.
    New resolution: distances go on, in patches, from the borders of the new grid.   Cost: no parameters, O(n d).
    Invariant to: nothing; mirroring the picture exchanges the channels of opposite sides.
    Raises: ShapeError if the width has less than 4 channels per axis of `pos`.
    Differs from the reference: it counts down along one axis, see `countdown`; both ends of every axis are ours.

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
    knows = ("place",)

    dim: Whole
    temperature: Positive = 10000.0

    def table(self, pos: Positions, image: Tensor | None = None) -> Tensor:
        """Return the table, (1 or b, n, d) in float32 or better, 0 for prefix tokens."""
        self._need_axes(pos)
        self._need_start(pos, "reads distances to both ends of the grid")
        table = pos.remember((self.name, self.dim, self.temperature), lambda: self._table(pos))
        count, sides = self.dim // (4 * pos.axes), 2 * pos.axes
        return padded(self.opened(table, count, copies=sides), self.dim)

    def _table(self, pos: Positions) -> Tensor:
        count = self.dim // (4 * pos.axes)
        if not count:
            raise ShapeError(
                f"border needs 4 channels for each of {pos.axes} axes, got dim={self.dim}; take a width of "
                f"{4 * pos.axes} or more."
            )
        near = at_least_float32(pos.coords)
        far = (pos.extent - pos.cell)[:, None] - near
        # both distances of an axis beside each other
        away = torch.stack([near, far], -1).flatten(-2)
        made = waves(away[..., None] * rates(count, self.temperature, away))
        return made.flatten(-2) * pos.spatial[..., None]
