"""Pattern: the share against a plain analysis of variance, planted maps, models without positions, memory."""

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


def images(n, side=8, channels=3, seed=0):
    return torch.randn(n, channels, side, side, generator=torch.Generator().manual_seed(seed))


def test_the_share_is_that_of_variances():
    maps = (images(6) + 0.7 * images(1, seed=5)).double()
    x = maps.flatten(2).numpy()
    x = x - x.mean(-1, keepdims=True)
    n, _, patches = x.shape
    variance = (x.mean(0) ** 2).sum() / patches
    within = ((x - x.mean(0)) ** 2).sum() / (n - 1) / patches
    chance = within / n
    assert map_share(maps) == pytest.approx((variance - chance) / (variance - chance + within), rel=1e-12)


def test_the_share_does_not_depend_on_the_number_of_images():
    common = images(1, 16, seed=7)
    shares = [map_share(images(3, 16, seed=s) + common) for s in range(20)]
    many = [map_share(images(24, 16, seed=100 + s) + common) for s in range(5)]
    truth = common.sub(common.mean((2, 3), keepdim=True)).square().mean().item()
    assert np.mean(shares) == pytest.approx(truth / (1 + truth), abs=0.03)
    assert np.mean(many) == pytest.approx(truth / (1 + truth), abs=0.03)


def test_the_measure_gives_the_share_and_its_interval_holds_it():
    common = 0.5 * images(1, seed=5)
    actual = audit(AuditedModel(lambda x: x + common, "f"), images(20), [SharedPattern()]).findings[0]
    assert actual.value == pytest.approx(map_share(images(20) + common), rel=1e-5)
    assert actual.interval[0] < actual.value < actual.interval[1]
    assert actual.verdict == "yes"


def test_nothing_in_common_means_no():
    actual = audit(AuditedModel(lambda x: x, "f"), images(20, 16), [SharedPattern()]).findings[0]
    assert actual.verdict == "no"
    assert actual.value < 0.02


def test_a_vit_shares_a_map_through_its_encoding_alone():
    torch.manual_seed(0)
    model = timm.create_model("test_vit", img_size=128, num_classes=0)
    audited = AuditedModel(VisionModel(convert(model, "sincos2d").eval()), "m")
    actual = audit(audited, images(8, 128), [SharedPattern()]).findings[0]
    assert actual.verdict == "yes"
    assert actual.control["none"] < 0.05


def test_memory_does_not_grow_with_images():
    acc = Accumulator()
    sizes = []
    for number in range(16):
        acc.begin(number)
        SharedPattern().on_features(acc, images(1, seed=number)[0])
        sizes.append(sum(v.numel() for v in acc.sums.values()))
    assert len(set(sizes)) == 1


def test_one_image_shares_nothing():
    with pytest.raises(ShapeError, match="at least 2 images"):
        map_share(images(1))
    assert (
        "at least 2 images"
        in audit(AuditedModel(lambda x: x, "f"), images(1), [SharedPattern()]).refused["pattern"][1]
    )
