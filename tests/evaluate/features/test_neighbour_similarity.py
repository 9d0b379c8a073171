"""Near patches with similar features: closed forms of averages, and models with and without positions."""

import numpy as np
import pytest
import timm
import torch

import vispe
from tests.cases import cases
from vispe.backbones.vision_model import VisionModel
from vispe.errors import ShapeError
from vispe.evaluate.audit.runner import audit
from vispe.evaluate.features.neighbour_similarity import NeighbourSimilarity, index, profile
from vispe.evaluate.measure.audited_model import AuditedModel


def test_the_profile_is_that_of_a_loop():
    x = torch.randn(12, 5, dtype=torch.float64)
    centred = x - x.mean(0)
    unit = centred / centred.norm(dim=1, keepdim=True)
    expected = {}
    for i in range(12):
        for j in range(12):
            far = round(float(np.hypot(i // 4 - j // 4, i % 4 - j % 4)))
            expected.setdefault(far, []).append(float(unit[i] @ unit[j]))
    actual = profile(x, (3, 4))
    assert actual.tolist() == pytest.approx([np.mean(expected[k]) for k in sorted(expected)])
    with pytest.raises(ShapeError, match="must have 15 tokens"):
        profile(x, (3, 5))


@cases("largest", range(1, 9))
def test_the_index_compares_with_distances_beyond_half_of_the_largest(largest):
    curve = torch.randn(largest + 1, dtype=torch.float64)
    distant = [float(curve[r]) for r in range(2, largest + 1) if r > largest / 2]
    expected = float(curve[1]) - np.mean(distant) if distant else np.nan
    assert index(curve) == pytest.approx(expected, nan_ok=True)


def test_one_causal_average_makes_neighbours_similar_and_a_bidirectional_one_does_not():
    g = torch.Generator().manual_seed(0)
    curves, plain = [], []
    for _ in range(16):
        tokens = torch.randn(64, 128, generator=g, dtype=torch.float64)
        causal = tokens.cumsum(0) / torch.arange(1, 65)[:, None]
        curves.append(index(profile(causal, (64,))))
        plain.append(index(profile(tokens, (64,))))
    # means of more and more tokens differ little from one to the next
    assert min(curves) > 0.8
    assert abs(float(np.mean(plain))) < 0.02
    both = torch.randn(64, 128, generator=g, dtype=torch.float64)
    assert abs(index(profile(both + both.mean(0), (64,)))) < 0.03


@pytest.mark.slow
def test_positions_are_detected_where_there_are_some():
    images = torch.randn(5, 3, 160, 160, generator=torch.Generator().manual_seed(3))
    torch.manual_seed(0)
    sines = vispe.convert(timm.create_model("test_vit", depth=2), "sincos2d").eval()
    actual = audit(AuditedModel(VisionModel(sines), "sines"), images, (NeighbourSimilarity(),)).findings[0]
    assert actual.verdict == "yes"
    assert actual.control["none"] == pytest.approx(0, abs=0.02)
    bag = vispe.convert(timm.create_model("test_vit", depth=2), "none").eval()
    assert (
        audit(AuditedModel(VisionModel(bag), "bag"), images, (NeighbourSimilarity(),)).findings[0].verdict
        == "no"
    )
