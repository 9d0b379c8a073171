"""The training loop against a loop of a few lines, and what is frozen, averaged, logged and refused."""

import copy
import json
import math

import pytest
import torch

from tests.train.tiny import RandomImages, config, training
from vispe.errors import InputError, OptionError
from vispe.images.symmetry.symmetrization import patch_kernel
from vispe.train.data import Batches
from vispe.train.retrofit.config import LossWeights, Probe, Stage, Student, Target
from vispe.train.retrofit.distillation import retrofit
from vispe.train.retrofit.distillation_losses import Objective, sample_pose
from vispe.train.retrofit.lora import merge_lora
from vispe.train.retrofit.monitoring import feature_maps, position_channels, probe_images
from vispe.train.retrofit.student import load_teacher
from vispe.train.retrofit.training_log import Log, read_log

TIGHT = {"rtol": 0, "atol": 0}


def weights_of(run):
    return {n: p.detach().clone() for n, p in run.student.state_dict().items()}


def by_hand(requested, source):
    """Train by a reference loop; return the weights after every update."""
    run, actual, step = training(requested, source), [], 0
    teacher, student = run.objective.teacher, run.student
    objective = Objective(teacher, student, requested.loss, requested.target.blank)
    for k, stage in enumerate(requested.stages):
        optimizer = torch.optim.AdamW(student.parameters(), lr=stage.lr, weight_decay=requested.weight_decay)
        half = (0.5, 0.5, 0.5)
        batches = Batches(
            source, stage.img_size, stage.batch_size, seed=requested.seed + k * 1_000_003, mean=half, std=half
        )
        for local_step in range(stage.steps):
            parts, _, _ = objective.parts(batches.load(local_step), sample_pose(requested.seed, step))
            loss = sum(getattr(requested.loss, name) * value.mean() for name, value in parts.items())
            optimizer.zero_grad()
            loss.backward()
            if requested.clip_grad:
                torch.nn.utils.clip_grad_norm_(student.parameters(), requested.clip_grad)
            optimizer.step()
            actual.append((float(loss.detach()), copy.deepcopy(student.state_dict())))
            step += 1
    return actual


@pytest.mark.slow
@pytest.mark.parametrize("loss", [LossWeights(), LossWeights(0.7, 0.5, 0.2)])
def test_training_equals_the_reference_loop(tmp_path, loss):
    requested = config(tmp_path / "a", loss=loss, clip_grad=0.5, seed=3, logging_steps=1)
    run = training(requested, RandomImages())
    run.run()
    expected = by_hand(config(tmp_path / "b", loss=loss, clip_grad=0.5, seed=3), RandomImages())
    lines = read_log(run.folder.log)
    assert [line["step"] for line in lines] == list(range(1, 8))
    assert [line["loss"] for line in lines] == pytest.approx([loss for loss, _ in expected], abs=2e-6)
    for name, value in weights_of(run).items():
        torch.testing.assert_close(value, expected[-1][1][name], rtol=1e-4, atol=2e-5)


