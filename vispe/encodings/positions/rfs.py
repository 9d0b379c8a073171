"""Random float sampling: ordered real numbers from the same range in training and evaluation."""

from __future__ import annotations

import torch
from torch import Tensor

from vispe.encodings.parts.positions.unit_range import ReachSampler
from vispe.encodings.registry import register
from vispe.utils.options import Probability


@register
class Rfs(ReachSampler):
    """Assigns ordered real numbers below `reach` to the cells of each axis, drawn in every training step.

    Args:
        reach: end of the range.
        spacing: ``'drawn'`` uses the numbers; ``'kept'`` divides them so that neighbours have distance 1, in
            the mean, on the training grid (its longest side): recommended with distance biases.
        grid: the training grid; the host supplies it.
        per: one draw for the whole batch, or one per sample (slower).
        min_gap: smallest distance of neighbours, as a fraction of their mean distance, below 1.

    Shapes: coordinates (1 or b, n, a) -> (1 or b, n, a); prefix tokens are unchanged.
    New resolution: any, always within the trained range: (i + 1/2) reach / n in evaluation.   Cost: no fused table of
        offsets, as tokens are no longer on a grid.
    Invariant to: nothing; distances differ in every step.
    Differs from the reference: the paper has no code. Order statistics of uniform draws, and even positions in
        evaluation, are our interpretation; gaps are then nearly exponential, so neighbours may almost coincide.

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

    min_gap: Probability = 0.0

    def draw(self, cells: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
        """Return `cells` uniform draws below `reach`, in order."""
        gap = self.min_gap * self.reach / cells
        # draw in the range without the smallest gaps, then insert them between the draws
        uniform = torch.rand(cells, dtype=torch.float64, generator=generator, device=device)
        line = uniform.sort().values * (self.reach - gap * cells)
        return (line + gap * torch.arange(cells, dtype=torch.float64, device=device)) * self.unit

    def fixed(self, cells: int, device: torch.device) -> Tensor:
        """Return evenly spaced numbers."""
        # centres of equal parts of the range
        middle = torch.arange(cells, dtype=torch.float64, device=device) + 0.5
        return middle * self.reach / cells * self.unit
