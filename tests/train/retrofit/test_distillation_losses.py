"""The parts of the loss against their definitions."""

import math

import pytest
import torch

from tests.train.tiny import TEACHER
from vispe.errors import OptionError, ShapeError
from vispe.images.symmetry.d4 import D4, IDENTITY
from vispe.images.symmetry.symmetrization import patch_kernel
from vispe.train.retrofit.config import LossWeights, Student
from vispe.train.retrofit.distillation_losses import Objective, ablated, cosine_distance, sample_pose
from vispe.train.retrofit.student import final_tokens, load_teacher, make_student


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("shape", [(2, 5, 3, 4), (1, 7, 1, 1), (3, 6)])
def test_cosine_distance_is_the_mean_over_patches(shape):
    actual, reference = random(*shape), random(*shape, seed=1)
    expected = []
    for a, b in zip(actual.flatten(2) if actual.ndim > 2 else actual[..., None],
                    reference.flatten(2) if reference.ndim > 2 else reference[..., None], strict=True):  # fmt: skip
        cosines = [float(u @ v / u.norm() / v.norm()) for u, v in zip(a.T, b.T, strict=True)]
        expected.append(1 - sum(cosines) / len(cosines))
    torch.testing.assert_close(cosine_distance(actual, reference), torch.tensor(expected))


def test_gradient_of_cosine_distance():
    actual = random(2, 4, 2, 3, dtype=torch.float64).requires_grad_()
    reference, cotangent = random(2, 4, 2, 3, seed=1, dtype=torch.float64), random(2, seed=2)
    cosine_distance(actual, reference).backward(cotangent)
    u, v = actual.detach().movedim(1, -1), reference.movedim(1, -1)
    lengths = u.norm(dim=-1, keepdim=True), v.norm(dim=-1, keepdim=True)
    cosine = (u * v).sum(-1, keepdim=True) / lengths[0] / lengths[1]
    derivative = -(v / lengths[0] / lengths[1] - cosine * u / lengths[0] ** 2) / 6
    expected = (derivative * cotangent.double()[:, None, None, None]).movedim(-1, 1)
    torch.testing.assert_close(actual.grad, expected, rtol=1e-5, atol=1e-7)


def test_the_length_of_features_does_not_count():
    actual, reference = random(2, 5, 3, 4), random(2, 5, 3, 4, seed=1)
    torch.testing.assert_close(cosine_distance(3 * actual, reference / 7), cosine_distance(actual, reference))
    assert cosine_distance(actual, 2 * actual).abs().max() < 1e-6
    torch.testing.assert_close(cosine_distance(actual, -actual), torch.tensor([2.0, 2.0]))


def test_cosine_distance_is_float32_whatever_comes_in():
    actual = random(2, 5, 3, 4).bfloat16()
    assert cosine_distance(actual, actual).dtype == torch.float32


def test_features_of_different_shapes_are_refused():
    with pytest.raises(ShapeError, match=r"shapes must be equal, got \(1, 3, 2, 2\) and \(1, 3, 2, 1\)"):
        cosine_distance(random(1, 3, 2, 2), random(1, 3, 2, 1))


def test_blanked_channels_are_zero_and_others_stay():
    maps = random(2, 6, 3, 4)
    actual = ablated(maps, [4, 1])
    assert not actual[:, [1, 4]].any()
    assert torch.equal(actual[:, [0, 2, 3, 5]], maps[:, [0, 2, 3, 5]])
    assert maps[:, [1, 4]].all(), "what was given changed"
    assert torch.equal(ablated(maps, []), maps)
    with pytest.raises(OptionError, match="channels must be below 6, got 6"):
        ablated(maps, [0, 6])


def test_poses_are_drawn_by_seed_and_step_from_the_seven_that_move():
    poses = [sample_pose(3, step) for step in range(700)]
    assert poses == [sample_pose(3, step) for step in range(700)]
    assert poses != [sample_pose(4, step) for step in range(700)]
    counts = [poses.count(pose) for pose in D4]
    assert counts[0] == 0
    assert all(abs(count - 100) < 5 * math.sqrt(100 * 6 / 7) for count in counts[1:])


@pytest.fixture
def models():
    teacher = load_teacher(TEACHER, seed=1)
    return teacher, make_student(teacher, Student("rope_axial"))


def test_every_part_equals_its_definition(models):
    teacher, student = models
    images = random(2, 3, 24, 40)
    objective = Objective(teacher.model, student, LossWeights(2.0, 0.5, 0.25), [5, 2])
    for pose in D4[1:]:
        parts, maps, target = objective.parts(images, pose)
        reference, token = final_tokens(teacher.model, images)
        patches, class_token = final_tokens(student, images)
        reference = reference.clone()
        reference[:, [2, 5]] = 0
        assert torch.equal(maps, patches)
        assert torch.equal(target, reference)
        torch.testing.assert_close(parts["distill"], cosine_distance(patches, reference))
        torch.testing.assert_close(parts["class_token"], cosine_distance(class_token, token))
        rotated = final_tokens(student, pose.apply(images))[0]
        torch.testing.assert_close(parts["d4"], cosine_distance(pose.undo(rotated), patches))
        assert parts["d4"].min() > 1e-4
        expected = 2 * parts["distill"] + 0.5 * parts["d4"] + 0.25 * parts["class_token"]
        torch.testing.assert_close(objective.total(parts), expected)


def test_only_the_student_gets_gradients(models):
    teacher, student = models
    objective = Objective(teacher.model, student, LossWeights(1.0, 1.0, 1.0))
    objective.total(objective.parts(random(2, 3, 24, 40), D4[3])[0]).sum().backward()
    assert all(p.grad is None for p in teacher.model.parameters())
    missing = [n for n, p in student.named_parameters() if p.requires_grad and p.grad is None]
    assert missing in ([], ["pos_embed"]), missing


def test_parts_of_weight_0_are_not_computed(models):
    teacher, student = models
    assert set(Objective(teacher.model, student, LossWeights()).parts(random(1, 3, 32, 32), IDENTITY)[0]) == {
        "distill"
    }


def test_an_isotropic_student_is_equivariant():
    teacher = load_teacher(TEACHER, seed=1)
    student = make_student(teacher, Student("alibi2d", symmetric=True))
    assert patch_kernel(student).asymmetry < 1e-12
    objective = Objective(teacher.model, student, LossWeights(1.0, 1.0))
    for pose in D4[1:]:
        assert objective.parts(random(2, 3, 40, 24), pose)[0]["d4"].abs().max() < 1e-6
