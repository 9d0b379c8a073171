"""`vispe debias`: output folders that other commands load, and errors."""

import json

import numpy as np
import pytest
import timm
import transformers
from PIL import Image

from vispe.cli.main import main

MODEL = ["test_vit", "--weights", "random", "--img-size", "64"]


def test_the_output_folder_loads_as_a_model_in_other_commands(tmp_path, capsys):
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (70, 91), np.uint8)).save(tmp_path / "a.png")
    out = str(tmp_path / "out")
    words = [
        "debias",
        MODEL[0],
        str(tmp_path / "a.png"),
        *MODEL[1:],
        "--noise",
        "2",
        "--method",
        "poses+rasa",
    ]
    assert main([*words, "--rounds", "2", "-o", out, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["passes"], report["rounds"], report["images"]) == (8, 2, 3)
    assert main(["probe", out, "--noise", "1", "--step", "2", "--no-layers"]) == 0
    assert f"{out}, 1 noise image" in capsys.readouterr().out
    assert main(["debias", *MODEL, "-o", out]) == 2
    assert "exist; add --force to overwrite" in capsys.readouterr().err


@pytest.mark.parametrize("prefix", ["local-dir:", "hf:"])
def test_relative_model_folders_load_from_another_directory(prefix, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    if prefix == "hf:":
        kwargs = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32}
        config = transformers.ViTConfig(**kwargs, intermediate_size=16, patch_size=8)
        transformers.ViTModel(config).save_pretrained("net")
        transformers.ViTImageProcessor().save_pretrained("net")
    else:
        timm.models.save_for_hf(
            timm.create_model("test_vit", img_size=64), "net", model_args={"img_size": 64}
        )
    assert main(["debias", f"{prefix}net", "-o", "out"]) == 0
    monkeypatch.chdir("elsewhere")
    assert main(["probe", "../out", "--noise", "1", "--step", "2", "--no-layers"]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--method", "rasas"], "method must be names joined by +, got 'rasas'. Did you mean 'rasa'?"),
        (["--method", "rasa"], "images must be passed for registers, rasa"),
        (["--noise", "1"], "got method='poses' and images=generator"),
        (["--rounds", "3"], "--rounds 3 has no effect on --method poses"),
    ],
)
def test_invalid_arguments_raise(words, message, tmp_path, capsys):
    assert main(["debias", *MODEL, *words, "-o", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_shipped_backbone_raises(tmp_path, capsys):
    assert main(["debias", "vispe_micro", "-o", str(tmp_path / "out")]) == 2
    assert "model does not support the shipped backbone here" in capsys.readouterr().err
