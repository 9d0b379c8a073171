"""Fields of biases against naive sums, and heads that look farther or nearer than their bias."""

import math

import pytest
import torch
from timm.models import VisionTransformer

import vispe
from vispe.backbones.vision_model import VisionModel
from vispe.errors import OptionError
from vispe.evaluate.attention.receptive_field import ReceptiveField, decay, one_sided, plane
from vispe.evaluate.audit.runner import audit
from vispe.evaluate.measure.audited_model import AuditedModel


def naive(values, eps):
    """Return the smallest distance within which 1 - eps of (distance, value) lies, whole rings."""
    total, reached = sum(v for _, v in values), 0.0
    rings = {}
    for d, v in values:
        rings[d] = rings.get(d, 0.0) + v
    for d in sorted(rings):
        reached += rings[d]
        if reached >= (1 - eps) * total * (1 - 1e-12):
            return d
    raise AssertionError


def value(form, p, d):
    return math.exp(-p * d) if form == "alibi" else (1 + d) ** -p


@pytest.mark.parametrize(("form", "p"), [("alibi", 0.3), ("alibi", 2.0), ("power", 2.5), ("power", 1.2)])
def test_fields_are_those_of_a_naive_sum(form, p):
    eps, n, r = (0.5, 0.1, 0.02), 50, 7
    line = [(d, value(form, p, d)) for d in range(n)]
    assert one_sided(form, p, eps, n) == [naive(line, e) for e in eps]
    both = range(-r, r + 1)
    square = [
        (math.sqrt(y * y + x * x), value(form, p, math.sqrt(y * y + x * x))) for y in both for x in both
    ]
    assert plane(form, p, eps, r) == pytest.approx([naive(square, e) for e in eps])
    with pytest.raises(OptionError, match="form must be one of alibi, power"):
        decay("cosine", p, torch.ones(1))


def measured(model, images):
    return audit(AuditedModel(VisionModel(model.eval()), ""), images, [ReceptiveField()], controls=())


def test_heads_without_content_reach_as_far_as_their_bias():
    torch.manual_seed(0)
    sizes = {"img_size": 48, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 0}
    model = vispe.convert(VisionTransformer(**sizes), "alibi2d.local(slopes=geometric)")
    images = list(torch.randn(5, 3, 48, 48))
    for block in model.blocks:
        block.attn.qkv.weight.data[:32].mul_(0)
    actual = measured(model, images).findings[0]
    assert actual.value == pytest.approx(1)
    assert actual.control["bias alone"] == 1
    assert actual.verdict == "no"
    for block in model.blocks:  # queries that look at what is far: those of one sign at keys of the other
        block.attn.qkv.weight.data.mul_(0)
        block.attn.qkv.weight.data[:64].normal_(std=2.0)
    assert measured(model, images).findings[0].value != pytest.approx(1, abs=0.01)
    reasons = measured(vispe.convert(model, "none"), images).refused
    assert "equal for all images" in reasons["trf"][1]
