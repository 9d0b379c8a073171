"""The training of vispe_micro: resumption, and distillation from a teacher."""

import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

from models.micro import coarse, train, trainer
from models.micro.trainer import Recipe, Trainer, distance
from vispe.backbones.micro import Micro, load_micro
from vispe.backbones.vision_model import VisionModel
from vispe.errors import OptionError

PICTURES = torch.rand(3, 3, 96, 96, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Train the smallest network, on few images, and validate on nothing."""
    monkeypatch.setattr(train.data, "installed", PICTURES.unbind)
    tiny = {"dim": 8, "widths": (8, 8, 8), "width": 16, "depth": 1, "heads": 2}
    monkeypatch.setitem(trainer.SIZES, "small", tiny)
    monkeypatch.setattr(Trainer, "validate", lambda *_: {})


def run(out, steps, *args):
    words = [
        "--out",
        str(out),
        "--batch-size",
        "2",
        "--img-size",
        "48",
        "--series",
        "0.5",
        "--num-queries",
        "100",
        "--seed",
        "3",
    ]
    train.main([*words, "--steps", str(steps), *args])
    return load_file(out / "weights.safetensors")


@pytest.mark.slow
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    uninterrupted = run(tmp_path / "whole", 6)
    run(tmp_path / "parts", 6, "--stop", "4")
    parts = run(tmp_path / "parts", 6)
    assert uninterrupted.keys() == parts.keys()
    assert all(torch.equal(uninterrupted[k], parts[k]) for k in uninterrupted)
    rows = [json.loads(line) for line in (tmp_path / "parts/log.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows if "recipe" in r] == [0, 4]
    assert json.loads((tmp_path / "parts/card.json").read_text())["steps_done"] == 6


@pytest.mark.slow
def test_a_teacher_of_another_size_adds_its_distance(tmp_path):
    torch.manual_seed(1)
    file = tmp_path / "teacher.safetensors"
    save_file({k: v.half() for k, v in Micro(8, (12, 16, 8), 24, 2, 3).state_dict().items()}, file)
    teacher, recipe = (
        load_micro(file),
        Recipe(steps=200, batch_size=2, img_size=48, num_queries=100, near=0.5),
    )
    without = Trainer(replace(recipe, near=1.0), list(PICTURES.numpy()), tmp_path)
    taught = Trainer(recipe, list(PICTURES.numpy()), tmp_path, teacher)
    images = torch.from_numpy(np.stack([without.sample_task(0, i).image for i in range(2)]))
    extra = 0.5 * without.rate() * distance(without.model(images), teacher(images)).item()
    assert taught.train_step()["loss"] - without.train_step()["loss"] == pytest.approx(extra, rel=1e-4)
    changed = [
        n for n, p in taught.model.named_parameters() if not torch.equal(p, without.model.get_parameter(n))
    ]
    assert len(changed) > 40
    run(tmp_path / "out", 2, "--teacher", str(file))
    card = json.loads((tmp_path / "out/card.json").read_text())
    assert card["teacher"] == hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.fixture
def retrofitted(tmp_path, monkeypatch):
    """Return a folder that stands for a finished retrofit of timm's smallest transformer."""
    torch.manual_seed(2)
    model = timm.create_model("test_vit", num_classes=0, dynamic_img_size=True, img_size=64).eval()
    folder = tmp_path / "retrofit"
    folder.mkdir()
    (folder / "student.safetensors").write_bytes(b"weights")
    monkeypatch.setattr(coarse, "load_student", lambda _: (VisionModel(model, exact=False), None, {}))
    return folder


def test_a_coarse_teacher_uses_features_of_the_trunk(tmp_path, retrofitted):
    recipe, figures = (
        Recipe(steps=200, batch_size=2, img_size=64, num_queries=100, block=3),
        list(PICTURES.numpy()),
    )
    without = Trainer(replace(recipe, block=7), figures, tmp_path)
    taught = Trainer(recipe, figures, tmp_path, coarse=retrofitted)
    images = torch.from_numpy(np.stack([without.sample_task(0, i).image for i in range(2)]))
    target = taught.coarse.target(images)
    assert target.shape == (2, 64, 4, 4)  # one token of 16 px for each of the trunk
    # written out: the trunk's tokens through the head, without the mean over the batch, cosine by cosine
    calls = []
    hook = taught.model.trunk.register_forward_hook(lambda *call: calls.append(call[-1]))
    maps = taught.model(images)
    hook.remove()
    tokens = torch.einsum("bdhw,cd->bchw", calls[0], taught.coarse.head.weight)
    tokens = tokens + taught.coarse.head.bias[:, None, None]
    a, b = (t - t.mean((0, 2, 3), keepdim=True) for t in (tokens, target))
    expected = 1 - ((a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1))).mean()
    actual = taught.coarse(images)
    assert actual.item() == pytest.approx(expected.item(), abs=1e-5)
    actual.backward()
    assert taught.coarse.head.weight.grad.abs().sum() > 0
    assert all(p.grad is not None for p in taught.model.trunk.parameters())
    assert maps.shape[1] == 8
    taught.optimizer.zero_grad()
    with torch.no_grad():
        extra = taught.rate() * expected.item()
    assert taught.train_step()["loss"] - without.train_step()["loss"] == pytest.approx(extra, rel=1e-3)


@pytest.mark.slow
def test_a_run_with_a_coarse_teacher_goes_on_and_keeps_no_head(tmp_path, retrofitted):
    args = ("--coarse-teacher", str(retrofitted), "--block", "3")
    uninterrupted = run(tmp_path / "whole", 4, *args)
    run(tmp_path / "parts", 4, *args, "--stop", "2")
    parts = run(tmp_path / "parts", 4, *args)
    assert all(torch.equal(uninterrupted[k], parts[k]) for k in uninterrupted)
    assert set(uninterrupted) == set(run(tmp_path / "plain", 2))
    card = json.loads((tmp_path / "whole/card.json").read_text())
    assert card["coarse_teacher"] == hashlib.sha256(b"weights").hexdigest()
    with pytest.raises(OptionError, match=r"state.pt was trained without a coarse teacher"):
        run(tmp_path / "plain", 4, *args)
    with pytest.raises(OptionError, match="block=3 has no effect without a coarse teacher"):
        Trainer(Recipe(block=3), list(PICTURES.numpy()), tmp_path)


def test_incompatible_options(tmp_path, monkeypatch):
    images = list(PICTURES.numpy())
    with pytest.raises(OptionError, match=r"near=0.5 has no effect without a teacher"):
        Trainer(Recipe(near=0.5), images, tmp_path)
    with pytest.raises(OptionError, match="the teacher has 12 features, but the network to train has 8"):
        Trainer(Recipe(), images, tmp_path, Micro(12, (8, 8, 8), 16, 1, 2))
    run(tmp_path, 2)
    monkeypatch.setitem(trainer.SIZES, "large", {**trainer.SIZES["small"], "depth": 2})
    with pytest.raises(OptionError, match=r"state.pt contains a network of another size than 'large'"):
        run(tmp_path, 4, "--size", "large")


def test_distance_is_in_units_of_the_variance_of_each_channel():
    target = torch.randn(3, 2, 40, 50) * torch.tensor([2.0, 0.1])[:, None, None] + 5
    assert float(distance(target, target)) == 0
    off = target + torch.tensor([2.0, 0.1])[:, None, None]
    assert float(distance(off, target)) == pytest.approx(1, abs=0.05)
