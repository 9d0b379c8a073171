"""The program of the proof, at a size that proves nothing: what is trained, stored, continued, measured and drawn."""

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from vispe.train.data import SyntheticSource
from vispe.train.data.dataset import Source
from vispe.train.retrofit.config import Probe, Stage

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "eval"))
proof = importlib.import_module("small_retrofit")
figure = importlib.import_module("small_retrofit_figure")
report_file = importlib.import_module("small_retrofit_report")
measure = importlib.import_module("small_retrofit_metrics")
PICTURES_OF = proof.load_images  # the run below replaces it
NAMES = ("alibi2d", "alibi2d, random weights")


class Dots(Source):
    """Random images that take no time."""

    def __len__(self):
        return 5

    def __getitem__(self, i):
        make = torch.Generator().manual_seed(i)
        return torch.rand(1, 56, 50 + i, generator=make).expand(3, -1, -1)

    def describe(self):
        return {"kind": "dots", "count": 5, "where": ["/somewhere/else/dots"], "licence": "none"}

    def fingerprint(self):
        return "dots"


@pytest.fixture(scope="module")
def micrographs(tmp_path_factory):
    """Two sets of two frames that have scribbles in a corner, and one that has none."""
    folder = tmp_path_factory.mktemp("micrographs")
    rng = np.random.default_rng(0)
    for name in ("bright", "dark", "layers"):
        for part in ("images", "masks", *([] if name == "layers" else ["scribbles_corner"])):
            (folder / name / part).mkdir(parents=True)
        for k in range(2):
            mask = np.kron(rng.integers(0, 2, (14, 14)), np.ones((4, 4))).astype(np.uint8)
            image = (80 + 90 * mask + rng.integers(0, 30, mask.shape)).astype(np.uint8)
            Image.fromarray(image).save(folder / name / "images" / f"{k}.png")
            Image.fromarray(mask).save(folder / name / "masks" / f"{k}.png")
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory, micrographs):
    """Return a function that runs the program at a tiny size, and its folder of results."""
    patch = pytest.MonkeyPatch()
    recipe = replace(
        proof.RECIPE, img_size=24, patch_size=4, dim=16, depth=2, num_heads=2, steps=3, batch_size=2
    )
    patch.setattr(proof, "RECIPE", recipe)
    small = replace(recipe, table="normal", table_std=0.02)
    patch.setattr(proof, "TEACHERS", {"own": recipe, "pool": recipe, "small table": small})
    stages = (
        Stage(img_size=24, steps=3, batch_size=2, lr=1e-3),
        Stage(img_size=48, steps=1, batch_size=2, lr=1e-3),
    )
    patch.setattr(proof, "STAGES", stages)
    patch.setattr(proof, "BLANKED", 2)
    patch.setattr(proof, "PROBE", Probe(noise=1, textures=1, masks=1, img_size=24))
    patch.setattr(proof, "ROWS", {"own": NAMES, "small table": ()})
    patch.setattr(proof, "load_images", lambda pool, cache: Dots())
    for key, value in {"SIZES": (24, 48), "PATCH": 4, "NOISE": 2, "TEXTURES": 2, "UNSEEN": 1}.items():
        patch.setattr(measure, key, value)
    folder = tmp_path_factory.mktemp("proof")

    def call(*args):
        options = [
            "--runs",
            str(folder / "runs"),
            "--out",
            str(folder / "out"),
            "--micrographs",
            str(micrographs),
        ]
        patch.setattr(sys, "argv", ["small_retrofit.py", *options, *args])
        proof.main()
        return json.loads((folder / "out" / "proof.json").read_text())

    yield call, folder
    patch.undo()


