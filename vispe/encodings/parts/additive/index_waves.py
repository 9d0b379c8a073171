"""Interleaved sines and cosines of the index of each cell of a grid, and their assignment to tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from vispe.grid import Positions


def wave_rates(width: int, temperature: float, like: Tensor) -> Tensor:
    """Return ``temperature ** (-2 i / width)`` (width / 2,), with the dtype and on the device of `like`."""
    powers = torch.arange(0, width, 2, dtype=like.dtype, device=like.device) / width
    return temperature**-powers


def rounded_angles(index: Tensor, width: int, temperature: float) -> Tensor:
    """Return index (...) times `wave_rates`, (..., width / 2), with the rounding of the released code of LOOPE.

    Args:
        index: float32.
        width: channels of the waves.
        temperature: approximate ratio of the longest to the shortest wavelength.
    """
    powers = torch.arange(0, width, 2, dtype=torch.float32, device=index.device)
    # float32 in every step, as in the released code
    return index[..., None] * (powers * -(math.log(temperature) / width)).exp()


def interleaved_waves(angle: Tensor) -> Tensor:
    """Return sine and cosine of angles (..., k) in alternation, (..., 2 k)."""
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(-2)


def of_tokens(cells: Tensor, pos: Positions) -> Tensor:
    """Return the row of every token of `pos` (1 or b, n, d), 0 for prefix tokens.

    Args:
        cells: rows of all cells of the grid (1 or b, h w, d).
        pos: positions of tokens of the grid.
    """
    prefix = pos.grid.prefix if pos.grid else 0
    if pos.regular:
        return F.pad(cells, (0, 0, prefix, 0))
    numbers = pos.numbers()
    b = max(len(cells), len(numbers), len(pos.spatial))
    index = torch.where(pos.spatial, numbers, 0).expand(b, -1)
    # (b, h w, d) -> (b, n, d)
    gathered = cells.expand(b, -1, -1).gather(1, index[..., None].expand(-1, -1, cells.shape[-1]))
    return gathered * pos.spatial[..., None]
