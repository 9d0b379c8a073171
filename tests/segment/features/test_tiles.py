from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import cases
from vispe.errors import ShapeError
from vispe.segment.features.blend import Blend, window
from vispe.segment.features.tiles import OVERLAP, Region, blocks, even_tiles, padding, tiles


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 70))
def test_blocks_cover_each_pixel_once(height, width, side):
    count = np.zeros((height, width), int)
    for region in blocks(height, width, side):
        count[region.slices] += 1
        assert max(region.shape) <= side
    assert (count == 1).all()


@given(st.integers(1, 30), st.integers(1, 30), st.integers(1, 30), st.integers(1, 16))
def test_tiles_cover_the_page_on_the_patch_grid(rows, columns, side, step):
    tile = (min(side, rows) * step, min(side, columns) * step)
    actual = tiles(rows * step, columns * step, tile, step)
    count = np.zeros((rows * step, columns * step), int)
    for region in actual:
        assert region.shape == tile
        assert region.top % step == 0
        assert region.left % step == 0
        count[region.slices] += 1
    assert (count > 0).all()
    lefts = sorted({r.left for r in actual})
    if tile[1] // step >= 4:
        for a, b in pairwise(lefts):
            assert a + tile[1] - b >= OVERLAP * tile[1] - 1e-9


def test_the_last_tile_is_moved_inward():
    assert [r.left for r in tiles(64, 144, (64, 64), 16)] == [0, 48, 80]


def test_invalid_tiles_raise():
    with pytest.raises(ShapeError, match="height=65, tile=32"):
        tiles(65, 64, (32, 32), 16)
    with pytest.raises(ShapeError, match="width=32, tile=48"):
        tiles(64, 32, (32, 48), 16)


@cases("size", [(1, 1), (14, 28), (5, 3)])
def test_the_window_is_positive_and_symmetric(size):
    actual = window(*size)
    assert actual.dtype == np.float32
    assert actual.min() > 0
    np.testing.assert_allclose(actual, actual[::-1, ::-1], rtol=1e-5)
    assert actual[size[0] // 2, size[1] // 2] == actual.max()


@cases(
    ("size", "step", "least", "expected"),
    [
        ((256, 320), 14, (1, 1), (5, 5, 1, 1)),
        ((3, 16), 16, (1, 1), (6, 7, 0, 0)),
        ((10, 40), 16, (64, 32), (27, 27, 4, 4)),
        ((64, 64), 16, (64, 64), (0, 0, 0, 0)),
    ],
)
def test_padding_is_symmetric_with_the_odd_pixel_at_the_end(size, step, least, expected):
    assert padding(*size, step, least) == expected


def test_blending_equal_probabilities_is_the_identity():
    rng = np.random.default_rng(0)
    truth = rng.random((40, 56, 3)).astype(np.float32)
    truth /= truth.sum(-1, keepdims=True)
    blend = Blend(40, 56, 3)
    for region in tiles(40, 56, (24, 32), 8):
        blend.add(region, truth[region.slices], window(24, 32))
    assert blend.overlap_pixels > 0
    assert blend.disagreeing_pixels == 0
    np.testing.assert_allclose(blend.result(), truth.transpose(2, 0, 1), atol=1e-6)


def test_disagreement_counts_pixels_where_any_two_tiles_differ():
    blend = Blend(4, 10, 2)
    first, second = np.zeros((4, 6, 2), np.float32), np.zeros((4, 6, 2), np.float32)
    first[..., 0], second[..., 1] = 0.9, 0.8
    second[0, :, 0], second[0, :, 1] = 0.8, 0.0  # the first row agrees
    blend.add(Region(0, 4, 0, 6), first, np.full((4, 6), 3, np.float32))
    blend.add(Region(0, 4, 4, 10), second, np.full((4, 6), 1, np.float32))
    assert blend.overlap_pixels == 8
    assert blend.disagreeing_pixels == 6
    prob = blend.result()
    np.testing.assert_allclose(prob[:, 2, 5], [0.9 * 3 / 4, 0.8 / 4], rtol=1e-6)
    np.testing.assert_allclose(prob[:, 2, 9], [0, 0.8], rtol=1e-6)


@cases("length", [16, 48, 64, 80, 96, 112, 160, 208, 400, 1024, 1600, 4000])
@cases(("most", "overlap"), [(48, 16), (64, 0), (16, 0), (576, 64)])
def test_even_tiles_cover_the_page_symmetrically(length, most, overlap):
    actual = even_tiles(length, 48, most, 16, overlap)
    columns = len({r.left for r in actual})
    rows = actual[::columns]
    side = rows[0].shape[0]
    assert len({r.shape for r in actual}) == 1
    assert side % 16 == 0
    assert side <= most
    assert rows[0].top == 0
    assert rows[-1].bottom == length
    for tile_region, next_region in pairwise(rows):
        assert tile_region.top % 16 == 0
        assert tile_region.bottom - next_region.top >= overlap
    for k, (tile_region, opposite) in enumerate(zip(rows, rows[::-1], strict=True)):
        if 2 * k + 1 != len(rows):
            assert tile_region.top == length - opposite.bottom
    fewest = -(-(length - overlap) // (most - overlap)) if length > most else 1
    assert fewest <= len(rows) <= fewest + 1
