"""Shape of a regular token grid, without tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from vispe.errors import OptionError, ShapeError
from vispe.grid.positions import Positions
from vispe.grid.validation import as_offset, as_shape, as_spacing, is_size

Origin = Literal["start", "end", "centre"]


@dataclass(frozen=True)
class Grid:
    """The shape of a regular token grid, row-major, with leading prefix tokens.

    Args:
        shape: tokens per axis, slow to fast: (n,), (h, w) or (t, h, w).
        prefix: number of tokens without a position (class, registers), before the patches.
        spacing: distance between neighbours along each axis, in any length unit; 1 per axis by default.
        reference: shape of the grid that the model was trained with, for encodings that rescale.
        origin: token with coordinate 0: 'start', the first of each axis; 'end', the last, counting backwards, so that
            the newest frame of a video is always 0; 'centre', the middle of the grid, so that rotations by 90 degrees
            and flips only permute coordinates and change signs. Encodings of coordinates use it; encodings that look up
            cells, or fractions of the extent, do not support it and raise.
        offset: physical coordinates of `origin`, added to all coordinates, for grids in one coordinate system
            (`Positions.joined`); 0 by default. Encodings that do not support other origins do not support it.

    Raises:
        ShapeError: an axis is empty, there are more than 3 axes, or the lengths of the arguments differ.
        OptionError: `spacing` is not one positive number per axis, `offset` is not one number per axis, or `origin` is
            unknown.

    Example:
        >>> Grid((4,), origin="centre").positions().coords.flatten().tolist()
        [-1.5, -0.5, 0.5, 1.5]
    """

    shape: tuple[int, ...]
    prefix: int = 0
    spacing: tuple[float, ...] | None = None
    reference: tuple[int, ...] | None = None
    origin: Origin = "start"
    offset: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        shape = as_shape(self.shape, "shape")
        object.__setattr__(self, "shape", shape)
        if not is_size(self.prefix) or self.prefix < 0:
            raise ShapeError(f"Grid needs a prefix of 0 or more tokens, got prefix={self.prefix!r}.")
        if self.spacing is not None:
            object.__setattr__(self, "spacing", as_spacing(self.spacing, len(shape)))
        if self.reference is not None:
            reference = as_shape(self.reference, "reference")
            if len(reference) != len(shape):
                raise ShapeError(
                    f"Grid needs a reference with one number per axis of shape={shape}, got reference={reference}."
                )
            object.__setattr__(self, "reference", reference)
        if self.offset is not None:
            object.__setattr__(self, "offset", as_offset(self.offset, len(shape)))
        if self.origin not in get_args(Origin):
            raise OptionError(f"origin must be one of {', '.join(get_args(Origin))}, got {self.origin!r}.")

    @property
    def axes(self) -> int:
        """Number of axes, 1 to 3."""
        return len(self.shape)

    @property
    def patches(self) -> int:
        """Number of tokens with a position."""
        count = 1
        for n in self.shape:
            count = count * n
        return count

    @property
    def tokens(self) -> int:
        """Number of all tokens, including the prefix."""
        return self.prefix + self.patches

    def positions(self, device: torch.device | str | None = None) -> Positions:
        """Return the `Positions` of all tokens of this grid, with float32 coordinates (1, n, a)."""
        spacing = self.spacing or (1.0,) * self.axes
        lines = [
            self._line(torch.arange(n, dtype=torch.float32, device=device), n) * s
            for n, s in zip(self.shape, spacing, strict=True)
        ]
        # (n_1, ..., a) -> (n, a) in raster order
        coords = torch.stack(torch.meshgrid(*lines, indexing="ij"), dim=-1).flatten(0, -2)
        cell = torch.tensor(spacing, dtype=torch.float32, device=device)
        # the first and last token are opposite corners
        extent = (coords[-1] - coords[0]).abs() + cell
        if self.offset is not None:
            coords = coords + coords.new_tensor(self.offset)
        spatial = coords.new_ones(coords.shape[0], dtype=torch.bool)
        # prefix tokens come first, at coordinate 0 and without a position
        if self.prefix:
            coords = torch.cat([coords.new_zeros(self.prefix, self.axes), coords])
            spatial = torch.cat([spatial.new_zeros(self.prefix), spatial])
        pos = Positions(coords[None], spatial[None], extent[None], cell=cell[None], grid=self)
        # other origins have coordinates that differ from cells
        pos.on_grid = self.origin == "start" and self.offset is None
        return pos

    def _line(self, cells: Tensor, n: int) -> Tensor:
        """Return the coordinates of the cells 0 .. n - 1 of an axis, in units of cells."""
        if self.origin == "start":
            return cells
        return n - 1 - cells if self.origin == "end" else cells - (n - 1) / 2
