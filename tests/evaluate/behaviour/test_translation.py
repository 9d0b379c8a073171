"""Shift: rolls by whole patches of models with and without positions, of pixel maps, of what cannot be moved."""

import pytest
import timm
import torch

from vispe import convert
from vispe.backbones.vision_model import VisionModel
from vispe.evaluate.audit.runner import audit
from vispe.evaluate.behaviour.translation import TranslationChange, inside_margin
from vispe.evaluate.measure.audited_model import AuditedModel
from vispe.evaluate.measure.base import Accumulator
from vispe.evaluate.measure.perturbed_runs import PerturbedRuns


def vit(encoding=None, size=64):
    torch.manual_seed(0)
    model = timm.create_model("test_vit", img_size=size, num_classes=0)
    return VisionModel((convert(model, encoding) if encoding else model).eval())


class Counted:
    """A function of images that counts its calls."""

    def __init__(self, f, patch_size=None):
        self.f, self.patch_size, self.calls = f, patch_size, 0

    def __call__(self, images):
        self.calls += 1
        return self.f(images)


def actual(f, images, **options):
    audited = AuditedModel(f, "model", **options)
    return audit(audited, images, [TranslationChange()], controls=())


def test_a_model_without_encoding_is_equivariant_to_rolls():
    outcome = actual(vit("none"), torch.randn(2, 3, 64, 64)).findings[0].outcome
    assert outcome.value < 1e-6
    assert outcome.details["with the seam"] < 1e-6


def test_an_encoding_shows_and_less_of_it_shows_less():
    images, values = torch.randn(2, 3, 64, 64), []
    for contents in (1, 10):
        f = vit("sincos2d")
        with torch.no_grad():
            f.model.patch_embed.proj.weight.mul_(contents)
        values.append(actual(f, images).findings[0].value)
    assert 0.001 < values[1] < values[0] / 2


def test_planted_change_of_one_channel_gives_its_closed_form():
    # a second channel that is 1 in the upper half: cosine 1/sqrt(2) where a roll moves a cell between halves
    upper = torch.zeros(1, 1, 4, 4)
    upper[:, :, :2] = 1

    def f(images):
        one = torch.ones(len(images), 1, 4, 4)
        return torch.cat([one, upper.expand(len(images), -1, -1, -1)], 1)

    outcome = actual(f, torch.randn(1, 3, 16, 16), patch_size=4).findings[0].outcome
    assert outcome.value == pytest.approx(1 - 0.5**0.5)


@pytest.mark.parametrize("patch", [None, 4])
def test_maps_at_the_resolution_of_pixels(patch):
    f = Counted(lambda images: images.softmax(1), patch)
    outcome = actual(f, torch.randn(2, 3, 16, 16)).findings[0].outcome
    assert outcome.value < 1e-6
    assert ("patch size is unknown, so shifts may be by fractions of a patch" in outcome.note) == (
        patch is None
    )
    assert f.calls == 2 * 4


def test_rolls_are_whole_patches_where_a_patch_has_several_cells():
    # each block of 4 x 4 pixels is replaced by its own mean: the phase of the blocks matters, their position does not
    def f(images):
        mean = torch.nn.functional.avg_pool2d(images, 4)
        return torch.nn.functional.interpolate(mean, scale_factor=4)

    images = torch.rand(3, 3, 24, 24)
    assert actual(f, images, patch_size=4).findings[0].value < 1e-6


def test_what_patches_do_not_divide_is_refused_in_a_sentence():
    def f(images):
        return images[..., :7, :7]

    result = actual(f, torch.randn(1, 3, 16, 16))
    assert not result.findings
    assert "has 7 x 7 cells" in result.refused["shift"][1]


def test_patches_away_from_the_frame_before_and_after():
    for grid, offset, margin in (((5, 8), (2, 3), 1), ((8, 8), (4, 0), 2), ((4, 4), (1, 1), 0)):
        h, w = grid
        expected = torch.zeros(grid, dtype=torch.bool)
        for y in range(h):
            for x in range(w):
                v, u = (y + offset[0]) % h, (x + offset[1]) % w
                expected[y, x] = all(margin <= p < n - margin for p, n in ((y, h), (x, w), (v, h), (u, w)))
        assert torch.equal(inside_margin(grid, offset, margin), expected)


def test_memory_does_not_grow_with_the_image():
    def accumulated(size):
        acc = Accumulator()
        acc.begin(0)
        TranslationChange().rerun(
            acc, PerturbedRuns(AuditedModel(lambda x: x, "pixels"), torch.rand(3, size, size), 0)
        )
        assert not acc.sums
        return len(str(acc.records[0].keys())), sum(
            len(v) for v in acc.records[0].values() if isinstance(v, list)
        )

    assert accumulated(8) == accumulated(32)
