"""The loss of two placements: what it is, when it is 0, its gradient, and that it goes on after a stop."""

from dataclasses import asdict

import pytest
import torch
from torch import nn

from tests.train.tiny import TEACHER, RandomImages, config, training
from vispe.backbones.model_access import final_tokens
from vispe.errors import OptionError
from vispe.images.symmetry import IDENTITY, Placement, common_part
from vispe.train.data import Augment
from vispe.train.retrofit.checkpoint import RunFolder
from vispe.train.retrofit.config import LossWeights, Stage, Student
from vispe.train.retrofit.config_checks import check
from vispe.train.retrofit.distillation import retrofit
from vispe.train.retrofit.distillation_losses import (
    Objective,
    cosine_distance,
    sample_placements,
    view_distance,
)
from vispe.train.retrofit.student import check_models, load_teacher, make_student

PLACED = {"loss": LossWeights(1.0, 0.0, place=0.5), "augment": Augment(place=9, curriculum=0.8)}


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


class Toy(nn.Module):
    """Patches of 4 pixels, a convolution of their neighbours (PEG) and the mean over all of them."""

    def __init__(self, padding="circular", dtype=torch.float32):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.proj = nn.Conv2d(3, 6, 4, 4)
            self.peg = nn.Conv2d(6, 6, 3, padding=1, padding_mode=padding, groups=6)
        self.blocks = nn.ModuleList([nn.Identity()])
        self.to(dtype)

    def forward_intermediates(self, images, indices, **options):
        maps = self.proj(images)
        maps = maps + self.peg(maps)
        return [maps + maps.mean((2, 3), keepdim=True).tanh()]


@pytest.mark.parametrize("offsets", [((0, 0), (3, 1)), ((2, 2), (0, 3))])
def test_a_translation_equivariant_model_has_zero_loss(offsets):
    pair = common_part(*(Placement((3, 2), (6, 5), offset) for offset in offsets))
    images = random(2, 3, 12, 8)
    assert view_distance(Toy(), images, *pair).abs().max() < 1e-6
    assert view_distance(Toy("zeros"), images, *pair).min() > 1e-4


@pytest.mark.parametrize(
    ("spec", "least"), [("none", 0), ("peg(padding=circular)", 0), ("learned", 1e-5), ("sincos2d", 1e-3)]
)
def test_what_a_student_loses_is_its_bias_of_position(spec, least):
    student = make_student(load_teacher(TEACHER, seed=1), Student(spec)).eval()
    pair = common_part(Placement((4, 4), (6, 6), (0, 0)), Placement((4, 4), (6, 6), (2, 1)))
    actual = view_distance(student, random(2, 3, 32, 32), *pair)
    assert actual.min() > least if least else actual.abs().max() < 1e-6


@pytest.mark.parametrize("follow", [False, True])
def test_gradient_is_that_of_the_formula(follow):
    toy = Toy("zeros", torch.float64)
    images, cotangent = random(2, 3, 12, 8, dtype=torch.float64), random(2, seed=2).double()
    first, second = Placement((3, 2), (5, 5), (0, 1)), Placement((3, 2), (5, 5), (2, 3))
    actual = view_distance(toy, images, *common_part(first, second), follow=follow)
    grads = torch.autograd.grad(actual, list(toy.parameters()), cotangent)
    # written down again: two canvases of zeros, each with the image at its position, one pass each
    maps = []
    for down, right in (first.offset, second.offset):
        canvas = torch.zeros(2, 3, 20, 20, dtype=torch.float64)
        canvas[..., 4 * down : 4 * down + 12, 4 * right : 4 * right + 8] = images
        maps.append(final_tokens(toy, canvas)[0][..., down : down + 3, right : right + 2].float())
    if follow:
        maps[0] = maps[0].detach()
    u, v = (m.flatten(2) for m in maps)
    cosine = (u * v).sum(1) / u.norm(dim=1) / v.norm(dim=1)
    expected = (1 - cosine).mean(1)
    torch.testing.assert_close(actual, expected)
    reference = torch.autograd.grad(expected, list(toy.parameters()), cotangent)
    for grad, one in zip(grads, reference, strict=True):
        torch.testing.assert_close(grad, one, rtol=1e-4, atol=1e-6)


def test_parts_of_the_image_that_two_small_canvases_show_are_compared():
    toy, images = Toy("zeros"), random(2, 3, 16, 16)
    pair = common_part(Placement((4, 4), (3, 3), (0, 0)), Placement((4, 4), (3, 3), (-1, -1)))
    one, other = (final_tokens(toy, images[..., k : k + 12, k : k + 12])[0] for k in (0, 4))
    expected = cosine_distance(other[..., :2, :2], one[..., 1:, 1:])
    torch.testing.assert_close(view_distance(toy, images, *pair), expected)


def test_the_objective_has_it_where_it_has_a_weight():
    teacher = load_teacher(TEACHER, seed=1)
    student = make_student(teacher, Student("learned")).eval()
    images, pair = random(2, 3, 32, 32), sample_placements(3, 5, 0.5, (4, 4), Augment(place=7))
    objective = Objective(teacher.model, student, LossWeights(2.0, place=0.5))
    parts, _, _ = objective.parts(images, IDENTITY, None, pair)
    assert set(parts) == {"distill", "place"}
    torch.testing.assert_close(parts["place"], view_distance(student, images, *pair))
    torch.testing.assert_close(objective.total(parts), 2 * parts["distill"] + 0.5 * parts["place"])
    with pytest.raises(OptionError, match=r"loss.place=0.5 needs two placements, got none"):
        objective.parts(images, IDENTITY)


