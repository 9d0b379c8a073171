import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.ndimage import gaussian_filter

from tests.cases import cases
from vispe.errors import OptionError, ShapeError
from vispe.segment.features.filters.filters2d import SIGMAS, Filters, group_pixels
from vispe.segment.features.tiles import Region, blocks

SIZES = [(1, 1), (1, 7), (5, 1), (2, 3), (17, 40), (33, 150), (131, 70)]


def image(height, width, channels=1, seed=0):
    return np.random.default_rng(seed).random((height, width, channels), np.float32)


def rotated(array, turns, flip):
    return np.ascontiguousarray(np.rot90(array[::-1] if flip else array, turns))


@cases("size", SIZES)
def test_features_are_rotation_equivariant(size):
    page, filters = image(*size), Filters()
    page[: size[0] // 2, : size[1] // 3] = 0.5  # a flat part: variances are 0 there
    actual = filters(page)
    for turns in range(4):
        for flip in (False, True):
            rotated_features = filters(rotated(page, turns, flip))
            np.testing.assert_allclose(rotated_features, rotated(actual, turns, flip), atol=1e-5, rtol=0)


def test_cached_planes_equal_recomputed_planes():
    page, filters = image(90, 80, 2), Filters()
    page[3:9, 40:60] = np.nan
    regions = [Region(0, 40, 0, 30), Region(30, 90, 20, 80), Region(40, 60, 30, 50)]
    expected = [Filters().planes(page, region) for region in regions]
    for region, planes in zip(regions, expected, strict=True):
        np.testing.assert_array_equal(filters.planes(page, region, again=True), planes)
    # equal pixels within a larger page have other features near the edge
    larger = np.pad(page, ((7, 70), (5, 70), (0, 0)), mode="wrap")
    shifted = Region(7, 47, 5, 35)
    np.testing.assert_array_equal(filters.planes(larger, shifted), Filters().planes(larger, shifted))
    for region, planes in zip(regions, expected, strict=True):
        np.testing.assert_array_equal(filters.planes(page.copy(), region), planes)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 3), st.booleans(), st.booleans())
def test_features_of_tiny_images_are_rotation_equivariant(height, width, turns, flip, holes):
    page, filters = image(height, width, seed=height * 41 + width), Filters()
    if holes:
        page[np.random.default_rng(1).random((height, width)) < 0.2] = np.nan
    rotated_features = filters(rotated(page, turns, flip))
    assert np.isfinite(rotated_features).all()
    np.testing.assert_allclose(rotated_features, rotated(filters(page), turns, flip), atol=1e-5, rtol=0)


@cases("size", [(3, 5), (40, 90), (150, 33)])
def test_smoothing_and_std_agree_with_scipy(size):
    page, filters = image(*size), Filters()
    actual = dict(zip(filters.names(), np.moveaxis(filters(page), -1, 0), strict=True))
    grey = page[..., 0].astype(np.float64)
    for sigma in SIGMAS:
        mean, square = (gaussian_filter(v, sigma, mode="reflect", truncate=4) for v in (grey, grey * grey))
        np.testing.assert_allclose(actual[f"gaussian_{sigma:g}"], mean, atol=1e-6)
        np.testing.assert_allclose(
            actual[f"std_{sigma:g}"], np.sqrt(np.maximum(square - mean**2, 0)), atol=1e-6
        )


def test_derivatives_of_a_parabola_are_exact():
    y, x = np.mgrid[0:121, 0:101].astype(np.float32)
    page = (0.02 * (y - 60) ** 2 + 0.005 * (x - 50) ** 2)[..., None]
    filters = Filters((1.0,))
    actual = filters(page)[40:80, 30:70]
    yy, xx = np.mgrid[40:80, 30:70]
    gradient = np.hypot(0.04 * (yy - 60), 0.01 * (xx - 50))
    np.testing.assert_allclose(actual[..., 2], gradient, atol=1e-4)
    np.testing.assert_allclose(actual[..., 3], 0.04, atol=1e-4)  # the larger eigenvalue first
    np.testing.assert_allclose(actual[..., 4], 0.01, atol=1e-4)


@cases("side", [1, 48, 1000])
def test_blocks_equal_the_whole_image(side):
    size = (70, 95) if side > 1 else (3, 4)
    page, filters = image(*size, channels=2), Filters()
    page[30:33, 60:80] = np.nan
    expected, actual = filters(page), np.zeros((*size, 52), np.float32)
    for region in blocks(*size, side):
        actual[region.slices] = filters(page, region)
    np.testing.assert_allclose(actual, expected, atol=1e-7, rtol=0)


