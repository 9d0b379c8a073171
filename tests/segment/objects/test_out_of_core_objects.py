"""Block by block, objects are those of the page in memory, whatever the blocks."""

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
    out = np.zeros(labels.shape, np.uint32)

    def paint(page, region, mask, number):
        out[page][region.slices][mask] = number

    source = RegionSource(
        labels.shape,
        lambda page, region: labels[page][region.slices],
        lambda page, region, number: prob[page, number - 1][region.slices],
        lambda page, region: grey[page][region.slices],
        np.zeros(labels.shape, np.int64),
        paint,
    )
    return out, find_in_blocks(source, blocks(*labels.shape[1:], side), NAMES, options, **more)


@partly(1)
@cases("touching", ["keep", "split"])
@cases(("shape", "volumes"), [((1, 61, 83), None), ((4, 29, 33), None), ((6, 23, 31), 3)])
def test_the_table_and_the_map_do_not_depend_on_blocks(shape, volumes, touching):
    labels, prob, grey = scene(shape, seed=3)
    labels[:, 11:40, 25:27] = 0  # no data, which the counting frame ends at
    labels[:, :3] = labels[..., -2:] = 0  # margins without data, as of a crop
    spacing = (0.5, 0.25, 0.25)[-3 if volumes else -2 :]
    for options, sides in (
        (ObjectOptions(["pore", "carbide"], touching, 0), (7, 100)),
        (ObjectOptions(["carbide"], touching, 5, True, True), (7, 16)),
    ):
        expected, known = find(labels, prob, grey, NAMES, options, volumes=volumes, spacing=spacing)
        for side in sides:
            actual, objects = in_blocks(labels, prob, grey, side, options, volumes=volumes, spacing=spacing)
            assert np.array_equal(actual, expected)
            assert objects.rows == known.rows
            assert (objects.small, objects.border) == (known.small, known.border)
            assert objects.in_frame == known.in_frame
        assert len(known.rows) + known.border > 2


def test_a_patch_larger_than_memory_is_refused_by_name():
    labels = np.full((1, 40, 50), 2, np.uint8)
    prob, grey = np.ones((1, 3, 40, 50), np.float32), np.ones((1, 40, 50, 1))
    with pytest.raises(
        InputError, match="a connected component of 'pore' has a bounding box of 1 x 40 x 50 pixels"
    ):
        in_blocks(labels, prob, grey, 16, ObjectOptions("pore"), memory=10_000)
