"""Objects computed in blocks equal those of the page in memory, for any block size."""

import numpy as np
import pytest

from tests.cases import cases
from tests.products import partly
from tests.segment.objects.test_labelling import NAMES, scene
from vispe.errors import InputError
from vispe.segment.features.tiles import blocks
from vispe.segment.objects.labelling import find
from vispe.segment.objects.options import ObjectOptions
from vispe.segment.objects.out_of_core_objects import RegionSource, find_in_blocks


def in_blocks(labels, prob, grey, side, options, **more):
    instances = np.zeros(labels.shape, np.uint32)

    def paint(page, region, mask, number):
        instances[page][region.slices][mask] = number

    source = RegionSource(
        labels.shape,
        lambda page, region: labels[page][region.slices],
        lambda page, region, number: prob[page, number - 1][region.slices],
        lambda page, region: grey[page][region.slices],
        np.zeros(labels.shape, np.int64),
        paint,
    )
    return instances, find_in_blocks(source, blocks(*labels.shape[1:], side), NAMES, options, **more)


@partly(1)
@cases("touching", ["keep", "split"])
@cases(("shape", "volumes"), [((1, 61, 83), None), ((4, 29, 33), None), ((6, 23, 31), 3)])
def test_table_and_map_are_independent_of_blocks(shape, volumes, touching):
    labels, prob, grey = scene(shape, seed=3)
    labels[:, 11:40, 25:27] = 0  # invalid pixels, which limit the counting frame
    labels[:, :3] = labels[..., -2:] = 0  # invalid margins, as of a crop
    spacing = (0.5, 0.25, 0.25)[-3 if volumes else -2 :]
    for options, sides in (
        (ObjectOptions(["pore", "carbide"], touching, 0), (7, 100)),
        (ObjectOptions(["carbide"], touching, 5, True, True), (7, 16)),
    ):
        expected, expected_objects = find(
            labels, prob, grey, NAMES, options, volumes=volumes, spacing=spacing
        )
        for side in sides:
            actual, objects = in_blocks(labels, prob, grey, side, options, volumes=volumes, spacing=spacing)
            assert np.array_equal(actual, expected)
            assert objects.rows == expected_objects.rows
            assert (objects.small, objects.border) == (expected_objects.small, expected_objects.border)
            assert objects.in_frame == expected_objects.in_frame
        assert len(expected_objects.rows) + expected_objects.border > 2


def test_components_larger_than_memory_raise():
    labels = np.full((1, 40, 50), 2, np.uint8)
    prob, grey = np.ones((1, 3, 40, 50), np.float32), np.ones((1, 40, 50, 1))
    with pytest.raises(
        InputError, match="a connected component of 'pore' has a bounding box of 1 x 40 x 50 pixels"
    ):
        in_blocks(labels, prob, grey, 16, ObjectOptions("pore"), memory=10_000)
