"""Pattern: the share against a plain analysis of variance, planted maps, models without places, memory."""

import numpy as np
import pytest
import timm
import torch

from vispe import convert
from vispe.backbones.vision_model import VisionModel
from vispe.errors import ShapeError
from vispe.evaluate.audit.runner import audit
from vispe.evaluate.features.shared_pattern import SharedPattern, map_share
from vispe.evaluate.measure.audited_model import AuditedModel
from vispe.evaluate.measure.base import Accumulator


def pictures(n, side=8, channels=3, seed=0):
    return torch.randn(n, channels, side, side, generator=torch.Generator().manual_seed(seed))


def test_the_share_is_that_of_variances():
    maps = (pictures(6) + 0.7 * pictures(1, seed=5)).double()
    x = maps.flatten(2).numpy()
    x = x - x.mean(-1, keepdims=True)
    n, _, patches = x.shape
    spread = (x.mean(0) ** 2).sum() / patches
    within = ((x - x.mean(0)) ** 2).sum() / (n - 1) / patches
    chance = within / n
    assert map_share(maps) == pytest.approx((spread - chance) / (spread - chance + within), rel=1e-12)


def test_the_share_does_not_depend_on_the_number_of_pictures():
    common = pictures(1, 16, seed=7)
    few = [map_share(pictures(3, 16, seed=s) + common) for s in range(20)]
    many = [map_share(pictures(24, 16, seed=100 + s) + common) for s in range(5)]
    truth = common.sub(common.mean((2, 3), keepdim=True)).square().mean().item()
    assert np.mean(few) == pytest.approx(truth / (1 + truth), abs=0.03)
    assert np.mean(many) == pytest.approx(truth / (1 + truth), abs=0.03)


def test_the_measure_gives_the_share_and_its_interval_holds_it():
    common = 0.5 * pictures(1, seed=5)
    found = audit(AuditedModel(lambda x: x + common, "f"), pictures(20), [SharedPattern()]).findings[0]
    assert found.value == pytest.approx(map_share(pictures(20) + common), rel=1e-5)
    assert found.interval[0] < found.value < found.interval[1]
    assert found.verdict == "yes"


def test_nothing_in_common_means_no():
    found = audit(AuditedModel(lambda x: x, "f"), pictures(20, 16), [SharedPattern()]).findings[0]
    assert found.verdict == "no"
    assert found.value < 0.02


def test_a_vit_shares_a_map_through_its_encoding_alone():
    torch.manual_seed(0)
    model = timm.create_model("test_vit", img_size=128, num_classes=0)
    audited = AuditedModel(VisionModel(convert(model, "sincos2d").eval()), "m")
    found = audit(audited, pictures(8, 128), [SharedPattern()]).findings[0]
    assert found.verdict == "yes"
    assert found.control["none"] < 0.05


def test_memory_does_not_grow_with_pictures():
    acc = Accumulator()
    sizes = []
    for number in range(16):
        acc.begin(number)
        SharedPattern().on_features(acc, pictures(1, seed=number)[0])
        sizes.append(sum(v.numel() for v in acc.sums.values()))
    assert len(set(sizes)) == 1


def test_one_picture_shares_nothing():
    with pytest.raises(ShapeError, match="at least 2 images"):
        map_share(pictures(1))
    assert (
        "at least 2 images"
        in audit(AuditedModel(lambda x: x, "f"), pictures(1), [SharedPattern()]).refused["pattern"][1]
    )