def test_pairs_are_drawn_by_seed_and_step_and_always_differ():
    def pairs(seed=3, **options):
        augment = Augment(place=6, **options)
        return [sample_placements(seed, step, step / 60, (4, 4), augment) for step in range(60)]

    samples = pairs()
    assert samples == pairs() != pairs(4)
    assert all(a.offset != b.offset and a.canvas == b.canvas == (6, 6) and a.box == b.box for a, b in samples)
    assert len({a.offset for a, _ in samples}) == 9
    best = pairs(place_teacher="best", curriculum=1.0)
    # the second of two patches comes with the end of the run
    assert {(a.canvas, a.offset) for a, _ in best} == {((5, 5), (0, 0))}
    assert {a.offset for a, _ in pairs(place_teacher="best")} == {(1, 1)}


def test_what_is_learnt_is_the_same_in_chunks(tmp_path):
    actual = []
    for chunk in (None, 1, 3):
        run = training(config(tmp_path / str(chunk), micro_batch_size=chunk, **PLACED))
        run.optimizer = torch.optim.SGD(run.trained, lr=0.0)
        run._update(run.plan[0].batches.load(0), 4, 0.0)
        actual.append([p.grad for p in run.trained if p.grad is not None])
    for other in actual[1:]:
        for grad, reference in zip(other, actual[0], strict=True):
            torch.testing.assert_close(grad, reference, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_resumed_run_has_equal_draws(tmp_path):
    class Stop(Exception):
        pass

    def stop(number, total, line):
        if number == 3:
            raise Stop

    requested = {"student": Student("learned"), "save_steps": 1, **PLACED}
    uninterrupted = training(config(tmp_path / "whole", **requested))
    uninterrupted.run()
    first = training(config(tmp_path / "parts", **requested))
    with pytest.raises(Stop):
        first.run(stop)
    resumed = training(config(tmp_path / "parts", **requested))
    resumed.resume(RunFolder(tmp_path / "parts").load())
    assert resumed.progress == 3 / 7
    resumed.run()
    state = resumed.student.state_dict()
    for name, value in uninterrupted.student.state_dict().items():
        assert torch.equal(state[name], value), name


@pytest.mark.slow
def test_the_bias_of_position_falls_while_it_is_trained_on(tmp_path):
    requested = {"student": Student("learned"), "stages": [Stage(32, steps=30, batch_size=4, lr=1e-3)]}
    actual = []
    for weights in (LossWeights(), LossWeights(place=1.0)):
        augment = Augment(place=6 if weights.place else 0)
        run = training(config(tmp_path / str(weights.place), loss=weights, augment=augment, **requested))
        run.run()
        pair = sample_placements(99, 0, 1.0, (4, 4), Augment(place=6))
        images = run.plan[0].batches.load(40)
        actual.append(float(view_distance(run.student.eval(), images, *pair).detach().mean()))
    assert actual[1] < 0.7 * actual[0]


def test_the_card_has_it(tmp_path):
    # features of this student depend on position from the start, beyond rounding
    requested = config(
        tmp_path, student=Student("sincos2d"), stages=[Stage(32, steps=1, batch_size=2)], **PLACED
    )
    card = retrofit(requested, source=RandomImages()).card
    assert card["config"]["augment"] == asdict(PLACED["augment"])
    assert card["config"]["loss"]["place"] == 0.5
    assert card["last_line"]["place"] > 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"augment": Augment(place=9)}, r"augment\.place=9 and loss\.place=0\.0"),
        ({"loss": LossWeights(place=0.5)}, r"augment\.place=0 and loss\.place=0\.5"),
        (
            {"augment": Augment(curriculum=0.5)},
            r"augment\.curriculum has no effect with augment\.place=0, got 0\.5",
        ),
        (
            {"augment": Augment(place_teacher="best")},
            r"augment\.place_teacher has no effect with augment\.place=0, got best",
        ),
        ({"loss": LossWeights(place=-1.0)}, r"loss\.place needs a number of 0 or more"),
    ],
)
def test_keys_that_contradict_are_refused(changes, words, tmp_path):
    with pytest.raises(OptionError, match=words):
        check(config(tmp_path, **changes))


@pytest.mark.parametrize(
    ("position", "words"), [(4, r"4 patches per side\): images cannot be moved"), (3, "no patch in common")]
)
def test_canvases_that_show_nothing_are_refused(position, words, tmp_path):
    requested = config(tmp_path, loss=LossWeights(place=1.0), augment=Augment(place=position))
    with pytest.raises(OptionError, match=words):
        check_models(requested)


def test_placements_do_not_change_rows():
    plain = Augment(noise=0.1)
    assert Augment(noise=0.1, place=9, curriculum=0.5).of_rows() == plain.of_rows()
    for options in ({"place": -1}, {"place": 2.5}, {"curriculum": 1.5}, {"place_teacher": "good"}):
        with pytest.raises(OptionError, match=next(iter(options))):
            Augment(**options)
