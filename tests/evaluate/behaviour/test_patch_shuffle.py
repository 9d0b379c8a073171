"""Shuffle: a bag of patches, planted dependence on neighbours, pixel maps and rests at the border."""

import pytest
import timm
import torch

from vispe import convert
from vispe.backbones.vision_model import VisionModel
from vispe.evaluate.audit.measures import choose
from vispe.evaluate.audit.runner import audit
from vispe.evaluate.behaviour.patch_shuffle import PatchShuffle
from vispe.evaluate.measure.audited_model import AuditedModel


def actual(f, images, **options):
    return (
        audit(AuditedModel(f, "model", **options), images, [PatchShuffle()], controls=()).findings[0].outcome
    )


def vit(encoding):
    torch.manual_seed(0)
    return VisionModel(convert(timm.create_model("test_vit", img_size=80, num_classes=0), encoding).eval())


def test_a_model_without_encoding_is_a_bag_of_patches():
    images = torch.randn(2, 3, 80, 80)
    bag, not_bag = actual(vit("none"), images), actual(vit("sincos2d"), images)
    assert bag.value < 1e-6
    # five patches a side: the rest at the border stays, and blocks of 4 and 8 have no room
    assert bag.details["cosine"] == {g: pytest.approx(1, abs=1e-6) for g in ("blocks of 1", "blocks of 2")}
    assert not_bag.value > 0.01


def test_larger_blocks_keep_more_of_what_neighbours_give():
    def f(images):
        padded = torch.nn.functional.pad(images, (1, 1, 1, 1), mode="circular")
        return torch.nn.functional.unfold(padded, 3).reshape(len(images), -1, 16, 16)

    curve = actual(f, torch.randn(3, 3, 16, 16)).details["cosine"]
    values = [curve[f"blocks of {g}"] for g in (1, 2, 4, 8)]
    assert values == sorted(values)
    # one of nine neighbours is left where each pixel is moved: itself
    assert values[0] == pytest.approx(1 / 9, abs=0.05)


def test_it_runs_only_by_name():
    assert "shuffle" not in [m.name for m in choose(["behaviour"])]
    assert [m.name for m in choose(["shuffle"])] == ["shuffle"]


def test_maps_of_pixels_with_known_patches():
    assert actual(lambda x: x.softmax(1), torch.randn(1, 3, 16, 16), patch_size=4).value < 1e-6
