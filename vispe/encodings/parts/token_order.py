"""An order of the tokens that is given as data: one whole number per token in `Positions.attrs['rank']`."""

from __future__ import annotations

import torch
from torch import Tensor

from vispe.errors import ShapeError
from vispe.grid import PerToken, Positions

RANK = "rank"


def follow(name: str, pos: Positions) -> Positions:
    """Return positions whose ranks follow when tokens are dropped; those without ranks as they are."""
    given = pos.attrs.get(RANK)
    if not isinstance(given, Tensor):
        return pos
    return pos.replace(attrs={**pos.attrs, RANK: PerToken(check_ranks(name, given, pos), (1,))})


def ranks_of(name: str, pos: Positions) -> Tensor:
    """Return the rank of every token, (1 or b, n): what is given, else the cells of the grid, row by row.

    Raises:
        ShapeError: there are neither ranks nor a grid, or ranks are not one whole number per token.
    """
    given = pos.attrs.get(RANK)
    if isinstance(given, PerToken):
        given = given.values
    if given is not None:
        return check_ranks(name, given, pos)
    if pos.grid is None:
        raise ShapeError(
            f"{name} needs the rank of every token, got {pos} without any; put whole numbers (b, n) into "
            f"Positions.attrs[{RANK!r}], or give positions of a Grid."
        )
    return pos.numbers()


def check_ranks(name: str, given: object, pos: Positions) -> Tensor:
    """Return ranks, checked: whole numbers (1 or b, n) for the tokens of `pos`, prefix tokens included."""
    b, n = pos.coords.shape[:2]
    if isinstance(given, Tensor) and given.ndim == 2 and given.shape[1] == n:
        whole = not (given.is_floating_point() or given.is_complex() or given.dtype == torch.bool)
        if whole and (b == 1 or len(given) in (1, b)):
            return given
    found = f"{tuple(given.shape)} {given.dtype}" if isinstance(given, Tensor) else type(given).__name__
    raise ShapeError(
        f"{name} needs one whole number for each of {n} tokens, prefix included, in Positions.attrs[{RANK!r}], got "
        f"{found}; give a tensor ({b if b > 1 else 'b'}, {n}), before tokens are dropped."
    )