@pytest.mark.slow
def test_the_loss_falls(tmp_path):
    stages = [Stage(32, steps=40, batch_size=4, lr=3e-3)]
    requested = config(tmp_path, stages=stages, student=Student(init="random"), logging_steps=10)
    run = training(requested)
    run.run()
    losses = [line["loss"] for line in read_log(run.folder.log)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.slow
def test_chunks_give_the_gradient_of_the_whole_batch(tmp_path):
    actual = []
    for chunk in (None, 1, 3):
        run = training(config(tmp_path / str(chunk), micro_batch_size=chunk, loss=LossWeights(1.0, 1.0, 1.0)))
        run.optimizer = torch.optim.SGD(run.trained, lr=0.0)
        run._update(run.plan[0].batches.load(0), 4, 0.0)
        actual.append([p.grad for p in run.trained if p.grad is not None])
    for other in actual[1:]:
        for grad, reference in zip(other, actual[0], strict=True):
            torch.testing.assert_close(grad, reference, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("trainable", "spec"), [("lora", "alibi2d"), ("lora", "rpb"), ("encoding", "rpb")])
def test_frozen_parameters_are_unchanged_bit_for_bit(tmp_path, trainable, spec):
    run = training(config(tmp_path, student=Student(spec, trainable=trainable), weight_decay=0.1))
    before, teacher = weights_of(run), copy.deepcopy(run.objective.teacher.state_dict())
    run.run()
    changed = {n for n, value in weights_of(run).items() if not torch.equal(value, before[n])}
    encoding_names = {n for n in before if "pos_enc" in n.split(".")}
    low = {n for n in before if n.endswith((".0.up", ".0.down"))}
    assert changed == encoding_names | low
    assert bool(low) == (trainable == "lora")
    assert all(torch.equal(value, teacher[n]) for n, value in run.objective.teacher.state_dict().items())
    images = Batches(RandomImages(), 32, 2).load(0)
    actual = feature_maps(run.student.eval(), torch.device("cpu"))(images)
    merged = feature_maps(merge_lora(run.student), torch.device("cpu"))(images)
    torch.testing.assert_close(merged, actual, **TIGHT)
    result = run.finished()
    plain = load_teacher(run.config.teacher).model.state_dict()
    assert {n for n in result.state_dict() if "pos_enc" not in n} <= set(plain)
    if trainable == "encoding":
        assert all(torch.equal(value, plain[n]) for n, value in result.state_dict().items() if n in plain)


def test_the_average_follows_the_weights(tmp_path):
    requested = config(tmp_path / "a", ema_decay=0.6)
    run, plain = training(requested), training(config(tmp_path / "b"))
    expected = {n: p.detach().double() for n, p in plain.student.named_parameters()}
    steps = []

    def follow(step, total, line):
        decay = min(0.6, step / (step + 9))
        steps.append(step)
        for name, p in plain.student.named_parameters():
            expected[name] = decay * expected[name] + (1 - decay) * p.detach().double()

    plain.run(follow)
    run.run()
    assert steps == list(range(1, 8))
    for name, p in run.student.named_parameters():
        torch.testing.assert_close(p, dict(plain.student.named_parameters())[name], **TIGHT)
    result = run.finished()
    for name, p in result.named_parameters():
        torch.testing.assert_close(p.double(), expected[name], rtol=1e-5, atol=1e-6)


def test_a_symmetric_kernel_stays_symmetric(tmp_path):
    run = training(config(tmp_path, student=Student(symmetric=True), ema_decay=0.9))
    before = run.student.patch_embed.proj.weight.detach().clone()
    run.run()
    assert patch_kernel(run.student).asymmetry == 0
    assert patch_kernel(run.finished()).asymmetry == 0
    assert not torch.equal(run.student.patch_embed.proj.weight, before)


def test_checkpointed_gradients_are_the_same(tmp_path):
    actual, calls = [], []
    for on in (False, True):
        run = training(config(tmp_path / str(on), grad_checkpointing=on))
        run.student.blocks[1].register_forward_pre_hook(lambda *_, on=on: calls.append(on))
        run.run()
        actual.append(weights_of(run))
    assert calls.count(True) == 2 * calls.count(False), "nothing was computed twice"
    assert all(torch.equal(actual[0][name], actual[1][name]) for name in actual[0])


def test_bfloat16_trains_float32_weights_and_comes_near(tmp_path):
    runs = [training(config(tmp_path / amp, amp=amp, logging_steps=1)) for amp in ("no", "bf16")]
    for run in runs:
        run.run()
    plain, half = ([line["loss"] for line in read_log(run.folder.log)] for run in runs)
    assert half == pytest.approx(plain, abs=0.02)
    assert half != plain
    assert all(p.dtype == torch.float32 for p in runs[1].student.parameters())


def test_half_precision_needs_a_gpu(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(OptionError, match="fp16 needs a GPU"):
        retrofit(config(tmp_path, amp="fp16"), source=RandomImages())


def test_learning_rates():
    stage = Stage(32, steps=10, lr=2.0, warmup_steps=4, schedule="cosine")
    expected = [0.4, 0.8, 1.2, 1.6, *(1 + math.cos(math.pi * k / 6) for k in range(6))]
    assert [stage.rate_at(k, 10) for k in range(10)] == pytest.approx(expected)
    assert [Stage(32, steps=3, lr=2.0).rate_at(k, 3) for k in range(3)] == [2.0] * 3
    assert [Stage(32, epochs=e, batch_size=4).updates(10) for e in (0.01, 1.0, 2.5)] == [1, 2, 6]


def test_every_line_of_the_log_has_its_interval(tmp_path):
    run = training(config(tmp_path, loss=LossWeights(1.0, 0.5), logging_steps=3, target=Target([1, 2])))
    run.run()
    lines = [json.loads(text) for text in run.folder.log.read_text().splitlines()]
    assert [(line["step"], line["stage"], line["size"], line["rate"]) for line in lines] == [
        (3, 0, 32, 1e-3), (4, 0, 32, 1e-3), (6, 1, 48, 1e-4), (7, 1, 48, 1e-4),
    ]  # fmt: skip
    for line in lines:
        assert line["cosine"] == pytest.approx(1 - line["distill"], abs=1e-7)
        assert line["loss"] == pytest.approx(line["distill"] + 0.5 * line["d4"], abs=1e-7)
        assert 1 <= line["rank_student"] <= 24
        assert 1 <= line["rank_target"] <= 22
        assert line["images_per_s"] > 0
        assert line["memory_mib"] > 0


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path):
    class Spoilt(RandomImages):
        def __getitem__(self, i):
            return super().__getitem__(i) * float("nan")

    run = training(config(tmp_path), Spoilt())
    with pytest.raises(InputError, match=r"loss \(distill\) became non-finite at step 2"):
        run.run()
    assert run.folder.steps() == []


def test_channels_of_position_are_detected():
    teacher = load_teacher(config("o").teacher)
    probe = Probe(noise=2, textures=2, masks=2)
    actual = probe_images(teacher, probe, 64, 5)
    teacher_maps = feature_maps(teacher.model, torch.device("cpu"))

    def positional(images):
        maps = teacher_maps(images)
        h, w = maps.shape[2:]
        maps[:, 7] += 20 * torch.linspace(-1, 1, h)[:, None]
        maps[:, 19] += 20 * torch.linspace(-1, 1, w)
        return maps

    assert sorted(position_channels(positional, actual, probe, 2)) == [7, 19]
    assert position_channels(positional, actual, probe, 5) == position_channels(positional, actual, probe, 5)


def test_tensorboard_gets_the_same_numbers(tmp_path):
    pytest.importorskip("tensorboard")
    log = Log(tmp_path / "log.jsonl", 0, tmp_path / "board")
    log.write({"step": 3, "loss": 0.5, "rate": float("nan")})
    log.close()
    (events,) = (tmp_path / "board").iterdir()
    assert b"retrofit/loss" in events.read_bytes()
    assert b"retrofit/rate" not in events.read_bytes()  # no number
    assert read_log(log.path) == [{"step": 3, "loss": 0.5, "rate": None}]
