"""Spectra of features: closed forms, and the measure on planted collapses."""

import math

import numpy as np
import pytest
import timm
import torch

from vispe.backbones.vision_model import VisionModel
from vispe.errors import OptionError, ShapeError
from vispe.evaluate.audit.runner import audit
from vispe.evaluate.features.spectrum import (
    Spectrum,
    alpha_req,
    eigenspectrum,
    preservation,
    rankme,
    stable_rank,
    width,
)
from vispe.evaluate.measure.audited_model import AuditedModel
from vispe.evaluate.measure.base import Accumulator


def test_rankme_and_stable_rank_of_known_spectra():
    x = torch.linalg.qr(torch.randn(30, 8, dtype=torch.float64))[0]
    assert rankme(x) == pytest.approx(8, rel=1e-5)
    assert stable_rank(x) == pytest.approx(8)
    values = torch.tensor([4.0, 2.0, 1.0, 1.0], dtype=torch.float64)
    y = x[:, :4] * values
    share = values / values.sum()
    assert rankme(y) == pytest.approx(math.exp(-(share * share.log()).sum()), rel=1e-5)
    assert stable_rank(y) == pytest.approx(22 / 16)


@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.5])
def test_alpha_of_a_power_law_is_detected(alpha):
    shares = torch.arange(1, 61, dtype=torch.float64) ** -alpha
    # a factor of all shares does not matter
    assert alpha_req(7 * shares, 3, 40) == pytest.approx(alpha, abs=1e-9)
    with pytest.raises(OptionError, match="need a spectrum of more than 60 entries, got 60"):
        alpha_req(shares, 3, 60)


def test_shares_of_variance_do_not_see_the_mean():
    x = torch.randn(50, 6, dtype=torch.float64)
    assert torch.allclose(eigenspectrum(x), eigenspectrum(x + 100), atol=1e-9)
    assert float(eigenspectrum(x).sum()) == pytest.approx(1)
    with pytest.raises(ShapeError, match=r"features must be \(n, d\)"):
        eigenspectrum(x[None])


def test_sines_keep_distances_and_random_tables_do_not():
    y, x = torch.meshgrid(torch.arange(14.0), torch.arange(14.0), indexing="ij")
    positions = torch.stack([y.flatten(), x.flatten()], 1)
    rate = 100.0 ** (-torch.arange(16) / 16)
    sines = torch.cat([f(p[:, None] * rate) for p in positions.T for f in (torch.sin, torch.cos)], 1)
    assert preservation(sines, positions) > 0.6
    assert abs(preservation(torch.randn(196, 64), positions)) < 0.1


def test_a_narrow_bump_has_a_small_width():
    position = torch.arange(64.0)
    gap = (position[:, None] - position).abs()
    bump = torch.exp(-((torch.minimum(gap, 64 - gap) / 3) ** 2))
    wide = torch.exp(-((torch.minimum(gap, 64 - gap) / 12) ** 2))
    narrow, broad = (width(t / t.norm(dim=1, keepdim=True))[1] for t in (bump, wide))
    assert 0 < narrow < broad < 0.5


def test_a_planted_collapse_is_measured_and_outliers_are_apart():
    free = torch.randn(24, 12, 12, generator=torch.Generator().manual_seed(0))
    flat = free[:1] * torch.ones(24, 1, 1) + 0.01 * free
    loud = free.clone()
    loud[3] *= 200

    def actual(maps):
        acc = Accumulator()
        for k in range(2):
            acc.begin(k)
            Spectrum().on_features(acc, maps)
        return Spectrum().summarize(acc, None)

    assert actual(free).value < 0.1
    assert actual(flat).value > 0.7
    assert actual(loud).value > 0.5
    assert actual(loud).details["without_outliers"] < 0.2


def test_a_random_model_and_its_copy_have_not_collapsed():
    model = timm.create_model("test_vit", depth=2).eval()
    images = torch.randn(5, 3, 160, 160, generator=torch.Generator().manual_seed(0))
    actual = audit(AuditedModel(VisionModel(model), "random"), images, (Spectrum(),)).findings[0]
    assert actual.verdict == "no"
    assert len(actual.outcome.per_layer) == 2
    assert 0 <= actual.value <= 1
    assert np.isfinite(actual.outcome.details["alpha"])
