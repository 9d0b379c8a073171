"""Random float sampling: real numbers drawn from one range in training and test."""

from __future__ import annotations

import torch
from torch import Tensor

from vispe.encodings.parts.unit_range import ReachSampler
from vispe.encodings.registry import register
from vispe.options import Chance


@register
class Rfs(ReachSampler):
    """Gives the cells of each axis real numbers below `reach`, in order, drawn in every step of training.

    Args:
        reach: end of the range.
        spacing: ``'drawn'`` leaves the numbers as they are; ``'kept'`` divides them so that neighbours are 1 apart, in
            the mean, on the training grid (its longest side): advised beside biases of distance.
        grid: the training grid; the host supplies it.
        per: one draw for the whole batch, or one for every sample (slower).
        min_gap: least distance of neighbours, as a share of their mean distance, below 1.

    Shapes: coordinates (1 or b, n, a) -> (1 or b, n, a); prefix tokens stay.
    New resolution: any, always within the trained range: (i + 1/2) reach / n in evaluation.   Cost: no fused table of
        offsets, as tokens are no longer on a grid.
    Invariant to: nothing; what reads the coordinates sees other distances in every step.
    Differs from the reference: the paper has no code. Order statistics of uniform draws, and even places in
        evaluation, are our reading of it; gaps are then nearly exponential, so neighbours may almost coincide.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("rfs(reach=28)+rope_axial", dim=16, num_heads=2).eval()
        >>> encoding.prepare(Grid((1, 4)).positions()).coords[0, :, 1]
        tensor([ 3.5000, 10.5000, 17.5000, 24.5000])
    """

    name = "rfs"
    paper = "Random Float Sampling, https://arxiv.org/abs/2602.14050"
    year = 2026
    ndim = (1, 2, 3)

    min_gap: Chance = 0.0

    def draw(self, cells: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
        """Return `cells` uniform draws below `reach`, in order."""
        gap = self.min_gap * self.reach / cells
        # what the least gaps need is taken out, and put between the draws again
        drawn = torch.rand(cells, dtype=torch.float64, generator=generator, device=device)
        line = drawn.sort().values * (self.reach - gap * cells)
        return (line + gap * torch.arange(cells, dtype=torch.float64, device=device)) * self.unit

    def fixed(self, cells: int, device: torch.device) -> Tensor:
        """Return numbers that are spread evenly."""
        middle = torch.arange(cells, dtype=torch.float64, device=device) + 0.5
        return middle * self.reach / cells * self.unit
