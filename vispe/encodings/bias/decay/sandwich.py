"""Sandwich: inner products of sinusoids as a bias that decreases with distance (arXiv 2212.10356)."""

from __future__ import annotations

import torch
from torch import Tensor

from vispe.attention.bias.abstract_bias import Bias
from vispe.encodings.parts.bias.radial import RadialEncoding
from vispe.encodings.registry import register
from vispe.grid import Positions
from vispe.utils.options import PositiveEvenInt, PositiveFloat, PositiveInt


@register
class Sandwich(RadialEncoding):
    """Attention falls off like the inner product of two sinusoidal embeddings, quickly at first and then slowly.

    bias[h, i, j] = (sum over c of cos(w_c d) - 1) / r_h, w_c = base^(-2c / width), r_h = 8 h / H     arXiv 2212.10356

    c runs over width / 2 frequencies, h over 1 to H. Subtracting 1 shifts all logits of a row equally; otherwise
    patches would prefer each other to prefix tokens. There are no parameters, and a pretrained model changes at first.

    Args:
        num_heads: heads, H.
        width: channels of the embeddings, twice the number of frequencies.
        base: ratio of the highest frequency (one radian per unit of the spacing) to just below the lowest.
        metric: 'euclidean', 'manhattan', 'chebyshev' or 'squared' (euclidean, squared), in units of the spacing.
        wrap: distances on the torus: per axis min(d, n - d).
        normalize: 'max' divides by the largest distance in the grid, 'reference' by that of the reference grid, 'none'
            not at all.
        reference: shape for normalize='reference'; the grid that the host was built with by default.
        spacing: distance between neighbouring patches per axis, instead of `Grid.spacing`.

    Shapes: pos (n, axes) -> bias (1, h, n, n); prefix rows and columns are 0.
    New resolution: no resampling needed; a step costs the same.   Cost: no parameters, O(1) per score.
    Invariant to: translation, rotation by any angle, flips (euclidean or squared, without wrap).
    Raises: ShapeError if `pos` has other axes than `spacing`; OptionError for incompatible options.
    Differs from the reference: two-sided and on grids, with cosines of the distance; 0 at distance 0.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("sandwich", num_heads=2)
        >>> encoding.bias(Grid((2, 3)).positions(), 0).dense().shape
        torch.Size([1, 2, 6, 6])
    """

    name = "sandwich"
    paper = "Dissecting Transformer Length Extrapolation, https://arxiv.org/abs/2212.10356"
    year = 2022
    encodes = ("distance",)
    invariant = ("translation", "quarter_turns", "reflection", "rotation")
    formula = (
        r"b_{hij} = \frac{1}{r_h} \left( \sum_c \cos \omega_c (p_i - p_j) - 1 \right), \quad r_h = "
        r"\frac{8 h}{H}"
    )
    tested_options = ("width=6,base=50,metric=chebyshev", "wrap=true,normalize=max", "spacing=[2,0.5]")

    num_heads: PositiveInt
    width: PositiveEvenInt = 128
    base: PositiveFloat = 10000.0

    def bias(self, pos: Positions, layer: int, x: Tensor | None = None) -> Bias | None:
        """Return the bias, the same for all blocks."""
        return self._radial(self._fall, pos, key=("sandwich", self.num_heads, self.width, self.base))

    def _fall(self, distance: Tensor) -> Tensor:
        """Return the bias (h, m) of distances (m,)."""
        half, like = self.width // 2, {"device": distance.device, "dtype": distance.dtype}
        rates = self.base ** (-torch.arange(half, **like) / half)
        total = torch.zeros_like(distance)
        for chunk in rates.split(8):  # in chunks, since free tokens have many pairs
            # cos(x) - 1 = -2 sin(x / 2)^2, accurate for small distances
            total = total - 2.0 * (distance[:, None] * chunk / 2).sin().square().sum(-1)
        ratio = torch.arange(1, self.num_heads + 1, **like) * (8 / self.num_heads)
        return total / ratio[:, None]
