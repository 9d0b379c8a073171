"""Models that probe, health, rotate and audit accept under the same names, and errors for unsupported ones."""

import json

import pytest
import torch

from vispe.cli.commands.evaluation import audit, health, probe, rotate
from vispe.cli.main import main
from vispe.cli.shared_options import MODEL
from vispe.evaluate import evaluated
from vispe.evaluate.evaluated import EvaluatedModel

CALLABLE = """
import torch
from vispe import Attention
from vispe.grid import Grid

def flat(images):
    return images[:, :, ::8, ::8]

flat.patch_size = 8

class Own(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_size, self.attn = 8, Attention(3, 1)

    def forward(self, images):
        tokens = images[:, :, ::8, ::8]
        grid = Grid(tokens.shape[-2:])
        return self.attn(tokens.flatten(2).mT, grid).mT.unflatten(2, grid.shape)

own = Own()
"""
PROBE = ("--noise", "1", "--step", "3", "--masks", "1", "--json")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(CALLABLE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def report(capsys, *words):
    assert main(list(words)) == 0
    return json.loads(capsys.readouterr().out)


def failed(capsys, *words):
    assert main(list(words)) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    return err


def test_commands_share_the_help_of_model():
    commands = (probe.probe, health.health, rotate.rotate, audit.audit)
    assert not [command for command in commands if "        model: " in command.__doc__]
    text = MODEL["model"]
    assert all(word in text for word in ("timm", "open_clip:", "hf:", "retrofit", ".vispe", "file.py:name"))


def test_functions_are_probed_on_final_features(folder, capsys):
    actual = report(capsys, "probe", "mine.py:flat", *PROBE, "--no-layers", "--baselines", "--shifts", "1")
    rows = actual["results"]["noise"]["baselines"]["rows"]
    keys = ["none", "blank", "svd", "published_average", "d4_average"]
    assert [row["key"] for row in rows] == [*keys, "rasa_published", "rasa", "rasa_mixed", "d4_rasa"]
    assert "mine.py:flat has only final features, got layers=True. Pass --no-layers." in failed(
        capsys, "probe", "mine.py:flat", *PROBE
    )
    assert "has no effect on mine.py:flat" in failed(
        capsys, "probe", "mine.py:flat", *PROBE, "--weights", "random"
    )


def test_health_accepts_modules_and_functions_raise(folder, capsys):
    actual = report(capsys, "health", "mine.py:own", "--noise", "1", "--json")
    assert actual["layers"] == ["attn"]
    error = failed(capsys, "health", "mine.py:flat", "--noise", "1")
    assert "health: cannot read the attention of mine.py:flat: it is a function of images" in error


def test_probe_and_health_accept_transformers(folder, capsys):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.CLIPVisionConfig(**sizes, image_size=48, patch_size=8)
    transformers.CLIPVisionModel._from_config(config).save_pretrained(folder / "clip")
    (folder / "clip" / "preprocessor_config.json").write_text(
        '{"image_mean": [0, 0, 0], "image_std": [1, 1, 1]}'
    )
    capsys.readouterr()
    assert len(report(capsys, "probe", "hf:clip", *PROBE)["results"]["noise"]["layers"]["blocks"]) == 2
    assert len(report(capsys, "health", "hf:clip", "--noise", "1", "--json")["layers"]) == 2


def test_saved_segmenters_are_probed_on_probabilities(capsys, monkeypatch):
    class Halves:
        def __call__(self, image):
            raise AssertionError("labels are not needed")

        def probabilities(self, image):
            side = torch.linspace(0, 1, image.shape[-1]).expand(image.shape[-2:])
            return torch.stack([side, 1 - side])

    saved = EvaluatedModel("seg.vispe", segmenter=Halves(), size=48, names=("left", "right"))
    monkeypatch.setattr(evaluated, "_saved", lambda *words: saved)
    actual = report(capsys, "probe", "seg.vispe", *PROBE, "--no-layers", "--target", "lr")
    assert actual["results"]["noise"]["rows"][0]["r2_heldout"]["median"] > 0.99
    assert "health: cannot read the attention of seg.vispe" in failed(
        capsys, "health", "seg.vispe", "--noise", "1"
    )
