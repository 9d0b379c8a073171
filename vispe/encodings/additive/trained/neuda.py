"""Learned anchor positions on grids of several resolutions (NeuDA, arXiv 2303.02375)."""

from __future__ import annotations

from itertools import product
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vispe.attention.precision import at_least_float32
from vispe.encodings.parts.additive.fourier import ProgressiveBands, band_weights
from vispe.encodings.parts.coords import FieldEncoder, padded
from vispe.encodings.parts.layers import PreciseLinear, small_init
from vispe.encodings.registry import register
from vispe.errors import OptionError, counted
from vispe.grid import Positions
from vispe.utils.options import FiniteFloat, NonNegativeFloat, PositiveFloat, PositiveInt


@register
class NeuDA(ProgressiveBands, FieldEncoder):
    """Adds interpolated waves of learned anchors around every token, from several grids of anchors.

    level i: sum over the 2^axes corners of multilinear weight * [sin(2^i a), cos(2^i a)], a the corner's anchor
    [x, level 0, .., level L - 1], then a linear map to d          arXiv 2303.02375, section 3.2

    Anchors are encoded first, and then interpolated. Each is initialised at a vertex of a grid of int(base * growth^i)
    cells per axis. On its own, ``encode(x)`` takes free coordinates (..., axes) in `box`.

    Args:
        dim: width of the tokens, d.
        grid: shape of the model's grid; defines the number of coordinates. The anchors do not depend on it.
        axes: number of coordinates, 1 to 3, if no grid is known; 2 by default.
        levels: number of grids of anchors, L.
        base: cells per axis of the first level.
        growth: ratio of the cells of a level to those of the previous level. ``neuda.released`` has 8 levels from 16
            cells, each 1.38 times finer, as published for three axes (12 million anchors).
        box: coordinates of the first and the last vertex of every axis.
        eps: coordinates are clamped to this much below the upper bound of the box.
        project: whether a linear map to d follows; without it channels beyond axes * (1 + 2 L) are 0.
        normalize: `table` maps the cell centres of the field to the box; False uses unscaled coordinates.
        reveal: 'linear' or 'cosine' opens level by level while the model is trained, coarse ones first (PINs, see
            `vispe.encodings.positions.set_progress`); 'none' uses all bands from the start.

    Shapes: pos.coords (1 or b, n, axes) -> (1 or b, n, d) float32; prefix tokens get 0.
    New resolution: the same field of view is sampled at other points.
    Cost: sum of (cells + 1)^axes anchors with `axes` numbers each; 2^axes look-ups per token and level.
    Invariant to: the resolution, where cell centres coincide (normalize=True).
    Raises: ShapeError if `pos` has another number of axes; OptionError for invalid numbers of features.
    Differs from the reference: one to three axes instead of three; a linear map to the width of the tokens, which
        starts small (0.02); outside the box, the anchors of its border are used, as in the reference.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("neuda", dim=16, grid=(2, 3))
        >>> encoding.table(Grid((2, 3)).positions()).shape
        torch.Size([1, 6, 16])
    """

    name = "neuda"
    paper = "NeuDA: Neural Deformable Anchor for High-Fidelity Implicit Surface Reconstruction, https://arxiv.org/abs/2303.02375"
    year = 2023
    encodes = ("position",)
    formula = (
        r"\Big[ x, \; \sum_{c} w_c \left[ \sin 2^i a_c, \; \cos 2^i a_c \right], \; i = 0, \ldots, L - 1 "
        r"\Big]"
    )
    tested_options = (
        "levels=2,base=3,growth=1.5,box=[0,2]",
        "levels=2,project=false,normalize=false,eps=0,reveal=linear",
    )
    presets: ClassVar[dict[str, dict[str, Any]]] = {"released": {"levels": 8, "base": 16, "growth": 1.38}}

    levels: PositiveInt = 4
    base: PositiveInt = 4
    growth: PositiveFloat = 2.0
    box: tuple[FiniteFloat, FiniteFloat] = (-1.0, 1.0)
    eps: NonNegativeFloat = 1e-6
    project: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = self.box
        if low >= high or self.eps >= high - low:
            raise OptionError(
                f"box needs a lower bound more than eps below its upper bound, got box=[{low:g}, {high:g}], "
                f"eps={self.eps:g}."
            )
        # cells per axis of each level
        self.scales = tuple(int(self.base * self.growth**i) for i in range(self.levels))
        if min(self.scales) < 1:
            raise OptionError(
                f"levels need at least one cell per axis, got {list(self.scales)} from base={self.base}, "
                f"growth={self.growth:g}."
            )
        self.count = self.coordinates * (1 + 2 * self.levels)
        if not self.project and self.count > self.dim:
            raise OptionError(
                f"neuda has {counted(self.count, 'feature')}, which do not fit into dim={self.dim}. Use fewer "
                "levels, or project=true."
            )
        vertices = sum((n + 1) ** self.coordinates for n in self.scales)
        self.anchors = nn.Parameter(torch.empty(vertices, self.coordinates))
        self.to_dim = PreciseLinear(self.count, self.dim) if self.project else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set every anchor to its vertex, first axis slowest, level by level; the linear map starts small (0.02)."""
        low, high = self.box
        start = 0
        with torch.no_grad():
            for n in self.scales:
                # n cells have n + 1 vertices per axis, borders included
                line = (
                    low
                    + (high - low) * torch.arange(n + 1, dtype=torch.float32, device=self.anchors.device) / n
                )
                vertices = torch.stack(torch.meshgrid(*[line] * self.coordinates, indexing="ij"), -1).flatten(
                    0, -2
                )
                self.anchors[start : start + len(vertices)] = vertices
                start += len(vertices)
        if self.to_dim is not None:
            small_init(self.to_dim)

    def features(self, coords: Tensor) -> Tensor:
        """Return the coordinates followed by the waves of every level, (..., axes * (1 + 2 L))."""
        low, high = self.box
        # in [0, 1): `eps` assigns the upper border to the last cell
        inside = (coords.clamp(low, high - self.eps) - low) / (high - low)
        gates = band_weights(self.levels, self._share, self.reveal).to(inside) if self.uses_progress else None
        features, start = [coords], 0
        for level, n in enumerate(self.scales):
            waves = self._level(inside, start, n, 2.0**level)
            features.append(waves if gates is None else waves * gates[level])
            # anchors of all levels are rows of one parameter
            start += (n + 1) ** self.coordinates
        return torch.cat(features, -1)

    def _level(self, inside: Tensor, start: int, n: int, rate: float) -> Tensor:
        """Return the interpolated waves (..., 2 axes) of one level at positions (..., axes) in [0, 1)."""
        position = inside * n
        # the index of the cell has no gradient
        cell = position.detach().floor().clamp(max=n - 1)
        part = position - cell
        first = cell.long()
        total: Tensor | None = None
        for corner in product((0, 1), repeat=self.coordinates):
            row, weight = torch.zeros_like(first[..., 0]), torch.ones_like(part[..., 0])
            for axis, step in enumerate(corner):
                # row-major index of the corner among the (n + 1)^axes vertices
                row = row * (n + 1) + first[..., axis] + step
                weight = weight * (part[..., axis] if step else 1 - part[..., axis])
            anchor = self.anchors.index_select(0, start + row.flatten()).unflatten(0, row.shape)
            angle = rate * at_least_float32(anchor)
            # encode, then interpolate: the mean of waves is not the wave of the mean
            waves = torch.cat([angle.sin(), angle.cos()], -1) * weight[..., None]
            total = waves if total is None else total + waves
        return inside.new_zeros(0) if total is None else total

    def _encode(self, coords: Tensor, pos: Positions | None) -> Tensor:
        if pos is not None and self.normalize:
            low, high = self.box
            # from fractions of the field to the box of the anchors
            coords = low + (high - low) * coords
        features = self.features(coords)
        return padded(features, self.dim) if self.to_dim is None else self.to_dim(features)
