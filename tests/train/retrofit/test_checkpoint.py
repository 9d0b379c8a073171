"""A killed run resumes to the result of an uninterrupted one; folders are never overwritten by mistake."""

import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tests.products import slow_except
from tests.train.tiny import TEACHER, RandomImages, config
from tests.train.worker import killed_config
from vispe.errors import InputError, OptionError
from vispe.evaluate.evaluated import load_evaluated_model
from vispe.evaluate.measure.audited_model import as_audited_model
from vispe.train.retrofit.checkpoint import RunFolder
from vispe.train.retrofit.config import Stage, Student, Target
from vispe.train.retrofit.distillation import retrofit
from vispe.train.retrofit.student import final_tokens, load_student
from vispe.train.retrofit.teacher import load_teacher
from vispe.train.retrofit.training_log import read_log

ROOT = Path(__file__).resolve().parents[3]


class Stop(Exception):
    pass


def stop_at(step):
    def follow(number, total, line):
        if number == step:
            raise Stop

    return follow


def without_clock(lines):
    return [{k: v for k, v in line.items() if k not in ("images_per_s", "memory_mib")} for line in lines]


@pytest.fixture(scope="module")
def uninterrupted_run(tmp_path_factory):
    """Return the result and the folder of an uninterrupted run."""
    out = tmp_path_factory.mktemp("uninterrupted") / "out"
    torch.set_num_threads(1)
    return retrofit(killed_config(out), source=RandomImages()), out


def same_run(out, uninterrupted_run):
    """Check that a folder has the results of the uninterrupted run."""
    expected = load_file(uninterrupted_run / "student.safetensors")
    actual = load_file(out / "student.safetensors")
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    assert without_clock(read_log(out / "log.jsonl")) == without_clock(
        read_log(uninterrupted_run / "log.jsonl")
    )
    cards = [json.loads((folder / "card.json").read_text()) for folder in (out, uninterrupted_run)]
    for key in ("probe", "likeness", "blanked", "data", "updates"):
        assert cards[0][key] == cards[1][key]
    assert sorted(p.name for p in (out / "state").iterdir()) == ["000000006", "000000007"]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="needs processes that fork")
def test_a_run_that_is_killed_anywhere_ends_with_the_same_bits(uninterrupted_run, tmp_path):
    """At a random step, while a state is written, and again after going on; 7 is the end."""
    steps = sorted(random.Random().sample(range(1, 8), 2))
    positions = ["saving:4", "saving:7", *(f"after:{step}" for step in steps)]
    # a later run goes on from an earlier state
    positions.sort(key=lambda position: (position[-1], position[0] == "a"))
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tests.train.worker",
        "killed",
        str(tmp_path / "out"),
        *positions,
    ]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert process.returncode == 0, f"{positions}: {process.stderr[-3000:]}"
    same_run(tmp_path / "out", uninterrupted_run[1])


@pytest.mark.parametrize("step", slow_except(range(1, 8), [3, 4]))  # 4 is the end of the first stage
def test_a_run_that_is_stopped_at_any_step_ends_with_the_same_bits(step, uninterrupted_run, tmp_path):
    requested = killed_config(tmp_path)
    with pytest.raises(Stop):
        retrofit(requested, source=RandomImages(), on_step=stop_at(step))
    assert not (tmp_path / "card.json").exists()
    torch.manual_seed(step)  # what others drew meanwhile does not matter
    retrofit(requested, source=RandomImages())
    same_run(tmp_path, uninterrupted_run[1])


def test_the_folder_holds_a_model_and_its_card(uninterrupted_run):
    result, out = uninterrupted_run
    card = json.loads((out / "card.json").read_text())
    assert card == json.loads(json.dumps(result.card))
    assert card["blanked"] == [3, 11]
    assert card["data"] == {"fingerprint": RandomImages().fingerprint(), "kind": "random", "count": 10}
    assert set(card["probe"]["noise"]) == {"pictures", "before", "blanked", "after", "cosine", "rank"}
    assert card["config"]["student"]["pos_embed"] == "rope_axial+learned"
    assert card["updates"] == 7
    assert (out / "student.safetensors").stat().st_mode == (
        out / "log.jsonl"
    ).stat().st_mode  # others may read it
    student, teacher, _ = load_student(out)
    images = torch.randn(1, 3, 24, 40, generator=torch.Generator().manual_seed(0))
    actual = final_tokens(student.model, images)[0]
    assert torch.equal(actual, final_tokens(result.student, images)[0])
    assert not torch.allclose(actual, final_tokens(teacher.model, images)[0], atol=1e-2)
    assert load_student(out / "student.safetensors")[0].patch_size == 8
    # every command finds it by its folder
    subject = load_evaluated_model(str(out), device="cpu")
    assert torch.equal(subject.features(images), student(images))
    assert torch.equal(subject.mean, student.mean)
    assert not subject.exact
    assert torch.equal(as_audited_model(subject).maps(images), student(images))
    with pytest.raises(OptionError, match="loaded as a retrofit"):
        load_evaluated_model(str(out), weights="random")
    assert "cosine" in result.verdict


