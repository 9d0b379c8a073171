"""How relevance is split between what is seen and where it is, rule by rule (PA-LRP).

Relevance of a sum, a product, a softmax or a rotation is handed to what went in, so that nothing is lost: what tokens
and positions get adds up to what the output had. Stabilisers stand as in the authors' code, without a sign, and take
a trace of it: `signed=True` keeps denominators from crossing zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vispe.attention.transform.abstract_transform import Layout


def over(x: Tensor, total: Tensor, eps: float, *, signed: bool = False) -> Tensor:
    """Return x / (total + eps); with `signed`, eps has the sign of the total."""
    return x / (total + (torch.where(total < 0, -eps, eps) if signed else eps))


def split_epsilon(
    x: Tensor, e: Tensor, relevance: Tensor, eps: float = 1e-6, *, signed: bool = False
) -> tuple[Tensor, Tensor]:
    """Return what tokens x and positions e get of the relevance of x + e: each its share of the sum.

    >>> split_epsilon(torch.tensor([1.0]), torch.tensor([3.0]), torch.tensor([8.0]), 0.0)
    (tensor([2.]), tensor([6.]))
    """
    share = over(relevance, x + e, eps, signed=signed)
    return share * x, share * e


def split_ratio(x: Tensor, e: Tensor, relevance: Tensor, eps: float = 1e-9) -> tuple[Tensor, Tensor]:
    """Return what x and e get of the relevance of x + e, (b, ...), each scaled so that its sum is its share of all.

    Raw shares may be huge and of two signs. Their sums over a sample say by their size how the whole is divided.
    """
    total = x + e
    raw = torch.where(total == 0, 0.0, over(relevance, total, eps))
    parts = raw * x, raw * e
    rest = tuple(range(1, relevance.ndim))
    sums = [part.sum(rest, keepdim=True) for part in parts]
    whole, size = relevance.sum(rest, keepdim=True), sums[0].abs() + sums[1].abs()
    # a part whose shares cancel to nothing has nothing
    first, second = (
        torch.where(s == 0, 0.0, part * (s.abs() / size * whole) / s)
        for part, s in zip(parts, sums, strict=True)
    )
    return first, second


def turned(x: Tensor, layout: Layout) -> Tensor:
    """Return channels turned by a quarter: (a, b) of each pair becomes (-b, a)."""
    if layout == "half":
        a, b = x.chunk(2, -1)
        return torch.cat([-b, a], -1)
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([-b, a], -1).flatten(-2)


def through_rotation(
    x: Tensor, cos: Tensor, sin: Tensor, relevance: Tensor, *, layout: Layout, eps: float = 1e-8, signed: bool = False
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return what x, cosines and sines get of the relevance of x cos + turned(x) sin, each of the shape of x.

    The sum is split by the epsilon rule, and each product in halves; what the turned channels get goes back to those
    they came from.
    """
    straight, across = x * cos, turned(x, layout) * sin
    of_straight, of_across = split_epsilon(straight, across, relevance, eps, signed=signed)
    # a quarter turn moves channels and their signs; relevance moves alone
    back = swapped(of_across / 2, layout)
    return of_straight / 2 + back, of_straight / 2, of_across / 2


def swapped(x: Tensor, layout: Layout) -> Tensor:
    """Return channels with the two of each pair exchanged."""
    if layout == "half":
        return torch.cat(x.chunk(2, -1)[::-1], -1)
    return x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)


def through_product(
    a: Tensor, b: Tensor, product: Tensor, relevance: Tensor, eps: float = 1e-8, *, signed: bool = False
) -> tuple[Tensor, Tensor]:
    """Return what both matrices get of the relevance of a @ b: half each, by the epsilon rule.

    Args:
        a: (..., n, k).
        b: (..., k, m).
        product: a @ b.
        relevance: of it.
        eps: stabiliser of twice the product.
        signed: as in `over`.
    """
    share = over(relevance, 2 * product, eps, signed=signed)
    return a * (share @ b.mT), b * (a.mT @ share)


def through_softmax(logits: Tensor, weights: Tensor, relevance: Tensor) -> Tensor:
    """Return what logits get of the relevance of their softmax; masked logits, -inf, get nothing."""
    handed = relevance - weights * relevance.sum(-1, keepdim=True)
    return torch.where(weights == 0, 0.0, logits * handed)
