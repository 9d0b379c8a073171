"""Coordinate network of damped sines (SPDER, arXiv 2306.15242)."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Annotated

import torch
from torch import Tensor, nn

from vispe.attention.precision import at_least_float32
from vispe.encodings.parts.coords import FieldEncoder
from vispe.encodings.parts.layers import PreciseLinear, small_init
from vispe.encodings.registry import register
from vispe.errors import OptionError
from vispe.grid import Positions
from vispe.utils.interval import Interval
from vispe.utils.options import PositiveFloat, PositiveInt

MOST = 4096  # inputs of a layer


@register
class Spder(FieldEncoder):
    """Adds a small network of the coordinates, with sines multiplied by the root of their argument, to the tokens.

    layer: u = omega (W x + b), y = sin(u) sqrt(|u|)          arXiv 2306.15242

    On its own, ``encode(x)`` takes free coordinates (..., axes), in [-1, 1] as the paper uses them; ``table`` maps
    the cell centres of a grid to that range. With ``project=False`` and one layer it is the paper's layer itself.

    Args:
        dim: width of the tokens, d.
        grid: shape of the model's grid; defines the number of coordinates.
        axes: number of coordinates if no grid is known; 2 by default. `table` needs 1 to 3, `encode` supports up to
            4096, so that single layers of deeper networks can be built.
        hidden: width of the layers; d by default.
        layers: number of damped-sine layers.
        omega: factor of the argument.
        project: whether a linear map to d follows; without it the last layer has width d.
        normalize: `table` maps fractions of the field to [-1, 1]; False uses unscaled coordinates.

    Shapes: pos.coords (1 or b, n, axes) -> (1 or b, n, d) float32; prefix tokens get 0.
    New resolution: the same field of view is sampled at other points.   Cost: the network, once per forward.
    Invariant to: the resolution, where cell centres coincide (normalize=True).
    Raises: ShapeError if `pos` has another number of axes.
    Differs from the reference: the root is taken of at least the smallest normal number, so that the gradient at
        u = 0 (0 * inf = NaN in the reference) is the limit 0; computed in float32 for half-precision parameters;
        the linear map starts small (0.02), as tables do.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("spder", dim=16, grid=(2, 3))
        >>> encoding.table(Grid((2, 3)).positions()).shape
        torch.Size([1, 6, 16])
    """

    name = "spder"
    paper = "SPDER: Semiperiodic Damping-Enabled Object Representation, https://arxiv.org/abs/2306.15242"
    year = 2023
    encodes = ("position",)
    formula = r"y = \sin(u) \sqrt{|u|}, \quad u = \omega (W x + b)"
    tested_options = ("layers=2,hidden=10", "project=false", "omega=10,normalize=false")

    axes: Annotated[int, Interval(least=1, most=MOST)] | None = None
    hidden: PositiveInt | None = None
    layers: PositiveInt = 1
    omega: PositiveFloat = 30.0
    project: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden is not None and self.layers == 1 and not self.project:
            raise OptionError(
                f"hidden={self.hidden} has no effect on one layer with project=False: its width is dim={self.dim}."
            )
        inner = self.hidden or self.dim
        widths = [self.coordinates, *[inner] * (self.layers - 1), inner if self.project else self.dim]
        self.sines = nn.ModuleList(PreciseLinear(i, o) for i, o in pairwise(widths))
        self.to_dim = PreciseLinear(inner, self.dim) if self.project else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the first weight from U(-1/n, 1/n), others from U(-r, r), r = sqrt(6/n)/omega, n inputs."""
        for i, layer in enumerate(_linears(self.sines)):
            layer.reset_parameters()  # the bias is initialised as in torch
            n = layer.in_features
            bound = math.sqrt(6 / n) / self.omega if i else 1 / n
            nn.init.uniform_(layer.weight, -bound, bound)
        if self.to_dim is not None:
            small_init(self.to_dim)

    def _encode(self, coords: Tensor, pos: Positions | None) -> Tensor:
        x = coords
        if pos is not None and self.normalize:
            # cell centres from (0, 1) to (-1, 1)
            x = 2 * x - 1
        for layer in _linears(self.sines):
            x = damped_sine(self.omega * layer(x))
        return x if self.to_dim is None else self.to_dim(x)


def damped_sine(u: Tensor) -> Tensor:
    """Return ``sin(u) * sqrt(|u|)``, with gradient 0 at u = 0."""
    u = at_least_float32(u)
    return u.sin() * u.abs().clamp(min=torch.finfo(u.dtype).tiny).sqrt()


def _linears(layers: nn.ModuleList) -> list[PreciseLinear]:
    return [layer for layer in layers if isinstance(layer, PreciseLinear)]
