import numpy as np
import pytest

from tests.cases import cases
from vispe.errors import ShapeError
from vispe.segment.materials import correlation
from vispe.segment.materials.correlation import lag_counts, two_point_correlation


def naive(mask, reach):
    """Count pairs at every lag with plain loops over shifts."""
    h, w = mask.shape
    out = np.zeros((2 * reach + 1, 2 * reach + 1), int)
    for a in range(-reach, reach + 1):
        for b in range(-reach, reach + 1):
            first = mask[max(0, -a) : h - max(0, a), max(0, -b) : w - max(0, b)]
            shifted = mask[max(0, a) : h + min(0, a), max(0, b) : w + min(0, b)]
            out[a + reach, b + reach] = (first & shifted).sum()
    return out


@cases("tile", [5, 16, 1024])
@cases("shape", [(23, 31), (16, 9)])
def test_pair_counts_equal_a_naive_loop_for_any_tile_size(monkeypatch, tile, shape):
    monkeypatch.setattr(correlation, "_TILE", tile)
    mask = np.random.default_rng(tile).random(shape) < 0.4
    for reach in (1, 4):
        np.testing.assert_array_equal(lag_counts(mask, reach), naive(mask, reach))


def test_shells_are_means_over_valid_pairs():
    rng = np.random.default_rng(2)
    inside, valid = rng.random((24, 30)) < 0.5, rng.random((24, 30)) < 0.8
    actual = two_point_correlation(inside, valid)
    inside_pairs, pairs = naive(inside & valid, 12), naive(valid, 12)
    offsets = np.arange(-12, 13)
    length = np.hypot(offsets[:, None], offsets)
    for shell, (r, value) in enumerate(zip(actual.distance, actual.value, strict=True)):
        region = np.rint(length) == shell
        assert r == pytest.approx(length[region].mean())
        assert value == pytest.approx(inside_pairs[region].sum() / pairs[region].sum())
    assert len(actual.value) == 13
    assert actual.value[0] == pytest.approx(inside[valid].mean())


def test_invalid_pixels_do_not_affect_constant_pages():
    valid = np.random.default_rng(0).random((40, 33)) < 0.6
    actual = two_point_correlation(np.ones((40, 33), bool), valid)
    np.testing.assert_array_equal(actual.value, 1)
    assert actual.specific_surface == pytest.approx(0, abs=1e-12)


def boolean(side, radius, density, seed):
    """Make discs at random positions (Boolean model) -> bool (side, side)."""
    rng = np.random.default_rng(seed)
    wide = side + 2 * radius
    y, x = np.mgrid[:side, :side]
    out = np.zeros((side, side), bool)
    for cy, cx in rng.random((rng.poisson(density * wide**2), 2)) * wide - radius:
        out |= (y - cy) ** 2 + (x - cx) ** 2 < radius**2
    return out


def test_boolean_model_of_discs_matches_theory():
    radius, density = 7, 0.004
    actual = [
        two_point_correlation(boolean(200, radius, density, s), np.ones((200, 200), bool)) for s in range(6)
    ]
    value, r = np.mean([f.value for f in actual], 0), actual[0].distance
    # both outside: no centre in the union of two discs
    t = np.clip(r / (2 * radius), 0, 1)
    common = 2 * radius**2 * (np.arccos(t) - t * np.sqrt(1 - t**2))
    empty = np.exp(-density * np.pi * radius**2)
    expected = 1 - 2 * empty + np.exp(-density * (2 * np.pi * radius**2 - common))
    np.testing.assert_allclose(value, expected, atol=0.03)
    surface = np.mean([f.specific_surface for f in actual])
    assert surface == pytest.approx(4 / np.pi * 2 * np.pi * radius * density * empty, rel=0.06)


def test_distances_scale_with_the_pixel_size():
    inside = np.random.default_rng(1).random((64, 64)) < 0.5
    full_mask = np.ones_like(inside)
    plain, small = (
        two_point_correlation(inside, full_mask),
        two_point_correlation(inside, full_mask, (0.2, 0.2)),
    )
    np.testing.assert_allclose(small.distance, 0.2 * plain.distance)
    np.testing.assert_array_equal(small.value, plain.value)
    assert small.specific_surface == pytest.approx(plain.specific_surface / 0.2)
    anisotropic = two_point_correlation(inside, full_mask, (1.0, 2.0))
    assert anisotropic.distance[-1] < 33
    with pytest.raises(ShapeError, match=r"inside \(64, 64\) and valid \(2,\) must be one page"):
        two_point_correlation(inside, np.ones(2, bool))
