import json
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from tests.cases import cases
from vispe.cli.main import main


def scene(seed=0, height=40, width=51):
    rng = np.random.default_rng(seed)
    mask = np.zeros((height, width), np.uint8)
    mask[height // 4 : height // 2, width // 3 : width // 2] = 1
    grey = np.clip(np.where(mask, 60, 180) + rng.normal(0, 8, mask.shape), 0, 255).astype(np.uint8)
    labels = np.where(rng.random(mask.shape) < 0.25, mask + 1, 0).astype(np.uint8)
    return grey, mask, labels


def vispe(words):
    return main(words.split())


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, array in zip(("a", "mask", "drawn"), scene(), strict=True):
        Image.fromarray(array).save(tmp_path / f"{name}.png")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_micrograph_is_segmented_by_one_command(folder, capsys):
    words = (
        "segment a.png --labels drawn.png --classes matrix,pore --truth mask.png --classifier logistic -o out"
    )
    assert vispe(words) == 0
    output = capsys.readouterr()
    lines = output.out.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("a.png: matrix ")
    assert "pore" in lines[0]
    assert "; mIoU " in lines[0]
    assert lines[0].endswith("-> out/a_seg.png")
    assert output.err == ""  # no progress where stderr is not a terminal
    Image.open("out/a_overlay.png").load()


def test_json_output_equals_the_report(folder, capsys):
    assert vispe("segment a.png --labels drawn.png --classifier logistic -o out --json") == 0
    assert json.loads(capsys.readouterr().out) == json.loads(Path("out/report.json").read_text())


def test_apply_uses_a_saved_model(folder, capsys, default_trees):
    assert vispe("segment a.png --labels drawn.png -o out") == 0  # the defaults of the command
    Image.fromarray(scene(1)[0]).save("b.png")
    Path("mask.png").rename("a_mask.png")
    assert vispe("apply out/model.vispe a.png b.png -o more --truth a_mask.png") == 0
    assert Path("more/a_seg.png").read_bytes() == Path("out/a_seg.png").read_bytes()
    labels = np.asarray(Image.open("more/b_seg.png"))
    assert (labels - 1 == scene(1)[1]).mean() > 0.95
    assert not Path("more/model.vispe").exists()


def test_cluster_option(folder, capsys):
    assert vispe("segment a.png --cluster 2 --truth mask.png -o out") == 0
    assert "cluster 1" in capsys.readouterr().out


def test_results_are_not_overwritten_without_force(folder, capsys):
    words = "segment a.png --labels drawn.png --classifier logistic -o out"
    assert vispe(words) == 0
    mtimes = {p: p.stat().st_mtime_ns for p in Path("out").iterdir()}
    assert vispe(words) == 2
    assert "add --force to overwrite" in capsys.readouterr().err
    assert mtimes == {p: p.stat().st_mtime_ns for p in Path("out").iterdir()}
    assert vispe(f"{words} --force") == 0


def test_token_options(folder, capsys):
    words = "segment a.png --labels drawn.png --model test_vit --weights random -o out --json"
    assert vispe(f"{words} --token-stride 8 --token-shifts 2 --layers 1,-1") == 0
    actual = json.loads(capsys.readouterr().out)["features"]
    assert (actual["token_stride"], actual["token_shifts"], actual["layers"]) == (8, 2, [1, -1])
    assert vispe(f"{words} --layers -2,-1 --force") == 0
    assert json.loads(capsys.readouterr().out)["features"]["layers"] == [-2, -1]
    for options, sentence in (
        ("--token-stride 7", "token_stride must divide the patch size of 16 x 16 px, got 7 px"),
        ("--layers 9", "layer must be one of the 6 blocks of the model, got 9"),
        ("--model vispe_micro --weights x --layers 1", "--layers (1,) has no effect on vispe_micro"),
    ):
        assert vispe(f"{words} {options} --force") == 2
        err = capsys.readouterr().err
        assert sentence in err
        assert "Traceback" not in err
    for options, sentence in (
        ("--truth-zero ignore", "--truth-zero has no effect without --truth. Omit it."),
        ("--truth-page 0", "--truth-page has no effect without --truth. Omit it."),
        ("--score-labelled", "--score-labelled has no effect without --truth. Omit it."),
        ("--normalize none --clip 5,95", "--clip has no effect on --normalize none. Omit one of them."),
    ):
        assert vispe(f"{words} {options} --force") == 2
        assert sentence in capsys.readouterr().err
    assert vispe("segment a.png --text pore matrix --token-stride 7 -o text") == 2
    assert "--token-stride 7 has no effect on text" in capsys.readouterr().err


def test_options_are_read_from_a_config_file(folder, capsys):
    Path("run.yaml").write_text(
        "labels: [drawn.png]\nclassifier: logistic\nclasses: [matrix, pore]\nseed: 3\n"
    )
    assert vispe("segment a.png --config run.yaml -o out --json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["classifier"] == "logistic"
    assert report["seed"] == 3
    assert report["classes"] == ["matrix", "pore"]


def test_options_are_stored_in_the_report(folder, capsys):
    colour = np.repeat(scene()[0][..., None], 3, -1)
    tifffile.imwrite("rgb.tif", colour)
    words = (
        "segment rgb.tif --labels drawn.png --channel 1 --normalize image --clip 1,99 --tile 32 --smooth 1 "
        "--min-area 5 --prior em --clean --device cpu --classifier logistic --seed 4 -o out --json"
    )
    assert vispe(words) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["images"][0]["channels"] == 1
    assert report["normalize"] == "image"
    assert report["clip"] == [1, 99]
    assert report["post"] == {"smooth": 1, "min_area": 5, "prior": "em", "clean": True}
    assert report["features"]["tile"] == 32


def test_model_uses_tokens_and_filters(folder, capsys):
    words = "segment a.png --labels drawn.png --model test_vit --weights random --classifier logistic -o out --json"
    assert vispe(words) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["features"]["kind"] == "both"
    assert len(report["features"]["fingerprint"]) == 64


@cases("command", ["segment", "apply"])
def test_help_ends_with_examples(command, capsys):
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert "examples:" in text
    assert f"vispe {command} " in text.rstrip().splitlines()[-1]
