"""Sines and cosines of 3D points followed by an MLP (PETR, arXiv 2203.05625; 3DPPE, arXiv 2211.14710)."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from vispe.encodings.parts.additive.fourier import ProgressiveBands
from vispe.encodings.parts.coords import FieldEncoder, exact_device, padded
from vispe.encodings.parts.layers import PreciseLinear
from vispe.encodings.registry import register
from vispe.errors import OptionError
from vispe.grid import Positions
from vispe.utils.interval import Interval
from vispe.utils.options import PositiveEvenInt, PositiveFloat


@register
class SinCos3DPoints(ProgressiveBands, FieldEncoder):
    """Adds an MLP of the sines and cosines of every token's 3D point to the tokens.

    per axis and i = 0 .. F - 1: a_i = 2 pi p / T^(2 floor(i / 2) / F), sin for even i, cos for odd i; axes in the
    order y, x, z; then linear, ReLU, linear          arXiv 2211.14710

    On its own, ``encode(points)`` takes points (..., 3) as x, y, z in [0, 1]: a pixel and its depth, un-projected and
    divided by the range of the scene. Used for both image tokens and object queries, it embeds them in one space.
    ``table`` reads `Positions.coords`, whose axes are ordered slow to fast: depth (or time) is z, rows are y, columns
    x.

    Args:
        dim: width of the tokens, d.
        features: sines and cosines per axis, F, even; 128 with the MLP, without it the largest that fits into d / 3.
        temperature: T.
        mlp: whether the MLP (d hidden units) follows; without it channels beyond 3 F are 0.
        normalize: `table` reads coordinates as fractions of the field; False uses unscaled coordinates.
        reveal: 'linear' or 'cosine' activates frequency bands during training, long wavelengths first (PINs, see
            `vispe.encodings.positions.set_progress`); 'none' uses all bands from the start.

    Shapes: pos.coords (1 or b, n, 3) -> (1 or b, n, d) float32; prefix tokens get 0.
    New resolution: the same field of view is sampled at other points.   Cost: the MLP on n points.
    Invariant to: the resolution, where cell centres coincide (normalize=True).
    Raises: ShapeError if `pos` is not 3-axis.
    Differs from the reference: angles are computed in float32 or better for every dtype of the model.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("sincos3d_points", dim=16)
        >>> encoding.table(Grid((2, 3, 2)).positions()).shape
        torch.Size([1, 12, 16])
    """

    name = "sincos3d_points"
    paper = "3DPPE: 3D Point Positional Encoding for Multi-Camera 3D Object Detection Transformers, https://arxiv.org/abs/2211.14710"
    year = 2022
    ndim = (3,)
    encodes = ("position",)
    formula = (
        r"\sin a_i \text{ for even } i, \; \cos a_i \text{ for odd } i, \quad a_i = \frac{2 \pi p}{T^{2 "
        r"\lfloor i / 2 \rfloor / F}}"
    )
    tested_options = ("features=6", "mlp=false", "mlp=false,normalize=false", "temperature=20")

    axes: ClassVar[int] = 3
    grid: ClassVar[None] = None

    dim: Annotated[int, Interval(least=6)]
    features: PositiveEvenInt | None = None
    temperature: PositiveFloat = 10000.0
    mlp: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        # without the MLP: the largest even number of features per axis that fits the width
        self.per_axis = self.features or (128 if self.mlp else self.dim // 6 * 2)
        if not self.mlp and 3 * self.per_axis > self.dim:
            raise OptionError(
                f"sincos3d_points has 3 x {self.per_axis} features, which do not fit into dim={self.dim} without an "
                "MLP. Use fewer, or mlp=true."
            )
        self.first = PreciseLinear(3 * self.per_axis, self.dim) if self.mlp else None
        self.second = PreciseLinear(self.dim, self.dim) if self.mlp else None

    def constant(self) -> bool:
        """Whether the table depends only on positions."""
        return not self.uses_progress and super().constant()

    def reset_parameters(self) -> None:
        """Initialise both layers as torch does."""
        for layer in (self.first, self.second):
            if layer is not None:
                layer.reset_parameters()

    def _encode(self, coords: Tensor, pos: Positions | None) -> Tensor:
        points = coords if pos is None else coords.flip(-1)  # slow to fast -> x, y, z
        waves = self._waves(points)
        if self.first is None or self.second is None:
            return padded(waves, self.dim)
        return self.second(self.first(waves).relu())

    def _waves(self, points: Tensor) -> Tensor:
        pairs = self.per_axis // 2
        powers = torch.arange(pairs, dtype=torch.float64, device=exact_device(points)) / pairs
        rates = (2 * math.pi * self.temperature**-powers).to(points)
        # order of the axes in the reference
        y_x_z = torch.cat([points[..., 1:2], points[..., 0:1], points[..., 2:]], -1)
        angle = y_x_z[..., None] * rates
        # (..., 3, F / 2, 2) -> (..., 3 F), sine and cosine alternating
        waves = torch.stack([angle.sin(), angle.cos()], -1).flatten(-3)
        return self.with_band_weights(waves, pairs, copies=3, interleaved=True)
