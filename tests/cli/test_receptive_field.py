"""`vispe receptive-field`: table, report and errors."""

import json

import numpy as np
import pytest
from PIL import Image

from vispe.cli.main import main

MODEL = ["test_vit", "--weights", "random", "--img-size", "64"]


def test_noise_prints_the_table(capsys):
    assert main(["receptive-field", *MODEL, "--noise", "2"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("test_vit (random weights): 95 % of the influence is within ")
    assert "| reach 95 % (px)" in out


@pytest.mark.slow
def test_images_write_a_report_and_a_figure(capsys, tmp_path):
    page = np.random.default_rng(0).integers(0, 255, (70, 91), np.uint8)
    Image.fromarray(page).save(tmp_path / "grey.png")
    out = tmp_path / "out"
    words = ["receptive-field", MODEL[0], str(tmp_path / "grey.png"), *MODEL[1:], "-o", str(out), "--json"]
    assert main(words) == 0
    printed = json.loads(capsys.readouterr().out)
    assert sorted(p.name for p in out.iterdir()) == ["receptive_field.png", "report.html", "report.json"]
    stored = json.loads((out / "report.json").read_text())
    assert stored == printed
    assert np.shape(stored["influence"]) == (64, 64)
    assert np.sum(stored["influence"]) == pytest.approx(1)
    assert "<th class=left>influence</th>" in (out / "report.html").read_text()


def test_missing_images_raise(capsys):
    assert main(["receptive-field", *MODEL]) == 2
    assert "needs either images or --noise" in capsys.readouterr().err