def test_inner_region_equals_the_crop_of_the_whole_image():
    page, filters = image(200, 300), Filters()
    region = Region(77, 130, 101, 102)
    np.testing.assert_allclose(filters(page, region), filters(page)[region.slices], atol=1e-7, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("size", [(1, 31), (31, 1), (63, 65), (130, 97)])
@pytest.mark.parametrize(("strip", "chunk"), [(64, 1024), (7, 11), (1, 1000), (30, 1)])
def test_no_seams_between_strips(size, strip, chunk, monkeypatch):
    page = image(*size)
    if min(size) > 1:
        page[10:20, 5:9] = np.nan
    expected = Filters((0.7, 8.0))(page)
    monkeypatch.setattr("vispe.segment.features.filters.filters2d._STRIP", strip)
    monkeypatch.setattr("vispe.segment.features.filters.filters2d._CHUNK", chunk)
    np.testing.assert_allclose(Filters((0.7, 8.0))(page), expected, atol=1e-7, rtol=0)


@cases("size", [(1, 31), (30, 2), (44, 65)])
def test_derivatives_are_finite_differences_of_the_smoothed_image(size):
    page, filters = image(*size), Filters((1.0, 3.0, 16.0))
    actual = dict(zip(filters.names(), np.moveaxis(filters(page), -1, 0), strict=True))
    for sigma in (1.0, 3.0, 16.0):
        smooth = gaussian_filter(page[..., 0].astype(np.float64), sigma, mode="reflect", truncate=4)
        s = np.pad(smooth, 1, mode="edge")
        gy, gx = (s[2:, 1:-1] - s[:-2, 1:-1]) / 2, (s[1:-1, 2:] - s[1:-1, :-2]) / 2
        yy, xx = s[2:, 1:-1] + s[:-2, 1:-1] - 2 * smooth, s[1:-1, 2:] + s[1:-1, :-2] - 2 * smooth
        xy = (s[2:, 2:] + s[:-2, :-2] - s[2:, :-2] - s[:-2, 2:]) / 4
        eigenvalues = np.linalg.eigvalsh(np.moveaxis(np.array([[yy, xy], [xy, xx]]), (0, 1), (-2, -1)))
        expected = {
            "gradient": np.hypot(gy, gx),
            "hessian_small": eigenvalues[..., 0],
            "hessian_large": eigenvalues[..., 1],
        }
        for name, values in expected.items():
            scale = np.abs(values).max()
            np.testing.assert_allclose(actual[f"{name}_{sigma:g}"], values, atol=2e-6 * scale + 1e-12, rtol=0)


def test_planes_are_the_features_with_channels_first():
    page, filters = image(20, 31, channels=2), Filters()
    planes = filters.planes(page)
    assert planes.flags.c_contiguous
    np.testing.assert_array_equal(np.moveaxis(filters(page), -1, 0), planes)


def test_invalid_pixels_are_zero_and_do_not_affect_neighbours():
    page = np.full((50, 60, 1), 0.25, np.float32)
    page[20:30, 10:40] = np.nan
    page[0, 0] = np.inf
    actual = Filters()(page)
    invalid = ~np.isfinite(page[..., 0])
    assert (actual[invalid] == 0).all()
    names = Filters().names()
    for name, layer in zip(names, np.moveaxis(actual, -1, 0), strict=True):
        expected = 0.25 if name.startswith(("intensity", "gaussian")) else 0
        np.testing.assert_allclose(layer[~invalid], expected, atol=1e-6, err_msg=name)


def test_channels_are_computed_independently():
    page, filters = image(20, 31, channels=3), Filters()
    actual = filters(page)
    assert actual.shape == (20, 31, 78)
    assert actual.dtype == np.float32
    for c in range(3):
        np.testing.assert_array_equal(actual[..., 26 * c : 26 * (c + 1)], filters(page[..., c : c + 1]))
    assert len(filters.names(3)) == 78
    assert filters.names(3)[26] == "c1.intensity"


def test_invalid_arguments_raise():
    with pytest.raises(OptionError, match=r"scales above 0 px, got sigmas=\(0,\)"):
        Filters((0,))
    with pytest.raises(ShapeError, match=r"got shape \(3, 4\)"):
        Filters()(np.zeros((3, 4), np.float32))
    with pytest.raises(ShapeError, match="at least one pixel"):
        Filters()(np.zeros((0, 4, 1), np.float32))


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 60), st.integers(1, 300), st.integers(1, 40), st.booleans(), st.integers(0, 99))
def test_features_at_pixels_equal_those_of_the_page(height, width, count, holes, seed):
    rng, page = np.random.default_rng(seed), image(height, width, channels=2, seed=seed)
    if holes:
        page[rng.random((height, width)) < 0.1] = np.nan
    filters = Filters((1.0, 3.0))
    y, x = rng.integers(0, height, count), rng.integers(0, width, count)
    actual = filters.at(page, y, x)
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, filters.planes(page)[:, y, x].T, atol=1e-6, rtol=0)


def test_distant_pixels_are_grouped_in_separate_rectangles():
    y, x = (n.ravel() for n in np.mgrid[:200, :300])
    assert len(group_pixels(y, x, 65)) == 1
    rng = np.random.default_rng(0)
    centres = np.array([(20, 30), (400, 450), (50, 470)])
    y, x = (centres[:, None] + rng.integers(-8, 9, (3, 50, 2))).reshape(-1, 2).T
    groups = group_pixels(y, x, 65)
    assert sorted(len(indices) for indices in groups) == [50, 50, 50]
    np.testing.assert_array_equal(np.sort(np.concatenate(groups)), np.arange(150))
