"""Crop: distances and changes, a planted border, a model that looks around, a ViT without positions, refusals."""

import pytest
import timm
import torch
from torch.nn.functional import avg_pool2d, pad

from vispe import convert
from vispe.backbones.vision_model import VisionModel
from vispe.errors import ShapeError
from vispe.evaluate.audit.runner import audit
from vispe.evaluate.features.context_crop import (
    ContextCrop,
    border_distance,
    border_excess,
    by_distance,
    change,
)
from vispe.evaluate.measure.audited_model import AuditedModel
from vispe.evaluate.measure.base import Accumulator
from vispe.evaluate.measure.perturbed_runs import PerturbedRuns


def images(n=6, side=16, seed=0):
    return torch.randn(n, 3, side, side, generator=torch.Generator().manual_seed(seed))


def framed(strength):
    """Return a function of images: their pixels, all of one size, and more at the sides of what is shown."""

    def f(x):
        x = x / x.norm(dim=1, keepdim=True)
        edge = (border_distance(*x.shape[-2:]) == 0).float()
        return torch.cat([x, strength * edge.expand(len(x), 1, -1, -1)], 1)

    return f


def actual(f, samples=None):
    samples = images() if samples is None else samples
    return audit(AuditedModel(f, "f"), samples, [ContextCrop()], controls=())


def test_change_and_distance_are_those_of_a_loop():
    a, b = images(2, 7, seed=3).double()
    changed, profile = change(a, b), {}
    for i in range(7):
        for j in range(7):
            value = (a[:, i, j] - b[:, i, j]).square().sum().sqrt() / b[:, i, j].square().sum().sqrt()
            assert changed[i, j] == pytest.approx(value.item(), rel=1e-12)
            profile.setdefault(min(i, j, 6 - i, 6 - j), []).append(value.item())
    means = [sum(profile[r]) / len(profile[r]) for r in range(4)]
    assert by_distance(changed).tolist() == pytest.approx(means)
    assert border_excess(by_distance(changed)) == pytest.approx(means[0] - (means[2] + means[3]) / 2)


def test_nothing_inside_has_changed_as_a_whole_or_not_at_all():
    empty = torch.zeros(2, 1, 2)
    full = torch.tensor([[[1.0, 0.0]], [[0.0, 0.0]]])
    assert change(full, empty).tolist() == [[1.0, 0.0]]
    with pytest.raises(ShapeError, match="same shape"):
        change(empty, torch.zeros(2, 2, 1))


def test_a_planted_border_is_the_value():
    outcome = actual(framed(0.5)).findings[0]
    assert outcome.value == pytest.approx(0.5, rel=1e-5)
    assert outcome.verdict == "yes"
    assert outcome.outcome.details["profile"][1:] == pytest.approx([0, 0, 0], abs=1e-6)


def test_pixels_have_none():
    finding = actual(framed(0.0)).findings[0]
    assert finding.value == pytest.approx(0, abs=1e-6)
    assert finding.verdict == "no"


def test_other_neighbours_count_less_than_a_border_of_zeros():
    zeros = actual(lambda x: avg_pool2d(pad(x + 3, (1, 1, 1, 1)), 3, 1)).findings[0]
    mean = actual(lambda x: avg_pool2d(x + 3, 3, 1, 1, count_include_pad=False)).findings[0]
    assert mean.outcome.details["surroundings"] > 0.05
    assert zeros.value > 0.2 > 0.05 > mean.value


def vit(encoding, size=160, **options):
    torch.manual_seed(0)
    model = timm.create_model("test_vit", img_size=size, num_classes=0, **options)
    return VisionModel((convert(model, encoding) if encoding else model).eval())


def test_a_vit_without_positions_has_no_border():
    finding = actual(vit("none", dynamic_img_size=True), images(6, 160)).findings[0]
    assert abs(finding.value) < 0.01
    assert finding.verdict == "no"


def test_three_passes_alongside_that_of_the_image_and_the_image_stays():
    calls, image = [], images(1)[0]
    acc, runs = (
        Accumulator(),
        PerturbedRuns(AuditedModel(lambda x: calls.append(x.shape) or x, "f"), image, 0),
    )
    acc.begin(0)
    ContextCrop().rerun(acc, runs)
    assert [tuple(c[-2:]) for c in calls] == [(16, 16), (8, 8), (16, 16), (16, 16)]
    assert torch.equal(image, images(1)[0])
    assert not acc.sums


def test_errors():
    assert "10 patches" in actual(lambda x: x, images(1, 9)).refused["crop"][1]

    def fixed(x):
        if x.shape[-1] != 16:
            raise ValueError("16 x 16 alone")
        return x

    assert (
        "does not accept a crop of 8 x 8 patches: 16 x 16 alone"
        in actual(fixed, images(1)).refused["crop"][1]
    )
