"""The loss of slots: values per sample, gradient, and equality over processes."""

import math

import pytest
import torch

from tests.train.processes import two_processes
from vispe.backbones.distributed import Processes
from vispe.errors import OptionError, ShapeError
from vispe.experimental.vlm.slot_distillation import divergence, slot_distillation, slot_weights


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def batch(count):
    """Return logits of student and teacher, and slots of which one occurs in both parts of a batch."""
    slots = torch.tensor([0, 3, 1, 3, 3, 0, 7])[:count]
    return random(count, 4, 5), random(count, 4, 5, seed=1), slots


def by_hand(kl, slots, anchor):
    """The weights, sample by sample."""
    kl, slots = kl.tolist(), slots.tolist()
    of = {s: [k for k, t in zip(kl, slots, strict=True) if t == s] for s in sorted(set(slots) - {0})}
    total = sum(math.exp(sum(ks) / len(ks)) for ks in of.values())
    actual = []
    for k, s in zip(kl, slots, strict=True):
        if s == 0:
            actual.append(anchor)
            continue
        ks = of[s]
        share = len(of) * math.exp(sum(ks) / len(ks)) / total
        actual.append(share / len(ks) * k / max(ks))
    return torch.tensor(actual)


@pytest.mark.parametrize(("anchor", "temperature"), [(1.0, 1.0), (0.0, 2.0), (2.5, 0.5)])
def test_loss_and_gradient_equal_the_formula(anchor, temperature):
    student, teacher, slots = batch(7)
    student, masks = student.requires_grad_(), (random(7, 4) > 0, random(7, 4) > 0)
    masks[0][:, 2] = masks[1][:, 1] = True
    for row, reference in zip(masks[0], masks[1], strict=True):  # as many tokens on both sides
        reference[:] = row.roll(1)
    actual = slot_distillation(
        student,
        teacher,
        slots,
        student_mask=masks[0],
        teacher_mask=masks[1],
        anchor_weight=anchor,
        temperature=temperature,
    )
    kl = []
    for k in range(7):
        p = (teacher[k][masks[1][k]] / temperature).softmax(-1)
        q = (student[k][masks[0][k]] / temperature).log_softmax(-1)
        kl.append((p * (p.log() - q)).sum(-1).mean())
    kl = torch.stack(kl)
    torch.testing.assert_close(actual.kl, kl)
    weights = by_hand(kl.detach(), slots, anchor)
    torch.testing.assert_close(actual.weights, weights)
    expected = (weights * kl).sum() * temperature**2
    torch.testing.assert_close(actual.loss, expected)
    grads = [torch.autograd.grad(x, student, retain_graph=True)[0] for x in (actual.loss, expected)]
    torch.testing.assert_close(*grads)
    assert not actual.weights.requires_grad


def test_equal_answers_have_zero_loss():
    student, _, slots = batch(7)
    actual = slot_distillation(student.requires_grad_(), student.detach(), slots)
    assert abs(float(actual.loss.detach())) < 1e-6
    actual.loss.backward()
    assert student.grad.abs().max() < 1e-7
    assert slot_weights(torch.tensor([0.0, -1e-8, 0.0, 9.0]), torch.tensor([1, 1, 2, 3])).tolist()[:3] == [
        0,
        0,
        0,
    ]


def test_a_batch_of_anchors_has_the_weight_of_anchors():
    student, teacher, _ = batch(3)
    actual = slot_distillation(student, teacher, torch.zeros(3, dtype=torch.int64), anchor_weight=0.5)
    torch.testing.assert_close(actual.loss, 0.5 * divergence(student, teacher).sum())


def test_weights_are_those_of_all_parts_of_a_batch():
    student, teacher, slots = batch(7)
    full = slot_distillation(student, teacher, slots)
    halves = [(full.kl[part], slots[part]) for part in (slice(0, 4), slice(4, None))]

    class Second(Processes):
        def joined(self, part, error=None):
            assert torch.equal(part[0], halves[1][0])
            return halves

    actual = slot_distillation(student[4:], teacher[4:], slots[4:], processes=Second(1, 2))
    assert torch.equal(actual.weights, full.weights[4:])


@pytest.mark.slow
def test_two_processes_have_the_weights_of_the_concatenated_batch(tmp_path):
    two_processes("slots", tmp_path / "two")
    parts = [torch.load(tmp_path / f"two.{rank}.pt") for rank in range(2)]
    student, teacher, slots = batch(7)
    actual = slot_distillation(student.requires_grad_(), teacher, slots)
    actual.loss.backward()
    assert torch.equal(torch.cat([part["weights"] for part in parts]), actual.weights)
    torch.testing.assert_close(sum(part["loss"] for part in parts), actual.loss.detach())
    torch.testing.assert_close(torch.cat([part["gradient"] for part in parts]), student.grad)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"temperature": 0.0}, OptionError, r"got temperature=0\.0"),
        ({"anchor_weight": -1.0}, OptionError, r"anchor_weight=-1\.0"),
        ({"student_mask": torch.ones(3, 4)}, ShapeError, r"a mask \(b, l\) of bool, got .*float32"),
        ({"student_mask": torch.zeros(3, 4, dtype=torch.bool)}, ShapeError, r"with \[0, 0, 0\] and \[4, 4, 4\]"),
        ({"teacher": random(3, 4, 6)}, ShapeError, "answers must have equal lengths"),
        ({"slots": torch.zeros(2, dtype=torch.int64)}, ShapeError, "slots must be 3 integers"),
        ({"slots": torch.zeros(3)}, ShapeError, "integers.*float32"),
    ],
)  # fmt: skip
def test_errors(change, error, words):
    student, teacher, slots = batch(3)
    with pytest.raises(error, match=words):
        slot_distillation(**{"student": student, "teacher": teacher, "slots": slots, **change})
