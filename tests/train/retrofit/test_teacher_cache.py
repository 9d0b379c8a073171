"""Windows with the teacher's features stored in files: contents, poses, and resuming after a stop."""

import json
import sys
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.train.tiny import TEACHER, RandomImages, config
from vispe.backbones.distributed import Processes
from vispe.backbones.local.debiased import Debiasing
from vispe.backbones.local.debiased_folder import save_debiased
from vispe.backbones.model_access import final_tokens
from vispe.errors import InputError, OptionError
from vispe.images.symmetry import D4, Placement, View, ViewAverage
from vispe.train.data import Batches
from vispe.train.data.augmentation import Augment
from vispe.train.retrofit.config import LossWeights, Stage, Target, Teacher
from vispe.train.retrofit.config_checks import check
from vispe.train.retrofit.distillation import retrofit
from vispe.train.retrofit.student import load_student, load_teacher
from vispe.train.retrofit.teacher_cache import CropBatches, Crops

HALF = (0.5, 0.5, 0.5)


def windows(batch=3, **options):
    return Batches(RandomImages(), 32, batch, seed=3, mean=HALF, std=HALF, **options)


def make(folder, count=7, on_crops=None, teacher=None, **identity):
    crops = Crops(folder, count)
    net = (teacher or load_teacher(TEACHER)).model
    crops.make(net, windows(), 24, 8, identity, Processes(), nullcontext, on_crops)
    return crops


def test_files_have_the_first_rows_and_their_teacher_features(tmp_path):
    calls = []
    crops = make(tmp_path / "cache", on_crops=lambda *progress: calls.append(progress))
    assert calls == [(3, 7), (6, 7), (7, 7)]
    images, features = crops.arrays()
    rows = torch.cat([windows().load(step) for step in range(3)])[:7]
    eight = torch.from_numpy(images.copy())
    torch.testing.assert_close(eight / 255, rows * 0.5 + 0.5, rtol=0, atol=0.5001 / 255)
    with torch.no_grad():
        expected, _ = final_tokens(load_teacher(TEACHER).model, (eight / 255 - 0.5) / 0.5)
    stored = torch.from_numpy(features.copy()).view(torch.bfloat16)
    torch.testing.assert_close(stored.float(), expected, rtol=2**-8, atol=1e-6)


def test_passes_go_through_all_windows_with_their_features(tmp_path):
    crops = make(tmp_path)
    images, features = (torch.from_numpy(a.copy()) for a in crops.arrays())
    batches = CropBatches(crops, windows(4))
    assert len(batches) == 7
    order = []
    for step, (crops, maps) in zip(range(21), batches.from_step(0), strict=False):
        resumed = next(batches.from_step(step))
        assert torch.equal(resumed[0], crops)
        assert torch.equal(resumed[1], maps)
        for window, of in zip(crops, maps, strict=True):
            (i,) = (k for k in range(7) if torch.equal(images[k].float().div(255).sub(0.5).div(0.5), window))
            assert torch.equal(features[i].view(torch.bfloat16), of)
            order.append(i)
    passes = [order[at : at + 7] for at in range(0, 84, 7)]
    assert all(sorted(one) == list(range(7)) for one in passes)
    assert passes[0] != passes[1]


def test_a_stopped_cache_resumes(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["vispe.train.retrofit.teacher_cache"], "_EVERY", 1)
    uninterrupted = make(tmp_path / "whole")

    def stop(ready, count):
        if ready == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "parts", on_crops=stop)
    calls = []
    parts = make(tmp_path / "parts", on_crops=lambda *progress: calls.append(progress))
    assert calls == [(7, 7)]
    for one, other in zip(uninterrupted.arrays(), parts.arrays(), strict=True):
        assert np.array_equal(one, other)
    before = (tmp_path / "parts" / "features.npy").stat().st_mtime_ns
    make(tmp_path / "parts")
    assert (tmp_path / "parts" / "features.npy").stat().st_mtime_ns == before
    with pytest.raises(
        InputError,
        match=r"contains windows computed with another amp\. Set another target.folder, or delete it\.",
    ):
        make(tmp_path / "parts", amp="bf16")


def test_a_retrofit_with_windows_resumes_bit_for_bit(tmp_path):
    stages = [
        Stage(32, steps=5, batch_size=4, lr=1e-3, crops=9),
        Stage(48, steps=2, batch_size=2, lr=1e-4, crops=3),
    ]
    requested = config(
        tmp_path / "whole", stages=stages, augment=Augment(pose=True), loss=LossWeights(1, 0.1, centred=0.5)
    )
    uninterrupted = retrofit(requested, source=RandomImages())
    lines = [json.loads(t) for t in (tmp_path / "whole" / "log.jsonl").read_text().splitlines()]
    assert {"distill", "centred", "d4"} <= set(lines[-1])
    assert sorted(p.name for p in (tmp_path / "whole" / "crops").iterdir()) == ["32-9", "48-3"]

    def stop(step, total, line):
        if step == 3:
            raise KeyboardInterrupt

    shared = replace(requested.target, folder=str(tmp_path / "shared"))
    parts = replace(requested, out=str(tmp_path / "parts"), target=shared)
    with pytest.raises(KeyboardInterrupt):
        retrofit(parts, source=RandomImages(), on_step=stop)
    resumed = retrofit(parts, source=RandomImages())
    state = resumed.student.state_dict()
    for name, value in uninterrupted.student.state_dict().items():
        assert torch.equal(value, state[name]), name
    # the teacher is not asked again for another student
    other = replace(parts, out=str(tmp_path / "other"), seed=requested.seed)
    times = {p: p.stat().st_mtime_ns for p in (tmp_path / "shared").rglob("*.npy")}
    retrofit(other, source=RandomImages())
    assert times == {p: p.stat().st_mtime_ns for p in (tmp_path / "shared").rglob("*.npy")}


