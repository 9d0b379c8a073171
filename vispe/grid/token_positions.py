"""Positions of given tokens."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from vispe.errors import ShapeError, counted
from vispe.grid.positions import Positions
from vispe.grid.token_grid import Grid


def as_positions(where: Positions | Grid | Sequence[int], like: Tensor) -> Positions:
    """Return positions for tokens `like` (b, n, d), from Positions, a Grid or a grid shape.

    A shape implies no prefix tokens; use ``Grid(shape, prefix=...)`` otherwise.

    Raises:
        ShapeError: `like` has another number of tokens or is on another device than `where`.

    Example:
        >>> import torch
        >>> as_positions((2, 3), torch.zeros(1, 6, 8)).tokens
        6
    """
    if like.ndim != 3:
        raise ShapeError(f"The input must be tokens (b, n, d), got {tuple(like.shape)}.")
    if isinstance(where, Positions):
        pos = where
    else:
        grid = where if isinstance(where, Grid) else Grid(tuple(where))
        pos = grid.positions(like.device)
    if pos.tokens != like.shape[1]:
        raise ShapeError(
            f"The input has {counted(like.shape[1], 'token')}, but {pos.grid or pos} has {pos.tokens}. "
            "Pass the grid of this input, with prefix=number of class and register tokens."
        )
    if pos.coords.device != like.device:
        raise ShapeError(
            f"The input is on {like.device}, but its positions are on {pos.coords.device}. "
            "Create them with grid.positions(x.device)."
        )
    return pos
