"""`vispe retrofit` with a config file: written files, printed summary and one-line errors."""

import json

import numpy as np
import pytest
from PIL import Image

from tests.cases import cases
from vispe.cli.main import main

RECIPE = """
teacher:
  name: vit_tiny_patch16_224
  weights: random
  img_size: 32
  options: {embed_dim: 24, depth: 2, num_heads: 2, patch_size: 8}
student: {symmetric: true}
target: {blank: auto, count: 1}
stages:
- {img_size: 32, steps: 3, batch_size: 2, lr: 0.001}
- {img_size: 40, epochs: 0.5, batch_size: 2, lr: 0.0001}
data:
- folder: PICTURES
probe: {noise: 1, textures: 1, masks: 1}
tensorboard: false
logging_steps: 2
"""


@pytest.fixture
def recipe(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for k in range(4):
        Image.fromarray(rng.integers(0, 255, (48, 64, 3), dtype=np.uint8)).save(folder / f"{k}.png")
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE.replace("PICTURES", str(folder)))
    return str(file)


def test_a_config_file_trains_a_student(recipe, tmp_path, capsys):
    out = tmp_path / "out"
    overrides = ["--student.pos_embed", "rope_axial", "--loss.d4", "0.5", "--ema-decay", "0.9"]
    assert main(["retrofit", "--config", recipe, "-o", str(out), *overrides]) == 0
    output = capsys.readouterr()
    card = json.loads((out / "card.json").read_text())
    assert card["config"]["student"] == {
        "pos_embed": "rope_axial", "init": "teacher", "symmetric": True, "trainable": "all", "rank": 8,
    }  # fmt: skip
    assert (card["config"]["loss"]["d4"], card["config"]["ema_decay"]) == (0.5, 0.9)
    assert card["updates"] == 4
    assert len(card["blanked"]) == 1
    assert card["data"]["kind"] == "folder"
    assert sorted(p.name for p in out.iterdir()) == [
        "card.json", "log.jsonl", "run.json", "state", "student.safetensors",
    ]  # fmt: skip
    before, after = (card["probe"]["noise"][key]["lr+ud"] for key in ("before", "after"))
    lines = output.out.splitlines()
    assert lines[0].startswith(
        f"position decoded from noise (held-out R²; 1: perfectly, 0 or less: not at all): {before:.3f} before"
    )
    assert lines[0].endswith(f"{after:.3f} after")
    assert lines[1].startswith("position decoded from textures")
    assert "1 of 24 channels ablated" in lines[1]
    assert f"cosine {card['likeness']['cosine']:.3f}" in lines[2]
    assert len(lines) == 3
    assert f"written: {out}" in output.err
    assert "step 2 of 4: loss" in output.err
    assert "selecting channels to ablate" in output.err

    assert main(["retrofit", "--config", recipe, "-o", str(out), *overrides]) == 2
    assert "contains a finished retrofit. Set --force" in capsys.readouterr().err


INVALID = [
    (["--student.pos_embd", "x"], "no option '--student.pos_embd'. Did you mean '--student.pos_embed'"),
    (["--student.pos_embed", "alibi2e"], "alibi2d"),
    (
        ["--target.blank", "[24]", "--target.count", "null"],
        "target.blank must be channels below 24, the number of features of",
    ),
    (["--target.blank", "some"], "--target.blank must be 'none' or 'auto' or a list, got 'some'"),
    (
        ["--stages", "[{img_size: 30, steps: 1}]"],
        "stages[0].img_size must be a multiple of the patch size of vit_tiny_patch16_224, 8 px, got 30",
    ),
    (["--stages", "[{img_size: 32, step: 1}]"], "unknown key 'step' in stages"),
    (["--data", "[{foldr: a}]"], "must contain exactly one of folder, tar, hub, synthetic"),
    (["--data", "[{folder: /nowhere/at/all}]"], "/nowhere/at/all"),
    (
        ["--teacher.img_size", "33"],
        "teacher.img_size must be a multiple of the patch size of vit_tiny_patch16_224, 8 px, got 33",
    ),
    (["--amp", "bf17"], "--amp must be 'no' or 'bf16' or 'fp16', got 'bf17'"),
    (["--student.trainable", "encoding"], "needs an encoding with parameters, got alibi2d"),
    (
        ["--stages", "[{img_size: 32, epochs: 1, batch_size: 2, warmup_steps: 5}]"],
        "warmup_steps must be below the 2 steps",
    ),
]


@pytest.mark.parametrize(("words", "text"), INVALID)
def test_invalid_settings_raise_a_one_line_error(recipe, tmp_path, capsys, words, text):
    assert main(["retrofit", "--config", recipe, "-o", str(tmp_path / "out"), *words]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert text in error[-1]
    assert error[-1].startswith("vispe: ")
    assert not (tmp_path / "out").exists()


@cases(
    ("line", "text"),
    [
        ("teachr: {name: a}", "unknown key 'teachr"),
        ("student: {pos_embd: a}", "'pos_embd'"),
        ("stages: [{img_size: 32, stps: 1}]", "unknown key 'stps' in stages"),
    ],
)
def test_unknown_keys_of_a_config_file_raise(tmp_path, capsys, line, text):
    (tmp_path / "a.yaml").write_text(f"out: x\n{line}\n")
    assert main(["retrofit", "--config", str(tmp_path / "a.yaml")]) == 2
    assert text in capsys.readouterr().err


def test_print_config_prints_all_settings(recipe, capsys):
    assert main(["retrofit", "--config", recipe, "-o", "x", "--print_config"]) == 0
    printed = capsys.readouterr().out
    for line in (
        "  pos_embed: alibi2d",
        "  blank: auto",
        "  steps: 3",
        "  textures: 1",
        "grad_checkpointing: false",
    ):
        assert line in printed.splitlines()
