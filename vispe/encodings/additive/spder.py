"""A coordinate network of damped sines (SPDER, arXiv 2306.15242)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from vispe.attention.precision import at_least_float32
from vispe.encodings.parts.coords import CoordinateEncoder, affine, small_init
from vispe.encodings.registry import register
from vispe.errors import OptionError, check_flag, is_positive, is_whole
from vispe.grid import Positions

MOST = 4096  # inputs of a layer


@register
class Spder(CoordinateEncoder):
    """Adds a small network of the coordinates to the tokens, with a sine damped by the root of its argument.

    layer: u = omega (W x + b), y = sin(u) sqrt(|u|)          arXiv 2306.15242

    On its own, ``encode(x)`` takes free coordinates (..., axes), in [-1, 1] as the paper uses them; ``table`` brings
    the cell centres of a grid to that range. With ``project=False`` and one layer it is the paper's layer itself.

    Args:
        dim: width of the tokens, d.
        grid: shape of the model's grid; says how many coordinates there are.
        axes: number of coordinates where no grid is known; 2 by default. `table` needs 1 to 3, `encode` takes up to
            4096, so that single layers of deeper networks can be built.
        hidden: width of the layers; d by default.
        layers: number of damped-sine layers.
        omega: factor of the argument.
        project: whether a linear map to d follows; without it the last layer has width d.
        normalize: `table` reads fractions of the field as [-1, 1]; False takes the coordinates as they are.

    Shapes: pos.coords (1 or b, n, axes) -> (1 or b, n, d) float32; prefix tokens get 0.
    New resolution: the same field of view is sampled at other points.   Cost: the network, once per forward.
    Invariant to: the resolution, where cell centres coincide (normalize=True).
    Raises: ShapeError if `pos` has another number of axes.
    Differs from the reference: the root is taken of at least the smallest normal number, so that the gradient at
        u = 0, there 0 * inf = NaN, is the limit 0; everything is computed in float32 for half-precision parameters;
        the linear map starts small (0.02), as tables do.
    """

    name = "spder"
    paper = "SPDER: Semiperiodic Damping-Enabled Object Representation, https://arxiv.org/abs/2306.15242"
    year = 2023
    ndim = (1, 2, 3)

    def __init__(
        self,
        *,
        dim: int,
        grid: Sequence[int] | None = None,
        axes: int | None = None,
        hidden: int | None = None,
        layers: int = 1,
        omega: float = 30.0,
        project: bool = True,
        normalize: bool = True,
    ) -> None:
        super().__init__(dim, axes, grid, normalize, most=MOST)
        if not is_whole(layers) or layers < 1 or not (hidden is None or (is_whole(hidden) and hidden > 0)):
            raise OptionError(
                f"spder needs at least one layer of width above 0, got layers={layers!r}, hidden={hidden!r}."
            )
        if not is_positive(omega):
            raise OptionError(f"spder needs a positive omega, got omega={omega!r}.")
        check_flag("project", project)
        if hidden is not None and layers == 1 and not project:
            raise OptionError(
                f"hidden={hidden} has no effect on one layer with project=False: its width is dim={dim}."
            )
        self.hidden, self.layers, self.omega, self.project = hidden, layers, omega, project
        inner = dim if hidden is None else hidden
        widths = [self.coordinates, *[inner] * (layers - 1), inner if project else dim]
        self.sines = nn.ModuleList(nn.Linear(i, o) for i, o in pairwise(widths))
        self.head = nn.Linear(inner, dim) if project else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the first weight from U(-1/n, 1/n), others from U(-r, r), r = sqrt(6/n)/omega, n inputs."""
        for i, layer in enumerate(_linears(self.sines)):
            layer.reset_parameters()  # the bias is torch's own
            n = layer.in_features
            bound = math.sqrt(6 / n) / self.omega if i else 1 / n
            nn.init.uniform_(layer.weight, -bound, bound)
        if self.head is not None:
            small_init(self.head)

    def _encode(self, coords: Tensor, pos: Positions | None) -> Tensor:
        x = coords
        if pos is not None and self.normalize:
            x = 2 * x - 1
        for layer in _linears(self.sines):
            x = damped_sine(self.omega * affine(layer, x))
        return x if self.head is None else affine(self.head, x)


def damped_sine(u: Tensor) -> Tensor:
    """Return ``sin(u) * sqrt(|u|)``, with gradient 0 at u = 0."""
    u = at_least_float32(u)
    return u.sin() * u.abs().clamp(min=torch.finfo(u.dtype).tiny).sqrt()


def _linears(layers: nn.ModuleList) -> list[nn.Linear]:
    return [layer for layer in layers if isinstance(layer, nn.Linear)]
