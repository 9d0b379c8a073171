"""Distances of heads against loops, and between models."""

import math

import pytest
import timm
import torch

from vispe.backbones.vision_model import VisionModel
from vispe.errors import ShapeError, UnsupportedHost
from vispe.evaluate.attention import divergence
from vispe.evaluate.attention.divergence import (
    compare_heads,
    jensen_shannon,
    mixture_kl,
    strongest,
    symmetric_kl,
)
from vispe.evaluate.measure.audited_model import AuditedModel


def maps(heads, tokens=5, seed=0, causal=False):
    logits = torch.randn(heads, tokens, tokens, generator=torch.Generator().manual_seed(seed)).double()
    if causal:
        logits = logits.masked_fill(torch.ones(tokens, tokens).triu(1).bool(), -math.inf)
    return logits.softmax(-1)


def kl(p, q):
    return sum(float(x * (x / y).log()) for x, y in zip(p, q, strict=True))


@pytest.mark.parametrize("causal", [True, False])
def test_divergences_are_the_naive_loop(causal):
    a, b = maps(2, seed=1, causal=causal), maps(3, seed=2, causal=causal)
    actual = [f(a, b, causal=causal) for f in (jensen_shannon, symmetric_kl, mixture_kl)]
    for i in range(2):
        for j in range(3):
            expected = torch.zeros(3, dtype=torch.float64)
            for t in range(5):
                keys = t + 1 if causal else 5
                p, q = a[i, t, :keys], b[j, t, :keys]
                m = (p + q) / 2
                expected[0] += (kl(p, m) + kl(q, m)) / 2 / 5
                expected[1] += (kl(p, q) + kl(q, p)) / 5
                expected[2] += (kl(m, p) + kl(m, q)) / 2 / 5
            assert [f[i, j].item() for f in actual] == pytest.approx(expected.tolist(), abs=1e-12)
    assert torch.equal(strongest(a, causal=causal), a.argmax(-1))


def test_divergences_of_equal_and_of_opposite_heads():
    a = maps(3)
    assert jensen_shannon(a, a).diagonal().abs().max() < 1e-12
    assert symmetric_kl(a, a).diagonal().abs().max() < 1e-12
    one, other = torch.eye(4)[None], torch.eye(4).roll(1, 0)[None]
    assert jensen_shannon(one, other).item() == pytest.approx(math.log(2))
    assert symmetric_kl(one, other).isfinite().all()
    with pytest.raises(ShapeError, match="the same tokens"):
        jensen_shannon(one, torch.eye(3)[None])


def audited(seed, side=80, **options):
    torch.manual_seed(seed)
    model = timm.create_model("test_vit", img_size=side, depth=2, **options).eval()
    # random weights attend to all equally
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight[:128].mul_(8)
    return AuditedModel(VisionModel(model), f"model {seed}")


def test_layers_of_two_models_are_compared():
    images = [torch.randn(3, 80, 80, generator=torch.Generator().manual_seed(k)) for k in range(2)]
    a, b = audited(0), audited(1)
    same, other = compare_heads(a, a, images), compare_heads(a, b, images)
    assert same.shape == other.shape == (2, 2)
    assert same.diagonal().abs().max() < 1e-9
    assert other.min() > 0.01
    assert other.max() < math.log(2)
    assert torch.allclose(other, compare_heads(b, a, images).T)
    # one layer against its own map, seen by the reference way
    captured = []
    for one in (a, b):
        one.watch(images[0][None], lambda s: captured.append(divergence.attention_map(s.call)[1][0]))
    expected = jensen_shannon(captured[1], captured[2]).min()
    assert compare_heads(a, b, images[:1])[1, 0].item() == pytest.approx(expected.item(), abs=1e-6)


def test_long_sequences_are_compared_on_some_rows(monkeypatch):
    monkeypatch.setattr(divergence, "QUERIES", 8)
    captured = []
    audited(0).watch(torch.zeros(1, 3, 80, 80), lambda s: captured.append(divergence._some_rows(s)))
    assert captured[0].shape == (2, 7, 26)


def test_errors():
    images = [torch.zeros(3, 80, 80)]
    with pytest.raises(ShapeError, match="no images, got an empty sequence"):
        compare_heads(audited(0), audited(1), [])
    with pytest.raises(ShapeError, match="the same tokens"):
        compare_heads(audited(0), audited(1, patch_size=20), images)
    blind = AuditedModel(lambda x: x, "a function")
    with pytest.raises(UnsupportedHost, match=r"attention of a function cannot be read \(it is a function"):
        compare_heads(blind, audited(1), images)
