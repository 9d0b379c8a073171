"""Polygon rasterization, against the point-in-polygon tests of matplotlib and scikit-image."""

import numpy as np
from matplotlib.path import Path as Outline
from skimage.draw import polygon2mask

from tests.cases import cases
from vispe.images.annotations.rasterize import fill


def mask(rings, h, w):
    out = np.zeros((h, w), int)
    rows, columns = fill(rings, h, w)
    np.add.at(out, (rows, columns), 1)
    assert out.max(initial=0) <= 1  # no pixel twice
    return out.astype(bool)


def centres(h, w):
    y, x = np.mgrid[:h, :w] + 0.5
    return np.stack([x, y], -1)


@cases("seed", range(20))
def test_pixels_are_filled_if_their_centre_is_inside(seed):
    rng = np.random.default_rng(seed)
    h, w = rng.integers(1, 40, 2)
    angle = np.sort(rng.uniform(0, 2 * np.pi, rng.integers(3, 12)))  # a star: it does not cross itself
    radius = rng.uniform(0.2, 0.9, len(angle)) * max(h, w)
    ring = np.stack([w / 2 + radius * np.cos(angle), h / 2 + radius * np.sin(angle)], 1)
    actual = mask([ring], h, w)
    expected = Outline(np.vstack([ring, ring[:1]]), closed=True).contains_points(centres(h, w).reshape(-1, 2))
    np.testing.assert_array_equal(actual, expected.reshape(h, w))
    np.testing.assert_array_equal(actual, polygon2mask((h, w), ring[:, ::-1] - 0.5))


def test_inner_rings_are_holes_and_repeated_vertices_are_ignored():
    outer, inner = (
        np.array([[0, 0], [9, 0], [9, 7], [0, 7], [0, 0]]),
        np.array([[2, 1], [2, 5], [6, 5], [6, 1]]),
    )
    expected = np.zeros((8, 11), bool)
    expected[:7, :9] = True
    expected[1:5, 2:6] = False
    np.testing.assert_array_equal(mask([outer, inner], 8, 11), expected)


def test_adjacent_polygons_partition_the_pixels():
    # borders run through pixel centres
    h, w, middle = 9, 13, np.array([6.5, 4.5])
    frame = [np.array(p) for p in ([0, 0], [6.5, 0], [w, 0], [w, 4.5], [w, h], [6.5, h], [0, h], [0, 4.5])]
    triangles = [np.stack([middle, frame[i], frame[(i + 1) % 8]]) for i in range(8)]
    np.testing.assert_array_equal(sum(mask([p], h, w).astype(int) for p in triangles), np.ones((h, w), int))


@cases("shift", [(-6, 0), (0, -6), (7, 3), (-100, -100), (3, 100)])
def test_polygons_are_clipped_to_the_image(shift):
    ring = np.array([[1.2, 0.3], [9.7, 2.2], [8.1, 9.6], [2.4, 7.7]]) + shift
    large = mask([ring + 200], 420, 420)[200:210, 200:212]
    np.testing.assert_array_equal(mask([ring], 10, 12), large)


def test_polygons_between_pixel_centres_fill_no_pixel():
    assert not mask([np.array([[0.6, 0.6], [0.9, 0.6], [0.9, 3.2]])], 5, 5).any()
