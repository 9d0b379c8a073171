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
    """Parametrize a test over towers and `rows`; pairs that are not in `fast` are long tests."""
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
    """Register a small model under the name 'tiny'; return the depth of its tower."""
    tower, depth = request.param
    config = {"embed_dim": 16, "vision_cfg": tower, "text_cfg": TEXT}
    monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, "tiny", config)
    return depth


@pytest.mark.parametrize("encoding", [pytest.param(None, marks=pytest.mark.slow), "alibi2d"])
@with_towers(
    "command",
    COMMANDS,
    {("its own tower", "probe"), ("a tower of timm", "health"), ("its own tower", "receptive-field")},
)
def test_commands_accept_open_clip_models(command, encoding, capsys, tmp_path):
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


def test_rotate_measures_every_block_of_both_kinds_of_towers(capsys, tiny):
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
def test_segment_uses_tokens_of_open_clip_models(encoding, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    labels = np.zeros((70, 91), np.uint8)
    labels[8:30, 8:40], labels[40:60, 40:80] = 1, 2
    Image.fromarray(labels).save("labels.png")
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (70, 91), np.uint8)).save("a.png")
    model = ["--features", "tokens", "--model", "open_clip:tiny", "--weights", "random"]
    model += ["--pos-embed", encoding] if encoding else []
    assert main(["segment", "a.png", "--labels", "labels.png", *model, "-o", "out"]) == 0
    assert main(["apply", "out/model.vispe", "a.png", "-o", "again"]) == 0
    first, second = (np.asarray(Image.open(f"{folder}/a_seg.png")) for folder in ("out", "again"))
    assert np.array_equal(first, second)


def test_doctor_accepts_open_clip_models(capsys):
    assert main(["doctor", "open_clip:tiny", "--encoding", "alibi2d", "--device", "cpu", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["model"], report["weights"], report["image_size"]) == (
        "open_clip:tiny",
        "random",
        [64, 64],
    )
    assert report["paths"]


def test_images_are_normalized_as_in_open_clip(capsys, tmp_path):
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (70, 91, 3), np.uint8)).save(tmp_path / "a.png")
    assert main(["health", "open_clip:tiny", str(tmp_path / "a.png"), "--weights", "random"]) == 0
    side, mean, std = input_settings(load_model("open_clip:tiny", weights="random").model)
    assert side == 64
    assert torch.equal(mean.flatten(), torch.tensor(open_clip.OPENAI_DATASET_MEAN))
    assert torch.equal(std.flatten(), torch.tensor(open_clip.OPENAI_DATASET_STD))


def test_weight_files_are_loaded(tmp_path):
    torch.manual_seed(5)
    model = open_clip.create_model("tiny")
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    loaded = load_model("open_clip:tiny", weights=str(tmp_path / "weights.pt")).model.state_dict()
    expected = getattr(model.visual, "trunk", model.visual).state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[k], v) for k, v in expected.items())
    random = load_model("open_clip:tiny", weights="random").model.state_dict()
    assert not all(torch.equal(random[k], v) for k, v in loaded.items())


@pytest.mark.parametrize("command", ["health", "probe"])
@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("open_clip:tinny", "open_clip has no model 'tinny'. Did you mean 'tiny'"),
        ("open_clip:tiny", "open_clip:tiny needs one source of weights, got none"),
        ("open_clip:ViT-B-33", "open_clip has no model 'ViT-B-33'. Did you mean"),
    ],
)
def test_missing_models_and_weights_raise_a_one_line_error(command, model, text, capsys):
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
