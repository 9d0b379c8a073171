"""The PESI scores: the published values, a slow reference with scipy, and tables with known scores."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from vispe import Grid, create_encoding
from vispe.errors import OptionError, ShapeError
from vispe.experimental.measures.pesi import cosine_similarity, pesi

pytestmark = pytest.mark.filterwarnings("ignore::scipy.stats.ConstantInputWarning")


def slow(table, directions):
    h, w, _ = table.shape
    cells = [(y, x) for y in range(h) for x in range(w)]
    mono, direct, asym = [], [], []
    for cy, cx in cells:
        rings, sectors = {}, {}
        for y, x in cells:
            a, b = table[cy, cx], table[y, x]
            s = round(float(a @ b / max(np.linalg.norm(a) * np.linalg.norm(b), 1e-12)), 9)
            d = math.hypot(y - cy, x - cx)
            rings.setdefault(round(d), []).append(s)
            theta = math.atan2(x - cx, y - cy)
            k = math.floor(theta / (2 * math.pi / directions)) % directions
            sectors.setdefault(k, []).append((d, s))
        means = {r: round(np.mean(v), 9) for r, v in rings.items()}
        mono.append(1 - np.nan_to_num(spearmanr(list(means), list(means.values())).statistic))
        rho = [spearmanr(*zip(*v, strict=True)).statistic for v in sectors.values() if len(v) > 1]
        direct.append(1 - np.nan_to_num(rho).sum() / directions)
        asym.append(np.mean([np.std(v) / np.mean(v) for v in rings.values()]))
    return np.mean(mono), np.mean(direct), np.mean(asym)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(3, 5), (4, 4), (1, 6), (6, 2)])
@pytest.mark.parametrize("directions", [1, 4, 7])
def test_against_scipy(shape, directions):
    table = np.random.default_rng(0).normal(size=(*shape, 5)) + 1
    actual = pesi(table, directions)
    expected = slow(table, directions)
    measures = (actual.undirected_monotonicity, actual.directed_monotonicity, actual.undirected_asymmetry)
    assert measures == pytest.approx(expected, abs=1e-9)
    assert actual.directions == directions


@pytest.mark.slow
def test_published_values_of_the_sinusoid():
    k = torch.arange(384, dtype=torch.float64)
    angle = torch.arange(196, dtype=torch.float64)[:, None] * 10000 ** (-2 * k / 768)
    actual = pesi(torch.stack([angle.sin(), angle.cos()], -1).reshape(14, 14, 768))
    assert actual.undirected_monotonicity == pytest.approx(1.9567, abs=1e-4)
    assert actual.directed_monotonicity == pytest.approx(1.4905, abs=1e-4)
    assert actual.undirected_asymmetry == pytest.approx(0.1243, abs=1e-4)


@pytest.mark.slow
def test_an_encoding_and_a_constant():
    table = create_encoding("sincos2d", dim=768).table(Grid((14, 14)).positions()).reshape(14, 14, 768)
    assert pesi(table).undirected_monotonicity == pytest.approx(1.99914, abs=2e-4)
    flat = pesi(torch.ones(4, 5, 3))
    assert (flat.undirected_monotonicity, flat.directed_monotonicity) == (1, 1)
    assert flat.undirected_asymmetry == 0
    assert pesi(torch.zeros(2, 3, 4)).undirected_asymmetry == 0
    one = pesi(torch.ones(1, 1, 3))
    assert (one.undirected_monotonicity, one.undirected_asymmetry) == (1, 0)


def test_scale_and_flips_change_nothing():
    table = torch.randn(4, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    base = pesi(table, 4)
    assert pesi(table * 7, 4) == base
    rotated = pesi(table.flip(0), 1)
    assert rotated.undirected_monotonicity == pytest.approx(base.undirected_monotonicity)
    assert rotated.undirected_asymmetry == pytest.approx(base.undirected_asymmetry)
    assert (cosine_similarity(table).diagonal() == 1).all()


def test_errors():
    with pytest.raises(ShapeError, match=r"table must be \(h, w, d\) with finite entries, got \(4, 3\)"):
        pesi(torch.ones(4, 3))
    with pytest.raises(ShapeError, match="finite entries"):
        pesi(torch.full((2, 2, 2), float("nan")))
    with pytest.raises(OptionError, match="directions needs an integer above 0, got directions=0"):
        pesi(torch.ones(2, 2, 2), 0)
