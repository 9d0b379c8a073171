"""Splitting of touching objects: necks are cut, single objects are not."""

import numpy as np
from scipy import ndimage
from skimage.measure import label

from tests.cases import cases
from vispe.segment.objects.split import split

RNG = np.random.default_rng(5)


def discs(shape, centres, radii):
    """Make a mask of discs that may overlap."""
    y, x = np.indices(shape)
    actual = [(y - cy) ** 2 + (x - cx) ** 2 <= r * r for (cy, cx), r in zip(centres, radii, strict=True)]
    return np.any(actual, 0)


@cases("distance", [29, 32, 34])
@cases("angle", [0, 33, 90])
def test_touching_discs_are_split(distance, angle):
    step = distance / 2 * np.array([np.sin(np.radians(angle)), np.cos(np.radians(angle))])
    mask = discs((80, 90), [(40 - step[0], 45 - step[1]), (40 + step[0], 45 + step[1])], (18, 18))
    assert label(mask, connectivity=2).max() == 1
    instances = split(mask, np.ones(mask.shape))
    assert instances.max() == 2
    sizes = np.bincount(instances.ravel())[1:]
    assert abs(sizes[0] - sizes[1]) < 0.06 * sizes.sum()
    assert np.array_equal(instances > 0, mask)


@cases(
    "mask",
    [
        discs((60, 60), [(30, 30)], [20]),
        discs((60, 80), [(30, 32), (30, 40)], [20, 20]),  # nearly one disc
        np.pad(np.ones((20, 60), bool), 5),
        np.pad(np.ones((3, 3), bool), 2),
    ],
    ids=["disc", "oblong", "bar", "small"],
)
def test_single_objects_are_not_split(mask):
    assert split(mask, np.ones(mask.shape)).max() == 1
    noisy = mask & ~(ndimage.binary_dilation(~mask) & (RNG.random(mask.shape) < 0.2))
    assert split(noisy, np.ones(mask.shape)).max() == label(noisy, connectivity=2).max()


def test_objects_are_split_at_a_minimum_of_the_probability():
    mask = np.pad(np.ones((20, 60), bool), 4)
    prob = np.ones(mask.shape)
    assert split(mask, prob).max() == 1
    prob[:, 33:36] = 0.5
    instances = split(mask, prob)
    assert instances.max() == 2
    assert 32 <= np.argmax(instances[10] == instances[10, -6]) <= 36