@pytest.mark.parametrize("average", [{}, {"poses": 2}])
def test_windows_do_not_depend_on_the_micro_batch_size(tmp_path, average):
    stages = [Stage(32, steps=2, batch_size=4, crops=7)]
    batches = []
    for size in (None, 1, 3):
        folder = tmp_path / str(size)
        target = Target([3, 11], folder=str(folder / "crops"), **average)
        options = {"stages": stages, "target": target, "micro_batch_size": size}
        retrofit(config(folder / "out", **options), source=RandomImages())
        images, features = Crops(folder / "crops" / "32-7", 7).arrays()
        batches.append((images.copy(), torch.from_numpy(features.copy()).view(torch.bfloat16).float()))
    for images, features in batches[1:]:
        np.testing.assert_array_equal(images, batches[0][0])
        torch.testing.assert_close(features, batches[0][1], rtol=2**-7, atol=1e-5)


def test_a_run_with_windows_goes_on_with_another_micro_batch_size(tmp_path):
    class Stop(Exception):
        pass

    def stop(step, total, line):
        if step == 2:
            raise Stop

    options = {"stages": [Stage(32, steps=3, batch_size=4, crops=7)], "save_steps": 1}
    with pytest.raises(Stop):
        retrofit(config(tmp_path, **options), source=RandomImages(), on_step=stop)
    result = retrofit(config(tmp_path, **options, micro_batch_size=2), source=RandomImages())
    assert result.card["updates"] == 3


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"stages": [Stage(32, steps=1, crops=0)]}, r"stages\[0\].crops needs an integer above 0"),
        ({"target": Target(folder="cache")}, "target.folder needs a stage with crops, got cache without one"),
        (
            {"stages": [Stage(32, steps=1, crops=4)], "loss": LossWeights(class_token=1.0)},
            r"stages\[0\].crops=4 stores patch features only, but loss.class_token needs class tokens",
        ),
    ],
)
def test_incompatible_options(tmp_path, changes, sentence):
    with pytest.raises(OptionError, match=sentence):
        check(config(tmp_path, **changes))


def test_stored_features_are_means_over_the_views_of_their_batch(tmp_path):
    views = {
        0: [View(D4[2]), View(D4[5])],
        1: [View(D4[0], Placement((4, 4), (5, 5), (1, 0), "mirror"))],
        2: [],
    }
    crops, teacher = Crops(tmp_path, 7), load_teacher(TEACHER)
    crops.make(teacher.model, windows(), 24, 8, {}, Processes(), nullcontext, None, views.get)
    images, features = (torch.from_numpy(a.copy()) for a in crops.arrays())
    for row in range(7):
        image = (images[row, None] / 255 - 0.5) / 0.5
        with torch.no_grad():
            maps = [view.undo(teacher(view.apply(image))) for view in views[row // 3] or [View()]]
        expected = torch.stack(maps).mean(0)[0]
        torch.testing.assert_close(
            features[row].view(torch.bfloat16).float(), expected, rtol=2**-7, atol=1e-4
        )


@pytest.mark.parametrize("crops", [None, 7])
def test_a_symmetrised_target_is_reproducible_and_differs_from_a_plain_one(tmp_path, crops):
    stages = [Stage(32, steps=4, batch_size=4, lr=1e-3, crops=crops)]
    target = Target([3], poses=3, positions=2)
    caches = [
        retrofit(config(tmp_path / name, stages=stages, target=target), source=RandomImages())
        for name in ("a", "b")
    ]
    pairs = zip(*(run.student.state_dict().values() for run in caches), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    plain = retrofit(config(tmp_path / "c", stages=stages, target=Target([3])), source=RandomImages())
    changed = zip(plain.student.parameters(), caches[0].student.parameters(), strict=True)
    assert any(not torch.equal(*pair) for pair in changed)
    if crops:
        stored = str(tmp_path / "a" / "crops")
        with pytest.raises(InputError, match="windows computed with another poses, positions"):
            retrofit(
                config(tmp_path / "d", stages=stages, target=Target([3], folder=stored)),
                source=RandomImages(),
            )


def test_a_debiased_model_as_teacher(tmp_path):
    folder = tmp_path / "debiased"
    save_debiased(
        folder,
        Debiasing("poses", ViewAverage(poses=8)),
        {"name": "test_vit", "pos_embed": None, "weights": "random", "img_size": 64, "seed": 0},
    )
    stages = [Stage(48, steps=1, batch_size=2)]
    teacher, target = Teacher(str(folder)), Target()
    run = retrofit(
        config(tmp_path / "out", teacher=teacher, stages=stages, target=target), source=RandomImages()
    )
    assert run.card["debiased"] == "poses"
    assert run.card["config"]["teacher"]["name"] == "test_vit"
    assert type(load_teacher(teacher).model).__name__ == "DebiasedModel"
    student, base, _ = load_student(tmp_path / "out")
    assert type(base.model).__name__ == "VisionTransformer"
    assert student.channels == 64
