"""open_clip models by name in `vispe probe`, `vispe health` and `vispe rotate`."""

import json

import numpy as np
import open_clip
import pytest
import torch
from PIL import Image

from vispe.backbones.load_model import load_model
from vispe.backbones.model_access import input_settings
from vispe.cli.main import main

TEXT = {"context_length": 8, "vocab_size": 32, "width": 32, "heads": 2, "layers": 1}
OWN = {"image_size": 64, "layers": 2, "width": 32, "head_width": 8, "patch_size": 8}
TIMM = {"image_size": 64, "timm_model_name": "test_vit", "timm_pool": "", "timm_proj": "linear",
        "timm_model_pretrained": False}  # fmt: skip
COMMANDS = {
    "health": ["--noise", "2"],
    "receptive-field": ["--noise", "2"],
    "probe": ["--noise", "1", "--masks", "1", "--step", "2"],
}


TOWERS = {"its own tower": (OWN, 2), "a tower of timm": (TIMM, 6)}


def with_towers(names, rows, fast):
    """Parametrise a test by a tower and `names`: `rows` with both towers, all but the pairs in `fast` as long tests."""
    pairs = [(tower, row) for row in rows for tower in TOWERS]
    values = [
        pytest.param(
            TOWERS[tower], row, id=f"{tower}-{row}", marks=() if (tower, row) in fast else pytest.mark.slow
        )
        for tower, row in pairs
    ]
    return pytest.mark.parametrize(("tiny", names), values, indirect=["tiny"])


@pytest.fixture(params=TOWERS.values(), ids=TOWERS, autouse=True)
def tiny(request, monkeypatch):
    """A small model under the name 'tiny'; how many blocks its tower has."""
    tower, depth = request.param
    known = {"embed_dim": 16, "vision_cfg": tower, "text_cfg": TEXT}
    monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, "tiny", known)
    return depth


@pytest.mark.parametrize("encoding", [pytest.param(None, marks=pytest.mark.slow), "alibi2d"])
@with_towers(
    "command",
    COMMANDS,
    {("its own tower", "probe"), ("a tower of timm", "health"), ("its own tower", "receptive-field")},
)
def test_commands_take_them(command, encoding, capsys, tmp_path):
    words = [
        command,
        "open_clip:tiny",
        "--weights",
        "random",
        *COMMANDS[command],
        "-o",
        str(tmp_path),
        "--json",
    ]
    assert main([*words, *(["--pos-embed", encoding] if encoding else [])]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["model"], report["pos_embed"], report["weights"]) == ("open_clip:tiny", encoding, "random")
    assert (tmp_path / "report.html").exists()


def test_rotate_sees_every_block_of_both_kinds_of_towers(capsys, tiny):
    words = [
        "rotate",
        "open_clip:tiny",
        "--weights",
        "random",
        "--textures",
        "1",
        "--quick",
        "--metrics",
        "layers",
    ]
    assert main([*words, "--json"]) == 0
    parts = {row["part"] for row in json.loads(capsys.readouterr().out)["rows"]}
    assert {part for part in parts if part.startswith("layer ") and "," not in part} == {
        f"layer {k}" for k in range(tiny)
    }


@with_towers("encoding", ["", "alibi2d"], {("its own tower", ""), ("a tower of timm", "alibi2d")})
def test_segment_learns_from_their_tokens(encoding, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    labels = np.zeros((70, 91), np.uint8)
    labels[8:30, 8:40], labels[40:60, 40:80] = 1, 2
    Image.fromarray(labels).save("labels.png")
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (70, 91), np.uint8)).save("a.png")
    model = ["--features", "tokens", "--model", "open_clip:tiny", "--weights", "random"]
    model += ["--pos-embed", encoding] if encoding else []
    assert main(["segment", "a.png", "--labels", "labels.png", *model, "-o", "out"]) == 0
    assert main(["apply", "out/model.vispe", "a.png", "-o", "again"]) == 0
    first, again = (np.asarray(Image.open(f"{folder}/a_seg.png")) for folder in ("out", "again"))
    assert np.array_equal(first, again)


def test_doctor_explains_them(capsys):
    assert main(["doctor", "open_clip:tiny", "--encoding", "alibi2d", "--device", "cpu", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["model"], report["weights"], report["image_size"]) == (
        "open_clip:tiny",
        "random",
        [64, 64],
    )
    assert report["paths"]


def test_images_are_prepared_as_open_clip_does(capsys, tmp_path):
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (70, 91, 3), np.uint8)).save(tmp_path / "a.png")
    assert main(["health", "open_clip:tiny", str(tmp_path / "a.png"), "--weights", "random"]) == 0
    side, mean, std = input_settings(load_model("open_clip:tiny", weights="random").model)
    assert side == 64
    assert torch.equal(mean.flatten(), torch.tensor(open_clip.OPENAI_DATASET_MEAN))
    assert torch.equal(std.flatten(), torch.tensor(open_clip.OPENAI_DATASET_STD))


def test_a_file_of_weights_is_loaded(tmp_path):
    torch.manual_seed(5)
    model = open_clip.create_model("tiny")
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    loaded = load_model("open_clip:tiny", weights=str(tmp_path / "weights.pt")).model.state_dict()
    expected = getattr(model.visual, "trunk", model.visual).state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[k], v) for k, v in expected.items())
    other = load_model("open_clip:tiny", weights="random").model.state_dict()
    assert not all(torch.equal(other[k], v) for k, v in loaded.items())


@pytest.mark.parametrize("command", ["health", "probe"])
@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("open_clip:tinny", "open_clip has no model 'tinny'. Did you mean 'tiny'"),
        ("open_clip:tiny", "open_clip:tiny needs one source of weights, got none"),
        ("open_clip:ViT-B-33", "open_clip has no model 'ViT-B-33'. Did you mean"),
    ],
)
def test_what_is_not_there_is_said_in_a_sentence(command, model, text, capsys):
    assert main([command, model, *COMMANDS[command]]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert text in err


@pytest.mark.parametrize("words", ["probe --noise 1", "health --noise 1", "rotate --textures 1", "doctor"])
def test_missing_weights_have_the_same_message_in_every_command(words, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HOME", str(tmp_path))
    command, *options = words.split()
    assert main([command, "open_clip:ViT-B-32/openai", *options]) == 2
    err = capsys.readouterr().err
    assert "the checkpoint ViT-B-32:openai is not on this disk and HF_HUB_OFFLINE is set; no other" in err
    assert err.count("\n") == 1
