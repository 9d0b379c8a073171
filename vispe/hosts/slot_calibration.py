"""Slots of a prompt: how much attention items get where they stand, and attention calibrated by that.

The prior of slots is what content-free items get: arXiv 2406.16008 (found in the middle), 2508.05128 (attention basin).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vispe.errors import OptionError, ShapeError


def slot_curve(attention: Tensor, item: Tensor) -> Tensor:
    """Return the mean attention to the tokens of each item (..., items), of attention (..., tokens).

    Args:
        attention: of one query to all tokens.
        item: number of the item of each token (tokens,) int64; below 0 for tokens of none.

    Raises:
        ShapeError: not one number for each token, or an item without tokens.

    >>> slot_curve(torch.tensor([0.5, 0.2, 0.2, 0.1]), torch.tensor([-1, 0, 0, 1]))
    tensor([0.2000, 0.1000], dtype=torch.float64)
    """
    if item.shape != attention.shape[-1:] or not item.numel() or int(item.max()) < 0:
        raise ShapeError(
            f"Slots need the item of each of {attention.shape[-1]} tokens, and at least one item; got numbers of the "
            f"shape {tuple(item.shape)}."
        )
    inside = item >= 0
    count = item[inside].bincount()
    if not bool(count.all()):
        raise ShapeError(f"Item {int(count.argmin())} has no tokens; number items from 0 without gaps.")
    values = attention.double()[..., inside]
    total = values.new_zeros(*values.shape[:-1], len(count)).index_add_(-1, item[inside], values)
    return total / count


def slot_spread(curve: Tensor) -> Tensor:
    """Return (largest - smallest) / mean of curves (..., slots)."""
    return (curve.amax(-1) - curve.amin(-1)) / curve.mean(-1)


def psi(scores: Tensor, decimals: int | None = None) -> Tensor:
    """Return the position sensitivity index 1 - smallest / largest of scores (..., slots), rounded if asked.

    >>> psi(torch.tensor([0.8, 1.0], dtype=torch.float64), 3)
    tensor(0.2000, dtype=torch.float64)
    """
    found = 1 - scores.double().amin(-1) / scores.double().amax(-1)
    return found if decimals is None else found.round(decimals=decimals)


@dataclass(frozen=True, eq=False)
class Calibrated:
    """Attention without the prior of its slots.

    Attributes:
        relevance: mean attention to each item less that to a content-free one in its slot (..., items).
        share: softmax of relevance / temperature over items (..., items).
        attention: rescaled (..., tokens); what goes to items together stays as it is, and so do tokens of no item.
    """

    relevance: Tensor
    share: Tensor
    attention: Tensor


def calibrate(attention: Tensor, item: Tensor, dummy: Tensor, temperature: float) -> Calibrated:
    """Return attention (..., tokens) of one query, rescaled to what its items have to say, float64.

    Args:
        attention: to all tokens.
        item: of each token (tokens,) int64; below 0 for tokens of none.
        dummy: mean attention to a content-free item in each slot, (items,) or (..., items).
        temperature: of the softmax; the paper takes 5e-5.

    Raises:
        ShapeError: items and slots do not agree.
        OptionError: the temperature is not above 0.
    """
    if not temperature > 0:
        raise OptionError(f"Calibration needs a temperature above 0, got temperature={temperature}.")
    mean = slot_curve(attention, item)
    if dummy.shape[-1] != mean.shape[-1]:
        raise ShapeError(f"There are {mean.shape[-1]} items and the prior of {dummy.shape[-1]} slots.")
    relevance = mean - dummy.double()
    # an item that gets nothing keeps nothing, and takes no share
    share = (relevance / temperature).masked_fill(mean == 0, -torch.inf).softmax(-1).nan_to_num(0.0)
    inside, tiny = item >= 0, torch.finfo(torch.float64).tiny
    given = attention.double()
    rate = (share / mean.clamp(min=tiny))[..., item.clamp(min=0)]
    raised = given * rate * inside
    # the paper leaves the constant open; this one keeps the sum over items
    total = (given * inside).sum(-1, keepdim=True) / raised.sum(-1, keepdim=True).clamp(min=tiny)
    return Calibrated(relevance, share, torch.where(inside, raised * total, given))
