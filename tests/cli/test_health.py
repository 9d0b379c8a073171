import json

import numpy as np
import pytest
from PIL import Image

from vispe.cli.main import main

MODEL = ["test_vit", "--weights", "random", "--img-size", "64"]


def failed(capsys, *words):
    assert main(["health", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


@pytest.fixture
def images(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 255, (70, 91), np.uint8)).save(folder / "grey.png")
    Image.fromarray(rng.integers(0, 255, (90, 80, 3), np.uint8)).save(folder / "colour.png")
    return folder


def test_noise_prints_the_table(capsys):
    assert main(["health", *MODEL, "--noise", "2"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    title, *lines = out.splitlines()
    assert title.startswith("test_vit (random weights), 2 noise images: ")
    rows = [line.split("|") for line in lines if line.startswith("| ")]
    assert [c.strip() for c in rows[0][1:6]] == ["layer", "distributed", "local", "sink", "dead"]
    assert [row[1].strip() for row in rows[1:]] == [str(i) for i in range(len(rows) - 1)]
    assert all(row[-2].strip() == "-" for row in rows[1:])  # no bias


@pytest.mark.slow
def test_images_write_a_report_and_a_figure(capsys, images, tmp_path):
    out = tmp_path / "out"
    words = [
        "health",
        "test_vit",
        str(images),
        *MODEL[1:],
        "--pos-embed",
        "alibi2d.geometric",
        "-o",
        str(out),
    ]
    assert main([*words, "--batch-size", "2"]) == 0
    assert sorted(p.name for p in out.iterdir()) == ["heads.png", "report.html", "report.json"]
    page = (out / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 1
    assert "test_vit + alibi2d.geometric" in page
    assert "<th class=left>layer</th>" in page
    with Image.open(out / "heads.png") as image:
        assert min(image.size) > 700
    report = json.loads((out / "report.json").read_text())
    assert (report["images"], report["weights"], report["pos_embed"]) == (2, "random", "alibi2d.geometric")
    assert len(report["inputs"]) == 2
    shape = np.shape(report["sink_mass"])
    assert np.shape(report["bias_reach"]) == (2, *shape)
    assert np.shape(report["pattern"]) == shape == np.shape(report["sink_token"])
    assert np.isfinite(np.array(report["receptive_field"], float)).all()
    assert report["layers"][0] == "blocks.0.attn"
    assert "written: " in capsys.readouterr().err
    assert "add --force to overwrite" in failed(capsys, *words[1:])
    assert main([*words[:-2], "--json"]) == 0
    second = json.loads(capsys.readouterr().out)
    np.testing.assert_allclose(second["sink_mass"], report["sink_mass"], rtol=1e-5)


def test_json_prints_the_report(capsys):
    assert main(["health", *MODEL, "--noise", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["patterns"] == ["distributed", "local", "sink", "dead"]
    assert report["position_r2"][0][0] is None  # one image


def test_invalid_arguments_raise(capsys, images):
    assert "health: needs either images or --noise, got" in failed(capsys, *MODEL)
    assert "health: needs either images or --noise, got" in failed(
        capsys, "test_vit", str(images), "--noise", "1"
    )
    assert "--batch-size needs an integer above 0, got --batch-size 0." in failed(
        capsys, *MODEL, "--noise", "1", "--batch-size", "0"
    )
    assert "resnet10t" not in failed(capsys, "resnet1o", "--noise", "1", "--weights", "random").split(":")[0]
    error = failed(capsys, "resnet10t", "--noise", "1", "--weights", "random")
    assert "must have supported attention layers" in error
