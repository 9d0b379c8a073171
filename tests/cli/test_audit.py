"""`vispe audit`: table, files, errors, and equal results with two processes."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import timm
from PIL import Image

from vispe.backbones.load_model import load_model
from vispe.cli.main import main

MODEL = ["audit", "test_vit", "--weights", "random", "--img-size", "128"]
FEW = ["--only", "probe,heads,shift"]


def failed(capsys, *words):
    assert main([*words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


@pytest.fixture
def images(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 255, (150, 131), np.uint8)).save(folder / "grey.png")
    Image.fromarray(rng.integers(0, 255, (128, 190, 3), np.uint8)).save(folder / "colour.png")
    return folder


@pytest.mark.slow
def test_the_table_has_a_row_for_every_question(capsys):
    assert main([*MODEL, "--noise", "5", *FEW]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("test_vit (random weights)")
    rows = [[c.strip() for c in line.split("|")[1:-1]] for line in out.splitlines() if line.startswith("| ")]
    assert rows[0] == ["question", "number", "95 % interval", "control", "verdict"]
    assert [row[0] for row in rows[1:]] == [
        "Can the position be decoded from the features?",
        "Do heads collapse onto one token?",
        "Do features change when the same content is shifted?",
    ]
    assert {row[-1] for row in rows[1:]} <= {"yes", "no", "not decided"}


def test_output_files_contain_every_image_and_are_not_overwritten(capsys, images, tmp_path):
    out = tmp_path / "out"
    words = [*MODEL[:2], str(images), *MODEL[2:], "--noise", "2", "--textures", "1", *FEW, "-o", str(out)]
    assert main(words) == 0
    assert sorted(p.name for p in out.iterdir()) == ["audit.png", "report.html", "report.json"]
    report = json.loads((out / "report.json").read_text())
    assert report["inputs"] == ["colour.png", "grey.png", "noise 0", "noise 1", "texture 0, random field"]
    probe = report["findings"][0]
    assert probe["name"] == "probe"
    assert len(probe["per_image"]) == 5
    assert set(probe["control"]) == {"mean position", "shuffled positions", "random", "none"}
    page = (out / "report.html").read_text()
    assert "Audit of positions: test_vit (random weights)" in page
    assert "Caveats of each number" in page
    assert "prefers-color-scheme: dark" in page
    with Image.open(out / "audit.png") as image:
        assert min(image.size) > 300
    capsys.readouterr()
    assert "report.html" in failed(capsys, *words)


def test_against_compares_two_models(capsys, tmp_path):
    out = tmp_path / "out"
    words = ["audit", "test_vit", "--weights", "random", "--noise", "5", "--only", "shift"]
    code = tmp_path / "code.py"
    code.write_text(
        "import torch\ndef f(x):\n    return torch.nn.functional.avg_pool2d(x, 16)\nf.patch_size = 16\n"
    )
    assert main(["audit", f"{code}:f", *words[4:], "--against", f"{code}:f", "-o", str(out)]) == 0
    report = json.loads((out / "report.json").read_text())
    assert report["against"]["differences"]["shift"] == {"difference": 0.0, "interval": [0.0, 0.0]}
    assert report["against"]["heads"] == {"why": "no measure of attention was requested"}
    page = (out / "report.html").read_text()
    assert "Comparison with" in page
    assert "Heads of the two models were not compared: no measure of attention was requested." in page


def test_heads_of_two_models_are_compared(tmp_path):
    model = load_model("test_vit", weights="random", img_size=128).model
    timm.models.save_for_hf(model, tmp_path / "same")
    words = [*MODEL, "--noise", "5", "--only", "heads", "--controls", "none"]
    words += ["--against", f"local-dir:{tmp_path / 'same'}"]
    assert main([*words, "-o", str(tmp_path / "out")]) == 0
    actual = json.loads((tmp_path / "out" / "report.json").read_text())["against"]["heads"]
    nats = np.array(actual["nats"])
    assert nats.shape == (6, 6)
    # the same model: every layer has itself
    np.testing.assert_allclose(np.diag(nats), 0, atol=1e-12)
    assert (nats[~np.eye(6, dtype=bool)] > 1e-6).all()
    assert "Divergence between the heads of two layers" in (tmp_path / "out" / "report.html").read_text()


def test_two_models_use_their_own_normalization(tmp_path):
    kwargs = {"img_size": 64, "embed_dim": 24, "depth": 1, "num_heads": 2}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=0, **kwargs)
    folders = []
    for k, mean in enumerate(((0.5, 0.5, 0.5), (0.1, 0.2, 0.3))):
        model.pretrained_cfg |= {"mean": mean, "std": (0.1 + 0.4 * k,) * 3}
        folders.append(f"local-dir:{tmp_path / str(k)}")
        timm.models.save_for_hf(model, tmp_path / str(k), model_args=kwargs)
    words = ["--noise", "5", "--only", "neighbours,heads", "--controls", "none"]
    assert main(["audit", folders[0], *words, "--against", folders[1], "-o", str(tmp_path / "both")]) == 0
    assert main(["audit", folders[1], *words, "-o", str(tmp_path / "one")]) == 0
    comparison, single = (
        json.loads((tmp_path / name / "report.json").read_text()) for name in ("both", "one")
    )
    values = [
        {f["name"]: f["value"] for f in audit["findings"]}
        for audit in (comparison["against"]["audit"], single, comparison)
    ]
    assert values[0] == values[1]
    assert values[0] != values[2]
    # equal weights, but not the same input
    assert comparison["against"]["heads"]["nats"][0][0] > 1e-6


def test_a_debiased_model_is_compared_at_the_requested_size(tmp_path, capsys):
    folder = str(tmp_path / "symmetric")
    assert main(["debias", "test_vit", "--weights", "random", "-o", folder]) == 0
    words = ["--noise", "5", "--only", "probe", "--controls", "none", "--img-size", "96"]
    assert main(["audit", "test_vit", "--weights", "random", *words, "--against", folder]) == 0
    assert main(["audit", folder, *words]) == 0
    assert "Can the position be decoded" in capsys.readouterr().out
    error = failed(capsys, "audit", folder, *words, "--weights", "random")
    assert f"--weights random has no effect on {folder}, which is loaded as a debiased model" in error


def test_reports_without_a_computable_measure_have_no_notes(capsys):
    small = ["--noise", "5", "--only", "probe", "--img-size", "64", "--json"]
    assert main([*MODEL[:4], *small]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["verdict"], report["notes"]) == ("no measure could be computed", [])


def test_invalid_arguments_raise(capsys, images):
    assert "Pass paths, noise or textures" in failed(capsys, *MODEL)
    assert "unknown measure or family, got 'prove'" in failed(
        capsys, *MODEL, "--noise", "1", "--only", "prove"
    )
    assert "unknown control, got 'nothing'" in failed(capsys, *MODEL, "--noise", "1", "--controls", "nothing")
    assert "no open_clip" not in failed(capsys, "audit", "no_such_model", "--noise", "1")


@pytest.mark.slow
def test_two_processes_equal_one_process(tmp_path):
    words = [*MODEL, "--noise", "5", "--only", "probe,heads,shift,sides", "-o"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    single_run = subprocess.run(
        [sys.executable, "-m", "vispe", *words, str(tmp_path / "one")],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert single_run.returncode == 0, single_run.stderr
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--standalone",
        "-m",
        "vispe",
    ]
    distributed_run = subprocess.run(
        [*launch, *words, str(tmp_path / "two")], env=env, capture_output=True, text=True, check=False
    )
    assert distributed_run.returncode == 0, distributed_run.stderr
    one, two = (json.loads((tmp_path / n / "report.json").read_text()) for n in ("one", "two"))
    assert almost_equal(one, two)


def almost_equal(a, b):
    """Return whether two reports are equal up to the rounding errors of another summation order."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(almost_equal(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(almost_equal, a, b))
    return a == b if not isinstance(a, float) else a == pytest.approx(b, rel=1e-12, abs=1e-14)
