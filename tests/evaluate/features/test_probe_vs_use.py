"""Probe versus use: hosts whose answers use the decodable position, ignore it, or have none; folds of the probe."""

import numpy as np
import pytest
import torch

from vispe.errors import OptionError, ShapeError
from vispe.evaluate.audit.runner import audit
from vispe.evaluate.features import probe_vs_use
from vispe.evaluate.features.probe_vs_use import ProbeVersusUse, probe_hits, render_squares
from vispe.evaluate.measure.audited_model import AuditedModel


def colour_maps(images):
    """Return maps (b, 2, 1, 1): where red and blue are, from left to right."""
    cols = torch.linspace(-1, 1, images.shape[-1])
    red, blue = (1 - images[:, 2]), (1 - images[:, 0])
    return torch.stack([(c * cols).sum((1, 2)) / c.sum((1, 2)) for c in (red, blue)], 1)[..., None, None]


def blind(images):
    """Return maps that differ from image to image and do not depend on sides."""
    rows = torch.linspace(-1, 1, images.shape[-2])[:, None]
    return ((1 - images) * rows).sum((2, 3))[..., None, None]


def tells(samples, question, answers):
    red, blue = colour_maps(samples[0][None])[0, :, 0, 0]
    return torch.tensor([float(red < blue), float(red > blue)]).log_softmax(0)


def silent(samples, question, answers):
    return torch.tensor([0.0, -1.0]).log_softmax(0)


def actual(f, answers):
    return audit(
        AuditedModel(f, "model", answers=answers), [torch.rand(3, 32, 32)], [ProbeVersusUse()]
    ).findings[0]


@pytest.mark.slow
def test_a_decodable_position_without_use_is_a_gap():
    gap = actual(colour_maps, silent)
    assert gap.verdict == "yes"
    assert gap.outcome.details["probe"] == 1.0
    assert gap.outcome.details["answers"] == 0.5
    assert gap.value == pytest.approx(1.0)


@pytest.fixture
def one_shuffle(monkeypatch):
    """The chance level comes from one permutation of the labels, which saves most of the time."""
    monkeypatch.setattr(probe_vs_use, "SHUFFLES", 1)


@pytest.mark.usefixtures("one_shuffle")
def test_a_decodable_position_in_use_has_no_gap():
    gap = actual(colour_maps, tells)
    assert gap.value == 0
    assert gap.verdict == "no"


@pytest.mark.usefixtures("one_shuffle")
def test_no_decodable_position_has_no_gap():
    gap = actual(blind, silent)
    assert gap.verdict != "yes"
    assert gap.value < 0.2


def test_images_of_a_pair_exchange_colours():
    (first, first_side), (second, second_side) = render_squares(6, (48, 64)), render_squares(7, (48, 64))
    assert (first_side, second_side) == (0, 1)
    assert torch.equal(first.flip(0), second)
    assert colour_maps(first[None])[0, 0] < colour_maps(first[None])[0, 1]


def test_a_group_is_never_on_both_sides():
    # every group has a channel of its own: across groups there is nothing to learn
    groups = torch.arange(40) // 2
    labels = torch.randint(2, (20,), generator=torch.Generator().manual_seed(0))[groups]
    x = torch.eye(20)[groups]
    inside = probe_hits(x, labels, torch.arange(40)).mean()
    assert inside > 0.9 > probe_hits(x, labels, groups).mean() + 0.1


def test_hits_do_not_depend_on_the_scale_of_features():
    x = torch.randn(30, 4, generator=torch.Generator().manual_seed(2)).double()
    labels, groups = (x[:, 0] > 0).long(), torch.arange(30)
    scale = torch.tensor([1.0, 100.0, 0.01, 5.0])
    assert np.array_equal(probe_hits(x, labels, groups), probe_hits(x * scale + 3, labels, groups))


def test_bad_input_is_refused():
    with pytest.raises(ShapeError, match="features"):
        probe_hits(torch.zeros(4, 2), torch.zeros(3).long(), torch.arange(4))
    with pytest.raises(OptionError, match="2 groups"):
        probe_hits(torch.zeros(4, 2), torch.zeros(4).long(), torch.arange(4) // 2)


def test_hosts_without_answers_raise():
    reasons = audit(AuditedModel(colour_maps, "model"), [torch.rand(3, 32, 32)], [ProbeVersusUse()]).refused
    assert "does not answer questions" in reasons["read_or_used"][1]
