"""Frequency vectors of pairs of channels, with evenly spread directions on one to three axes."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

GOLDEN = (1 + math.sqrt(5)) / 2
PLASTIC = 1.324717957244746  # root of x^3 = x + 1, the two-dimensional analogue of the golden ratio


def golden_frequencies(pairs: int, axes: int, low: float, high: float, unrotated: float) -> Tensor:
    """Return frequency vectors (pairs, axes) float64 from slow to fast, each pair in a separate direction.

    Args:
        pairs: number of pairs.
        axes: number of axes.
        low: smallest magnitude, in radians per unit of the coordinates.
        high: largest magnitude.
        unrotated: fraction of the pairs, the first ones, with magnitude 0.
    """
    count = round(unrotated * pairs)
    way = torch.linspace(0, 1, pairs - count, dtype=torch.float64)
    sizes = F.pad(low * (high / low) ** way, (count, 0))
    return sizes[:, None] * _golden_directions(pairs, axes)


def spiral_frequencies(
    pairs: int, axes: int, low: float, high: float, unrotated: float, groups: int
) -> Tensor:
    """Return frequency vectors (pairs, axes) float64 in groups with one direction and all magnitudes, fast to slow.

    The arguments are those of `golden_frequencies`, where `unrotated` applies to each group, and the number of groups.
    """
    parts: list[Tensor] = []
    for group in torch.arange(pairs).tensor_split(groups):
        count = round(unrotated * len(group))
        way = torch.arange(len(group) - count, dtype=torch.float64) / max(len(group) - count, 1)
        parts.append(F.pad(high * (low / high) ** way, (count, 0)))
    counts = torch.tensor([len(part) for part in parts])
    directions = _spread_directions(groups, axes).repeat_interleave(counts, 0, output_size=pairs)
    return torch.cat(parts)[:, None] * directions


def _golden_directions(count: int, axes: int) -> Tensor:
    """Return directions (count, axes) float64 of which any consecutive ones are spread evenly."""
    f = torch.arange(count, dtype=torch.float64)
    if axes < 3:
        return _circle(math.pi * f / GOLDEN, axes)
    # height and azimuth advance by irrational steps, so any consecutive directions are spread evenly
    return _sphere((f / PLASTIC + 0.5) % 1, 2 * math.pi * f / PLASTIC**2)


def _spread_directions(count: int, axes: int) -> Tensor:
    """Return directions (count, axes) float64 that are spread evenly, identifying opposite ones."""
    g = torch.arange(count, dtype=torch.float64)
    if axes < 3:
        # half a circle: the opposite direction only changes the sign of the angle
        return _circle(math.pi * g / count, axes)
    return _sphere((g + 0.5) / count, 2 * math.pi * g / GOLDEN)


def _circle(angle: Tensor, axes: int) -> Tensor:
    """Return directions (y, x); on one axis, all are equal."""
    return torch.stack([angle.sin(), angle.cos()], -1) if axes == 2 else torch.ones_like(angle)[:, None]


def _sphere(height: Tensor, angle: Tensor) -> Tensor:
    """Return directions (z, y, x) with uniform heights from 0 to 1, which cover the half sphere uniformly."""
    radius = (1 - height.square()).sqrt()
    return torch.stack([height, radius * angle.sin(), radius * angle.cos()], -1)
