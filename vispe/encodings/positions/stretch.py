"""Stretch: random scaling of each axis, as training augmentation."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vispe.encodings.parts.positions.sampler import Sampler
from vispe.encodings.registry import register
from vispe.errors import OptionError
from vispe.utils.options import PositiveFloat


@register
class Stretch(Sampler):
    """Multiplies each axis by a factor, drawn log-uniformly in every training step.

    Args:
        low: smallest factor.
        high: largest factor.
        per: one draw for the whole batch, or one per sample (slower).

    Shapes: coordinates (1 or b, n, a) -> (1 or b, n, a); prefix tokens are unchanged.
    New resolution: any; positions are unchanged in evaluation. Encodings that normalise by the field of view see
        no difference.   Cost: in training no fused table of offsets.
    Invariant to: nothing; each axis is scaled separately.
    Raises: OptionError if `low` is above `high`.
    Differs from the reference: the same as `jitter_coords` of `rope_dinov3`, for encodings of any kind.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("stretch(low=2.0,high=2.0)+rope_axial", dim=16, num_heads=2)
        >>> encoding.prepare(Grid((1, 3)).positions()).coords[0, :, 1]
        tensor([0., 2., 4.])
    """

    name = "stretch"
    paper = "DINOv3, https://arxiv.org/abs/2508.10104"
    ndim = (1, 2, 3)
    year = 2025

    low: PositiveFloat = 0.5
    high: PositiveFloat = 2.0

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise OptionError(f"stretch needs low <= high, got low={self.low:g} and high={self.high:g}.")

    def draw(self, cells: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
        """Return the cells times a random factor."""
        low, high = math.log(self.low), math.log(self.high)
        # uniform in the logarithm: with the defaults, halving is as likely as doubling
        unit = torch.rand(1, dtype=torch.float64, generator=generator, device=device)
        return torch.arange(cells, dtype=torch.float64, device=device) * (low + (high - low) * unit).exp()

    def field(self, cells: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scaled length and spacing."""
        # all steps are equal to the factor
        step = positions[:, 1] if cells > 1 else torch.ones_like(positions[:, 0])
        return cells * step, step
