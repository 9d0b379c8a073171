"""Segmented sequences: coordinates of a short input from several segments of a long one."""

from __future__ import annotations

import torch
from torch import Tensor

from vispe.encodings.parts.positions.sampler import Sampler
from vispe.encodings.registry import register
from vispe.errors import ShapeError, counted
from vispe.utils.options import PositiveInt


@register
class Segments(Sampler):
    """Places `count` segments of each axis at random on a larger canvas, in order, drawn in every training step.

    Args:
        canvas: cells of the long input along each axis.
        count: number of segments; their lengths differ by at most one cell, and each has at least one.
        per: one draw for the whole batch, or one per sample (slower).

    Shapes: coordinates (1 or b, n, a) -> (1 or b, n, a); prefix tokens are unchanged.
    New resolution: up to `canvas` cells an axis; in evaluation the image is at the origin of the canvas, which
        remains the field of view of encodings that normalise.   Cost: no fused table of offsets.
    Invariant to: nothing; distances within a segment are preserved.
    Raises: ShapeError if an axis has more cells than the canvas.
    Differs from the reference: the paper samples segments of long texts; this assigns their coordinates to a full
        input. For actual windows of a large image see `vispe.train.data.window_sequences`.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("segments(canvas=64,count=2)+rope_axial", dim=16, num_heads=2)
        >>> steps = encoding.prepare(Grid((2, 6)).positions()).coords[0, :6, 1].diff()
        >>> int((steps > 1).sum()) <= 1
        True
    """

    name = "segments"
    paper = (
        "Extending Input Contexts through Training on Segmented Sequences, https://arxiv.org/abs/2310.14633"
    )
    year = 2023
    ndim = (1, 2, 3)

    canvas: PositiveInt = 64
    count: PositiveInt = 2

    def draw(self, cells: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
        """Return the cells with each segment shifted by a separate number, increasing over segments."""
        free = self._free_cells(cells)
        count = min(self.count, cells)
        # one shift per segment, sorted, so that segments remain in order
        shifts = torch.randint(free + 1, (count,), generator=generator, device=device).sort().values
        line = torch.arange(cells, device=device)
        # line * count // cells is the segment of each cell
        return (line + shifts[line * count // cells]).double()

    def fixed(self, cells: int, device: torch.device) -> Tensor:
        """Return the cells at the origin of the canvas."""
        self._free_cells(cells)
        return torch.arange(cells, dtype=torch.float64, device=device)

    def field(self, cells: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the length of the canvas; neighbours have distance 1."""
        one = torch.ones_like(positions[:, 0])
        return self.canvas * one, one

    def _free_cells(self, cells: int) -> int:
        if cells > self.canvas:
            raise ShapeError(
                f"segments(canvas={self.canvas}) has no room for {counted(cells, 'cell')}. Use a longer canvas."
            )
        return self.canvas - cells
