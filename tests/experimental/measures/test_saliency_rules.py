"""Rules of relevance: conservation, equal halves, and layouts as permutations of channels."""

import pytest
import torch

from vispe.experimental.measures.saliency_rules import (
    over,
    rotated,
    split_epsilon,
    split_ratio,
    swapped,
    through_product,
    through_rotation,
    through_softmax,
)

G = torch.Generator().manual_seed(0)


def random(*shape):
    return torch.randn(shape, generator=G, dtype=torch.float64)


@pytest.mark.parametrize("split", [split_epsilon, split_ratio])
def test_both_parts_of_a_sum_have_all_its_relevance(split):
    x, e, relevance = random(3, 5, 4), random(1, 5, 4), random(3, 5, 4)
    tokens, positions = split(x, e, relevance, 1e-12)
    if split is split_epsilon:
        assert torch.allclose(tokens + positions, relevance, rtol=1e-9)
    total = relevance.sum((1, 2))
    # the ratio rule keeps the sum by size: parts of opposite signs are scaled by the same factor
    assert torch.allclose((tokens + positions).sum((1, 2)), total, rtol=1e-6)


def test_zeros_have_zero_relevance():
    x = torch.zeros(1, 2, 2, dtype=torch.float64)
    tokens, positions = split_ratio(x, x, torch.ones_like(x))
    assert not tokens.any()
    assert not positions.any()
    tokens, positions = split_epsilon(x, x, torch.ones_like(x))
    assert not tokens.any()
    assert not positions.any()


def test_a_signed_stabiliser_never_crosses_zero():
    total = torch.tensor([-1e-6, 1e-6], dtype=torch.float64)
    assert torch.isinf(over(torch.ones(2), total, 1e-6)[0])
    assert over(torch.ones(2), total, 1e-6, signed=True).tolist() == pytest.approx([-5e5, 5e5])


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rotations_conserve_relevance(layout):
    x, angle, relevance = random(2, 5, 6), random(5, 3), random(2, 5, 6)
    twice = torch.cat([angle, angle], -1) if layout == "half" else angle.repeat_interleave(2, -1)
    parts = through_rotation(x, twice.cos(), twice.sin(), relevance, layout=layout, eps=0.0)
    assert torch.allclose(sum(p.sum() for p in parts), relevance.sum(), rtol=1e-9)
    assert torch.allclose(rotated(rotated(x, layout), layout), -x)
    assert torch.allclose(swapped(swapped(x, layout), layout), x)
    # cosines have half of the straight part, and tokens the other half
    straight = relevance * x * twice.cos() / (x * twice.cos() + rotated(x, layout) * twice.sin())
    assert torch.allclose(parts[1], straight / 2)


def test_layouts_are_permutations_of_channels():
    x, cos, sin, relevance = (random(2, 3, 6) for _ in range(4))
    order = torch.tensor([0, 3, 1, 4, 2, 5])  # half -> interleaved
    half = through_rotation(x, cos, sin, relevance, layout="half")
    inputs = (t[..., order] for t in (x, cos, sin, relevance))
    pairs = through_rotation(*inputs, layout="interleaved")
    for one, other in zip(half, pairs, strict=True):
        assert torch.allclose(one[..., order], other)


def test_products_and_softmax():
    a, b = random(2, 4, 3), random(2, 3, 5)
    relevance = random(2, 4, 5)
    of_a, of_b = through_product(a, b, a @ b, relevance, 0.0)
    assert torch.allclose(of_a.sum() + of_b.sum(), relevance.sum(), rtol=1e-8)
    assert torch.allclose(of_a.sum(), of_b.sum(), rtol=1e-8)
    logits = random(2, 4, 5)
    logits[0, 0, 2] = float("-inf")
    weights = logits.softmax(-1)
    actual = through_softmax(logits, weights, relevance)
    assert actual[0, 0, 2] == 0
    assert torch.isfinite(actual).all()
    # the rule is x times the gradient of the softmax, of relevance per weight
    x = logits[1].clone().requires_grad_()
    p = x.softmax(-1)
    (p * (relevance[1] / p.detach())).sum().backward()
    assert torch.allclose(actual[1], (x * x.grad).detach())
