"""Random gaps between rows and columns, as training augmentation."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from vispe.encodings.parts.positions.sampler import Sampler
from vispe.encodings.registry import register
from vispe.utils.interval import Interval
from vispe.utils.options import PositiveInt


@register
class Gaps(Sampler):
    """Inserts gaps of random size between neighbouring cells of each axis, drawn in every training step.

    Args:
        rate: probability of a gap after a cell.
        size: largest gap, in cells.
        per: one draw for the whole batch, or one per sample (slower).

    Shapes: coordinates (1 or b, n, a) -> (1 or b, n, a); prefix tokens are unchanged.
    New resolution: any; positions are unchanged in evaluation.   Cost: in training no fused table of offsets.
    Invariant to: nothing; the distance of neighbours is larger across a gap.
    Differs from the reference: the paper puts random spaces between the digits of texts; missing rows and columns, as
        between tiles, are ours.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("gaps(rate=1.0,size=1)+rope_axial", dim=16, num_heads=2)
        >>> encoding.prepare(Grid((1, 3)).positions()).coords[0, :, 1]
        tensor([0., 2., 4.])
    """

    name = "gaps"
    paper = "Positional Description Matters for Transformers Arithmetic, https://arxiv.org/abs/2311.14737"
    year = 2023
    ndim = (1, 2, 3)

    rate: Annotated[float, Interval(above=0, most=1)] = 0.1
    size: PositiveInt = 4

    def draw(self, cells: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
        """Return the cell positions with random gaps."""
        opens = torch.rand(cells - 1, dtype=torch.float64, generator=generator, device=device) < self.rate
        sizes = torch.randint(1, self.size + 1, (cells - 1,), generator=generator, device=device)
        # the distance of neighbours without a gap is 1
        steps = 1.0 + (opens * sizes).double()
        return torch.cat([steps.new_zeros(1), steps.cumsum(0)])

    def field(self, cells: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the length including gaps; the spacing remains 1."""
        # the last cell has a width of 1 as well
        return positions[:, -1] + 1, torch.ones_like(positions[:, 0])
