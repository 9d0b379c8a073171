import json
import math

import numpy as np
import pytest
import torch

from tests.evaluate.rotation.cases import F64, noise, vit
from vispe.errors import InputError, OptionError, ShapeError
from vispe.evaluate.rotation import (
    RotationResult,
    VisionModel,
    layer_curve,
    position_r2,
    random_crops,
    raw_intensity,
)
from vispe.evaluate.rotation.metrics.fingerprint import fingerprint


def normal(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def test_noise_of_any_brightness_has_no_fingerprint():
    images = [normal((3, 20, 24), k) + 50 * k for k in range(40)]
    actual = fingerprint(raw_intensity, images, batch_size=7)
    assert actual.snr == pytest.approx(1, abs=0.15)
    assert actual.snr_uncentred < 0.01  # the brightness hides everything
    assert np.median(actual.channel_r2) < 0.05
    assert actual.notes == ()
    stacked = torch.stack(images)
    np.testing.assert_allclose(
        actual.mean, (stacked - stacked.mean((2, 3), keepdim=True)).mean(0), atol=1e-12
    )


@pytest.mark.parametrize("strength", [0.1, 0.5])
def test_a_planted_pattern_is_measured_with_its_size(strength):
    pattern = torch.linspace(-1, 1, 24, dtype=F64).expand(20, 24)
    images = [normal((3, 20, 24), k) for k in range(40)]

    def f(x):
        return torch.cat([x[:, :2], x[:, 2:] + strength * pattern], 1)

    actual = fingerprint(f, images)
    power = strength**2 * float(pattern.square().mean())
    assert actual.channel_snr[2] == pytest.approx(1 + 40 * power, rel=0.25)
    assert actual.snr == pytest.approx(1 + 40 * power / 3, rel=0.2)
    assert actual.top_channels(1) == [2]
    if strength == 0.5:
        assert actual.channel_r2[2] > 0.2
        leading = torch.from_numpy(actual.components[0])
        assert abs(float((leading * pattern).sum() / leading.norm() / pattern.norm())) > 0.8
    assert actual.components.shape == (3, 20, 24)
    assert (np.diff(actual.explained) <= 0).all()
    assert actual.explained.sum() == pytest.approx(1)
    json.dumps(actual.to_dict(), allow_nan=False)


def test_the_fingerprint_is_that_of_the_definition():
    images = [noise((4, 5), k) for k in range(6)]
    actual = fingerprint(raw_intensity, images, components=2)
    x = torch.stack(images).numpy()
    z = x - x.mean((2, 3), keepdims=True)
    assert actual.snr == pytest.approx(
        z.mean(0).var((1, 2)).sum() / (z.var(0, ddof=1).mean((1, 2)).sum() / 6)
    )
    expected = z.mean(0).var((1, 2)).sum() / (x.var(0, ddof=1).mean((1, 2)).sum() / 6)
    assert actual.snr_uncentred == pytest.approx(expected)
    assert actual.notes == ("6 images are too few for the content to average out.",)
    assert actual.components.shape == (2, 4, 5)
    constant = fingerprint(lambda v: v * 0, images)
    assert math.isnan(constant.snr)
    fixed = fingerprint(lambda v: v * 0 + torch.arange(5.0), images)
    assert fixed.snr == math.inf
    json.dumps([constant.to_dict(), fixed.to_dict()], allow_nan=False)


def test_position_leaves_a_fingerprint_and_its_absence_does_not():
    images = list(random_crops([normal((3, 90, 100), 3)], (42, 42), 30, seed=1))
    assert len(images) == 30
    assert fingerprint(VisionModel(vit("learn", False, depth=2)), images, batch_size=30).snr > 20
    assert fingerprint(VisionModel(vit("none", False, depth=2)), images, batch_size=30).snr < 2


def test_crops_are_windows_of_the_image_and_reproducible():
    image = torch.arange(30.0).reshape(1, 5, 6)
    first, second = (list(random_crops([image], (3, 4), 9, seed=s)) for s in (2, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    corners = {int(c[0, 0, 0]) for c in first}
    assert corners <= {6 * y + x for y in range(3) for x in range(3)}
    assert len(corners) > 2
    for crop in first:
        assert torch.equal(crop[0] - crop[0, 0, 0], image[0, :3, :4])


def test_errors():
    with pytest.raises(InputError, match="at least 2 images are needed, got 1"):
        fingerprint(raw_intensity, [noise((4, 4))])
    with pytest.raises(ShapeError, match=r"maps must have one shape, got \(3, 4, 4\) and \(3, 4, 5\)"):
        fingerprint(raw_intensity, [noise((4, 4)), noise((4, 5))])
    with pytest.raises(ShapeError, match=r"size must be at most the image \(4, 9\) px, got \(5, 5\)"):
        list(random_crops([noise((4, 9))], (5, 5), 1))
    with pytest.raises(OptionError, match="per_image needs an integer above 0, got per_image=0"):
        list(random_crops([noise((4, 9))], (2, 2), 0))


def test_position_is_read_where_it_is_and_not_where_it_is_not():
    images = [noise((42, 42)), noise((42, 42), 1), noise((28, 56), 2)]
    clean, shuffled = position_r2(VisionModel(vit("alibi2d")), images, batch_size=2)
    leaky, mixed = position_r2(VisionModel(vit("learn", depth=1)), images)
    assert [(r.transform, r.metric, r.control) for r in (leaky, mixed)] == [
        ("none", "r2", False), ("shuffled positions", "r2", True),
    ]  # fmt: skip
    assert np.median(clean.values) < 0.05
    assert max(np.median(shuffled.values), np.median(mixed.values)) < 0.05
    ramps = position_r2(
        lambda x: torch.stack(torch.meshgrid(*(torch.arange(6.0),) * 2, indexing="ij"))[None], images[:1]
    )
    assert ramps[0].values > 0.8
    assert (leaky.values > clean.values).all()
    assert RotationResult(ramps, ("a",)).verdict.startswith("features against position: strong")
    with pytest.raises(OptionError, match="masks needs an integer above 0, got masks=0"):
        position_r2(raw_intensity, images, masks=0)


def test_layer_curve_says_where_position_enters():
    images = [noise((42, 42)), noise((42, 42), 1)]
    clean = layer_curve(VisionModel(vit("alibi2d", False)), images, position_only=True, batch_size=2)
    assert [(r.transform, r.metric, r.part) for r in clean] == [
        *(("D4", "error", f"layer {k}") for k in range(4)),
        *(("none", "r2", f"layer {k}") for k in range(4)),
    ]
    assert max(r.values.max() for r in clean[:4]) < 1e-13
    assert np.median([r.values for r in clean[4:]]) < 0.1
    learned = layer_curve(VisionModel(vit("learn")), images)
    assert min(r.values.min() for r in learned[:4]) > 0.2
    last = layer_curve(VisionModel(vit("learn")), images, probe=False)
    assert len(last) == 4
    np.testing.assert_allclose(last[3].values, learned[3].values)
    f = VisionModel(vit("learn"), norm=False)
    direct = f(images[0][None])
    assert torch.equal(f.layers(images[0][None])[3], direct)
    assert not torch.equal(VisionModel(vit("learn"), layer=1, norm=False)(images[0][None]), direct)
    with pytest.raises(OptionError, match="masks needs an integer above 0"):
        layer_curve(f, images, masks=0)