@pytest.mark.slow
def test_every_row_occurs_once_without_repetitions(run, capsys, monkeypatch):
    call, folder = run
    report = call("--seeds", "3", "4")
    assert "no --pool was given" in capsys.readouterr().out
    keys = [(r["data"], r["student"], r["seed"]) for r in report["rows"]]
    expected = [("own", s, 3) for s in ("teacher", *NAMES)] + [("small table", "teacher", 3)]
    assert keys == expected + [("own", s, 4) for s in ("teacher", *NAMES)]
    assert "/somewhere" not in json.dumps(report)
    assert str(folder) not in json.dumps(report)

    def never(*args, **kwargs):
        raise AssertionError("trained again")

    monkeypatch.setattr(proof, "retrofit", never)
    monkeypatch.setattr(proof.masked, "train", never)
    report["rows"] = [r for r in report["rows"] if (r["student"], r["seed"]) != ("alibi2d", 4)]
    (folder / "out" / "proof.json").write_text(json.dumps(report))
    second = call("--seeds", "3", "4")
    assert sorted((r["data"], r["student"], r["seed"]) for r in second["rows"]) == sorted(keys)
    with pytest.raises(AssertionError, match="trained again"):
        call("--seeds", "5")


@pytest.mark.slow
def test_rows_hold_what_the_limits_are_about(run, micrographs):
    call, folder = run
    report = call("--seeds", "3")
    rows = {r["student"]: r for r in report["rows"] if (r["data"], r["seed"]) == ("own", 3)}
    for name in NAMES:
        row = rows[name]
        assert row["criteria"].keys() == report_file.LIMITS.keys()
        assert row["criteria"]["blanked"] == 2 / 16
        assert row["criteria"]["R² after"] == row["24 px"]["after"]["r2"]
        assert row["24 px"]["before"] == rows["alibi2d"]["24 px"]["before"]  # one teacher, the same images
        assert row["segmentation"]["sets"].keys() == {"bright", "dark"}
        assert row["likeness"]["micrographs"]["pictures"] == 4
        assert [line[0] for line in row["log"]] == [3, 4]
        beyond = row["segmentation"]["beyond_filters"]
        assert beyond["filters"] == 0
        assert row["criteria"]["corner"] == beyond["after"]
        for kind in ("noise", "textures"):
            assert row["48 px"]["after"][kind].keys() >= {"lr+ud", "radial", "shuffled", "by picture"}
    assert rows["alibi2d"]["config"]["teacher"]["weights"] == "own_3/weights.safetensors"
    assert rows["teacher"]["card"]["recipe"]["table"] == "sincos"
    assert len(rows["teacher"]["card"]["weights_sha256"]) == 64
    weights = [
        load_file(folder / "runs" / "own_3" / s / "student.safetensors")
        for s in ("alibi2d", "alibi2d_random_weights")
    ]
    assert all("pos_embed" not in w for w in weights)


def test_likeness_is_to_the_teacher_without_its_channels(run, micrographs):
    teacher = proof.masked.backbone("learn", proof.RECIPE).eval()
    result = measure.likeness(teacher, teacher, [], micrographs)["micrographs"]
    assert result["cosine"] == pytest.approx(1, abs=1e-6)
    assert result["centred cosine"] == pytest.approx(1, abs=1e-6)
    assert result["rank"] == pytest.approx(1)
    assert 0 < result["cosine of constant"] < 0.999
    similarity = measure.likeness(teacher, teacher, [3, 7], micrographs)["micrographs"]
    assert similarity["cosine"] < 0.999
    assert similarity["rank blanked"] != similarity["rank teacher"] == similarity["rank student"]


def test_the_average_over_shifts_has_no_position(run):
    teacher = proof.masked.backbone("learn", proof.RECIPE).eval()
    image = torch.randn(3, 24, 24, generator=torch.Generator().manual_seed(1))
    result = measure.shift_average(teacher, image)
    shifted = measure.shift_average(teacher, image.roll((8, -4), (1, 2)))
    torch.testing.assert_close(shifted, result.roll((2, -1), (1, 2)), rtol=1e-4, atol=1e-5)
    assert (measure.final_maps(teacher, image) - result).abs().max() > 0.1
    flat = measure.shift_average(teacher, torch.full((3, 24, 24), 0.3))
    torch.testing.assert_close(flat, flat[:, :1, :1].expand_as(flat), rtol=1e-4, atol=1e-5)


