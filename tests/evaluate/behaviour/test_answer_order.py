"""An answerer of sets has no spread over orders; one that reads only the first image has."""

import pytest
import torch

from vispe.errors import OptionError
from vispe.evaluate.behaviour.answer_order import OrderSensitivity, order_share, orders
from vispe.evaluate.measure.audited_model import AuditedModel
from vispe.evaluate.measure.base import Accumulator
from vispe.evaluate.measure.perturbed_runs import PerturbedRuns


def has_colour(image, question):
    channel = next(k for k, name in enumerate(("red", "green", "blue")) if name in question)
    others = [k for k in range(3) if k != channel]
    return float(((image[channel] > 0.85) & (image[others].amax(0) < 0.1)).any())


def answers_both(images, question, answers):
    actual = max(has_colour(p, question) for p in images)
    return torch.tensor([actual, 1 - actual]) * 4


def first(images, question, answers):
    actual = has_colour(images[0], question)
    return torch.tensor([actual, 1 - actual]) * 4


def always(images, question, answers):
    return torch.tensor([1.0, 0.0])


def run(answers):
    audited, acc, measure = (
        AuditedModel(lambda x: x, "a host", answers=answers),
        Accumulator(),
        OrderSensitivity(),
    )
    for number in range(measure.items):
        acc.begin(number)
        measure.rerun(acc, PerturbedRuns(audited, None, number))
    return measure.summarize(acc, audited)


@pytest.mark.parametrize("answers", [answers_both, always])
def test_an_answerer_of_sets_has_no_spread(answers):
    actual = run(answers)
    assert actual.value < 1e-9
    assert actual.details["answers_that_change"] == 0
    assert actual.details["gain_of_averaging"] == pytest.approx(0, abs=1e-12)


def test_an_answerer_of_the_first_image_depends_on_order():
    actual = run(first)
    assert actual.value > 0.5
    assert actual.details["answers_that_change"] == 0.5  # where the disc is there at all
    assert actual.details["gain_of_averaging"] > 0


def test_every_item_visits_every_slot_equally():
    for count in (2, 3, 4, 6):
        table = torch.tensor(orders(count))
        for slot in range(count):
            assert len(table[:, slot].bincount(minlength=count).unique()) == 1


def test_share_is_that_of_a_naive_loop():
    scores = torch.randn(5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = [sum((x - sum(r) / 6) ** 2 for x in r) / 6 for r in scores.tolist()]
    means = [sum(r) / 6 for r in scores.tolist()]
    between = sum((m - sum(means) / 5) ** 2 for m in means) / 5
    within = sum(rows) / 5
    assert order_share(scores) == pytest.approx((within / (within + between)) ** 0.5)


def test_one_item_has_no_order():
    with pytest.raises(OptionError, match="count needs an integer of 2 or more, got count=1"):
        orders(1)
