from pathlib import Path

import numpy as np
import pytest
from scipy import ndimage

from tests.cases import cases
from vispe.errors import InputError, OptionError
from vispe.images.read import Micrograph
from vispe.segment.features.feature_config import FeatureConfig
from vispe.segment.features.filters.filters2d import Filters
from vispe.segment.features.filters.filters3d import KINDS_3D, Filters3D, Stack
from vispe.segment.features.pixel_features import Features
from vispe.segment.features.tiles import Region

RNG = np.random.default_rng(5)
SIGMAS_2D = (1.0,)
SIGMAS_3D = (1.0, 2.5)


def micrograph(pages, axes=None, size=(1.0, 1.0), step=2.0):
    axes = (("Z", len(pages)),) if axes is None else axes
    return Micrograph(Path("s.tif"), pages, size, page_axes=axes, z_step=step)


def volume(*shape):
    return RNG.random(shape).astype(np.float32)


def features_3d(pages, number, region=None, filters=None, **facts):
    """Compute the 3D features of a page -> (channels, sigmas, kinds, rows, columns)."""
    filters = filters or Filters3D(SIGMAS_2D, sigmas_3d=SIGMAS_3D)
    image = micrograph(pages, **facts)
    page = np.where(image.valid[number][..., None], pages[number], np.float32(np.nan))
    actual = filters.within(Stack(image, pages), number).planes(page, region)
    features_2d = Filters(SIGMAS_2D).planes(page, region)
    np.testing.assert_array_equal(actual[: len(features_2d)], features_2d)
    assert actual.dtype == np.float32
    return actual[len(features_2d) :].reshape(
        pages.shape[3], len(SIGMAS_3D), len(KINDS_3D), *actual.shape[1:]
    )


def reference(grey, sigma, step):
    """Compute the six features of (z, h, w) with scipy and LAPACK -> (6, z, h, w)."""

    def smooth(values):
        return ndimage.gaussian_filter(values, (sigma / step, sigma, sigma), mode="reflect", truncate=4.0)

    grey = grey.astype(np.float64)
    mean = smooth(grey)
    padded = np.pad(mean, 1, mode="edge")
    spacing = (step, 1.0, 1.0)

    def shifted(*shift):
        return padded[tuple(slice(1 + s, n - 1 + s) for s, n in zip(shift, padded.shape, strict=True))]

    axes = np.eye(3, dtype=int)
    slope = [(shifted(*a) - shifted(*-a)) / (2 * u) for a, u in zip(axes, spacing, strict=True)]
    hessian = np.empty((*grey.shape, 3, 3))
    for i in range(3):
        hessian[..., i, i] = (shifted(*axes[i]) + shifted(*-axes[i]) - 2 * mean) / spacing[i] ** 2
        for j in range(i):
            a, b = axes[i], axes[j]
            cross = shifted(*a + b) + shifted(*-a - b) - shifted(*a - b) - shifted(*b - a)
            hessian[..., i, j] = hessian[..., j, i] = cross / (4 * spacing[i] * spacing[j])
    values = np.moveaxis(np.linalg.eigvalsh(hessian)[..., ::-1], -1, 0)
    std = np.sqrt(np.maximum(smooth(grey**2) - mean**2, 0))
    return np.stack([mean, np.sqrt(sum(s**2 for s in slope)), *values, std])


@cases(("shape", "step"), [((5, 23, 31, 1), 2.0), ((2, 17, 9, 2), 0.7), ((9, 8, 13, 1), 6.0)])
def test_features_equal_scipy_for_any_voxel_shape(shape, step):
    pages = volume(*shape)
    actual = np.stack([features_3d(pages, n, step=step) for n in range(shape[0])], 3)
    for c in range(shape[3]):
        for i, sigma in enumerate(SIGMAS_3D):
            expected = reference(pages[..., c], sigma, step)
            np.testing.assert_allclose(actual[c, i, :5], expected[:5], atol=2e-7)
            np.testing.assert_allclose(actual[c, i, 5], expected[5], atol=1e-6)


def test_slice_spacing_is_relative_to_the_pixel_size():
    pages = volume(4, 12, 14, 1)
    actual = features_3d(pages, 1, size=(0.5, 0.5), step=1.0)
    np.testing.assert_array_equal(actual, features_3d(pages, 1, step=2.0))
    np.testing.assert_array_equal(features_3d(pages, 1, size=None, step=3.0), features_3d(pages, 1, step=1.0))
    np.testing.assert_allclose(features_3d(pages, 1, size=(0.25, 1.0), step=1.0), actual, atol=1e-7)


@cases("region", [Region(0, 7, 3, 20), Region(60, 83, 11, 12), Region(5, 70, 0, 37)])
def test_region_equals_the_crop_of_the_whole_page(region):
    pages = volume(3, 83, 37, 1)
    expected = features_3d(pages, 1)
    np.testing.assert_allclose(features_3d(pages, 1, region), expected[(..., *region.slices)], atol=1e-7)


