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
from vispe.backbones.model_access import final_tokens
from vispe.errors import InputError, OptionError
from vispe.train.data import Batches
from vispe.train.data.augmentation import Augment
from vispe.train.retrofit.config import LossWeights, Stage, Target
from vispe.train.retrofit.config_checks import check
from vispe.train.retrofit.distillation import retrofit
from vispe.train.retrofit.student import load_teacher
from vispe.train.retrofit.teacher_cache import CropBatches, Crops

HALF = (0.5, 0.5, 0.5)


def windows(batch=3, **options):
    return Batches(RandomImages(), 32, batch, seed=3, mean=HALF, std=HALF, **options)


def make(folder, count=7, on_crops=None, teacher=None, **identity):
    crops = Crops(folder, count)
    net = (teacher or load_teacher(TEACHER)).model
    crops.make(net, windows(), 24, 8, identity, Processes(), nullcontext, on_crops)
    return crops


def test_files_hold_the_first_rows_and_what_the_teacher_says_of_them(tmp_path):
    shown = []
    crops = make(tmp_path / "kept", on_crops=lambda *done: shown.append(done))
    assert shown == [(3, 7), (6, 7), (7, 7)]
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
    seen = []
    for step, (given, maps) in zip(range(21), batches.from_step(0), strict=False):
        again = next(batches.from_step(step))
        assert torch.equal(again[0], given)
        assert torch.equal(again[1], maps)
        for window, of in zip(given, maps, strict=True):
            (i,) = (k for k in range(7) if torch.equal(images[k].float().div(255).sub(0.5).div(0.5), window))
            assert torch.equal(features[i].view(torch.bfloat16), of)
            seen.append(i)
    passes = [seen[at : at + 7] for at in range(0, 84, 7)]
    assert all(sorted(one) == list(range(7)) for one in passes)
    assert passes[0] != passes[1]


def test_what_was_stopped_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["vispe.train.retrofit.teacher_cache"], "_EVERY", 1)
    whole = make(tmp_path / "whole")

    def stop(ready, count):
        if ready == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "parts", on_crops=stop)
    shown = []
    parts = make(tmp_path / "parts", on_crops=lambda *done: shown.append(done))
    assert shown == [(7, 7)]
    for one, other in zip(whole.arrays(), parts.arrays(), strict=True):
        assert np.array_equal(one, other)
    before = (tmp_path / "parts" / "features.npy").stat().st_mtime_ns
    make(tmp_path / "parts")
    assert (tmp_path / "parts" / "features.npy").stat().st_mtime_ns == before
    with pytest.raises(
        InputError,
        match=r"contains windows computed with another amp\. Set another target.folder, or delete it\.",
    ):
        make(tmp_path / "parts", amp="bf16")


def test_a_retrofit_with_windows_goes_on_bit_for_bit(tmp_path):
    stages = [
        Stage(32, steps=5, batch_size=4, lr=1e-3, crops=9),
        Stage(48, steps=2, batch_size=2, lr=1e-4, crops=3),
    ]
    requested = config(
        tmp_path / "whole", stages=stages, augment=Augment(pose=True), loss=LossWeights(1, 0.1, centred=0.5)
    )
    whole = retrofit(requested, source=RandomImages())
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
    again = retrofit(parts, source=RandomImages())
    state = again.student.state_dict()
    for name, value in whole.student.state_dict().items():
        assert torch.equal(value, state[name]), name
    # the teacher is not asked again for another student
    other = replace(parts, out=str(tmp_path / "other"), seed=requested.seed)
    times = {p: p.stat().st_mtime_ns for p in (tmp_path / "shared").rglob("*.npy")}
    retrofit(other, source=RandomImages())
    assert times == {p: p.stat().st_mtime_ns for p in (tmp_path / "shared").rglob("*.npy")}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"stages": [Stage(32, steps=1, crops=0)]}, r"stages\[0\].crops needs an integer above 0"),
        ({"target": Target(folder="kept")}, "target.folder needs a stage with crops, got kept without one"),
        (
            {"stages": [Stage(32, steps=1, crops=4)], "loss": LossWeights(class_token=1.0)},
            r"stages\[0\].crops=4 stores patch features only, but loss.class_token needs class tokens",
        ),
    ],
)
def test_what_does_not_go_together(tmp_path, changes, sentence):
    with pytest.raises(OptionError, match=sentence):
        check(config(tmp_path, **changes))
