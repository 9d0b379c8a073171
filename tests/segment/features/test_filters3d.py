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
FLAT = (1.0,)
DEEP = (1.0, 2.5)


def micrograph(pages, axes=None, size=(1.0, 1.0), step=2.0):
    axes = (("Z", len(pages)),) if axes is None else axes
    return Micrograph(Path("s.tif"), pages, size, page_axes=axes, z_step=step)


def volume(*shape):
    return RNG.random(shape).astype(np.float32)


def deep(pages, number, region=None, filters=None, **facts):
    """Compute the 3D features of a page, (channels, sigmas, kinds, rows, columns)."""
    filters = filters or Filters3D(FLAT, sigmas_3d=DEEP)
    image = micrograph(pages, **facts)
    page = np.where(image.valid[number][..., None], pages[number], np.float32(np.nan))
    actual = filters.within(Stack(image, pages), number).planes(page, region)
    flat = Filters(FLAT).planes(page, region)
    np.testing.assert_array_equal(actual[: len(flat)], flat)
    assert actual.dtype == np.float32
    return actual[len(flat) :].reshape(pages.shape[3], len(DEEP), len(KINDS_3D), *actual.shape[1:])


def reference(grey, sigma, step):
    """Compute the six features of (z, h, w) with scipy and LAPACK -> (6, z, h, w)."""

    def smooth(values):
        return ndimage.gaussian_filter(values, (sigma / step, sigma, sigma), mode="reflect", truncate=4.0)

    grey = grey.astype(np.float64)
    mean = smooth(grey)
    padded = np.pad(mean, 1, mode="edge")
    unit = (step, 1.0, 1.0)

    def at(*shift):
        return padded[tuple(slice(1 + s, n - 1 + s) for s, n in zip(shift, padded.shape, strict=True))]

    axes = np.eye(3, dtype=int)
    slope = [(at(*a) - at(*-a)) / (2 * u) for a, u in zip(axes, unit, strict=True)]
    hessian = np.empty((*grey.shape, 3, 3))
    for i in range(3):
        hessian[..., i, i] = (at(*axes[i]) + at(*-axes[i]) - 2 * mean) / unit[i] ** 2
        for j in range(i):
            a, b = axes[i], axes[j]
            cross = at(*a + b) + at(*-a - b) - at(*a - b) - at(*b - a)
            hessian[..., i, j] = hessian[..., j, i] = cross / (4 * unit[i] * unit[j])
    values = np.moveaxis(np.linalg.eigvalsh(hessian)[..., ::-1], -1, 0)
    std = np.sqrt(np.maximum(smooth(grey**2) - mean**2, 0))
    return np.stack([mean, np.sqrt(sum(s**2 for s in slope)), *values, std])


@cases(("shape", "step"), [((5, 23, 31, 1), 2.0), ((2, 17, 9, 2), 0.7), ((9, 8, 13, 1), 6.0)])
def test_the_features_are_those_of_scipy_with_voxels_of_any_shape(shape, step):
    pages = volume(*shape)
    actual = np.stack([deep(pages, n, step=step) for n in range(shape[0])], 3)
    for c in range(shape[3]):
        for i, sigma in enumerate(DEEP):
            expected = reference(pages[..., c], sigma, step)
            np.testing.assert_allclose(actual[c, i, :5], expected[:5], atol=2e-7)
            np.testing.assert_allclose(actual[c, i, 5], expected[5], atol=1e-6)


def test_the_step_counts_in_pixels():
    pages = volume(4, 12, 14, 1)
    actual = deep(pages, 1, size=(0.5, 0.5), step=1.0)
    np.testing.assert_array_equal(actual, deep(pages, 1, step=2.0))
    np.testing.assert_array_equal(deep(pages, 1, size=None, step=3.0), deep(pages, 1, step=1.0))
    np.testing.assert_allclose(deep(pages, 1, size=(0.25, 1.0), step=1.0), actual, atol=1e-7)


@cases("region", [Region(0, 7, 3, 20), Region(60, 83, 11, 12), Region(5, 70, 0, 37)])
def test_a_region_gets_the_numbers_of_the_whole(region):
    pages = volume(3, 83, 37, 1)
    expected = deep(pages, 1)
    np.testing.assert_allclose(deep(pages, 1, region), expected[(..., *region.slices)], atol=1e-7)


