"""Token order supplied as data: an integer per token in `Positions.attrs['rank']`."""

from __future__ import annotations

import torch
from torch import Tensor

from vispe.errors import ShapeError, counted
from vispe.grid import PerToken, Positions

RANK = "rank"


def bind_ranks(name: str, pos: Positions) -> Positions:
    """Return positions whose ranks are gathered when tokens are dropped; unchanged without ranks."""
    ranks = pos.attrs.get(RANK)
    if not isinstance(ranks, Tensor):
        return pos
    return pos.replace(attrs={**pos.attrs, RANK: PerToken(check_ranks(name, ranks, pos), (1,))})


def ranks_of(name: str, pos: Positions) -> Tensor:
    """Return the rank of every token, (1 or b, n): those in `Positions.attrs`, else the row-major cells of the grid.

    Raises:
        ShapeError: there are neither ranks nor a grid, or ranks are not an integer per token.
    """
    ranks = pos.attrs.get(RANK)
    if isinstance(ranks, PerToken):
        ranks = ranks.values
    if ranks is not None:
        return check_ranks(name, ranks, pos)
    if pos.grid is None:
        raise ShapeError(
            f"{name} needs the rank of every token, got {pos} without any. Set Positions.attrs[{RANK!r}] to integers "
            "(b, n), or use positions of a Grid."
        )
    return pos.numbers()


def check_ranks(name: str, ranks: object, pos: Positions) -> Tensor:
    """Return checked ranks: integers (1 or b, n) for the tokens of `pos`, prefix tokens included."""
    b, n = pos.coords.shape[:2]
    if isinstance(ranks, Tensor) and ranks.ndim == 2 and ranks.shape[1] == n:
        is_integer = not (ranks.is_floating_point() or ranks.is_complex() or ranks.dtype == torch.bool)
        # one row for all samples, or one per sample
        if is_integer and (b == 1 or len(ranks) in (1, b)):
            return ranks
    description = f"{tuple(ranks.shape)} {ranks.dtype}" if isinstance(ranks, Tensor) else type(ranks).__name__
    raise ShapeError(
        f"{name} needs an integer per token ({counted(n, 'token')}, prefix included) in Positions.attrs[{RANK!r}], got "
        f"{description}. Pass a tensor ({b if b > 1 else 'b'}, {n}), before tokens are dropped."
    )
