"""Permissions of untrusted files: a recipe or a model card alone runs no code and contacts no server."""

import json
import socket
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save_file

from tests.cases import cases
from vispe.cli.main import main
from vispe.train.linear.command import main as linear
from vispe.train.retrofit.recipe_files import recipe_permissions

CODE = "from pathlib import Path\nPath('RAN').write_text('x')\ndef f(images):\n    return images\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Change to a folder with an image and two Python files; record and block network access."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "nowhere"))
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64), np.uint8)).save("i.png")
    for name in ("helper.py", "notes.py"):
        Path(name).write_text(CODE)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("torch.hub.get_dir", lambda: str(tmp_path / "hub"))

    def block_connection(*address, **_):
        Path("CONTACTED").write_text(str(address))
        raise OSError("no network here")

    monkeypatch.setattr(socket, "create_connection", block_connection)
    monkeypatch.setattr(socket, "getaddrinfo", block_connection)
    return tmp_path


@pytest.mark.parametrize("name", ["helper.py:f", "notes:f"])
@pytest.mark.parametrize("command", ["rotate", "probe", "audit", "health", "receptive-field"])
def test_a_recipe_runs_no_code(folder, capsys, command, name):
    Path("c.yaml").write_text(f"model: {name}\nimages: [i.png]\nout: o\n")
    assert main([command, "--config", "c.yaml"]) == 2
    assert f"model={name} is Python code, which a recipe alone may not run" in capsys.readouterr().err
    assert not Path("RAN").exists()
    assert not Path("o").exists()


@cases("words", [["--allow-code"], ["--model=helper.py:f"]])
def test_command_line_options_allow_code(words):
    from vispe.backbones.hub import check_code

    with recipe_permissions(["--config", "c.yaml", *words]) as remaining:
        check_code("helper.py:f")
    assert "--allow-code" not in remaining


def test_code_of_a_recipe_runs_with_allow_code(folder):
    Path("c.yaml").write_text("model: helper.py:missing\nimages: [i.png]\nout: o\n")
    assert main(["rotate", "--config", "c.yaml", "--allow-code"]) == 2  # after the file was imported
    assert Path("RAN").exists()


@pytest.mark.parametrize(
    "name", ["hf-hub:evil/x", "vit_tiny_patch16_224", "open_clip:ViT-B-32/openai", "hf:evil/x"]
)
def test_a_recipe_contacts_no_server(folder, capsys, name):
    Path("c.yaml").write_text(f"model: {name}\nimages: [i.png]\nout: o\n")
    assert main(["probe", "--config", "c.yaml"]) == 2
    assert not Path("CONTACTED").exists(), capsys.readouterr().err
    if name != "hf:evil/x":  # transformers retries many times
        main(["probe", "--config", "c.yaml", "--allow-download"])
        assert Path("CONTACTED").exists()


TEACHERS = {
    "hf-hub": {"name": "hf-hub:evil/x"},
    "open_clip of a hub": {"name": "open_clip:hf-hub:evil/x", "weights": None},
    "open_clip with a tag": {"name": "open_clip:ViT-B-32/openai"},
    "another tag": {"name": "open_clip:RN50/openai", "weights": "/etc/passwd"},
    "huge": {"name": "test_vit", "options": {"embed_dim": 10**9}},
    "deep": {"name": "test_vit", "options": {"depth": 10**9}},
    "wide": {"name": "test_vit", "options": {"patch_size": 10**9}},
    "address": {"name": "test_vit", "options": {"pretrained_cfg": {"url": "http://127.0.0.1/w.pth"}}},
    "file": {"name": "test_vit", "options": {"checkpoint_path": "/etc/passwd"}},
    "pretrained": {"name": "vit_tiny_patch16_224", "options": {"pretrained": True}},
    "cache": {"name": "test_vit", "options": {"cache_dir": "elsewhere"}},
    "no object": {"name": "test_vit", "options": "depth"},
    "name is a list": {"name": ["test_vit"]},
}


@pytest.mark.parametrize("kind", TEACHERS)
def test_a_card_contacts_no_server_and_builds_nothing_large(folder, capsys, kind):
    Path("rf").mkdir()
    save_file({"a": np.zeros((8, 8), np.float32)}, "rf/student.safetensors")
    config = {"seed": 0, "teacher": TEACHERS[kind], "student": {"pos_embed": "alibi2d"}}
    Path("rf/card.json").write_text(json.dumps({"config": config}))
    assert main(["probe", "rf", "i.png", "-o", "pr"]) == 2
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert err.count("\n") <= 2, err
    assert not Path("CONTACTED").exists(), err
    assert not Path("pr").exists()


