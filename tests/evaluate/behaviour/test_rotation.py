"""Rotation: the errors of `vispe rotate`, the encoding separately, rectangles, functions of images, flat features."""

import math

import pytest
import timm
import torch

from vispe import convert
from vispe.backbones.vision_model import VisionModel
from vispe.evaluate.audit.runner import audit
from vispe.evaluate.behaviour.rotation import POSES, Equivariance
from vispe.evaluate.measure.audited_model import AuditedModel
from vispe.evaluate.rotation.metrics.equivariance import equivariance, position_equivariance
from vispe.images.symmetry.d4 import element


def vit(encoding=None):
    torch.manual_seed(0)
    model = timm.create_model("test_vit", img_size=64, num_classes=0, dynamic_img_size=True)
    return VisionModel((convert(model, encoding) if encoding else model).eval())


def actual(f, images):
    return audit(AuditedModel(f, "model"), images, [Equivariance()], controls=()).findings[0].outcome


def test_numbers_are_those_of_rotate():
    f, images = vit(), torch.randn(3, 3, 64, 64)
    outcome = actual(f, images)
    poses = [element(name) for name in POSES]
    expected = equivariance(f, images, elements=poses, measures=["error"], controls=False)
    code = position_equivariance(f, images, elements=poses, measures=["error"])
    assert outcome.details["everything"] == pytest.approx(expected[0].summary().mean, rel=1e-4)
    assert list(outcome.per_image) == pytest.approx(code[0].values.tolist(), rel=1e-4)
    assert 0.01 < outcome.value < outcome.details["everything"]


@pytest.mark.parametrize("encoding", ["none", "alibi2d"])
def test_models_without_direction_are_equivariant(encoding):
    outcome = actual(vit(encoding), torch.randn(2, 3, 64, 64))
    assert outcome.value < 1e-4
    # the patch kernels have one
    assert outcome.details["everything"] > 0.1


def test_a_function_of_images_has_one_error_and_says_so():
    ramp = torch.linspace(0, 1, 8)

    def f(images):
        return torch.cat([images, ramp.expand(len(images), 1, 8, 8)], 1)

    outcome = actual(f, torch.randn(2, 3, 8, 8))
    assert "patch kernels are included" in outcome.note
    assert outcome.details["rot90"] > 0.1
    assert actual(lambda x: x, torch.randn(2, 3, 8, 8)).value == 0


def test_rectangles_are_rotated_by_half_so_that_sizes_stay():
    outcome = actual(vit("none"), torch.randn(1, 3, 32, 64))
    assert set(outcome.details) == {"everything", "rot180", "hflip"}
    assert outcome.value < 1e-4


def test_features_that_are_the_same_everywhere_have_no_error():
    outcome = actual(lambda x: x * 0 + 1, torch.randn(2, 3, 8, 8))
    assert math.isnan(outcome.value)
    assert "Excluded 2 images with constant features" in outcome.note
