"""RollPE: circular rolls of query and key channels by the coordinates of their patch (arXiv 2511.11668)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vispe.attention.transform.abstract_transform import Transform
from vispe.attention.transform.blocks import BlockTransform
from vispe.encodings.base import Rotary
from vispe.encodings.registry import register
from vispe.errors import OptionError
from vispe.grid import Positions
from vispe.utils.options import Axes, FiniteFloat, PositiveInt, Spacing, check_per_axis


@register
class RollPe(Rotary):
    """Rolls the channels of queries and keys by the coordinates of their patch, a part of the channels per axis.

    q' = roll(q, p), k' = roll(k, p): channel c of m moves to channel (c + p) mod m                 arXiv 2511.11668

    A roll by a number between two integers is that of the trigonometric interpolation of the channels. In the Fourier
    basis of the channels it is a rotation by 2 pi k p / m for wave k, which is RoPE with frequencies in equal steps.

    Args:
        dim: width of the tokens; its channels per head are d_h.
        num_heads: heads, h.
        head_dim: channels of a head, d_h; dim / num_heads by default.
        axes: number of axes of the grid, 1 to 3.
        speed: channels per patch, other than 0.
        spacing: distance between neighbouring patches per axis, instead of `Grid.spacing`.

    Shapes: pos (n, axes) -> matrices (1 or b, 1, n, axes, m, m), with the largest odd m of at most d_h / axes channels;
        a roll of an even number of channels has no real generator. The remaining channels are not rolled.
    New resolution: coordinates are extrapolated, in patches. Positions at a distance of m / speed patches are
        not distinguished.
    Cost: no parameters; n axes m^2 products per head for q and k.
    Invariant to: translation; norms are preserved.
    Raises: ShapeError if `pos` has other axes; OptionError for heads of fewer than 3 channels per axis, or speed 0.
    Differs from the reference: written from the abstract, which has one axis. One part of the channels per axis,
        the odd number of channels and `speed` are ours.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("rollpe", dim=3, num_heads=1, axes=1)
        >>> encoding.transform(Grid((3,)).positions(), 0).query(torch.tensor([1.0, 2, 3]).expand(1, 1, 3, 3)).round()
        tensor([[[[1., 2., 3.],
                  [3., 1., 2.],
                  [2., 3., 1.]]]])
    """

    name = "rollpe"
    paper = "Do traveling waves make good positional encodings?, https://arxiv.org/abs/2511.11668"
    year = 2025
    ndim = (1, 2, 3)
    encodes = ("distance", "direction")
    invariant = ("translation",)
    formula = r"q'_c = q_{(c - p) \bmod m}, \quad k'_c = k_{(c - p) \bmod m}"
    tested_options = ("speed=0.5", "axes=1", "spacing=[2,0.5]")

    dim: PositiveInt
    num_heads: PositiveInt
    head_dim: PositiveInt | None = None
    axes: Axes = 2
    speed: FiniteFloat = 1.0
    spacing: Spacing | None = None

    def __post_init__(self) -> None:
        head = self._resolve_head_dim()
        if head < 3 * self.axes:
            raise OptionError(
                f"rollpe needs 3 channels per head and axis or more, got head_dim={head} for axes={self.axes}. Choose "
                "a smaller num_heads."
            )
        if self.speed == 0:
            raise OptionError("rollpe needs a speed other than 0, got speed=0. Use pos_embed='none'.")
        check_per_axis("spacing", self.spacing, self.axes)
        self._accept(self.axes)
        part = head // self.axes
        self.channels = part - 1 + part % 2

    def transform(self, pos: Positions, layer: int, x: Tensor | None = None) -> Transform:
        """Return the roll of queries and keys, the same for all heads and layers."""
        self._need_axes(pos)
        return pos.remember((self.name, repr(self.config)), lambda: self._rolls(pos))

    def _rolls(self, pos: Positions) -> BlockTransform:
        matrices = self.rolls(pos)
        return BlockTransform(q=matrices, k=matrices)

    def rolls(self, pos: Positions) -> Tensor:
        """Return the matrices of the rolls (b or 1, 1, n, axes, m, m), float32 or better."""
        scaled = pos if self.spacing is None else pos.with_spacing(self.spacing)
        m = self.channels
        channels = torch.arange(m, device=pos.coords.device)
        # remainders are exact, so that far positions lose no digits in the cosines
        shift = (self.speed * scaled.coords).remainder(m)
        offset = channels - shift[..., None]  # (b, n, axes, m)
        # interpolation at all m frequencies: (1 + 2 sum_k cos(2 pi k t / m)) / m, 1 at t = 0 and 0 at other integers
        column = torch.full_like(offset, 1 / m)
        for wave in range(1, m // 2 + 1):
            column = column + (2 / m) * (2 * math.pi * wave / m * offset).cos()
        # circulant: rows are channels after the roll, columns before it
        matrix = column[..., (channels[:, None] - channels) % m]
        # exactly the identity for tokens without a position
        eye = torch.eye(m, dtype=matrix.dtype, device=matrix.device)
        return torch.where(pos.spatial[..., None, None, None], matrix, eye)[:, None]
