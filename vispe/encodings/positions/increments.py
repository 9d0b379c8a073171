"""Randomised increments: random step lengths between cells, as training augmentation."""

from __future__ import annotations

import torch
from torch import Tensor

from vispe.encodings.parts.positions.sampler import Sampler
from vispe.encodings.registry import register


@register
class Increments(Sampler):
    """Cumulative sums of steps drawn from 0 to 2 along each axis, rescaled if longer than the axis.

    Args:
        per: one draw for the whole batch, or one per sample (slower).

    Shapes: coordinates (1 or b, n, a) -> (1 or b, n, a); prefix tokens are unchanged.
    New resolution: any; positions are unchanged in evaluation.   Cost: in training no fused table of offsets.
    Invariant to: nothing; distances differ in every step.
    Differs from the reference: none known for one axis; several axes are ours.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("increments+rope_axial", dim=16, num_heads=2).eval()
        >>> encoding.prepare(Grid((1, 3)).positions()).coords[0, :, 1]
        tensor([0., 1., 2.])
    """

    name = "increments"
    paper = "Giraffe: Adventures in Expanding Context Lengths in LLMs, https://arxiv.org/abs/2308.10882"
    year = 2023
    ndim = (1, 2, 3)

    def draw(self, cells: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
        """Return the sums of random steps, at most `cells` long."""
        # steps are uniform in [0, 2), with mean 1
        line = (torch.rand(cells, dtype=torch.float64, generator=generator, device=device) * 2).cumsum(0)
        # sums shorter than the axis are not stretched
        return line * (cells / line[-1]).clamp(max=1)
