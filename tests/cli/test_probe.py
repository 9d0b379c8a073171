import json

import numpy as np
import pytest
from PIL import Image

from vispe.cli.main import main

MODEL = ["test_vit", "--weights", "random", "--img-size", "64", "--step", "2"]


def failed(capsys, *words):
    assert main(["probe", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


@pytest.fixture
def images(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 255, (50, 71), np.uint8)).save(folder / "grey.png")
    Image.fromarray(rng.integers(0, 255, (90, 60, 3), np.uint8)).save(folder / "colour.png")
    return folder


def test_noise_prints_the_table(capsys):
    assert main(["probe", *MODEL, "--noise", "2", "--masks", "3", "--no-layers"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    title, *lines = out.splitlines()
    assert title.startswith("test_vit (random weights), 2 noise images: ")
    assert "held-out R²" in title
    assert [line.split("|")[1].strip() for line in lines if line.startswith("| ")] == [
        "target", "lr+ud", "lr", "ud", "diag", "radial", "raster", "random",
    ]  # fmt: skip


def test_images_and_noise_write_a_report_and_two_figures(capsys, images, tmp_path):
    out = tmp_path / "out"
    words = ["probe", *MODEL[:1], str(images), *MODEL[1:], "--noise", "1", "--target", "ud", "-o", str(out)]
    assert main(words) == 0
    assert sorted(p.name for p in out.iterdir()) == [
        "probe.png",
        "probe_noise.png",
        "report.html",
        "report.json",
    ]
    with Image.open(out / "probe.png") as image:
        assert min(image.size) > 800
    report = json.loads((out / "report.json").read_text())
    assert report["results"]["images"]["n_images"] == 2
    assert report["results"]["noise"]["n_images"] == 1
    assert report["results"]["images"]["rows"][0]["target"] == "ud"
    assert report["results"]["images"]["settings"]["step"] == 2
    for actual in report["results"].values():
        assert len(actual["layers"]["blocks"]) == 6
        assert next(iter(actual["layers"]["pixels"])) == "ud"
        assert "baselines" not in actual
    page = (out / "report.html").read_text()
    assert page.count("<img ") == 4
    assert report["results"]["noise"]["verdict"][1:] in page.split("<h2>")[0]
    assert report["weights"] == "random"
    assert "written: " in capsys.readouterr().err
    modification_time = (out / "probe.png").stat().st_mtime_ns
    assert "add --force to overwrite them" in failed(capsys, *words[1:])
    assert (out / "probe.png").stat().st_mtime_ns == modification_time
    assert main([*words, "--force", "--no-layers", "--masks", "1", "--noise", "0"]) == 0
    assert (out / "probe.png").stat().st_mtime_ns > modification_time
    assert (out / "report.html").read_text().count("<img ") == 1


def test_json_is_printed_and_depends_on_the_seed(capsys):
    reports = []
    for seed in ("3", "3", "4"):
        assert main(["probe", *MODEL, "--noise", "1", "--json", "--seed", seed, "--masks", "2"]) == 0
        reports.append(json.loads(capsys.readouterr().out)["results"])
    assert reports[0] == reports[1]
    assert reports[0] != reports[2]


@pytest.mark.slow
def test_every_analysis_prints_its_own_table(capsys):
    words = ["--noise", "1", "--textures", "2", "--baselines", "--shifts", "2", "--masks", "2"]
    assert main(["probe", *MODEL, *words]) == 0
    out = capsys.readouterr().out
    starts = [line.split(":")[0] for line in out.splitlines() if ": " in line and line[0] != " "]
    headings = ["after every block", "remedies"]
    model = "test_vit (random weights), "
    assert starts == [f"{model}1 noise image", *headings, f"{model}2 textures", *headings]
    assert out.count("| average, 8 poses x 4 shifts ") == 2
    assert out.count("| RASA, fitted on mixed images ") == 2
    assert out.count("| block 5 |") == 2


@pytest.mark.slow
def test_remedies_use_blank_channels_or_select_them_on_other_images(capsys):
    actual = []
    for extra in (["--noise", "1"], ["--noise", "2"], ["--noise", "2", "--blank", "3,60"]):
        words = ["--baselines", "--no-layers", "--shifts", "1", "--masks", "2", "--json", *extra]
        assert main(["probe", *MODEL, *words]) == 0
        actual.append(json.loads(capsys.readouterr().out)["results"]["noise"])
    assert "layers" not in actual[0]
    messages = [result["baselines"]["chosen_on"] for result in actual]
    assert messages == ["chosen on 4 other images", "chosen on the other half of the images", "given"]
    assert actual[2]["baselines"]["rows"][1]["detail"] == "channels 3, 60 were set to 0"
    keys = ["none", "blank", "svd", "published_average", "d4_average"]
    keys += ["rasa_published", "rasa", "rasa_mixed", "d4_rasa"]
    assert [row["key"] for row in actual[0]["baselines"]["rows"]] == keys
    details = [
        {row["key"]: row["detail"] for row in result["baselines"]["rows"] if "rasa" in row["key"]}
        for result in actual
    ]
    assert [one["rasa"].partition(" rounds, ")[2] for one in details] == [
        f"fitted on {n} other image{'s' * (n > 1)}" for n in (4, 1, 1)
    ]
    assert {one["rasa_mixed"] for one in details} == {"8 rounds, fitted on images of several kinds"}
    for result, n in zip(actual, (1, 2, 2), strict=True):
        for row in result["baselines"]["rows"]:
            assert {len(values) for values in row["r2_heldout"].values()} == {n}
            assert len(row["effective_rank"]) == len(row["cosine"]) == n


def test_pos_embed_replaces_the_encoding_of_the_model(capsys):
    results = []
    for extra in ([], ["--pos-embed", "alibi2d"]):
        assert main(["probe", *MODEL, "--noise", "1", "--json", "--no-layers", *extra]) == 0
        results.append(json.loads(capsys.readouterr().out))
    assert results[1]["pos_embed"] == "alibi2d"
    assert results[0]["results"] != results[1]["results"]


def test_invalid_arguments_raise(capsys):
    assert "Pass paths, noise or textures" in failed(capsys, *MODEL)
    assert "need baselines=True" in failed(capsys, *MODEL, "--noise", "1", "--blank", "3")
    assert "need baselines=True" in failed(capsys, *MODEL, "--noise", "1", "--shifts", "2")
    assert "Did you mean 'test_vit'" in failed(capsys, "test_vitt", "--noise", "1", "--weights", "random")
    assert "nope.png does not exist" in failed(capsys, "test_vit", "nope.png", "--weights", "random")
    assert "There is no encoding 'alibi2'" in failed(capsys, *MODEL, "--noise", "1", "--pos-embed", "alibi2")
    assert "a trial, got nope.pth" in failed(capsys, "test_vit", "--noise", "1", "--weights", "nope.pth")
    assert "--target must be 'lr+ud' or 'lr'" in failed(capsys, *MODEL, "--noise", "1", "--target", "x")


def test_steps_too_large_for_the_grid_raise(capsys):
    words = [*MODEL[:-1], "6", "--noise", "1"]
    words[words.index("--img-size") + 1] = "64"
    assert "step must be at most 2 for a 4x4 grid, got 6" in failed(capsys, *words)
