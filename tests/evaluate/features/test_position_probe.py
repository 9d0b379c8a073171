"""Position probe: planted coordinates, of noise, of small grids, and layer by layer."""

import numpy as np
import pytest
import timm
import torch

from vispe.backbones.vision_model import VisionModel
from vispe.evaluate.audit.runner import audit
from vispe.evaluate.features.position_probe import PositionProbe, step_for
from vispe.evaluate.measure.audited_model import AuditedModel
from vispe.evaluate.probe.fit import fit_probe
from vispe.evaluate.probe.splits import Trials
from vispe.evaluate.probe.targets import ramp


def planted(strength):
    """Return a function of images: their pixels, and coordinates in two more channels."""

    def f(images):
        h, w = images.shape[-2:]
        rows, cols = torch.meshgrid(torch.linspace(-1, 1, h), torch.linspace(-1, 1, w), indexing="ij")
        positions = strength * torch.stack([rows, cols]).expand(len(images), -1, -1, -1)
        return torch.cat([images, positions], 1)

    return f


def images(n, side, channels=6):
    return torch.randn(n, channels, side, side, generator=torch.Generator().manual_seed(1))


def test_planted_positions_are_read_and_noise_is_not():
    yes = audit(AuditedModel(planted(1.0), "f"), images(6, 14), [PositionProbe()]).findings[0]
    no = audit(AuditedModel(planted(0.0), "f"), images(6, 14), [PositionProbe()]).findings[0]
    assert (yes.verdict, no.verdict) == ("yes", "no")
    assert yes.value > 0.8
    assert no.value < 0


def test_the_value_is_the_probe_of_every_mask():
    maps, finding = (
        images(1, 12),
        audit(AuditedModel(planted(0.0), "f"), images(1, 12), [PositionProbe()]).findings[0],
    )
    feats = torch.cat([maps[0], torch.zeros(2, 12, 12)]).permute(1, 2, 0)
    trials = Trials(("lr+ud",), 3, 4).draw((12, 12), np.random.default_rng(0))
    each = [fit_probe(feats, t.mask, {"p": ramp("lr+ud", (12, 12))})["p"].r2_heldout for t in trials]
    assert finding.outcome.details["unclipped"] == pytest.approx(np.mean(each))


def test_one_image_that_fails_counts_as_minus_one():
    wild = images(5, 7, 2)
    wild[0] = 0
    wild[0, 0, 3, 3] = 1e9
    outcome = audit(AuditedModel(lambda x: x, "f"), wild, [PositionProbe()]).findings[0].outcome
    assert min(outcome.per_image) >= -1


def test_grids_too_small_are_refused_and_small_ones_sampled_densely():
    assert [step_for((n, n)) for n in (5, 6, 7, 10, 16, 37)] == [None, 2, 2, 2, 4, 6]
    assert step_for((1, 100)) is None
    actual = audit(AuditedModel(planted(1.0), "f"), images(5, 5), [PositionProbe()])
    assert "5x5 patches" in actual.refused["probe"][1]


def test_every_layer_has_a_value():
    torch.manual_seed(0)
    model = timm.create_model("test_vit", img_size=160, num_classes=0).eval()
    outcome = (
        audit(AuditedModel(VisionModel(model), "m"), images(2, 160, 3), [PositionProbe()], controls=())
        .findings[0]
        .outcome
    )
    assert len(outcome.per_layer) == len(model.blocks)
    assert np.isfinite(outcome.per_layer).all()
