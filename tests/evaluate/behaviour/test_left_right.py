"""Only answerers that use the position change with a flip, and only those that decode it are correct."""

import pytest
import torch

from vispe.errors import OptionError
from vispe.evaluate.behaviour.left_right import LeftRight, draw_sides, flips, head_margins
from vispe.evaluate.measure.audited_model import AuditedModel
from vispe.evaluate.measure.base import Accumulator
from vispe.evaluate.measure.perturbed_runs import PerturbedRuns


def correct_answers(images, question, answers):
    """Read the centres of red and blue from the image, and the colour in question, from the question."""
    image = images[0]
    red, blue = (image[0] > 0.85) & (image[1] < 0.1), (image[2] > 0.85) & (image[1] < 0.1)
    if not red.any():
        return torch.zeros(2)
    along = 1 if "left" in answers[0] else 0
    gap = (red.nonzero().double().mean(0) - blue.nonzero().double().mean(0))[along]
    red_left = question.index("red") < question.index("blue")
    if "Seen from" in question:
        red_left = not red_left
    gap = gap if red_left else -gap
    return torch.stack([-gap, gap])


def constant(images, question, answers):
    return torch.tensor([0.0, -1.0])


def mirrored(images, question, answers):
    return -correct_answers(images, question, answers)


class Random:
    def __init__(self):
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, images, question, answers):
        return torch.randn(2, generator=self.generator)


def run(f=lambda x: x, answers=None):
    audited, acc, measure = AuditedModel(f, "a host", answers=answers), Accumulator(), LeftRight()
    for number in range(measure.items):
        acc.begin(number)
        measure.rerun(acc, PerturbedRuns(audited, None, number))
    return measure.summarize(acc, audited)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answers", "value", "flips_", "accuracy"),
    [(correct_answers, 1, 1, 1), (constant, 0, 0, 0.5), (mirrored, 0, 1, 0), (Random(), 0.25, 0.5, 0.5)],
)
def test_only_answerers_that_decode_the_position_are_correct_twice(answers, value, flips_, accuracy):
    actual = run(answers=answers)
    atol = 0.15 if isinstance(answers, Random) else 1e-12
    assert actual.value == pytest.approx(value, abs=atol)
    assert actual.details["accuracy"] == pytest.approx(accuracy, abs=atol)
    assert actual.details["flips"] == pytest.approx(flips_, abs=atol)
    assert actual.control == {"chance": 0.25}
    assert len(actual.per_image) == 32


def test_words_alone_do_not_help_who_needs_the_image():
    assert run(answers=correct_answers).details["language_prior"] == 0.5


def test_a_head_reads_positions_from_maps_that_hold_them():
    def positions(x):  # centre of red minus that of blue
        line = torch.linspace(-1, 1, x.shape[-1])
        gap = (x[:, 0] - x[:, 2])[:, None]
        return torch.cat([(gap * line).mean((2, 3), True), (gap * line[:, None]).mean((2, 3), True)], 1)

    actual = run(positions)
    assert actual.value == 1
    assert actual.details["accuracy"] > 0.95
    assert "upper bound" in actual.note


def test_a_head_finds_nothing_in_colours_alone():
    actual = run(lambda x: x.mean((2, 3), keepdim=True))
    assert 0.2 < actual.details["accuracy"] < 0.8


def test_a_pair_is_an_image_and_its_mirror_image():
    for number in range(4):
        pair = draw_sides(number, torch.Generator().manual_seed(number), side=64)
        assert torch.equal(pair.pictures[1], pair.pictures[0].flip(2 - pair.axis))


def test_flips_and_heads_by_hand():
    right, flipped = flips(torch.tensor([[-1.0, 1.0], [0.0, 1.0]]), torch.tensor([True, True]))
    assert right.tolist() == [0, 0.25]
    assert flipped.tolist() == [1, 0]
    truth = torch.tensor([True, False, True, False])
    features = torch.stack([truth.double() * 2 - 1, 1 - truth.double() * 2], 1)[..., None]
    assert flips(head_margins(features, truth), truth)[0].tolist() == [1, 1, 1, 1]


def test_images_that_are_too_small_raise():
    with pytest.raises(OptionError, match="side needs an integer of 32 or more, got side=16"):
        draw_sides(0, torch.Generator(), side=16)
