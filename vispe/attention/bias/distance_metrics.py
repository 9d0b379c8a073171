"""Distance metrics: between two sets of positions, and for all offsets of a regular grid."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, cast, get_args

import torch
from torch import Tensor

from vispe.errors import OptionError, counted
from vispe.grid import Grid, Positions
from vispe.utils.constants import constant

Metric = Literal["euclidean", "manhattan", "chebyshev", "squared"]
Normalize = Literal["max", "reference", "none"]
Reference = tuple[int, ...] | None
_vector_norm = cast("Callable[..., Tensor]", torch.linalg.vector_norm)  # pyright: ignore[reportUnknownMemberType]


def check_rule(metric: str, normalize: str) -> None:
    """Raise `OptionError` for an unknown metric or normalisation."""
    if metric not in get_args(Metric):
        raise OptionError(f"metric must be one of {', '.join(get_args(Metric))}, got {metric!r}.")
    if normalize not in get_args(Normalize):
        raise OptionError(f"normalize must be one of {', '.join(get_args(Normalize))}, got {normalize!r}.")


def distances(
    pos_q: Positions,
    pos_k: Positions,
    metric: Metric,
    wrap: bool,
    normalize: Normalize,
    reference: Reference = None,
) -> Tensor:
    """Return distances (b or 1, n, m) between tokens, 0 for tokens without a position.

    The result has the dtype of the coordinates (float32 or better). The subgradient at distance 0 is 0.
    """
    gap = (pos_q.coords[:, :, None] - pos_k.coords[:, None]).abs()
    period = pos_q.extent[:, None, None]
    # free coordinates may be outside of the extent
    if wrap:
        gap = gap.remainder(period)
    distance = _measure(gap, period, metric, wrap)
    divisor = largest(pos_q.extent, pos_q.cell, pos_q.grid, metric, wrap, normalize, reference)
    if divisor is not None:
        distance = distance / divisor[:, None, None]
    both_spatial = pos_q.spatial[:, :, None] & pos_k.spatial[:, None]
    return distance.masked_fill(~both_spatial, 0.0)


def offsets(
    grid: Grid,
    metric: Metric,
    wrap: bool,
    normalize: Normalize,
    reference: Reference = None,
    device: torch.device | None = None,
) -> Tensor:
    """Return the distances of all offsets on `grid`, (2 n_1 - 1, 2 n_2 - 1, ...) float32."""
    spacing = constant(grid.spacing or (1.0,) * grid.axes, torch.get_default_dtype(), device)
    lines = [torch.arange(1 - n, n, dtype=torch.float32, device=device) for n in grid.shape]
    gap = torch.stack(torch.meshgrid(*lines, indexing="ij"), -1).abs() * spacing
    extent = (torch.stack([line[-1] for line in lines]) + 1) * spacing  # sizes may be symbols
    distance = _measure(gap, extent, metric, wrap)
    divisor = largest(extent[None], spacing[None], grid, metric, wrap, normalize, reference)
    return distance if divisor is None else distance / divisor


def _measure(gap: Tensor, extent: Tensor, metric: Metric, wrap: bool) -> Tensor:
    if wrap:
        gap = torch.minimum(gap, extent - gap)
    # on one axis all metrics but 'squared' are equal; torch 2.11 cannot compile a norm over one element
    if gap.shape[-1] == 1:
        return gap[..., 0].square() if metric == "squared" else gap[..., 0]
    if metric == "euclidean":
        return _vector_norm(gap, dim=-1)
    if metric == "squared":
        return gap.square().sum(-1)
    return gap.sum(-1) if metric == "manhattan" else gap.amax(-1)


def largest(
    extent: Tensor,
    cell: Tensor,
    grid: Grid | None,
    metric: Metric,
    wrap: bool,
    normalize: Normalize,
    reference: Reference,
) -> Tensor | None:
    """Return the divisor of normalised distances: the largest distance of the field (b or 1,), or 1 if that is 0.

    Computed in closed form; None for normalize='none'.

    Raises:
        OptionError: normalize='reference' without a reference grid of as many axes.
    """
    if normalize == "none":
        return None
    cells = extent / cell
    if normalize == "reference":
        shape = reference or (grid.reference if grid else None)
        if shape is None or len(shape) != extent.shape[-1]:
            raise OptionError(
                f"normalize='reference' needs the grid shape of the training resolution, got {shape} for "
                f"{counted(extent.shape[-1], 'axis')}. Pass reference=[h, w] or Grid(..., reference=(h, w))."
            )
        cells = extent.new_tensor(shape)[None]
    # extent / cell may be off an integer by rounding, which floor below would turn into a missing cell
    integers = cells.round()
    cells = torch.where((cells - integers).abs() < 1e-3, integers, cells)
    # on a torus no token is farther than half of the extent
    farthest = (cells / 2).floor() if wrap else cells - 1
    largest = _measure(farthest * cell, extent, metric, wrap=False)
    return largest.where(largest > 0, torch.ones_like(largest))
