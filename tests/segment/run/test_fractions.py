"""Class percentages in all outputs of a run equal those of the label map or are labelled as estimates."""

import contextlib
import csv
import html
import io
import json
import re

import numpy as np
import pytest
import tifffile
from PIL import Image

from tests.segment.test_pipeline import scene
from vispe.cli.main import main
from vispe.segment.classify.fractions import estimate_words, map_words
from vispe.segment.features.feature_config import FeatureConfig
from vispe.segment.invariance_report import figure
from vispe.segment.live.paint.window_images import shown_result
from vispe.segment.overlays import figure_layout, label_map
from vispe.segment.pipeline import PostProcessing, segment
from vispe.segment.run import image_pipeline
from vispe.segment.run.reports.image_record import fractions
from vispe.segment.types import Areas, Prediction

NAMES = ["ground", "disc"]
"""Classes of the scene, whose estimated fractions differ from those of the map."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with all outputs: its folder, the texts of its figure legends, and its stdout."""
    folder = tmp_path_factory.mktemp("fractions")
    grey, _, scribbles = scene(seed=1)
    noise = np.random.default_rng(0).normal(0, 60, grey.shape)
    Image.fromarray(np.clip(grey + noise, 0, 255).astype(np.uint8)).save(folder / "a.png")
    Image.fromarray(scribbles).save(folder / "drawn.png")
    texts = {"legend": [], "key": []}
    patch = pytest.MonkeyPatch()
    rows, key = figure_layout.legend_rows, figure.legend_text
    patch.setattr(
        label_map, "legend_rows", lambda *args: texts["legend"].append(actual := rows(*args)) or actual
    )
    patch.setattr(figure, "legend_text", lambda *args: texts["key"].append(actual := key(*args)) or actual)
    argv = [
        "segment",
        str(folder / "a.png"),
        "--labels",
        str(folder / "drawn.png"),
        "--classes",
        ",".join(NAMES),
    ]
    argv += [
        "--features",
        "filters",
        "--trust",
        "--objects",
        "disc",
        "--materials",
        "-o",
        str(folder / "out"),
    ]
    with patch.context(), contextlib.redirect_stdout(io.StringIO()) as stream:
        assert main(argv) == 0
    patch.undo()
    return folder / "out", texts, stream.getvalue()


@pytest.fixture(scope="module")
def shares(run):
    """Fractions in per cent: of the label map, and estimated."""
    labels = np.asarray(Image.open(run[0] / "a_seg.png"))
    record = json.loads((run[0] / "report.json").read_text())["images"][0]
    of_map = {name: 100 * float((labels == k).mean()) for k, name in enumerate(NAMES, 1)}
    estimated = {name: 100 * record["fractions"][name] for name in NAMES}
    # otherwise the tests below are vacuous
    assert abs(of_map["disc"] - estimated["disc"]) > 0.3
    return of_map, estimated


def percentages(text, name):
    """Return the percentages that follow the name of a class, with their offsets in the text."""
    pattern = rf"\b{name}\b[ :(]{{1,2}}(\d+(?:\.\d+)?) %"
    return [(float(actual[1]), actual.start()) for actual in re.finditer(pattern, text)]


def check_percentages(text, of_map, estimated):
    """Assert that each percentage is that of the map, or an estimate after 'estimated'; return their number."""
    count = 0
    for name in NAMES:
        for value, start in percentages(text, name):
            count += 1
            if "estimated" in re.split(r"[.]\s|\n|of the map", text[:start])[-1]:
                assert value == pytest.approx(estimated[name], abs=0.06), text
            else:
                # the trust verdict is rounded to integers
                assert value == pytest.approx(of_map[name], abs=0.06 if value != round(value) else 0.51), text
    return count


def test_console_percentages(run, shares):
    assert check_percentages(run[2], *shares) == 2 * len(NAMES)
    assert "% of the map; estimated true fractions (95 %): " in run[2]


def test_figure_legends_show_map_fractions(run, shares):
    (rows,) = run[1]["legend"]
    assert [(name, share) for _, name, share in rows] == [
        (name, figure_layout.percent_text(share)) for name, share in shares[0].items()
    ]
    assert run[1]["key"] == [figure.legend_text(name, share) for name, share in shares[0].items()]


def test_html_percentages(run, shares):
    text = html.unescape((run[0] / "report.html").read_text())
    text = re.sub(r'"data:[^"]*"|<style>.*?</style>', "", text, flags=re.S)
    assert check_percentages(re.sub(r"<[^>]+>", " ", text).replace("\u00a0", " "), *shares) >= 2 * len(NAMES)
    tables = [
        [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr[^>]*>(.*?)</tr>", table)]
        for table in re.findall(r"<table>(.*?)</table>", text)
    ]
    header, cells = next(t for t in tables if "disc, map" in t[0])
    for name in NAMES:
        assert float(cells[header.index(f"{name}, map")]) == pytest.approx(shares[0][name], abs=0.06)
        assert float(cells[header.index(f"{name}, estimated")].split()[0]) == pytest.approx(
            shares[1][name], abs=0.06
        )
    trust = next(t for t in tables if "in the map" in t[0])
    for row in trust[1:]:
        row_values = dict(zip(trust[0], row, strict=True))
        assert float(row_values["in the map"].split()[0]) == pytest.approx(
            shares[0][row_values["class"]], abs=0.06
        )
    # no other table has a column of a class, and no other cell a percentage of one
    other_tables = [t for t in tables if "disc, map" not in t[0] and "in the map" not in t[0]]
    assert not [head for t in other_tables for head in t[0] if "fraction" in head or head == "area"]


def test_csv_fractions(run, shares):
    (row,) = csv.DictReader((run[0] / "report.csv").read_text().splitlines())
    assert row["fraction_kind"] == "estimate"
    for name in NAMES:
        assert 100 * float(row[f"map_fraction.{name}"]) == pytest.approx(shares[0][name])
        assert 100 * float(row[f"fraction.{name}"]) == pytest.approx(shares[1][name])
    known = ("map_fraction.", "fraction.", "fraction_low.", "fraction_high.", "fraction_kind")
    assert not [key for key in row if "fraction" in key and not key.startswith(known)]


def test_json_fractions(run, shares):
    record = json.loads((run[0] / "report.json").read_text())["images"][0]
    assert record["fraction_kind"] == "estimate"
    for name in NAMES:
        assert 100 * record["map_fractions"][name] == pytest.approx(shares[0][name])
        assert 100 * record["trust"]["classes"][name]["fraction"] == pytest.approx(shares[0][name])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["cluster", "uniform"])