def test_they_rotate_with_the_image_and_are_invariant_to_the_order_of_slices():
    pages = volume(4, 20, 33, 1)
    actual = deep(pages, 1)
    np.testing.assert_allclose(deep(pages[::-1], 2), actual, atol=1e-6)
    for turns in range(4):
        for mirror in (False, True):

            def move(a, axes, turns=turns, mirror=mirror):
                a = np.flip(a, axes[1]) if mirror else a
                return np.ascontiguousarray(np.rot90(a, turns, axes))

            np.testing.assert_allclose(deep(move(pages, (1, 2)), 1), move(actual, (3, 4)), atol=1e-6)


def test_pixels_without_data_have_no_weight():
    pages = volume(3, 15, 18, 1)
    pages[1, 4:9, 6:11] = np.nan
    actual = deep(pages, 1)
    valid = np.isfinite(pages[..., 0])
    assert np.isfinite(actual).all()
    assert (actual[..., ~valid[1]] == 0).all()
    filled = np.where(valid, pages[..., 0], 0).astype(np.float64)
    for i, sigma in enumerate(DEEP):
        mean, weight = (
            ndimage.gaussian_filter(a, (sigma / 2, sigma, sigma), mode="reflect", truncate=4.0)
            for a in (filled, valid.astype(float))
        )
        expected = (mean / weight)[1]
        np.testing.assert_allclose(actual[0, i, 0][valid[1]], expected[valid[1]], atol=1e-6)
    pages[2] = np.nan  # a whole slice
    np.testing.assert_array_equal(deep(pages, 2), 0)


def test_times_are_volumes_of_their_own_in_either_order():
    pages = volume(6, 11, 13, 1)
    expected = [deep(pages[3 * t : 3 * t + 3], 1) for t in range(2)]
    times = (("T", 2), ("Z", 3))
    for t in range(2):
        np.testing.assert_array_equal(deep(pages, 3 * t + 1, axes=times), expected[t])
    mixed = pages.reshape(2, 3, 11, 13, 1).swapaxes(0, 1).reshape(pages.shape)
    for t in range(2):
        np.testing.assert_array_equal(deep(mixed, 2 + t, axes=(("Z", 3), ("T", 2))), expected[t])


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
def test_what_is_no_volume_is_refused(count, axes, message):
    pages = volume(count, 5, 6, 1)
    with pytest.raises(InputError, match=message):
        Stack(micrograph(pages, axes), pages)


def test_notes_say_what_was_assumed():
    pages = volume(3, 5, 6, 1)
    known = Stack(micrograph(pages, size=(0.5, 0.5), step=2.0), pages)
    assert known.step == 4.0
    assert known.notes == (
        "the slice spacing of s.tif is 2 microns, 4 times the pixel size: 3D filters take this into account.",
    )
    guessed = Stack(micrograph(pages, (("Q", 3),), step=None), pages)
    assert guessed.step == 1.0
    assert guessed.notes[0] == "the pages of s.tif are interpreted as slices along Z."
    assert "the slice distance of s.tif is unknown: 3D filters assume cubic voxels" in guessed.notes[1]


def test_a_page_without_its_stack_is_refused():
    config = FeatureConfig(filters_3d=True)
    features = Features(config, device="cpu")
    page = volume(20, 20, 1)
    with pytest.raises(InputError, match=r"3D filters need the neighbouring slices"):
        features.prepare(page, np.ones((20, 20), bool)).compute(0)
    with pytest.raises(OptionError, match=r"filters_3d=True has no effect on features=tokens"):
        FeatureConfig("tokens", model="vispe_micro", filters_3d=True)


def test_every_channel_has_a_name():
    filters = Filters3D(FLAT, sigmas_3d=DEEP)
    for channels in (1, 2):
        pages = volume(2, 6, 7, channels)
        actual = filters.within(Stack(micrograph(pages), pages), 0).planes(pages[0])
        names = filters.names(channels)
        assert len(names) == len(actual) == len(set(names))
    assert names[-12:-10] == ["c1.gaussian3d_1", "c1.gradient3d_1"]
    assert filters.reach == 11
