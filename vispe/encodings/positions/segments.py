"""Segmented sequences: a short input takes its coordinates from several runs of a long one."""

from __future__ import annotations

import torch
from torch import Tensor

from vispe.encodings.parts.sampler import Sampler
from vispe.encodings.registry import register
from vispe.errors import ShapeError
from vispe.options import Whole


@register
class Segments(Sampler):
    """Cuts each axis into `count` runs and puts them anywhere on a larger canvas, in order, in every step of training.

    Args:
        canvas: cells of the long input along each axis.
        count: how many runs; their lengths differ by one cell at most, and each has at least one.
        per: one draw for the whole batch, or one for every sample (slower).

    Shapes: coordinates (1 or b, n, a) -> (1 or b, n, a); prefix tokens stay.
    New resolution: up to `canvas` cells an axis; evaluation puts the picture into the first corner of the canvas, which
        stays the field of view of encodings that normalise.   Cost: no fused table of offsets.
    Invariant to: nothing; distances inside a run are kept.
    Raises: ShapeError if an axis has more cells than the canvas.
    Differs from the reference: the paper samples runs of long texts; this gives a whole input their coordinates. For
        true windows of a large picture see `vispe.train.data.window_sequences`.

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

    canvas: Whole = 64
    count: Whole = 2

    def draw(self, cells: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
        """Return the cells with each run moved by its own number, which grows from run to run."""
        room = self._room(cells)
        count = min(self.count, cells)
        moved = torch.randint(room + 1, (count,), generator=generator, device=device).sort().values
        line = torch.arange(cells, device=device)
        return (line + moved[line * count // cells]).double()

    def fixed(self, cells: int, device: torch.device) -> Tensor:
        """Return the cells where they are, on the canvas."""
        self._room(cells)
        return torch.arange(cells, dtype=torch.float64, device=device)

    def field(self, cells: int, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return the length of the canvas; neighbours are 1 apart."""
        one = torch.ones_like(places[:, 0])
        return self.canvas * one, one

    def _room(self, cells: int) -> int:
        if cells > self.canvas:
            raise ShapeError(
                f"segments(canvas={self.canvas}) has no room for {cells} cells; say a longer canvas."
            )
        return self.canvas - cells
