"""The measure of sinks: what `vispe health` says of one image, and a planted sink that turns it."""

import pytest
import torch
from timm.models import VisionTransformer

from vispe.backbones.attention_recorder import record_attention
from vispe.backbones.vision_model import VisionModel
from vispe.evaluate.attention.attention_sink import AttentionSink
from vispe.evaluate.attention.head_health import head_health
from vispe.evaluate.audit.runner import audit
from vispe.evaluate.measure.audited_model import AuditedModel
from vispe.evaluate.measure.base import Accumulator


def small(seed=0):
    torch.manual_seed(seed)
    sizes = {"img_size": 40, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 0}
    return VisionTransformer(**sizes, pos_embed="none", reg_tokens=1).eval()


def accumulated(model, images):
    acc, measure = Accumulator(), AttentionSink()
    for i, image in enumerate(images):
        acc.begin(i)
        record_attention(model, image[None], lambda captured: measure.on_layer(acc, captured))
    return acc


IMAGES = list(torch.randn(5, 3, 40, 40, generator=torch.Generator().manual_seed(1)))


def test_numbers_are_those_of_health():
    model = small()
    for block in model.blocks:
        block.attn.qkv.weight.data.mul_(20)
    actual = AttentionSink().summarize(accumulated(model, IMAGES), AuditedModel(VisionModel(model), ""))
    health = head_health(model, IMAGES)
    assert actual.value == pytest.approx(health.peak_mass.mean())
    assert torch.tensor(actual.per_layer).tolist() == pytest.approx(health.peak_mass.mean(1).tolist())
    assert actual.details["entropy"][0] == pytest.approx(health.entropy[0].tolist())
    assert actual.details["local_mass"][1] == pytest.approx(health.local_mass[1].tolist())
    assert actual.control == {"uniform": 1 / 27}
    assert sum(actual.details["classes"].values()) == pytest.approx(1)
    assert list(actual.details["strongest"]) == ["class", "register 1", "patch"]
    one = AttentionSink().summarize(accumulated(model, IMAGES[:1]), AuditedModel(VisionModel(model), ""))
    single = head_health(model, IMAGES[:1])
    assert [len(one.details["reach"]), len(one.details["reach"][0])] == [2, 2]
    for i in (0, 1):
        assert one.details["reach"][i] == single.reach[1, i].tolist()
        assert one.details["sink_mass"][i] == pytest.approx(single.sink_mass[i].tolist())


def test_a_planted_sink_is_detected_and_located():
    model = small()
    audited = AuditedModel(VisionModel(model), "")
    plain = audit(audited, IMAGES, [AttentionSink()]).findings[0]
    assert plain.verdict == "no"
    assert plain.value == pytest.approx(1 / 27, abs=0.02)
    torch.nn.init.normal_(model.cls_token)
    for block in model.blocks:
        inside = []
        record_attention(model, torch.stack(IMAGES[:1]), inside.append)
        x = inside[[*model.blocks].index(block)].x[0]
        direction = x[0] - x[1:].mean(0)
        with torch.no_grad():
            block.attn.qkv.weight[:64] = 0
            block.attn.qkv.bias[:32] = 4.0
            block.attn.qkv.weight[32:64] = direction / direction.norm()
    assert audit(audited, IMAGES, [AttentionSink()]).findings[0].verdict == "yes"
    actual = AttentionSink().summarize(accumulated(model, IMAGES), audited)
    assert actual.details["strongest"]["class"] == 1
    assert actual.details["classes"]["dead"] + actual.details["classes"]["sink"] == 1


def test_memory_is_constant():
    one, three = (accumulated(small(), IMAGES[:n]) for n in (1, 3))
    assert {n: t.shape for n, t in one.sums.items()} == {n: t.shape for n, t in three.sums.items()}
