"""Token order supplied as data: an integer per token in `Positions.attrs['rank']`."""

from __future__ import annotations

import torch
from torch import Tensor

from vispe.errors import ShapeError
from vispe.grid import PerToken, Positions

RANK = "rank"


def bind_ranks(name: str, pos: Positions) -> Positions:
    """Return positions whose ranks are gathered when tokens are dropped; unchanged without ranks."""
    given = pos.attrs.get(RANK)
    if not isinstance(given, Tensor):
        return pos
    return pos.replace(attrs={**pos.attrs, RANK: PerToken(check_ranks(name, given, pos), (1,))})


def ranks_of(name: str, pos: Positions) -> Tensor:
    """Return the rank of every token, (1 or b, n): those in `Positions.attrs`, else the row-major cells of the grid.

    Raises:
        ShapeError: there are neither ranks nor a grid, or ranks are not an integer per token.
    """
    given = pos.attrs.get(RANK)
    if isinstance(given, PerToken):
        given = given.values
    if given is not None:
        return check_ranks(name, given, pos)
    if pos.grid is None:
        raise ShapeError(
            f"{name} needs the rank of every token, got {pos} without any. Set Positions.attrs[{RANK!r}] to integers "
            "(b, n), or use positions of a Grid."
        )
    return pos.numbers()


def check_ranks(name: str, given: object, pos: Positions) -> Tensor:
    """Return checked ranks: integers (1 or b, n) for the tokens of `pos`, prefix tokens included."""
    b, n = pos.coords.shape[:2]
    if isinstance(given, Tensor) and given.ndim == 2 and given.shape[1] == n:
        is_integer = not (given.is_floating_point() or given.is_complex() or given.dtype == torch.bool)
        # one row for all samples, or one per sample
        if is_integer and (b == 1 or len(given) in (1, b)):
            return given
    description = f"{tuple(given.shape)} {given.dtype}" if isinstance(given, Tensor) else type(given).__name__
    raise ShapeError(
        f"{name} needs an integer per token ({n} tokens, prefix included) in Positions.attrs[{RANK!r}], got "
        f"{description}. Pass a tensor ({b if b > 1 else 'b'}, {n}), before tokens are dropped."
    )
