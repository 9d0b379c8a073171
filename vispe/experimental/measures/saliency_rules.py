"""Propagation rules of relevance between content and positions (PA-LRP, arXiv 2506.02138).

The relevance of a sum, a product, a softmax or a rotation is propagated to its inputs and conserved: the relevance of
tokens and positions adds up to that of the output. Stabilisers have no sign, as in the authors' code, and absorb a
small part; `signed=True` keeps denominators from crossing zero.
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
    """Split the relevance of x + e between tokens x and positions e in proportion to the terms (epsilon rule).

    >>> split_epsilon(torch.tensor([1.0]), torch.tensor([3.0]), torch.tensor([8.0]), 0.0)
    (tensor([2.]), tensor([6.]))
    """
    ratio = over(relevance, x + e, eps, signed=signed)
    return ratio * x, ratio * e


def split_ratio(x: Tensor, e: Tensor, relevance: Tensor, eps: float = 1e-9) -> tuple[Tensor, Tensor]:
    """Split the relevance (b, ...) of x + e between x and e by the absolute sums of their raw relevance (ratio rule).

    Raw relevance by the epsilon rule may be huge and of both signs, so each part is rescaled per sample.
    """
    total = x + e
    raw = torch.where(total == 0, 0.0, over(relevance, total, eps))
    parts = raw * x, raw * e
    rest = tuple(range(1, relevance.ndim))
    sums = [part.sum(rest, keepdim=True) for part in parts]
    total_relevance, norm = relevance.sum(rest, keepdim=True), sums[0].abs() + sums[1].abs()
    # a part whose raw relevance cancels to 0 gets no relevance
    first, second = (
        torch.where(s == 0, 0.0, part * (s.abs() / norm * total_relevance) / s)
        for part, s in zip(parts, sums, strict=True)
    )
    return first, second


def rotated(x: Tensor, layout: Layout) -> Tensor:
    """Rotate each channel pair by 90 degrees: (a, b) becomes (-b, a), the `rotate_half` of rotary encodings."""
    if layout == "half":
        a, b = x.chunk(2, -1)
        return torch.cat([-b, a], -1)
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([-b, a], -1).flatten(-2)


def through_rotation(
    x: Tensor, cos: Tensor, sin: Tensor, relevance: Tensor, *, layout: Layout, eps: float = 1e-8, signed: bool = False
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Split the relevance of x cos + rotated(x) sin between x, cosines and sines, each with the shape of x.

    The sum is split by the epsilon rule, and each product in halves; the relevance of rotated channels is returned to
    the channels that they were rotated from.
    """
    cos_term, sin_term = x * cos, rotated(x, layout) * sin
    cos_relevance, sin_relevance = split_epsilon(cos_term, sin_term, relevance, eps, signed=signed)
    # the rotation by 90 degrees permutes channels and flips signs; relevance is only permuted
    back = swapped(sin_relevance / 2, layout)
    return cos_relevance / 2 + back, cos_relevance / 2, sin_relevance / 2


def swapped(x: Tensor, layout: Layout) -> Tensor:
    """Return channels with the two of each pair exchanged."""
    if layout == "half":
        return torch.cat(x.chunk(2, -1)[::-1], -1)
    return x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)


def through_product(
    a: Tensor, b: Tensor, product: Tensor, relevance: Tensor, eps: float = 1e-8, *, signed: bool = False
) -> tuple[Tensor, Tensor]:
    """Split the relevance of a @ b between both matrices, half each, by the epsilon rule.

    Args:
        a: (..., n, k).
        b: (..., k, m).
        product: a @ b, (..., n, m).
        relevance: relevance of the product, (..., n, m).
        eps: stabiliser of twice the product.
        signed: whether `eps` has the sign of the total, see `over`.
    """
    ratio = over(relevance, 2 * product, eps, signed=signed)
    return a * (ratio @ b.mT), b * (a.mT @ ratio)


def through_softmax(logits: Tensor, weights: Tensor, relevance: Tensor) -> Tensor:
    """Return the relevance of logits from that of their softmax weights; masked logits (-inf) get 0."""
    gradient = relevance - weights * relevance.sum(-1, keepdim=True)
    return torch.where(weights == 0, 0.0, logits * gradient)
