"""Attention by slot of a prompt (the index of an item in a list), and its calibration by the prior of slots.

The prior of a slot is the attention to a content-free item in this slot: arXiv 2406.16008 (found in the
middle), 2508.05128 (attention basin).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vispe.errors import ShapeError, counted
from vispe.utils.options import PositiveFloat, checked


def slot_curve(attention: Tensor, item: Tensor) -> Tensor:
    """Return the mean attention to the tokens of each item (..., items), of attention (..., tokens).

    Args:
        attention: attention weights of one query to all tokens.
        item: index of the item of each token (tokens,) int64; below 0 for tokens of no item.

    Raises:
        ShapeError: there is not one index per token, or an item has no tokens.

    >>> slot_curve(torch.tensor([0.5, 0.2, 0.2, 0.1]), torch.tensor([-1, 0, 0, 1]))
    tensor([0.2000, 0.1000], dtype=torch.float64)
    """
    if item.shape != attention.shape[-1:] or not item.numel() or int(item.max()) < 0:
        raise ShapeError(
            f"slot_curve: item must have the shape ({attention.shape[-1]},), one index per token with at least one "
            f"item, got {tuple(item.shape)}."
        )
    inside = item >= 0
    count = item[inside].bincount()
    if not bool(count.all()):
        raise ShapeError(
            f"slot_curve: item {int(count.argmin())} has no tokens. Number the items from 0 without gaps."
        )
    values = attention.double()[..., inside]
    total = values.new_zeros(*values.shape[:-1], len(count)).index_add_(-1, item[inside], values)
    return total / count


def slot_spread(curve: Tensor) -> Tensor:
    """Return (largest - smallest) / mean of curves (..., slots)."""
    return (curve.amax(-1) - curve.amin(-1)) / curve.mean(-1)


def psi(scores: Tensor, decimals: int | None = None) -> Tensor:
    """Return the position sensitivity index 1 - min / max of scores (..., slots), optionally rounded.

    >>> psi(torch.tensor([0.8, 1.0], dtype=torch.float64), 3)
    tensor(0.2000, dtype=torch.float64)
    """
    index = 1 - scores.double().amin(-1) / scores.double().amax(-1)
    return index if decimals is None else index.round(decimals=decimals)


@dataclass(frozen=True, eq=False)
class Calibrated:
    """Attention without the prior of its slots.

    Attributes:
        relevance: mean attention to each item minus that to a content-free item in its slot (..., items).
        share: softmax of relevance / temperature over items (..., items).
        attention: rescaled (..., tokens); the sum over all items and the tokens of no item are unchanged.
    """

    relevance: Tensor
    share: Tensor
    attention: Tensor


@checked
def calibrate(attention: Tensor, item: Tensor, dummy: Tensor, temperature: PositiveFloat) -> Calibrated:
    """Return the attention (..., tokens) of one query without the prior of slots, in float64.

    Args:
        attention: attention weights to all tokens (..., tokens).
        item: index of the item of each token (tokens,) int64; below 0 for tokens of no item.
        dummy: mean attention to a content-free item in each slot, (items,) or (..., items).
        temperature: temperature of the softmax over items; 5e-5 in the paper.

    Raises:
        ShapeError: the number of items differs from that of slots.
        OptionError: the temperature is not above 0.
    """
    mean = slot_curve(attention, item)
    if dummy.shape[-1] != mean.shape[-1]:
        raise ShapeError(
            f"calibrate: dummy must have one entry for each of {counted(mean.shape[-1], 'item')}, got "
            f"{dummy.shape[-1]}."
        )
    relevance = mean - dummy.double()
    # the attention of an item with attention 0 stays 0, so the item is excluded from the softmax
    share = (relevance / temperature).masked_fill(mean == 0, -torch.inf).softmax(-1).nan_to_num(0.0)
    inside, tiny = item >= 0, torch.finfo(torch.float64).tiny
    original = attention.double()
    rate = (share / mean.clamp(min=tiny))[..., item.clamp(min=0)]
    rescaled = original * rate * inside
    # the paper does not define the constant; this one preserves the sum over items
    total = (original * inside).sum(-1, keepdim=True) / rescaled.sum(-1, keepdim=True).clamp(min=tiny)
    return Calibrated(relevance, share, torch.where(inside, rescaled * total, original))
