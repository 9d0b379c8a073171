"""Evenly spread directions on one to three axes, for pairs of channels."""

from __future__ import annotations

import math

import torch
from torch import Tensor

GOLDEN = (1 + math.sqrt(5)) / 2
PLASTIC = 1.324717957244746  # root of x^3 = x + 1, the two-dimensional analogue of the golden ratio


def golden_directions(count: int, axes: int) -> Tensor:
    """Return directions (count, axes) float64 of which any consecutive ones are spread evenly."""
    f = torch.arange(count, dtype=torch.float64)
    if axes < 3:
        return _circle(math.pi * f / GOLDEN, axes)
    # height and azimuth advance by irrational steps, so any consecutive directions are spread evenly
    return _sphere((f / PLASTIC + 0.5) % 1, 2 * math.pi * f / PLASTIC**2)


def spread_directions(count: int, axes: int) -> Tensor:
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
