"""Base of samplers that draw positions from a fixed range, independent of the grid."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from vispe.encodings.parts.positions.sampler import Sampler
from vispe.errors import OptionError
from vispe.utils.options import PositiveFloat, PositiveInt


class ReachSampler(Sampler):
    """Sampler of positions from 0 to `reach`; subclasses define the distribution."""

    reach: PositiveFloat = 64.0
    spacing: Literal["drawn", "kept"] = "drawn"
    grid: tuple[PositiveInt, ...] | None = None

    def __post_init__(self) -> None:
        if self.spacing == "kept" and self.grid is None:
            raise OptionError(
                f"{self.name}(spacing=kept) scales to the mean spacing of the training grid, got grid=None. Pass grid."
            )

    @property
    def unit(self) -> float:
        """Factor of the positions: 1, or the factor that makes the mean spacing 1 on the training grid."""
        # the longest side of the training grid spans the range
        return max(self.grid) / self.reach if self.spacing == "kept" and self.grid else 1.0

    def field(self, cells: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the length of the range, and its length per cell."""
        length = torch.full_like(positions[:, 0], self.reach * self.unit)
        return length, length / cells