def test_relative_paths_work_from_another_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").mkdir()
    for k in range(2):
        Image.fromarray(np.full((40, 40), 60 * k, np.uint8)).save(tmp_path / "images" / f"{k}.png")
    torch.save(load_teacher(TEACHER).model.state_dict(), "teacher.pt")
    stages = [Stage(32, steps=2, batch_size=2, crops=2)]
    settings = config(
        "out", teacher=replace(TEACHER, weights="teacher.pt"), data=[{"folder": "images"}], stages=stages,
        target=Target(folder="crops"), save_steps=1,
    )  # fmt: skip
    with pytest.raises(Stop):
        retrofit(settings, on_step=stop_at(1))
    weights = (tmp_path / "teacher.pt").read_bytes()
    torch.save(load_teacher(TEACHER, seed=1).model.state_dict(), "teacher.pt")
    with pytest.raises(InputError, match=r"other settings: teacher\.digest was"):
        retrofit(settings)
    with pytest.raises(InputError, match="contains windows computed with another digest"):
        retrofit(replace(settings, out="other"))
    (tmp_path / "teacher.pt").write_bytes(weights)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    paths = {"data": [{"folder": "../images"}], "target": Target(folder="../crops"), "out": "../out"}
    card = retrofit(replace(settings, teacher=replace(TEACHER, weights="../teacher.pt"), **paths)).card
    assert card["config"]["teacher"]["weights"] == str(tmp_path / "teacher.pt")
    assert card["config"]["data"] == [{"folder": str(tmp_path / "images")}]
    assert card["config"]["target"]["folder"] == str(tmp_path / "crops")
    assert card["data"]["where"] == [str(tmp_path / "images")]
    assert load_student("../out")[1].channels == 24


def test_lora_is_written_as_plain_weights(tmp_path):
    requested = config(tmp_path, student=Student("alibi2d", trainable="lora", rank=2))
    result = retrofit(requested, source=RandomImages())
    state = load_file(tmp_path / "student.safetensors")
    assert not [name for name in state if "parametrizations" in name]
    images = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    read = load_student(tmp_path)[0].model
    assert torch.equal(final_tokens(read, images)[0], final_tokens(result.student, images)[0])
    assert result.card["trained_parameters"] < result.card["parameters"] / 2


def test_a_finished_run_is_replaced_only_by_force(tmp_path):
    retrofit(config(tmp_path), source=RandomImages())
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    with pytest.raises(InputError, match=r"contains a finished retrofit. Set `force`"):
        retrofit(config(tmp_path), source=RandomImages())
    with pytest.raises(InputError, match="finished"):
        retrofit(config(tmp_path, seed=1), source=RandomImages())
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before
    (tmp_path / "notes.txt").write_text("mine")
    replacement = retrofit(config(tmp_path, seed=1, force=True), source=RandomImages())
    assert replacement.card["config"]["seed"] == 1
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert [line["step"] for line in read_log(tmp_path / "log.jsonl")] == [2, 4, 6, 7]


def test_another_config_is_refused_and_its_keys_are_named(tmp_path):
    with pytest.raises(Stop):
        retrofit(config(tmp_path), source=RandomImages(), on_step=stop_at(3))
    for changes, text in (
        ({"seed": 4}, "seed was 0 and is 4"),
        (
            {"student": Student("rpb"), "ema_decay": 0.5},
            "pos_embed was 'alibi2d' and is 'rpb'; ema_decay was 0.0 and is 0.5",
        ),
        ({"target": Target([3])}, r"target.blank was \[3, 11\] and is \[3\]"),
        ({"stages": [Stage(32, steps=9, batch_size=4, lr=1e-3)]}, r"stages\[0\].steps was 4 and is 9"),
    ):
        with pytest.raises(InputError, match=text):
            retrofit(config(tmp_path, **changes), source=RandomImages())
    with pytest.raises(InputError, match=r"data.fingerprint was '[0-9a-f]+' and is '[0-9a-f]+'"):
        retrofit(config(tmp_path), source=RandomImages(seed=1))
    run = retrofit(config(tmp_path, logging_steps=1, save_steps=5), source=RandomImages())
    assert run.card["updates"] == 7, "what does not change the result may change"


def test_other_files_are_not_overwritten(tmp_path):
    (tmp_path / "log.jsonl").write_text("mine")
    with pytest.raises(InputError, match=r"log.jsonl exists and is not a file of a retrofit"):
        retrofit(config(tmp_path), source=RandomImages())
    assert (tmp_path / "log.jsonl").read_text() == "mine"


def test_nothing_is_written_where_the_config_is_wrong(tmp_path):
    with pytest.raises(Exception, match="got 99"):
        retrofit(config(tmp_path / "out", target=Target([99])), source=RandomImages())
    assert not (tmp_path / "out").exists()


def test_states_are_read_as_they_were_written(tmp_path):
    folder, shared = RunFolder(tmp_path), torch.arange(6.0).reshape(2, 3)
    for step in (2, 4, 10):
        folder.save(step, {"student": {"a": shared.T, "b": shared.T + step}}, {"step": step, "x": shared})
    assert folder.steps() == [4, 10]
    step, weights, moment = folder.load()
    assert step == 10
    assert torch.equal(weights["student"]["a"], shared.T)
    assert torch.equal(weights["student"]["b"], shared.T + 10)
    assert moment["step"] == 10
    (tmp_path / "state" / "000000010" / "student.safetensors").write_bytes(b"cut")
    with pytest.raises(InputError, match="000000010 is damaged"):
        folder.load()
    assert RunFolder(tmp_path / "other").load() is None


def test_load_student_names_missing_files(tmp_path):
    with pytest.raises(InputError, match="must contain a finished retrofit"):
        load_student(tmp_path)
    (tmp_path / "student.safetensors").write_bytes(b"")
    (tmp_path / "card.json").write_text("{}")
    with pytest.raises(InputError, match="is not a card of vispe retrofit"):
        load_student(tmp_path)


def test_the_state_of_the_optimizer_loads_without_running_code(tmp_path):
    with pytest.raises(Stop):
        retrofit(config(tmp_path), source=RandomImages(), on_step=stop_at(3))
    moment = torch.load(tmp_path / "state" / "000000002" / "moment.pt", weights_only=True)
    assert moment["optimizer"]["state"][0]["step"] == 2
