"""Instance maps to polygons: valid rings, whose rasterization equals the map."""

import numpy as np
import pytest
from skimage.measure import euler_number, label

from tests.cases import cases
from vispe.errors import InputError, ShapeError
from vispe.images.annotations.rasterize import fill
from vispe.images.annotations.vectorize import vectorize


def area(ring):
    (x, y), (u, v) = ring.T, np.roll(ring, -1, axis=0).T
    return (x * v - u * y).sum() / 2


def check(instances):
    h, w = instances.shape
    actual = vectorize(instances)
    assert list(actual) == [n for n in np.unique(instances) if n]
    restored = np.zeros_like(instances)
    for number, polygons in actual.items():
        mask = instances == number
        assert len(polygons) == label(mask, connectivity=1).max()
        holes = label(mask, connectivity=1).max() - euler_number(mask, connectivity=1)
        # a hole that touches itself at a corner is split into two
        assert sum(len(p) - 1 for p in polygons) >= holes
        for polygon in polygons:
            assert area(polygon[0]) > 0
            assert all(area(hole) < 0 for hole in polygon[1:])
            assert area(polygon[0]) + sum(map(area, polygon[1:])) > 0
            for ring in polygon:
                assert len(set(map(tuple, ring.tolist()))) == len(ring)  # no repeated vertices
                steps = np.roll(ring, -1, axis=0) - ring
                assert ((steps == 0).sum(1) == 1).all()  # axis-aligned edges
                assert (steps[:-1] * steps[1:] == 0).all()  # no collinear vertices
            rows, columns = fill(polygon, h, w)
            assert not restored[rows, columns].any()
            restored[rows, columns] = number
    np.testing.assert_array_equal(restored, instances)


@cases("seed", range(60))
def test_rasterized_polygons_equal_the_instance_map(seed):
    rng = np.random.default_rng(seed)
    h, w = rng.integers(1, 16, 2)
    check(rng.choice([0, 1, 2, 7, 400][: rng.integers(2, 6)], (h, w)))


@cases("kind", [np.uint8, np.uint16, np.int32, np.int64])
def test_every_integer_dtype_is_accepted(kind):
    check(np.array([[0, 3, 3], [1, 1, 3], [0, 1, 0]], kind))


MAPS = """
1, 11 11, 111 101 111, 111 101 110, 10 01, 01 10, 1001 0110 0110 1001, 11111 10101 11111, 11111 10111 11011 11111,
111 121 111, 0000 0000, 11111 10001 10101 10001 11111
"""


@cases("rows", MAPS.split(","))
def test_holes_corners_and_borders(rows):
    check(np.array([[int(c) for c in row] for row in rows.split()]))


def test_polygons_have_vertices_only_at_corners():
    instances = np.zeros((6, 8), int)
    instances[1:5, 2:7] = 5
    instances[2:4, 3:5] = 0
    ((outer, hole),) = vectorize(instances)[5]
    assert {tuple(p) for p in outer.tolist()} == {(2, 1), (7, 1), (7, 5), (2, 5)}
    assert {tuple(p) for p in hole.tolist()} == {(3, 2), (5, 2), (5, 4), (3, 4)}


def test_a_self_touching_ring_becomes_a_hole():
    # the hole touches the outside at one corner, which JTS allows for a hole and not for one ring
    polygons = vectorize(np.array([[1, 1, 1], [1, 0, 1], [1, 1, 0]]))[1]
    assert [len(p) for p in polygons] == [2]


@cases(
    ("bad", "error", "text"),
    [
        (np.zeros((2, 3, 4), int), ShapeError, "instance maps have the shape"),
        (np.zeros((2, 3)), InputError, r"integers from 0 \(no object\), got float64"),
        (np.array([[-1, 2]]), InputError, "got int64 with minimum -1"),
        (np.array([[True]]), InputError, "got bool"),
    ],
)
def test_arrays_that_are_not_instance_maps_raise(bad, error, text):
    with pytest.raises(error, match=text):
        vectorize(bad)
