"""Fixed sines and cosines of both coordinates (MoCo v3, arXiv 2104.02057; MAE; the ablation of arXiv 2603.16840)."""

from __future__ import annotations

from typing import Annotated, ClassVar

from vispe.encodings.parts.additive.waves import SinCos
from vispe.encodings.registry import register
from vispe.utils.interval import Interval


@register
class SinCos2D(SinCos):
    """Adds fixed sines and cosines of the row and column to the tokens.

    [sin(y w_k), cos(y w_k), sin(x w_k), cos(x w_k)], w_k = temperature ** (-k / (d / 4)), k = 0 .. d/4 - 1

    Args:
        dim: width of the tokens, d; a multiple of 4.
        temperature: ratio of the longest to the shortest wavelength; the shortest is 2 pi patches.
        std: rescale the values of the whole table to this standard deviation (that of the learned table it
            replaces, say); None keeps them in [-1, 1].
        reveal: 'linear' or 'cosine' activates frequency bands during training, long wavelengths first (PINs, see
            `vispe.encodings.positions.set_progress`); 'none' uses all bands from the start.

    Shapes: pos.coords (1 or b, n, 2) -> (1 or b, n, d) float32; prefix tokens get 0.
    New resolution: coordinates are extrapolated, in patches.   Cost: no parameters, O(n d) per forward.
    Invariant to: nothing; the value at a coordinate does not depend on the rest of the grid (std=None).
    Raises: ShapeError if `pos` is not 2-axis.
    Differs from the reference: coordinates are taken in float32 from the grid, never in the model's dtype.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("sincos2d", dim=16)
        >>> encoding.table(Grid((2, 3)).positions()).shape
        torch.Size([1, 6, 16])
    """

    name = "sincos2d"
    paper = (
        "An Empirical Study of Training Self-Supervised Vision Transformers, https://arxiv.org/abs/2104.02057"
    )
    year = 2021
    encodes = ("position",)
    formula = (
        r"\left[ \sin y \omega_k, \; \cos y \omega_k, \; \sin x \omega_k, \; \cos x \omega_k \right], "
        r"\quad \omega_k = T^{-k / (d / 4)}"
    )
    tested_options = ("temperature=100", "std=0.02", "reveal=cosine")

    spacing: ClassVar[None] = None

    dim: Annotated[int, Interval(above=0, step=4)]

    def counts(self) -> tuple[int, ...]:
        """Return a quarter of the width for each axis."""
        # two axes with sine and cosine each
        return (self.dim // 4,) * 2
