"""Frequency schedules against their formulas in plain Python, and published numbers."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.cases import cases
from vispe.errors import OptionError, ShapeError
from vispe.grid import frequencies as fr
from vispe.grid import grid_frequencies as gf
from vispe.grid import longrope, yarn

quick = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
dims = st.integers(2, 64).map(lambda n: 2 * n)
bases = st.floats(10, 1e6)
scales = st.floats(1, 32)
lengths = st.integers(8, 8192)


def rates(dim, base):
    return [base ** (-2 * i / dim) for i in range(dim // 2)]


def ramp(low, high, i):
    high = high + 0.001 if low == high else high
    return min(max((i - low) / (high - low), 0), 1)


def bounds(fast, slow, dim, base, length):
    indices = [dim * math.log(length / (2 * math.pi * r)) / (2 * math.log(base)) for r in (fast, slow)]
    return max(math.floor(indices[0]), 0), min(math.ceil(indices[1]), dim - 1)


@quick
@given(dim=dims, base=bases, scale=scales, length=lengths)
def test_rules_equal_their_formulas(dim, base, scale, length):
    plain = rates(dim, base)
    exact = {"dtype": torch.float64}
    close = {"rtol": 1e-9, "atol": 0.0}
    tensor = torch.tensor(plain, dtype=torch.float64)
    torch.testing.assert_close(fr.inverse_frequencies(dim, base, torch.float64), tensor, **close)
    torch.testing.assert_close(fr.interpolated(tensor, scale), tensor / scale, **close)
    low, high = bounds(32, 1, dim, base, length)
    assert yarn.wavelength_range(32, 1, dim, base, length) == (low, high)
    expected = [w / scale * ramp(low, high, i) + w * (1 - ramp(low, high, i)) for i, w in enumerate(plain)]
    actual = yarn.yarn(dim, base, scale, length, **exact)
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), **close)
    ntk = rates(dim, fr.ntk_base(base, scale, dim))
    assert ntk[-1] == pytest.approx(plain[-1] / scale)
    near, far = bounds(1.25, 0.75, dim, base, length), bounds(16, 2, dim, base, length)
    parts = []
    for i, w in enumerate(plain):
        mixed = w / scale * ramp(*near, i) + ntk[i] * (1 - ramp(*near, i))
        parts.append(mixed * ramp(*far, i) + w * (1 - ramp(*far, i)))
    actual = yarn.ntk_by_parts(dim, base, scale, length, **exact)
    torch.testing.assert_close(actual, torch.tensor(parts, dtype=torch.float64), **close)


@quick
@given(dim=dims, base=bases, scale=scales, power=st.floats(0, 2), truncate=st.integers(0, 4096))
def test_giraffe(dim, base, scale, power, truncate):
    expected = []
    for i, w in enumerate(rates(dim, base)):
        w = w / scale * (1 - i / (dim // 2)) ** power
        c = 2 * math.pi / truncate if truncate else 0
        expected.append(w if w >= c else c / 16 if w >= c / 8 else 0.0)
    actual = fr.giraffe(dim, base, scale=scale, power=power, truncate=truncate, dtype=torch.float64)
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=0)


def test_giraffe_of_the_paper_stops_eleven_pairs():
    assert (fr.giraffe(64, 10000, truncate=256) == 0).sum() == 11


@cases(
    ("dim", "base", "length", "scale", "range_", "mscale"),
    [
        (64, 1e4, 2048, 4, (8, 21), 1.13863),
        (128, 1e4, 4096, 16, (20, 46), 1.27726),
        (32, 100, 16, 2, (0, 4), 1.06931),
    ],
)
def test_yarn_numbers(dim, base, length, scale, range_, mscale):
    assert yarn.wavelength_range(32, 1, dim, base, length) == range_
    assert yarn.yarn_mscale(scale) == pytest.approx(mscale, abs=1e-5)
    assert yarn.yarn_mscale(0.5) == 1
    assert yarn.yarn_mscale(0.5, 2.0) == 2


def test_longrope():
    factors = torch.linspace(1, 4, 8)
    actual = longrope.longrope(16, 100.0, factors, torch.float64)
    expected = torch.tensor(rates(16, 100.0), dtype=torch.float64) / factors
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=0)
    torch.testing.assert_close(longrope.longrope_factors(factors, 16, 16, 64), torch.ones(8))
    torch.testing.assert_close(longrope.longrope_factors(factors, 64, 16, 64), factors)
    torch.testing.assert_close(longrope.longrope_factors(factors, 40, 16, 64), (1 + factors) / 2)
    torch.testing.assert_close(longrope.longrope_factors(factors, 8, 16, 64), torch.ones(8))
    torch.testing.assert_close(longrope.longrope_factors(factors, 99, 16, 64), factors)
    assert longrope.longrope_factors(factors, 8, 16, 64, clamp=False).min() < 1
    assert longrope.longrope_mscale("su", 2, 16) == pytest.approx(math.sqrt(1.25))
    assert longrope.longrope_mscale("su", 0.5, 16) == 1
    assert longrope.longrope_mscale("yarn", 4, 16) == yarn.yarn_mscale(4)
    assert longrope.longrope_mscale("1.3", 4, 16) == longrope.longrope_mscale(1.3, 4, 16) == 1.3


def test_ms_poe_p_rope_and_others():
    torch.testing.assert_close(fr.ms_poe_ratios(3), torch.tensor([1.2, 1.4, 1.6]))
    torch.testing.assert_close(fr.ms_poe_ratios(3, reach=True), torch.tensor([1.2, 1.5, 1.8]))
    torch.testing.assert_close(fr.ms_poe_ratios(1, reach=True), torch.tensor([1.2]))
    mixed = torch.tensor([0.1, 3.0, 0.5, 2.0])
    torch.testing.assert_close(gf.p_rope(mixed, 0.5), torch.tensor([0.0, 3.0, 0.0, 2.0]))
    assert torch.equal(gf.p_rope(mixed, 1.0), mixed)
    assert torch.equal(gf.p_rope(mixed, 0.74), gf.p_rope(mixed, 0.5))  # rounded down
    assert fr.dynamic_scale(8, 16) == 1
    assert fr.dynamic_scale(40, 16) == 2.5
    assert fr.entropy_factor(256, 16) == pytest.approx(2)
    cos, sin = fr.rotary_tables(torch.tensor([1.0, 0.1]), torch.tensor([[0, 2]]), 1.5)
    assert cos.shape == sin.shape == (1, 2, 4)
    torch.testing.assert_close(cos[0, 1] / 1.5, torch.tensor([2.0, 0.2, 2.0, 0.2]).cos())
    torch.testing.assert_close(sin[0, 1] / 1.5, torch.tensor([2.0, 0.2, 2.0, 0.2]).sin())


SMALLEST_BASES = {  # of side 14, 16, 24, 32, 37, 64, 128, by pairs
    8: (36, 106, 106, 209, 397, 1726, 2774),
    16: (24, 33, 51, 109, 109, 317, 1224),
    24: (23, 31, 43, 57, 86, 199, 684),
    32: (22, 30, 42, 53, 65, 169, 480),
}


@cases("pairs", SMALLEST_BASES)
def test_min_base_is_that_of_the_table(pairs):
    for side, base in zip((14, 16, 24, 32, 37, 64, 128), SMALLEST_BASES[pairs], strict=True):
        actual = gf.min_base(pairs, side)
        assert actual == pytest.approx(base, rel=0.025)
        expected = torch.cos(torch.arange(side + 1)[:, None] * actual ** (-torch.arange(pairs) / pairs)).sum(
            -1
        )
        assert (expected > -1e-4).all()
        freqs = torch.tensor([actual ** (-i / pairs) for i in range(pairs)])
        torch.testing.assert_close(gf.cosine_similarity_bound(freqs, side), expected, rtol=1e-4, atol=1e-4)
        smaller = (actual / 1.0101) ** (-torch.arange(pairs) / pairs)
        assert (gf.cosine_similarity_bound(smaller, side) < 0).any()


def test_min_base_of_the_smallest_side():
    # cos(1) + cos(1 / base) >= 0 already holds for base 1.01
    assert gf.min_base(2, 1) == pytest.approx(1.01)


def test_min_base_of_text_is_that_of_the_table():
    assert gf.min_base(64, 1024) == pytest.approx(4303, rel=0.025)


def on_grid(schedule, scale, length=16.0, dim=32, base=100.0, cell=1.0):
    freqs = torch.tensor(rates(dim, base), dtype=torch.float64)
    result = gf.grid_frequencies(
        freqs, schedule, torch.tensor(scale, dtype=torch.float64), torch.tensor(length), cell=cell
    )
    return freqs, result


@quick
@given(
    scale=st.floats(0.2, 8),
    schedule=st.sampled_from(["none", "rescale", "align_corners", "pi", "ntk", "yarn"]),
)
def test_grid_schedules(scale, schedule):
    freqs, result = on_grid(schedule, scale)
    factor = max(scale, 1.0)
    expected = []
    for i, w in enumerate(freqs.tolist()):
        turns = 16 * w / (2 * math.pi)
        blend = min(max(math.log(1 / turns) / math.log(4), 0), 1)  # 0 from 1 turn on, 1 up to a quarter
        rule = {
            "none": w,
            "rescale": w / scale,
            "align_corners": w * 15 / (16 * scale - 1),
            "pi": w / factor,
            "ntk": w / factor ** (i / 15),
            "yarn": w * (1 - blend) + w / factor * blend,
        }
        expected.append(rule[schedule])
    torch.testing.assert_close(result, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=0)
    if schedule not in ("none", "rescale", "align_corners") and scale <= 1:
        assert torch.equal(result, freqs)


@cases("trained", [1, 7, 49])
def test_align_corners_maps_the_last_patch_to_the_last_and_a_single_one_to_0(trained):
    for now in (1, 2, 49):
        scale = torch.tensor(now / trained, dtype=torch.float64)
        result = gf.grid_frequencies(
            torch.ones(2), "align_corners", scale, torch.tensor(trained * 0.5), cell=torch.tensor(0.5)
        )
        torch.testing.assert_close(result * (now - 1), torch.full((2,), float(trained - 1) * (now > 1)))
        assert now > 1 or (result == 0).all()


def test_ntk_of_a_grid_is_the_ntk_base():
    _, result = on_grid("ntk", 3.0)
    expected = fr.inverse_frequencies(32, fr.ntk_base(100.0, 3.0, 32), torch.float64)
    torch.testing.assert_close(result, expected)
    one = torch.tensor([1.0])
    assert torch.equal(gf.grid_frequencies(one, "ntk", torch.tensor(3.0), torch.tensor(16.0)), one)


def test_yarn_of_a_grid_never_stretches_waves_of_less_than_four_patches():
    freqs, result = on_grid("yarn", 2.0, length=2.0)  # so small that none makes a turn
    short = 2 * math.pi / freqs < 4
    assert not short.any()
    freqs, result = on_grid("yarn", 2.0, length=2.0, cell=2.0)
    short = 2 * math.pi / freqs < 8
    assert short.any()
    assert torch.equal(result[short], freqs[short])
    assert (result[~short] < freqs[~short]).all()


def test_grid_schedules_broadcast_and_keep_gradients():
    freqs = torch.rand(3, 4, requires_grad=True)
    scale, length = torch.tensor([[2.0], [0.5]]), torch.tensor([[16.0], [9.0]])
    for schedule in ("rescale", "pi", "yarn"):
        result = gf.grid_frequencies(freqs, schedule, scale, length, cell=torch.ones(2, 1))
        assert result.shape == (2, 3, 4)
        for i in range(2):
            single = gf.grid_frequencies(freqs, schedule, scale[i], length[i])
            torch.testing.assert_close(result[i], single)
        (grad,) = torch.autograd.grad(result, freqs, torch.randn_like(result))
        assert (grad != 0).all()


@cases(
    ("call", "error", "message"),
    [
        (lambda: fr.inverse_frequencies(7), OptionError, "an even number of channels >= 2, got dim=7"),
        (lambda: fr.inverse_frequencies(8, 0), OptionError, "base must be a positive number, got base=0"),
        (
            lambda: fr.interpolated(torch.ones(2), -1),
            OptionError,
            "scale must be a positive number, got scale=-1",
        ),
        (lambda: fr.ntk_base(100, 2, 2), OptionError, "more than one pair of channels, got dim=2"),
        (
            lambda: longrope.longrope(8, 100, [1.0]),
            ShapeError,
            r"each of 4 pairs \(dim=8\), got shape \(1,\)",
        ),
        (
            lambda: longrope.longrope_factors([1.0], 8, 16, 16),
            OptionError,
            "longest > trained, got longest=16",
        ),
        (
            lambda: longrope.longrope_mscale("ntk", 2, 16),
            OptionError,
            "policy must be su, yarn or a number, got 'ntk'",
        ),
        (lambda: fr.ms_poe_ratios(0), OptionError, "needs heads >= 1 and 0 < low <= high, got heads=0"),
        (
            lambda: gf.p_rope(torch.ones(2), 2),
            OptionError,
            "share must be a fraction from 0 to 1, got share=2",
        ),
        (lambda: fr.entropy_factor(1, 16), OptionError, "more than one key, got tokens=1, trained=16"),
        (lambda: gf.min_base(0, 4), OptionError, "pairs >= 1 and side >= 1, got pairs=0"),
        (
            lambda: on_grid("linear", 2.0),
            OptionError,
            "schedule must be one of none, rescale, align_corners, pi, ntk, yarn, got",
        ),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
