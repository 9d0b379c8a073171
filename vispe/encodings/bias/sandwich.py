"""Sandwich: inner products of sinusoids as a bias that falls with distance (arXiv 2212.10356)."""

from __future__ import annotations

import torch
from torch import Tensor

from vispe.attention.bias.abstract_bias import Bias
from vispe.encodings.parts.radial import RadialEncoding
from vispe.encodings.registry import register
from vispe.grid import Positions
from vispe.options import Even, Positive, Whole


@register
class Sandwich(RadialEncoding):
    """Attention falls off as the inner product of two sinusoidal embeddings does, fast at first and then slowly.

    bias[h, i, j] = (sum over c of cos(w_c d) - 1) / r_h, w_c = base^(-2c / width), r_h = 8 h / H     arXiv 2212.10356

    c runs over width / 2 frequencies, h over 1 to H. Subtracting 1 moves all logits of a row alike; without it patches
    would prefer each other to prefix tokens. There are no parameters, so a pretrained model does not keep its outputs.

    Args:
        num_heads: heads, H.
        width: channels of the embeddings, twice the number of frequencies.
        base: ratio of the highest frequency, one radian per unit of the spacing, to below the lowest.
        metric: 'euclidean', 'manhattan', 'chebyshev' or 'squared' (euclidean, squared), in units of the spacing.
        wrap: distances on the torus: per axis min(d, n - d).
        normalize: 'max' divides by the largest distance in the grid, 'reference' by that of the reference grid, 'none'
            not at all.
        reference: shape for normalize='reference'; the grid that the host was built with by default.
        spacing: distance between neighbouring patches per axis, in place of `Grid.spacing`.

    Shapes: pos (n, axes) -> bias (1, h, n, n); prefix rows and columns are 0.
    New resolution: no resampling needed; a step costs the same.   Cost: no parameters, O(1) per score.
    Invariant to: translation, rotation by any angle, flips (euclidean or squared, without wrap).
    Raises: ShapeError if `pos` has other axes than `spacing`; OptionError for options that do not fit together.
    Differs from the reference: two-sided and on grids, where the cosines are of the distance; 0 at distance 0.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("sandwich", num_heads=2)
        >>> encoding.bias(Grid((2, 3)).positions(), 0).dense().shape
        torch.Size([1, 2, 6, 6])
    """

    name = "sandwich"
    paper = "Dissecting Transformer Length Extrapolation, https://arxiv.org/abs/2212.10356"
    year = 2022
    knows = ("distance",)
    invariant = ("translation", "quarter_turns", "reflection", "rotation")

    num_heads: Whole
    width: Even = 128
    base: Positive = 10000.0

    def bias(self, pos: Positions, layer: int, x: Tensor | None = None) -> Bias | None:
        """Return the bias, the same for all blocks."""
        return self._radial(self._fall, pos, key=("sandwich", self.num_heads, self.width, self.base))

    def _fall(self, distance: Tensor) -> Tensor:
        """Return the bias (h, m) of distances (m,)."""
        half, like = self.width // 2, {"device": distance.device, "dtype": distance.dtype}
        rates = self.base ** (-torch.arange(half, **like) / half)
        total = torch.zeros_like(distance)
        for few in rates.split(8):  # a few at a time: pairs of free tokens are many
            # cos(x) - 1 without the difference, which would round small distances away
            total = total - 2.0 * (distance[:, None] * few / 2).sin().square().sum(-1)
        ratio = torch.arange(1, self.num_heads + 1, **like) * (8 / self.num_heads)
        return total / ratio[:, None]