def test_features_are_equivariant_to_rotation_and_slice_reversal():
    pages = volume(4, 20, 33, 1)
    actual = features_3d(pages, 1)
    np.testing.assert_allclose(features_3d(pages[::-1], 2), actual, atol=1e-6)
    for turns in range(4):
        for mirror in (False, True):

            def pose(a, axes, turns=turns, mirror=mirror):
                a = np.flip(a, axes[1]) if mirror else a
                return np.ascontiguousarray(np.rot90(a, turns, axes))

            np.testing.assert_allclose(features_3d(pose(pages, (1, 2)), 1), pose(actual, (3, 4)), atol=1e-6)


def test_invalid_pixels_have_no_weight():
    pages = volume(3, 15, 18, 1)
    pages[1, 4:9, 6:11] = np.nan
    actual = features_3d(pages, 1)
    valid = np.isfinite(pages[..., 0])
    assert np.isfinite(actual).all()
    assert (actual[..., ~valid[1]] == 0).all()
    filled = np.where(valid, pages[..., 0], 0).astype(np.float64)
    for i, sigma in enumerate(SIGMAS_3D):
        mean, weight = (
            ndimage.gaussian_filter(a, (sigma / 2, sigma, sigma), mode="reflect", truncate=4.0)
            for a in (filled, valid.astype(float))
        )
        expected = (mean / weight)[1]
        np.testing.assert_allclose(actual[0, i, 0][valid[1]], expected[valid[1]], atol=1e-6)
    pages[2] = np.nan  # a whole slice
    np.testing.assert_array_equal(features_3d(pages, 2), 0)


def test_time_points_are_separate_volumes_in_any_axis_order():
    pages = volume(6, 11, 13, 1)
    expected = [features_3d(pages[3 * t : 3 * t + 3], 1) for t in range(2)]
    times = (("T", 2), ("Z", 3))
    for t in range(2):
        np.testing.assert_array_equal(features_3d(pages, 3 * t + 1, axes=times), expected[t])
    z_first = pages.reshape(2, 3, 11, 13, 1).swapaxes(0, 1).reshape(pages.shape)
    for t in range(2):
        np.testing.assert_array_equal(features_3d(z_first, 2 + t, axes=(("Z", 3), ("T", 2))), expected[t])


@cases(
    ("count", "axes", "message"),
    [
        (1, (), r"s.tif has one page, but 3D filters need a Z stack. Omit filters_3d"),
        (
            4,
            (("T", 4),),
            r"has no Z axis \(it is a time series of 4 frames\).*Omit filters_3d, or specify",
        ),
        (4, (("T", 2), ("A", 2)), r"no Z axis \(its page axes are T and A\)"),
        (3, (("TZ", 3),), r"no Z axis \(its page axes are TZ\)"),
    ],
)
def test_inputs_without_a_z_axis_raise(count, axes, message):
    pages = volume(count, 5, 6, 1)
    with pytest.raises(InputError, match=message):
        Stack(micrograph(pages, axes), pages)


def test_notes_state_slice_spacing_and_assumptions():
    pages = volume(3, 5, 6, 1)
    stack = Stack(micrograph(pages, size=(0.5, 0.5), step=2.0), pages)
    assert stack.step == 4.0
    assert stack.notes == (
        "the slice spacing of s.tif is 2 microns, 4 times the pixel size: 3D filters take this into account.",
    )
    stack_without_spacing = Stack(micrograph(pages, (("Q", 3),), step=None), pages)
    assert stack_without_spacing.step == 1.0
    assert stack_without_spacing.notes[0] == "the pages of s.tif are interpreted as slices along Z."
    assert (
        "the slice distance of s.tif is unknown: 3D filters assume cubic voxels"
        in stack_without_spacing.notes[1]
    )


def test_pages_without_their_stack_raise():
    config = FeatureConfig(filters_3d=True)
    features = Features(config, device="cpu")
    page = volume(20, 20, 1)
    with pytest.raises(InputError, match=r"3D filters need the neighbouring slices"):
        features.prepare(page, np.ones((20, 20), bool)).compute(0)
    with pytest.raises(OptionError, match=r"filters_3d=True has no effect on features=tokens"):
        FeatureConfig("tokens", model="vispe_micro", filters_3d=True)


def test_every_channel_has_a_name():
    filters = Filters3D(SIGMAS_2D, sigmas_3d=SIGMAS_3D)
    for channels in (1, 2):
        pages = volume(2, 6, 7, channels)
        actual = filters.within(Stack(micrograph(pages), pages), 0).planes(pages[0])
        names = filters.names(channels)
        assert len(names) == len(actual) == len(set(names))
    assert names[-12:-10] == ["c1.gaussian3d_1", "c1.gradient3d_1"]
    assert filters.reach == 11
