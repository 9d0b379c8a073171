"""Sample grid of a page: points, training samples, and regions that add up to the page."""

import numpy as np
import pytest

from tests.cases import cases
from vispe.segment.classify.out_of_distribution import FeatureDistribution, feature_sums
from vispe.segment.features.blend import window
from vispe.segment.features.feature_config import FeatureConfig
from vispe.segment.features.pixel_features import Features
from vispe.segment.features.sample_grid import FeatureGrid, offsets, sample
from vispe.segment.features.tiles import Region, blocks, grid_points

RNG = np.random.default_rng(0)


def make_distribution(f, m=2):
    rng = np.random.default_rng(1)
    flat = np.zeros(2 * m), np.eye(2 * m), np.ones(2), 1
    return FeatureDistribution(np.zeros(f, np.float32), rng.normal(size=(m, f)).astype(np.float32), *flat)


@cases("region", [Region(0, 1, 0, 4), Region(0, 5, 3, 29), Region(13, 77, 4, 5), Region(60, 61, 5, 12)])
def test_points_are_centres_of_cells_of_eight_pixels(region):
    top, bottom, left, right = grid_points(region)
    rows = [i for i in range(20) if region.top <= 8 * i + 4 < region.bottom]
    columns = [i for i in range(20) if region.left <= 8 * i + 4 < region.right]
    assert list(range(top, bottom)) == rows
    assert list(range(left, right)) == columns
    y, x = offsets(region)
    assert (y + region.top).tolist() == [8 * i + 4 for i in rows]
    assert (x + region.left).tolist() == [8 * i + 4 for i in columns]


@cases("side", [8, 13, 64, 500])
def test_blocks_partition_the_points_of_a_page(side):
    shape = 133, 97
    counts = np.zeros(shape, int)
    for block in blocks(*shape, side):
        y, x = offsets(block)
        counts[np.ix_(y + block.top, x + block.left)] += 1
    y, x = offsets(Region(0, shape[0], 0, shape[1]))
    assert (counts[np.ix_(y, x)] == 1).all()
    assert counts.sum() == len(y) * len(x)


@cases(
    "config",
    [
        FeatureConfig(sigmas=(1.0, 2.0)),
        FeatureConfig("tokens", model="vispe_micro", tile=64),
        FeatureConfig("both", sigmas=(1.0, 3.0), model="vispe_micro", tile=64),
    ],
)
def test_sampled_features_equal_those_of_the_pixels(config):
    page = RNG.random((101, 83, 1), np.float32)
    valid = np.ones(page.shape[:2], bool)
    prepared = Features(config, device="cpu").prepare(page, valid)
    for number, piece in enumerate(prepared.pieces):
        actual = prepared.sampled(number)
        expected = prepared.compute(number)
        y, x = offsets(piece)
        np.testing.assert_allclose(actual, expected[:, y[:, None], x].transpose(1, 2, 0), atol=2e-5)


def test_samples_skip_invalid_points_and_small_patches():
    page, valid = RNG.random((150, 210, 1), np.float32), np.ones((150, 210), bool)
    valid[:64, :64] = False
    valid[64:80, 64:128] = False  # a quarter of a patch
    actual = sample(Features(FeatureConfig(sigmas=(1.0,)), device="cpu").prepare(page, valid), valid)
    # patches of 64 px: rows 0, 1 and 22 px of row 2, columns 0, 1, 2 and 18 px of column 3
    sizes = {(r, c): [8, 8, 3][r] * [8, 8, 8, 2][c] for r in range(3) for c in range(4)}
    sizes[0, 0], sizes[1, 1] = 0, 48
    used_patches = {position: size for position, size in sizes.items() if size >= 16}
    assert np.bincount(actual.patch).tolist() == [used_patches[position] for position in sorted(used_patches)]
    quarter = {(r, c): (r * 64 + 32 >= 75) * 2 + (c * 64 + 32 >= 105) for r, c in used_patches}
    assert actual.part.tolist() == [quarter[position] for position in sorted(used_patches)]
    assert actual.features.shape == (sum(used_patches.values()), 6)


def test_pieces_are_sampled_at_even_intervals():
    page, valid = RNG.random((64, 640, 1), np.float32), np.ones((64, 640), bool)
    prepared = Features(FeatureConfig(sigmas=(1.0,), tile=64), device="cpu").prepare(page, valid)
    actual = sample(prepared, valid, 4)
    full_sample = sample(prepared, valid, 16)
    assert len(full_sample.part) == 10
    assert len(actual.part) == 4
    indices = [0, 3, 6, 9]
    expected = np.concatenate([full_sample.features[full_sample.patch == k] for k in indices])
    np.testing.assert_array_equal(actual.features, expected)


def test_pages_without_data_or_points_give_none():
    features = Features(FeatureConfig(sigmas=(1.0,)), device="cpu")
    for shape, has_data in (((40, 40), False), ((3, 90), True), ((20, 20), True)):
        valid = np.full(shape, has_data)
        assert sample(features.prepare(RNG.random((*shape, 1), np.float32), valid), valid) is None


@pytest.mark.slow
@pytest.mark.parametrize("side", [40, 64, 77])
def test_regions_add_up_to_the_page_for_overlapping_pieces(side):
    shape = 118, 163
    page, valid = RNG.random((*shape, 1), np.float32), RNG.random(shape) > 0.2
    config = FeatureConfig("tokens", model="vispe_micro", tile=64)
    prepared = Features(config, device="cpu").prepare(page, valid)
    distribution = make_distribution(prepared.sampled(0).shape[-1])
    codes = [distribution.codes(prepared.sampled(number)) for number in range(len(prepared.pieces))]

    def fill_grid(region):
        out = FeatureGrid.empty(region, distribution)
        for number, piece in enumerate(prepared.pieces):
            out.add(piece, codes[number], prepared.weight(number))
        out.forget(~valid[region.slices])
        return out

    expected = fill_grid(Region(0, shape[0], 0, shape[1]))
    grids = [fill_grid(block) for block in blocks(*shape, side)]
    assert np.array_equal(sum(block_grid.sums() for block_grid in grids), expected.sums())
    assert np.array_equal(sum(expected.sums(block) for block in blocks(*shape, side)), expected.sums())
    # reference, point by point: the piece with the largest weight, of ties the first
    y, x = offsets(expected.region)
    selected_codes = []
    for row in y:
        for column in x:
            if valid[row, column]:
                best, code = -1.0, None
                for number, p in enumerate(prepared.pieces):
                    if p.top <= row < p.bottom and p.left <= column < p.right:
                        weight = window(*prepared._maps.regions[number].shape)[prepared._maps.crop(number)]
                        if weight[row - p.top, column - p.left] > best:
                            best, (top, _, left, _) = weight[row - p.top, column - p.left], grid_points(p)
                            code = codes[number][row // 8 - top, column // 8 - left]
                selected_codes.append(code)
    assert np.array_equal(expected.sums(), feature_sums(np.array(selected_codes)))


def test_map_has_one_value_per_patch():
    distribution = make_distribution(3)
    grid = FeatureGrid.empty(Region(0, 130, 0, 71), distribution)
    assert grid.map().shape == (2, 2)
    assert np.isnan(grid.map()).all()
    grid.codes[:] = RNG.integers(-3000, 3000, grid.codes.shape)
    grid.best[:8, :8] = 1
    assert np.isfinite(grid.map()).tolist() == [[True, False], [False, False]]
    assert grid.map()[0, 0] == distribution.patches(feature_sums(grid.codes[:8, :8].reshape(-1, 2))[None])[0]
