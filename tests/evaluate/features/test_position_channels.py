"""Channels that carry the position: planted ones are detected, no others, along sequences and on grids."""

import numpy as np
import pytest
import torch

from vispe.errors import OptionError, UnsupportedHost
from vispe.evaluate.features.position_channels import (
    PositionalChannels,
    held_out_residual,
    monotone,
    roughness,
    search,
    surface,
)
from vispe.evaluate.measure.base import GROUPS, Accumulator


def accumulated(maps):
    acc = Accumulator()
    for k, one in enumerate(maps):
        acc.begin(k)
        PositionalChannels().on_features(acc, one)
    return acc


def test_a_rising_channel_is_detected_in_the_layers_where_it_rises():
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(8, 60, 5))
    hidden[2:, :, 3] = np.linspace(5, -5, 60) + 0.01 * rng.normal(size=(6, 60))
    hidden[:, :, 1] = 4.0  # constant: neither rises nor ranks
    codes, rough, agreeing, ranking = search(hidden)
    assert (codes[2:, 3] == 2).all()
    assert (codes[:, 1] == 0).all()
    assert agreeing[3] == 5
    assert ranking[0] == 3
    assert 1 not in ranking
    assert np.isinf(rough[:, 1]).all()
    assert rough[4, 3] < rough[4, 0]
    assert monotone(np.arange(9.0) ** 2) == 1
    assert roughness(np.arange(20.0)) < 0.1 * roughness(rng.normal(size=20))
    with pytest.raises(OptionError, match="got 2 after skip=58"):
        search(hidden, skip=58)


@pytest.mark.parametrize("shape", [(12, 12), (9, 14)])
def test_a_surface_is_left_without_rest_on_blocks_that_were_not_fitted(shape):
    basis = surface(shape)
    maps = torch.randn(3, 8, dtype=torch.float64) @ basis.T
    assert float(held_out_residual(maps, basis, shape).abs().max()) < 1e-9
    noise = torch.randn(2, len(basis), dtype=torch.float64)
    assert float(held_out_residual(noise, basis, shape).square().mean()) > 0.9


@pytest.mark.parametrize(("kind", "column"), [("row", 1), ("column", 2), ("radial", 6), ("border", 7)])
def test_a_planted_channel_is_named(kind, column):
    g = torch.Generator().manual_seed(1)
    maps = torch.randn(16, 20, 12, 12, generator=g)
    maps[:, 5] += 3 * surface((12, 12))[:, column].reshape(12, 12).float()
    actual = PositionalChannels().summarize(accumulated(maps), None)
    assert actual.value == pytest.approx(1 / 20)
    assert actual.details["by_surface"][0]["channel"] == 5
    assert actual.details["by_surface"][0]["kind"] == kind
    if kind in ("row", "column"):
        assert actual.details["by_probe"][0]["channel"] == 5
    assert actual.units == GROUPS
    draws = [actual.statistic(np.random.default_rng(k).integers(0, GROUPS, GROUPS)) for k in range(20)]
    assert 1 / 20 <= np.mean(draws) < 3 / 20


def test_no_channel_of_noise_is_one_and_loud_ones_are_listed():
    maps = torch.randn(24, 40, 12, 12, generator=torch.Generator().manual_seed(2))
    maps[:, 7] *= 50
    actual = PositionalChannels().summarize(accumulated(maps), None)
    assert actual.value == 0
    assert actual.details["massive"] == [7]


def test_small_grids_are_refused():
    with pytest.raises(UnsupportedHost, match="at least 6 patches per side, got 4x4"):
        PositionalChannels().summarize(accumulated(torch.randn(2, 3, 4, 4)), None)
