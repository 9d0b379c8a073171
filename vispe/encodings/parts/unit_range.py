"""Samplers whose places are from one range, whatever the grid."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from vispe.encodings.parts.sampler import Sampler
from vispe.errors import OptionError
from vispe.options import Positive, Whole


class ReachSampler(Sampler):
    """Places from 0 to `reach`; classes say how they are drawn."""

    reach: Positive = 64.0
    spacing: Literal["drawn", "kept"] = "drawn"
    grid: tuple[Whole, ...] | None = None

    def __post_init__(self) -> None:
        if self.spacing == "kept" and self.grid is None:
            raise OptionError(
                f"{self.name}(spacing=kept) keeps the mean distance of tokens at the training size; say its grid."
            )

    @property
    def unit(self) -> float:
        """What a place is multiplied by: 1, or what makes neighbours 1 apart, in the mean, on the training grid."""
        return max(self.grid) / self.reach if self.spacing == "kept" and self.grid else 1.0

    def field(self, cells: int, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return the length of the range, and what it gives each cell."""
        length = torch.full_like(places[:, 0], self.reach * self.unit)
        return length, length / cells