def test_the_centred_cosine_ignores_what_all_patches_share():
    make = torch.Generator().manual_seed(0)
    one, other = (torch.randn(6, 3, 5, generator=make, dtype=torch.float64) for _ in range(2))
    shared = torch.randn(6, 1, 1, generator=make, dtype=torch.float64) * 9
    a, b = (x.flatten(1) - x.flatten(1).mean(1, keepdim=True) for x in (one, other))
    expected = ((a * b).sum(0) / (a.norm(dim=0) * b.norm(dim=0))).mean()
    assert measure.centred(one + shared, other) == pytest.approx(float(expected), rel=1e-12)


def test_the_summary_tells_whether_all_seeds_meet_a_limit():
    good = {"R² before": 0.7, "R² after": -0.3, "blanked": 0.04, "cosine": 0.95, "rank": 0.9, "corner": 0.02}
    bad = {**good, "R² after": 0.06, "rank": 0.4, "corner": None}
    rows = [
        {"data": "own", "student": "alibi2d", "seed": k, "criteria": c} for k, c in enumerate((good, bad))
    ]
    (line,) = report_file.summary(rows)
    met = {key: value["met by all"] for key, value in line.items() if isinstance(value, dict)}
    assert met == {
        "R² before": True,
        "R² after": False,
        "blanked": True,
        "cosine": True,
        "rank": False,
        "corner": True,
    }
    assert line["R² after"] == {
        "mean": pytest.approx(-0.12),
        "least": -0.3,
        "most": 0.06,
        "limit": 0.05,
        "met by all": False,
    }
    assert line["seeds"] == [0, 1]


def test_the_pool_is_named_with_licences_and_without_what_is_for_evaluation(tmp_path, monkeypatch):
    for name in ("blood", "skimage_data"):
        (tmp_path / name).mkdir()
        Image.fromarray(np.zeros((20, 30), np.uint8)).save(tmp_path / name / "a.png")
    (tmp_path / "DATASETS.md").write_text("| folder | n | licence |\n|---|---|---|\n| blood | 1 | MIT |\n")
    monkeypatch.setattr(
        proof, "SyntheticSource", lambda count, cache: SyntheticSource(count, side=8, cache=cache)
    )
    monkeypatch.setattr(proof, "RECIPE", replace(proof.RECIPE, textures=2))
    parts = PICTURES_OF(tmp_path, tmp_path / "cache").describe()["parts"]
    assert [(p["kind"], p["licence"]) for p in parts[2:]] == [("folder", "MIT")]
    assert parts[1]["count"] == len(proof.training_images.INSTALLED)
    (tmp_path / "other").mkdir()
    with pytest.raises(SystemExit, match="names no licence for other"):
        PICTURES_OF(tmp_path, tmp_path / "cache")


def test_images_stored_in_memory_are_those_of_the_source_in_8_bits():
    cached = proof.Bytes(Dots())
    assert [cached.shape(i) for i in range(5)] == [(56, 50 + i) for i in range(5)]
    assert max(float((cached[i] - Dots()[i]).abs().max()) for i in range(5)) <= 0.5 / 255 + 1e-6
    assert cached.describe()["bits"] == 8
    assert cached.fingerprint() != Dots().fingerprint()


@pytest.mark.slow
def test_the_figure_has_a_dot_for_every_seed(run):
    call, folder = run
    report = call("--seeds", "3", "4")
    axes = figure.draw(report)
    labels = [t.get_text() for t in axes.axes[0].get_yticklabels()]
    assert labels[1:] == [figure.BEFORE, figure.BLANKED, *NAMES]
    dots = [line for line in axes.axes[0].lines if line.get_marker() == "o"]
    assert [len(d.get_xdata()) for d in dots] == [2] * 4
    assert min(d.get_xdata().min() for d in dots) >= -1
    assert (folder / "out" / "proof.png").stat().st_size > 10_000
