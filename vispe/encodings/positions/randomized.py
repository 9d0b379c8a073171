"""Randomised positions: ordered integers drawn from a long range, as training augmentation."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from vispe.encodings.parts.positions.unit_range import ReachSampler
from vispe.encodings.registry import register
from vispe.errors import ShapeError, counted
from vispe.utils.options import PositiveInt


@register
class Randomized(ReachSampler):
    """Assigns distinct, ordered integers below `reach` to the cells of each axis, drawn in every training step.

    Args:
        reach: number of integers to draw from, at least as many as cells.
        spacing: ``'drawn'`` uses the integers; ``'kept'`` divides them so that neighbours have distance 1, in
            the mean, on the training grid (its longest side): recommended with distance biases.
        grid: the training grid; the host supplies it.
        per: one draw for the whole batch, as the authors', or one for every sample (slower).
        test: in evaluation, ``'even'`` uses floor((i + 1/2) reach / n), ``'draw'`` draws as the authors do.

    Shapes: coordinates (1 or b, n, a) -> (1 or b, n, a); prefix tokens are unchanged.
    New resolution: up to `reach` cells an axis, always within the trained range.   Cost: no fused table of offsets, as
        tokens are no longer on a grid.
    Invariant to: nothing; invariance to translation holds in the mean over draws.
    Raises: ShapeError if an axis has more cells than `reach`.
    Differs from the reference: evaluation does not draw by default; for ALiBi the authors draw distances instead,
        which is `alibi(randomized_offsets=...)`.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("randomized(reach=28)+rope_axial", dim=16, num_heads=2).eval()
        >>> encoding.prepare(Grid((1, 4)).positions()).coords[0, :, 1]
        tensor([ 3., 10., 17., 24.])
    """

    name = "randomized"
    paper = "Randomized Positional Encodings Boost Length Generalization, https://arxiv.org/abs/2305.16843"
    year = 2023
    ndim = (1, 2, 3)

    reach: PositiveInt = 64
    test: Literal["even", "draw"] = "even"

    @property
    def always(self) -> bool:
        """Whether it also draws in evaluation."""
        return self.test == "draw"

    def draw(self, cells: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
        """Return `cells` distinct integers below `reach`, in order."""
        self._check(cells)
        # the first entries of a permutation are distinct
        chosen = torch.randperm(self.reach, generator=generator, device=device)[:cells]
        return chosen.sort().values.double() * self.unit

    def fixed(self, cells: int, device: torch.device) -> Tensor:
        """Return evenly spaced integers."""
        self._check(cells)
        # centres of equal parts of the range
        middle = torch.arange(cells, dtype=torch.float64, device=device) + 0.5
        return (middle * self.reach / cells).floor() * self.unit

    def _check(self, cells: int) -> None:
        if cells > self.reach:
            raise ShapeError(
                f"{self.name}(reach={self.reach}) cannot assign distinct positions to {counted(cells, 'cell')}. Use "
                f"a longer reach."
            )
