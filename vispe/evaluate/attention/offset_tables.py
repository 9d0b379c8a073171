"""Tables of values by the offset between two patches, (..., 2 gh - 1, 2 gw - 1) for a grid of gh x gw patches.

Offsets are key minus query; the centre of a table is offset 0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vispe.grid import Grid


def by_offset(values: Tensor, grid: Grid) -> Tensor:
    """Sum values (..., N, N) over pairs of patches with the same offset, (..., 2 gh - 1, 2 gw - 1) float64.

    The query is the first axis; offsets are key minus query.
    """
    (h, w), outer = grid.shape, values.shape[:-2]
    values = values.unflatten(-2, (h, w))
    # keys of a row of queries are contiguous, and so are their offsets: add slices along one axis, then the other
    rows = values.new_zeros(*outer, w, (2 * h - 1) * w, dtype=torch.float64)
    for i in range(h):
        rows[..., (h - 1 - i) * w : (2 * h - 1 - i) * w] += values[..., i, :, :]
    rows = rows.unflatten(-1, (2 * h - 1, w))
    table = rows.new_zeros(*outer, 2 * h - 1, 2 * w - 1)
    for j in range(w):
        table[..., w - 1 - j : 2 * w - 1 - j] += rows[..., j, :, :]
    return table


def pairs(grid: Grid) -> Tensor:
    """Return the number of pairs of patches with each offset, (2 gh - 1, 2 gw - 1) float64."""
    h, w = grid.shape
    rows, cols = (n - torch.arange(1 - n, n, dtype=torch.float64).abs() for n in (h, w))
    return rows[:, None] * cols


def radii(grid: Grid) -> Tensor:
    """Return the distance in patches of every offset, (2 gh - 1, 2 gw - 1) float64."""
    h, w = grid.shape
    down, right = (torch.arange(1 - n, n, dtype=torch.float64) for n in (h, w))
    return (down[:, None] ** 2 + right**2).sqrt()


def by_distance(table: Tensor, grid: Grid) -> Tensor:
    """Return sums of a table by offset (h, 2 gh - 1, 2 gw - 1) at each rounded distance, (h, distances)."""
    ring = radii(grid).round().long().flatten().to(table.device)
    return table.new_zeros(len(table), int(ring.max()) + 1).index_add_(1, ring, table.flatten(1))


def local_mass(attention: Tensor, grid: Grid) -> Tensor:
    """Return the attention on the 3 x 3 neighbours from a table by offset, (..., 2 gh - 1, 2 gw - 1) -> (...)."""
    h, w = grid.shape
    return attention[..., max(h - 2, 0) : h + 1, max(w - 2, 0) : w + 1].sum((-2, -1))


def reach(table: Tensor, eps: float) -> Tensor:
    """Return the distance in patches that contains 1 - eps of a table by offset, (h,) float64.

    Args:
        table: (h, 2 gh - 1, 2 gw - 1), non-negative.
        eps: fraction outside of that distance.

    >>> reach(torch.ones(1, 3, 3), 0.5).tolist()
    [1.0]
    """
    h, w = table.shape[1:]
    distance, order = radii(Grid(((h + 1) // 2, (w + 1) // 2))).flatten().sort()
    mass = table.flatten(1)[:, order].cumsum(1)
    # offsets at equal distance form a ring, which is never split
    edge = torch.nn.functional.pad(distance[1:] != distance[:-1], (0, 1), value=True)
    required = mass[:, -1:] * (1 - eps) * (1 - 1e-9)
    reached = (mass >= required) & edge
    return torch.where(mass[:, -1] > 0, distance[reached.int().argmax(1)], math.nan)
