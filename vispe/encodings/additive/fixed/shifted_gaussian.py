"""Shifted Gaussians of every coordinate (Rethinking Positional Encoding, arXiv 2107.02561)."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
from torch import Tensor

from vispe.encodings.parts.coords import FieldEncoder, padded
from vispe.encodings.parts.layers import PreciseLinear, small_init
from vispe.encodings.registry import register
from vispe.errors import OptionError, counted
from vispe.grid import Positions
from vispe.utils.interval import Interval
from vispe.utils.options import FiniteFloat, PositiveFloat, PositiveInt

Divisor = Literal["constant", "batch", "none"]


@register
class ShiftedGaussian(FieldEncoder):
    """Adds Gaussians of each token's coordinates around evenly spaced centres on each axis.

    exp(-(x - c_k)^2 / (2 sigma^2)), c_k = k / m, k = 0 .. m - 1, per axis; axes concatenated          arXiv 2107.02561

    On its own, ``encode(x)`` takes free coordinates (..., axes) in [0, 1].

    Args:
        dim: width of the tokens, d.
        grid: shape of the model's grid; defines the number of coordinates.
        axes: number of coordinates, 1 to 3, if no grid is known; 2 by default.
        centres: number of centres per axis, m, or a list of the centres themselves; d // axes by default. Channels
            beyond axes * m are 0.
        sigma: width of the Gaussians, in fractions of the field. The paper tries 0.07, 0.003 and 0.001.
        divisor: 'constant' divides by the norm of the encoding of a point on the middle centre of every axis, so
            that norms are about 1 and a point's encoding depends on nothing else; 'batch' by the largest norm among
            the points at hand (for tokens: of the whole grid), as the released code; 'none' not at all.
        project: whether a learned linear map from axes * m features to d follows.
        normalize: `table` reads coordinates as fractions of the field; False takes them as they are.

    Shapes: pos.coords (1 or b, n, axes) -> (1 or b, n, d) float32; prefix tokens get 0.
    New resolution: the same field of view is sampled at other points.   Cost: no parameters without project, O(n d).
    Invariant to: the resolution, where cell centres coincide (normalize=True); distances between encodings depend
        on offsets only, away from the first and last centre.
    Raises: ShapeError if `pos` has another number of axes.
    Differs from the reference: a constant divisor by default, because with the largest norm of the batch a
        point's encoding depends on the other points.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("shifted_gaussian", dim=16, grid=(2, 3))
        >>> encoding.table(Grid((2, 3)).positions()).shape
        torch.Size([1, 6, 16])
    """

    name = "shifted_gaussian"
    paper = "Rethinking Positional Encoding, https://arxiv.org/abs/2107.02561"
    year = 2021
    encodes = ("position",)
    formula = r"\exp \left( - \frac{(x - c_k)^2}{2 \sigma^2} \right), \quad c_k = \frac{k}{m}"
    tested_options = (
        "centres=5,sigma=0.2",
        "divisor=batch",
        "divisor=none",
        "project=true,centres=20",
        "normalize=false",
    )

    centres: PositiveInt | Annotated[tuple[FiniteFloat, ...], Interval(least=1)] | None = None
    sigma: PositiveFloat = 0.07
    divisor: Divisor = "constant"
    project: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        centres = max(self.dim // self.coordinates, 1) if self.centres is None else self.centres
        self._points = tuple(k / centres for k in range(centres)) if isinstance(centres, int) else centres
        # the norm of the encoding of a point on the middle centre of every axis
        middle = self._points[len(self._points) // 2]
        # squares of the Gaussians exp(-x^2 / 2) at the middle centre
        bumps = [math.exp(-(((middle - c) / self.sigma) ** 2)) for c in self._points]
        self._norm = math.sqrt(self.coordinates * math.fsum(bumps))
        features = len(self._points) * self.coordinates
        if features > self.dim and not self.project:
            raise OptionError(
                f"shifted_gaussian has {counted(len(self._points), 'centre')} on each of "
                f"{counted(self.coordinates, 'axis')}, which do not fit into dim={self.dim}. Use fewer, or "
                "project=true."
            )
        self.to_dim = PreciseLinear(features, self.dim) if self.project else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the linear map, if there is one, from a truncated normal of 0.02; its bias is 0."""
        if self.to_dim is not None:
            small_init(self.to_dim)

    def centre_points(self) -> tuple[float, ...]:
        """Return the centres of one axis."""
        return self._points

    def _encode(self, coords: Tensor, pos: Positions | None) -> Tensor:
        features = self._bumps(coords)
        if self.divisor == "constant":
            features = features / self._norm
        elif self.divisor == "batch":
            features = features / self._largest(features, pos)
        return padded(features, self.dim) if self.to_dim is None else self.to_dim(features)

    def _bumps(self, coords: Tensor) -> Tensor:
        gap = (coords[..., None] - coords.new_tensor(self._points)) / self.sigma
        # (..., axes, centres) -> (..., axes * centres)
        return (gap.square() * -0.5).exp().flatten(-2)

    def _largest(self, features: Tensor, pos: Positions | None) -> Tensor:
        """Return the largest norm of all points at hand; of the whole grid when tokens have been dropped."""
        has_position = None if pos is None else pos.spatial
        if pos is not None and pos.grid is not None and pos.index is not None:
            all_tokens = pos.grid.positions(pos.coords.device)
            features, has_position = self._bumps(self.place(all_tokens)), all_tokens.spatial
        norms = features.square().sum(-1).sqrt()
        # prefix tokens must not determine the largest norm
        norms = norms if has_position is None else norms.masked_fill(~has_position, 0.0)
        # positive, since features are divided by it
        return norms.max().clamp(min=torch.finfo(norms.dtype).tiny)
