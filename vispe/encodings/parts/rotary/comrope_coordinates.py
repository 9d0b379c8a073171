"""Coordinates of ComRoPE: displacements in training, normalisation, and the lines of a grid."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from vispe.grid import Positions

Normalize = Literal["axis", "common", "none"]


def jittered(pos: Positions, noise: Tensor, amount: float) -> Tensor:
    """Return the coordinates (b, n, axes) with displacements by noise (1 or b, n, axes), times half a cell."""
    # at most half a cell, to preserve the order of neighbours
    moved = (noise.to(pos.coords) * (0.5 * amount)).clamp(-0.5, 0.5)
    if pos.axes == 3:  # frames are not displaced
        moved = torch.cat([torch.zeros_like(moved[..., :1]), moved[..., 1:]], -1)
    return pos.coords + moved * pos.cell[:, None]


def normalized(x: Tensor, pos: Positions, normalize: Normalize) -> Tensor:
    """Return coordinates (b, n, axes) as those of the centres of cells in fractions of the extent of the grid."""
    if normalize == "none":
        return x
    # 'common': the longer of rows and columns, so that both have the same scale
    extent = pos.extent if normalize == "axis" else pos.extent[:, -2:].amax(-1, keepdim=True)
    return (x + 0.5 * pos.cell[:, None]) / extent[:, None]


def grid_lines(coordinates: Tensor, pos: Positions) -> list[tuple[Tensor, Tensor]] | None:
    """Return, per axis, its coordinates (n_i + 1,), that of prefix tokens last, and each token's index into them (n,).

    None if the coordinates are not those of a grid, that is, after displacements.
    """
    if pos.grid is None:
        return None
    prefix, shape = pos.grid.prefix, pos.grid.shape
    lines: list[tuple[Tensor, Tensor]] = []
    cells = pos.cells()[0]
    for axis, count in enumerate(shape):
        on_grid = coordinates[0, prefix:, axis].reshape(shape)
        # coordinates along this axis, at the first cell of the other axes
        first = on_grid.movedim(axis, 0).reshape(count, -1)[:, 0]
        outside = coordinates[0, :1, axis] if prefix else first[:1]
        line = torch.cat([first, outside])
        index = torch.where(pos.spatial[0], cells[:, axis], count)
        # exact comparison: a sampler may have moved tokens off the lines of the grid
        if not torch.equal(line.index_select(0, index), coordinates[0, :, axis]):
            return None
        lines.append((line, index))
    return lines
