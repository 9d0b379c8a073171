"""Fixed sines and cosines of three coordinates, for volumes and videos (after arXiv 2205.09113 and V-JEPA)."""

from __future__ import annotations

from typing import Annotated

from vispe.encodings.parts.additive.waves import SinCos
from vispe.encodings.registry import register
from vispe.utils.interval import Interval
from vispe.utils.options import PositiveFloat, check_per_axis


@register
class SinCos3D(SinCos):
    """Adds fixed sines and cosines of depth (or time), row and column to the tokens.

    [sin(z w_k), cos(z w_k), sin(y w_k), cos(y w_k), sin(x w_k), cos(x w_k)], w_k = temperature ** (-k / K),
    k = 0 .. K - 1, where K is the number of frequencies of the axis: its fraction of the d / 2 of all axes.

    Args:
        dim: width of the tokens, d; even.
        temperature: ratio of the longest to the shortest wavelength; the shortest is 2 pi units of the spacing.
        split: shares of the three axes in the width, (1, 1, 1) for equal parts. What does not divide goes to the
            largest remainders, earlier axes first, so widths such as 1024 need no padding. V-JEPA's
            other layout, half of the width for time, is (2, 1, 1).
        spacing: distance between neighbouring patches per axis (d, h, w) or (t, h, w), instead of `Grid.spacing`.
        std: rescale the values of the whole table to this standard deviation (that of the learned table it
            replaces, say); None keeps them in [-1, 1].
        reveal: 'linear' or 'cosine' activates frequency bands during training, long wavelengths first (PINs, see
            `vispe.encodings.positions.set_progress`); 'none' uses all bands from the start.

    Shapes: pos.coords (1 or b, n, 3) -> (1 or b, n, d) float32; prefix tokens get 0.
    New resolution: coordinates are extrapolated, in units of the spacing.   Cost: no parameters, O(n d) per forward.
    Invariant to: nothing; the value at a coordinate does not depend on the rest of the grid (std=None).
    Raises: ShapeError if `pos` is not 3-axis.
    Differs from the reference: a width that 6 does not divide is shared out in whole frequencies (V-JEPA makes
        a wider table and cuts it, which leaves the last frequencies without their cosine).

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("sincos3d", dim=16)
        >>> encoding.table(Grid((2, 3, 2)).positions()).shape
        torch.Size([1, 12, 16])
    """

    name = "sincos3d"
    paper = "Masked Autoencoders As Spatiotemporal Learners, https://arxiv.org/abs/2205.09113"
    year = 2022
    ndim = (3,)
    encodes = ("position",)
    formula = (
        r"\left[ \sin z \omega_k, \; \cos z \omega_k, \; \sin y \omega_k, \; \cos y \omega_k, \; \sin x "
        r"\omega_k, \; \cos x \omega_k \right], \quad \omega_k = T^{-k / K}"
    )
    tested_options = ("temperature=100", "split=[2,1,1]", "spacing=[5,0.7,0.7]", "std=0.02")

    dim: Annotated[int, Interval(least=6, step=2)]
    temperature: PositiveFloat = 10000.0
    split: tuple[PositiveFloat, PositiveFloat, PositiveFloat] = (1, 1, 1)

    def __post_init__(self) -> None:
        check_per_axis("spacing", self.spacing, 3)

    def counts(self) -> tuple[int, ...]:
        """Return the number of frequencies of each axis; they sum to half of the width."""
        half, total = self.dim // 2, sum(self.split)
        exact = [half * share / total for share in self.split]
        # the tolerance is for products slightly below an integer
        counts = [int(e + 1e-9) for e in exact]
        # the remaining frequencies go to the axes with the largest remainders, the first of equal ones
        by_rest = sorted(range(3), key=lambda i: (round(counts[i] - exact[i], 9), i))
        for i in by_rest[: half - sum(counts)]:
            counts[i] += 1
        return tuple(counts)
