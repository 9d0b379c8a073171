"""Dimensions that encode the position: planted ones are chosen first, noise has none."""

import math

import pytest
import torch

from vispe.errors import UnsupportedHost
from vispe.evaluate.measure.base import Accumulator
from vispe.evaluate.measure.verdict import judge
from vispe.experimental.measures.latent_dimensions import IntrinsicProbe, bits, cells, moments


def actual(maps):
    acc = Accumulator()
    for k, one in enumerate(maps):
        acc.begin(k)
        IntrinsicProbe().on_features(acc, one)
    return IntrinsicProbe().summarize(acc, None)


def random(seed=0, n=8, d=12, side=12):
    return torch.randn(n, d, side, side, generator=torch.Generator().manual_seed(seed))


def test_bits_are_those_of_a_loop():
    x, bins = torch.randn(90, 3, dtype=torch.float64), torch.arange(90) % 16
    x[:, 0] += bins
    codes, at = torch.randn(20, 3, dtype=torch.float64), torch.arange(20) % 16
    means = torch.stack([x[bins == c].mean(0) for c in range(16)])
    gap = x - means[bins]
    covariance = gap.mT @ gap / len(x)
    covariance = 0.95 * covariance + 0.05 * torch.diag(covariance.diagonal())
    logs = torch.stack(
        [torch.distributions.MultivariateNormal(m, covariance).log_prob(codes) for m in means], 1
    )
    expected = (logs.log_softmax(1)[range(20), at].mean() + math.log(16)) / math.log(2)
    assert float(bits(*moments(x, bins), codes, at)) == pytest.approx(float(expected), abs=1e-6)


def test_planted_row_and_column_are_chosen_first():
    maps = random()
    ramp = torch.linspace(-4, 4, 12)
    maps[:, 7] += ramp[:, None]
    maps[:, 2] += ramp[None]
    outcome = actual(maps)
    assert set(outcome.details["dimensions"][:2]) == {2, 7}
    assert outcome.value > 1.0
    assert judge(0.05, outcome, {}).verdict == "yes"


def test_noise_encodes_no_position():
    outcome = actual(random(1))
    assert outcome.value < 0.1
    assert judge(0.05, outcome, {}).verdict == "no"
    assert torch.isnan(torch.tensor(actual(random(2, n=1)).value))


def test_cells_and_small_grids():
    assert torch.bincount(cells((9, 13))).min() >= 4
    with pytest.raises(UnsupportedHost, match="at least 4 patches per side"):
        actual(random(side=3))
