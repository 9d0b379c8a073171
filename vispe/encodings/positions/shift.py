"""Random shift of the image on a larger canvas, as training augmentation."""

from __future__ import annotations

import torch
from torch import Tensor

from vispe.encodings.parts.positions.sampler import Sampler
from vispe.encodings.registry import register
from vispe.errors import OptionError, ShapeError, counted
from vispe.utils.options import NonNegativeInt, PositiveInt


@register
class Shift(Sampler):
    """Shifts all cells of an axis by the same integer, drawn in every training step, on a canvas of `reach` cells.

    Only encodings of absolute positions are affected, not those of offsets.

    Args:
        reach: cells of the canvas along each axis.
        curriculum: largest shift at the beginning and at the end of training, between which it grows with
            `set_progress`; by default the full canvas from the start.
        per: one draw for the whole batch, or one per sample (slower).

    Shapes: coordinates (1 or b, n, a) -> (1 or b, n, a); prefix tokens are unchanged.
    New resolution: up to `reach` cells an axis; in evaluation the image is at the origin of the canvas, which
        remains the field of view of encodings that normalise.   Cost: no fused table of offsets.
    Invariant to: no effect with encodings that are invariant to translation.
    Raises: ShapeError if the canvas, or the last shift of the curriculum, is too small for the image.
    Differs from the reference: several axes are ours; TAPE's code draws up to twice the training length.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("shift(reach=28)+sincos2d", dim=16)
        >>> shifted = encoding.prepare(Grid((1, 3)).positions(), draws={"shift.0": torch.tensor([7.0]),
        ...                                                             "shift.1": torch.tensor([20.0, 21.0, 22.0])})
        >>> shifted.coords[0, :, 1]
        tensor([20., 21., 22.])
    """

    name = "shift"
    paper = "Randomized shift of positions (as in TAPE), https://arxiv.org/abs/2501.00712"
    year = 2025
    ndim = (1, 2, 3)
    reader = "sincos2d"

    reach: PositiveInt = 64
    curriculum: tuple[NonNegativeInt, NonNegativeInt] | None = None

    def __post_init__(self) -> None:
        if self.curriculum is not None and self.curriculum[0] > self.curriculum[1]:
            raise OptionError(
                f"shift needs an increasing curriculum, got curriculum={list(self.curriculum)}."
            )

    def draw(self, cells: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
        """Return the cells shifted by one integer."""
        free = self._free_cells(cells)
        if self.curriculum is not None:
            first, last = self.curriculum
            if last > free:
                raise ShapeError(
                    f"shift(reach={self.reach}) has room for {counted(free, 'cell')} beyond {cells}, but its "
                    f"curriculum ends at "
                    f"{last}. Use a longer reach."
                )
            # the largest shift grows linearly with the training progress
            free = round(first + (last - first) * self.progress)
        # from 0 to `free`, both included
        shift = torch.randint(free + 1, (1,), generator=generator, device=device)
        return torch.arange(cells, dtype=torch.float64, device=device) + shift

    def fixed(self, cells: int, device: torch.device) -> Tensor:
        """Return the cells at the origin of the canvas."""
        self._free_cells(cells)
        return torch.arange(cells, dtype=torch.float64, device=device)

    def field(self, cells: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the length of the canvas; neighbours have distance 1."""
        one = torch.ones_like(positions[:, 0])
        return self.reach * one, one

    def _free_cells(self, cells: int) -> int:
        if cells > self.reach:
            raise ShapeError(
                f"shift(reach={self.reach}) has no room for {counted(cells, 'cell')}. Use a longer reach."
            )
        return self.reach - cells