def test_fractions_are_of_the_map_without_an_estimate(run, tmp_path, how, capsys):
    source = run[0].parent
    options = (
        ["--cluster", "2"]
        if how == "cluster"
        else ["--labels", str(source / "drawn.png"), "--prior", "uniform"]
    )
    assert (
        main(["segment", str(source / "a.png"), *options, "--features", "filters", "-o", str(tmp_path)]) == 0
    )
    assert "estimated" not in capsys.readouterr().out
    record = json.loads((tmp_path / "report.json").read_text())["images"][0]
    assert record["fraction_kind"] == "map"
    assert record["fractions"] == record["map_fractions"]
    assert ", estimated" not in (tmp_path / "report.html").read_text()
    (row,) = csv.DictReader((tmp_path / "report.csv").read_text().splitlines())
    assert [v for k, v in row.items() if k.startswith("map_fraction")] == [
        v for k, v in row.items() if k.startswith("fraction.")
    ]


def test_stack_overlays_show_the_fractions_of_their_page(run, tmp_path, monkeypatch):
    pages = np.stack([np.asarray(Image.open(run[0].parent / "a.png"))] * 3)
    pages[1, :20] = 255
    tifffile.imwrite(tmp_path / "z.tif", pages, imagej=True, metadata={"axes": "TYX"})
    actual = []
    original = image_pipeline.overlay
    monkeypatch.setattr(
        image_pipeline, "overlay", lambda *a, **k: actual.append((a[1], k)) or original(*a, **k)
    )
    scribbles = np.zeros(pages.shape, np.uint8)
    scribbles[0] = np.asarray(Image.open(run[0].parent / "drawn.png"))
    tifffile.imwrite(tmp_path / "l.tif", scribbles, photometric="minisblack")
    segment(
        [tmp_path / "z.tif"], tmp_path / "out", labels=[tmp_path / "l.tif"], features=FeatureConfig(sigmas=(1.0,)),
        post=PostProcessing(smooth=1),
    )  # fmt: skip
    ((labels, options),) = actual
    assert "counts" not in options
    assert np.array_equal(labels, tifffile.imread(tmp_path / "out" / "z_seg.tif")[1])


def test_paint_window_shows_map_fractions():
    labels = np.array([[1, 2, 2, 0]], np.uint8)
    areas = Areas(np.array([2.0, 1.0]), np.zeros(2), (), np.zeros(2))
    prediction = Prediction(np.zeros((2, 1, 4)), labels, np.zeros((1, 4), np.float32), 0, 0, (), areas)
    assert shown_result(prediction, ((1, 2, 3), (4, 5, 6)))["fractions"] == [1 / 3, 2 / 3]


def test_classes_without_evidence_have_no_interval():
    names = ["a", "b", "never drawn"]
    areas = Areas(np.array([60.0, 40.0, 0.0]), np.array([3.0, 3.0, 0.0]), (np.ones(3) / 3,), np.zeros(3))
    actual = fractions(np.array([0, 70, 30, 0]), areas, names, "logistic")
    assert actual["fractions_ci95"]["never drawn"] is None
    assert actual["fractions_ci95"]["a"][0] < 0.6 < actual["fractions_ci95"]["a"][1]
    assert fractions(np.array([9, 0, 0, 0]), areas, names, "logistic")["fractions"]["a"] is None
    assert estimate_words(0.0, None) == "0.0 % (no interval)"
    assert estimate_words(None, None) == "no data"
    assert estimate_words(0.99, [0.9, 1.0]) == "99.0 % (at least 90.0)"
    assert map_words({"a": None, "b": None}) == "no pixel has data"


def test_runs_with_an_unlabelled_class_report_no_interval(run, tmp_path, capsys):
    source = run[0].parent
    options = [
        "--labels",
        str(source / "drawn.png"),
        "--classes",
        "ground,disc,pore",
        "--materials",
        "--trust",
    ]
    options += ["--objects", "pore", "--features", "filters"]
    assert main(["segment", str(source / "a.png"), *options, "-o", str(tmp_path)]) == 0
    assert "pore 0.0 % (no interval)" in capsys.readouterr().out
    page = (tmp_path / "report.html").read_text()
    assert "0.0 (no interval)" in page
    assert "the map has no pixel of the class" in page
    assert not re.search(r"\bnan\b|\bNone\b", re.sub(r'"data:[^"]*"', "", page))
    (row,) = csv.DictReader((tmp_path / "report.csv").read_text().splitlines())
    assert row["fraction_low.pore"] == row["fraction_high.pore"] == ""
