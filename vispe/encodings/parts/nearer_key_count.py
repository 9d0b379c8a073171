"""Counting what lies nearer: sums over keys in the order of their distance from a query."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from vispe.attention.bias.distance_metrics import distances
from vispe.grid import Positions

FINE = 1024  # distances that differ by less than this share of a step count as equal


def count_nearer(gates: Tensor, pos: Positions, causal: bool) -> tuple[Tensor, Tensor]:
    """Return sums of gates, and which pairs they are for, bool (b or 1, 1, n, n).

    The sum of query i and key j is over the keys m that are as near to i as j is, or nearer, j and i among them. Pairs
    of tokens without a place have none, nor what is later where it is causal.

    Args:
        gates: (b, h, n, n), of each query for each key.
        pos: the tokens.
        causal: whether keys are those before the query, along one axis.
    """
    order, last, seen = pos.remember(("nearer", causal), lambda: _order(pos, causal))
    order, last = (index[:, None].expand_as(gates) for index in (order, last))
    seen = seen[:, None]
    # keys by distance, one running sum, and for each key the sum up to the last one that is equally far
    return gates.where(seen, 0.0).gather(-1, order).cumsum(-1).gather(-1, last), seen


def _order(pos: Positions, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys by distance, the place of the last one as far as each, and which pairs count, (b or 1, n, n)."""
    away = distances(pos, pos, "euclidean", wrap=False, normalize="none").detach()
    # what a rounding error apart is equally far, so that turning a grid changes nothing
    steps = (away / pos.cell.detach().amin(-1)[:, None, None] * FINE).round()
    seen = (pos.spatial[:, :, None] & pos.spatial[:, None]).expand_as(steps)
    if causal:
        seen = seen & (pos.coords[:, :, None, 0] >= pos.coords[:, None, :, 0])
    steps = steps.masked_fill(~seen, float("inf"))
    ranked, order = steps.sort(dim=-1)
    # the number of the distance of each sorted key, then where keys of that distance end: ONNX has no searchsorted
    number = F.pad((ranked[..., 1:] != ranked[..., :-1]).long().cumsum(-1), (1, 0))
    ends = torch.zeros_like(number).scatter_add(-1, number, torch.ones_like(number)).cumsum(-1) - 1
    last = torch.zeros_like(order).scatter(-1, order, ends.gather(-1, number))
    return order, last, seen