BOMBS = {
    "aliases": "a: &a [x,x,x]\nmodel: *a\n",
    "billion laughs": "a: &a [x,x,x,x,x,x,x,x,x,x]\n"
    + "".join(f"{chr(98 + k)}: &{chr(98 + k)} [{','.join(['*' + chr(97 + k)] * 10)}]\n" for k in range(9))
    + "model: *j\n",
    "merge keys": "a: &a {x: 1}\nb: {<<: *a}\n",
    "nested lists": "model: " + "[" * 20000 + "]" * 20000 + "\n",
    "nested maps": "model: " + "{a: " * 200 + "1" + "}" * 200 + "\n",
    "large": "model: " + "x" * (1 << 21) + "\n",
    "broken": "model: [a\n",
    "no text": "model: \x07\n",
}
MESSAGES = {
    "aliases": ": aliases are not allowed, got *a in line 2.",
    "billion laughs": ": aliases are not allowed, got *a in line 2.",
    "merge keys": ": aliases are not allowed, got *a in line 2.",
    "nested lists": ": recipes must have at most 30 levels of nesting.",
    "nested maps": ": recipes must have at most 30 levels of nesting.",
    "large": ": recipes must have at most 1048576 bytes, got 2097160.",
    "broken": " is not readable YAML (",
    "no text": " is not readable YAML (",
}


@pytest.mark.parametrize("kind", BOMBS)
@pytest.mark.parametrize("words", [["probe", "--config", "c.yaml"], ["retrofit", "--teacher", "c.yaml"]])
def test_yaml_bombs_raise(folder, capsys, kind, words):
    Path("c.yaml").write_text(BOMBS[kind])
    assert main(words) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"vispe: c.yaml{MESSAGES[kind]}")
    assert err.count("\n") == 1


STUDENT = (
    "teacher: {name: test_vit, weights: random}\nstages: [{img_size: 64, steps: 1}]\n"
    "data: [{synthetic: 3}]\nout: o\n"
)
INVALID_RECIPES = {
    "class in a group": ("student: {class_path: notes.f}", "the key 'class_path' in line 5 is not allowed"),
    "class by name": ("student: notes.f", "student must be a mapping of its keys, got 'notes.f'"),
    "file of a group": ("student: notes.yaml", "student must be a mapping of its keys, got 'notes.yaml'"),
    "another recipe": ("config: notes.yaml", "a recipe cannot include another one, got the key config"),
    "repeated key": (
        "seed: 1\nseed: 2",
        "keys must be unique, got 'seed' twice, again in line 6. Remove one",
    ),
    "repeated inner key": (
        "student: {rank: 1, rank: 2}",
        "keys must be unique, got 'rank' twice, again in line 5",
    ),
}


@pytest.mark.parametrize("kind", INVALID_RECIPES)
def test_recipes_with_imports_or_duplicate_keys_raise(folder, capsys, kind, monkeypatch):
    monkeypatch.syspath_prepend(str(folder))
    lines, message = INVALID_RECIPES[kind]
    Path("notes.yaml").write_text("rank: 2\n")
    Path("c.yaml").write_text(f"{STUDENT}{lines}\n")
    assert main(["retrofit", "--config", "c.yaml"]) == 2
    assert message in capsys.readouterr().err
    assert not Path("RAN").exists()
    assert not Path("o").exists()


def test_groups_of_a_recipe_must_be_mappings(folder, capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(folder))
    Path("c.yaml").write_text(STUDENT.replace("{img_size: 64, steps: 1}", "notes.f"))
    assert main(["retrofit", "--config", "c.yaml"]) == 2
    assert "c.yaml: stages must be a mapping of its keys, got 'notes.f'" in capsys.readouterr().err
    Path("c.yaml").write_text("model: notes.f\nimages: [a]\nmasks: [b]\nout: o\n")
    assert linear(["--config", "c.yaml"]) == 2
    assert "c.yaml: model must be a mapping of its keys, got 'notes.f'" in capsys.readouterr().err
    assert not Path("RAN").exists()


def test_duplicate_keys_in_command_line_values_raise(folder, capsys):
    assert main(["retrofit", "--stages", "[{img_size: 64, img_size: 32, steps: 1}]"]) == 2
    assert "keys must be unique, got 'img_size' twice" in capsys.readouterr().err


def test_files_of_other_options_are_not_recipes(folder, capsys):
    text = json.dumps({"config": 1, "shapes": ["x" * (1 << 21)]})
    Path("shapes.json").write_text(text)
    assert main(["segment", "i.png", "--labels", "shapes.json", "-o", "o"]) == 2
    assert "recipe" not in capsys.readouterr().err


def test_pickled_weights_raise_a_one_line_error(folder, capsys):
    import pickle

    class Payload:
        def __reduce__(self):
            return exec, ("open('RAN', 'w')",)

    Path("m").mkdir()
    Path("m/config.json").write_text(json.dumps({"architecture": "test_vit", "num_classes": 0}))
    Path("m/pytorch_model.bin").write_bytes(pickle.dumps(Payload()))
    assert main(["probe", "local-dir:m", "i.png", "-o", "pr"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("vispe: the weights of local-dir:m cannot be loaded (")
    assert not Path("RAN").exists()
