"""The prior of positions against hand counts, and models that have one by construction."""

from functools import partial

import numpy as np
import pytest
import timm
import torch

from vispe.backbones.vision_model import VisionModel
from vispe.errors import OptionError, ShapeError
from vispe.evaluate.attention.attention_prior import DUMMIES, AttentionPrior, asymmetry, held_out_spread
from vispe.evaluate.audit.runner import audit
from vispe.evaluate.measure.audited_model import AuditedModel
from vispe.evaluate.measure.base import Accumulator
from vispe.evaluate.measure.perturbed_runs import PerturbedRuns
from vispe.hosts.convert import convert
from vispe.hosts.slot_calibration import calibrate, psi, slot_curve, slot_spread


def images(count, side=80):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, side, side, generator=generator) for _ in range(count)]


def plain(seed=0):
    torch.manual_seed(seed)
    return convert(timm.create_model("test_vit", img_size=80, depth=3).eval(), "none").eval()


def measured(model, count=2, **options):
    audited = AuditedModel(VisionModel(model), "a model")
    return audit(audited, images(count), [AttentionPrior()], **options).findings[0]


def test_slot_curve_by_hand():
    attention = torch.rand(3, 7)
    item = torch.tensor([-1, 0, 0, 1, 1, 1, -1])
    curve = slot_curve(attention, item)
    assert curve.shape == (3, 2)
    assert curve[1, 0].item() == pytest.approx(attention[1, 1:3].mean().item())
    assert curve[2, 1].item() == pytest.approx(attention[2, 3:6].mean().item())
    assert slot_spread(torch.tensor([1.0, 2.0, 3.0])) == 1
    assert psi(torch.tensor([1.0, 3.0, 2.0]), 2) == 0.67
    with pytest.raises(ShapeError, match="slot_curve: item 1 has no tokens"):
        slot_curve(torch.rand(3), torch.tensor([0, 0, 2]))
    with pytest.raises(ShapeError, match=r"item must have the shape \(3,\), one index per token.*got \(2,\)"):
        slot_curve(torch.rand(3), torch.tensor([0, 0]))


def test_calibration_keeps_the_total_and_takes_out_the_prior():
    item = torch.tensor([-1, 0, 0, 1, 1, 2])
    prior = torch.tensor([0.3, 0.1, 0.05], dtype=torch.float64)
    attention = torch.cat([torch.tensor([0.1], dtype=torch.float64), prior[item[1:]]])
    actual = calibrate(attention, item, prior, 5e-5)
    assert actual.relevance.abs().max() < 1e-15
    assert actual.share.numpy() == pytest.approx([1 / 3] * 3)
    assert actual.attention.sum().item() == pytest.approx(attention.sum().item(), abs=1e-15)
    assert actual.attention[0] == attention[0]
    # with nothing but the prior, all items get equally
    assert slot_curve(actual.attention, item).numpy() == pytest.approx([0.17] * 3)
    # an item that nobody looks at stays so
    attention[3:5] = 0
    for slots in (prior, torch.tensor([0.9, 0.0, 0.9])):
        actual = calibrate(attention, item, slots, 5e-5)
        assert actual.attention[3:5].abs().max() == 0
        assert actual.attention.sum().item() == pytest.approx(attention.sum().item())
    assert not calibrate(torch.zeros(6), item, prior, 1.0).attention.any()
    with pytest.raises(OptionError, match="temperature needs a number above 0"):
        calibrate(attention, item, prior, 0.0)
    with pytest.raises(ShapeError, match="each of 3 items, got 2"):
        calibrate(attention, item, prior[:2], 1.0)


def test_spread_is_read_from_what_did_not_choose_the_positions():
    table = torch.tensor([1.0, 4.0, 1.0, 2.0])
    assert held_out_spread(table.repeat(3, 1)).tolist() == [slot_spread(table).item()] * 3
    noise = torch.rand(400, 6, 50, generator=torch.Generator().manual_seed(0))
    naive, held_out = slot_spread(noise.mean(1)).mean(), held_out_spread(noise.transpose(0, 1)).mean()
    assert naive > 0.9
    assert abs(held_out) < 0.05


def test_asymmetry():
    ring = torch.tensor([[1.0, 2.0, 1.0], [2.0, 5.0, 2.0], [1.0, 2.0, 1.0]])
    assert asymmetry(ring) == pytest.approx(0, abs=1e-6)
    assert asymmetry(torch.arange(12.0).reshape(3, 4)) == pytest.approx(1)
    assert asymmetry(torch.ones(3, 4)) == 0


def test_a_model_without_positions_has_no_prior():
    actual = measured(plain())
    assert actual.outcome.details["mean_colour"] < 1e-5
    assert abs(actual.value) < 0.05
    assert actual.verdict == "no"
    assert len(actual.outcome.per_layer) == 3
    assert actual.outcome.units == DUMMIES


@pytest.mark.parametrize("query", ["class token", "mean over patches"])
def test_a_planted_position_is_detected(query):
    torch.manual_seed(0)
    options = {} if query == "class token" else {"class_token": False, "global_pool": "avg"}
    model = timm.create_model("test_vit", img_size=80, depth=3, **options).eval()
    with torch.no_grad():
        # one token is 40 times as long, and heads look for its direction
        model.pos_embed.zero_()
        model.pos_embed[0, -1] = 3.0 * torch.randn(64).sign()
        for block in model.blocks:
            q, k, _ = block.attn.qkv.weight.chunk(3)
            q.zero_()
            k.copy_(torch.eye(64))
            block.attn.qkv.bias[:64] = model.pos_embed[0, -1]
    actual = measured(model)
    assert actual.verdict == "yes"
    assert actual.value > 1
    assert actual.outcome.details["query"] == query
    table = np.array(actual.outcome.details["map"])
    assert table.shape == (5, 5)
    assert table.argmax() == 24
    assert actual.outcome.details["asymmetry"] > 0.5
    assert actual.outcome.details["explains"] > 0.9
    assert actual.outcome.details["psi"] > 0.5


def accumulated(audited, count):
    acc, measure = Accumulator(), AttentionPrior()
    for number, image in enumerate(images(count)):
        acc.begin(number)
        audited.watch(image[None], partial(measure.on_layer, acc))
        measure.rerun(acc, PerturbedRuns(audited, image, number))
    return acc


def test_memory_is_constant():
    audited = AuditedModel(VisionModel(plain()), "a model")
    one_image, three_images = accumulated(audited, 1), accumulated(audited, 3)
    assert {n: s.shape for n, s in one_image.sums.items()} == {
        n: s.shape for n, s in three_images.sums.items()
    }
    assert set(three_images.records[-1]) == {"size", "prefix_share"}


def test_dummies_are_six_more_passes():
    model, passes = plain(), []
    audited = AuditedModel(VisionModel(model), "a model")
    acc, before = accumulated(audited, 2), model(images(1)[0][None])
    handle = model.patch_embed.register_forward_hook(lambda *_: passes.append(1))
    AttentionPrior().summarize(acc, audited)
    handle.remove()
    assert len(passes) == DUMMIES == 6
    assert torch.equal(before, model(images(1)[0][None]))
