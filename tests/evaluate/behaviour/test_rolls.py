"""Rolls: a strip is moved to each position by whole patches, and sizes that do not divide raise."""

import pytest
import torch

from vispe.errors import UnsupportedHost
from vispe.evaluate.behaviour.rolls import K, raise_if_refused, rolled, rolls, starts, step_or_refusal
from vispe.evaluate.measure.audited_model import AuditedModel
from vispe.evaluate.measure.base import Accumulator
from vispe.evaluate.measure.perturbed_runs import CommonStep, PerturbedRuns


@pytest.mark.parametrize("grid", [(4, 4), (5, 8), (37, 37)])
def test_a_strip_comes_to_every_position_by_whole_patches(grid):
    for number in range(K):
        for axis, n in enumerate(grid):
            begin = starts(n)
            assert begin[0] == 0
            assert begin[-1] + n // K == n
            positions = [begin[number] + offset[axis] for offset in rolls(number, CommonStep(1, 1, grid))]
            assert tuple(positions) == begin


def test_a_roll_by_nothing_is_the_image_as_it_is():
    image = torch.rand(3, 8, 8)
    assert rolled(image, CommonStep(2, 1, (4, 4)), (0, 0))[0] == "as it is"
    name, result = rolled(image, CommonStep(2, 1, (4, 4)), (1, -1))
    assert name == "roll 2,-2"
    assert torch.equal(result[:, 2:, :-2], image[:, :-2, 2:])


def test_sizes_that_do_not_divide_raise_after_all_images():
    audited, acc = AuditedModel(torch.nn.AvgPool2d(4), "means", patch_size=4), Accumulator()
    acc.begin(0)
    assert step_or_refusal(acc, PerturbedRuns(audited, torch.rand(3, 16, 16), 0)) is not None
    raise_if_refused(acc)
    for size, words in (((14, 16), "has 3 x 4 cells"), ((4, 16), "needs at least 2 patches per side")):
        acc.begin(1)
        assert step_or_refusal(acc, PerturbedRuns(audited, torch.rand(3, *size), 1)) is None
        with pytest.raises(UnsupportedHost, match=words):
            raise_if_refused(Accumulator(acc.records[-1:]))
