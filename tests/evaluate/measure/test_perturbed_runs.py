"""Runs on changed images: one pass gives maps and descriptor, and the least move that brings patches onto patches."""

import pytest
import timm
import torch

from vispe.backbones.vision_model import VisionModel
from vispe.evaluate.measure.audited_model import AuditedModel
from vispe.evaluate.measure.perturbed_runs import CommonStep, PerturbedRuns


def test_maps_and_descriptor_of_an_image_are_one_pass():
    f = VisionModel(timm.create_model("test_vit", img_size=64, num_classes=0).eval())
    image, passes = torch.randn(3, 64, 64), []
    runs = PerturbedRuns(AuditedModel(f, "model"), image, 0)
    f.model.blocks[0].register_forward_hook(lambda *_: passes.append(1))
    maps, pooled = runs.maps(), runs.pooled()
    assert len(passes) == 1
    with torch.no_grad():
        assert torch.equal(maps, f(image[None])[0])
    assert torch.equal(pooled, AuditedModel(f, "model").maps_and_pooled(image[None])[1][0])


@pytest.mark.parametrize(
    ("cell", "patch", "expected"),
    [
        (4, 4, CommonStep(4, 1, (3, 6))),  # a transformer
        (1, 4, CommonStep(4, 4, (3, 6))),  # class probabilities of pixels
        (4, None, CommonStep(4, 1, (3, 6))),
        (1, None, CommonStep(1, 1, (12, 24))),
        (4, 2, CommonStep(4, 1, (3, 6))),  # cells of several patches
        (2, 3, CommonStep(6, 3, (2, 4))),
    ],
)
def test_the_least_move_is_whole_in_patches_and_cells(cell, patch, expected):
    audited = AuditedModel(torch.nn.AvgPool2d(cell), "means", patch_size=patch)
    assert PerturbedRuns(audited, torch.rand(3, 12, 24), 0).step() == expected
