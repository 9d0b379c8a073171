"""Sums of gates over keys ordered by their distance from a query."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from vispe.attention.bias.distance_metrics import distances
from vispe.grid import Positions

FINE = 1024  # distances that differ by less than 1 / FINE of a grid step are equal
# attribute of positions: pairs (b, n, n) hidden by a mask, whose keys do not count
HIDDEN_PAIRS = "hidden_pairs"


def count_nearer(
    gates: Tensor, pos: Positions, causal: bool, hidden: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return sums of gates over nearer keys, and a mask of valid pairs, bool (b or 1, 1, n, n).

    The sum of query i and key j is over all keys m at most as far from i as j, including j and i. Pairs with a token
    without a position are invalid; with `causal`, so are later keys; and so are hidden pairs.

    Args:
        gates: (b, h, n, n), of each query for each key.
        pos: positions of the tokens.
        causal: whether only keys up to the query count, along one axis.
        hidden: hidden pairs, bool (b, n, n).
    """
    order, last, visible = pos.remember(("nearer", causal), lambda: _order(pos, causal))
    order, last = (index[:, None].expand_as(gates) for index in (order, last))
    visible = (visible if hidden is None else visible & ~hidden)[:, None]
    # sort keys by distance, cumulative sum, then read the sum at the last key of equal distance
    return gates.where(visible, 0.0).gather(-1, order).cumsum(-1).gather(-1, last), visible


def _order(pos: Positions, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys sorted by distance, the rank of the last equally distant key, and the valid pairs, (b or 1, n, n)."""
    away = distances(pos, pos, "euclidean", wrap=False, normalize="none").detach()
    # distances equal up to rounding are ties, so that rotating the grid changes nothing
    steps = (away / pos.cell.detach().amin(-1)[:, None, None] * FINE).round()
    visible = (pos.spatial[:, :, None] & pos.spatial[:, None]).expand_as(steps)
    if causal:
        visible = visible & (pos.coords[:, :, None, 0] >= pos.coords[:, None, :, 0])
    steps = steps.masked_fill(~visible, float("inf"))
    ranked, order = steps.sort(dim=-1)
    # index of each distinct distance, then the last key of that distance (ONNX has no searchsorted)
    number = F.pad((ranked[..., 1:] != ranked[..., :-1]).long().cumsum(-1), (1, 0))
    ends = torch.zeros_like(number).scatter_add(-1, number, torch.ones_like(number)).cumsum(-1) - 1
    last = torch.zeros_like(order).scatter(-1, order, ends.gather(-1, number))
    return order, last, visible
