"""Jitter: small random displacements of cells, as training augmentation."""

from __future__ import annotations

import torch
from torch import Tensor

from vispe.encodings.parts.positions.sampler import Sampler
from vispe.encodings.registry import register
from vispe.utils.options import PositiveFloat


@register
class Jitter(Sampler):
    """Displaces every row and column by clipped Gaussian noise that preserves their order, in training.

    Args:
        sd: standard deviation of the moves before clipping at 0.49, in cells.
        per: one draw for the whole batch, or one per sample (slower).

    Shapes: coordinates (1 or b, n, a) -> (1 or b, n, a); prefix tokens are unchanged.
    New resolution: any; positions are unchanged in evaluation.   Cost: in training no fused table of offsets.
    Invariant to: nothing, by less than half a cell.
    Differs from the reference: there is none; it is ours.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("jitter(sd=0.1)+rope_axial", dim=16, num_heads=2)
        >>> bool((encoding.prepare(Grid((1, 9)).positions()).coords[0, :, 1].diff() > 0).all())
        True
    """

    name = "jitter"
    ndim = (1, 2, 3)
    year = 2026

    sd: PositiveFloat = 0.2

    def draw(self, cells: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
        """Return the cell positions with small displacements."""
        moved = torch.randn(cells, dtype=torch.float64, generator=generator, device=device) * self.sd
        # less than half a cell, so that the order is preserved
        return torch.arange(cells, dtype=torch.float64, device=device) + moved.clamp(-0.49, 0.49)
