"""HTML report of a run: complete, equal to report.json and self-contained."""

import base64
import csv
import html
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from tests.segment.test_pipeline import scene
from vispe.cli.main import main
from vispe.segment.invariance_report.verdict_text import format_points
from vispe.segment.run.reports.html_report import SHOWN, report_page


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    for number in range(2):
        grey, _, scribbles = scene(seed=number)
        Image.fromarray(grey).save(folder / f"i{number}.png")
        Image.fromarray(scribbles).save(folder / f"i{number}_labels.png")
    Image.fromarray(np.zeros((5, 4, 3), np.uint8)).save(folder / "other.png")
    names = [str(folder / f"{name}.png") for name in ("i0", "i1", "other")]
    labels = ",".join(str(folder / f"i{n}_labels.png") for n in range(2))
    argv = ["segment", *names, "--labels", labels, "--classes", "<ground>,disc", "--features", "filters"]
    main([*argv, "--objects", "disc", "--materials", "-o", str(folder / "out")])
    return folder / "out"


@pytest.fixture(scope="module")
def run_with_trust(run):
    """A run with a trust report on the first image."""
    argv = [
        "apply",
        str(run / "model.vispe"),
        str(run.parent / "i0.png"),
        "--objects",
        "disc",
        "--materials",
    ]
    assert main([*argv, "--trust", "-o", str(run.parent / "trusted")]) == 0
    return run.parent / "trusted"


SECTIONS = {
    "fractions.md": "<h2>Fractions of the area</h2>",
    "objects.md": "<h2>Objects</h2>",
    "materials.md": "<h2>Materials numbers</h2>",
    "invariance-report.md": "<h2>Trust: does rotating the sample change the answer?</h2>",
    "out-of-distribution.md": "out-of-distribution score (limit 1)</th>",
}
"""Text in the report for each topic of README's sentence about report.html, by the page that the topic links to."""


def test_report_has_all_sections_named_in_the_readme(run_with_trust):
    readme = (Path(__file__).parents[3] / "README.md").read_text()
    (sentence,) = re.findall(r"`report\.html` shows .*?\.(?=\s)", readme, re.S)
    items = [Path(link).name for link in re.findall(r"\]\(([^)]+)\)", sentence)]
    assert len(items) >= 5
    page = (run_with_trust / "report.html").read_text()
    for item in items:
        assert SECTIONS[item] in page, item


def test_trust_section_has_numbers_and_figure(run, run_with_trust):
    page = html.unescape((run_with_trust / "report.html").read_text())
    (record,) = json.loads((run_with_trust / "report.json").read_text())["images"]
    actual = record["trust"]
    assert f"<p>i0.png: {actual['verdict']}</p>" in page
    for name, values in actual["classes"].items():
        cells = ["i0.png", name, f"{100 * values['fraction']:.1f} %", values["dependence"]]
        cells += [format_points(actual["spread_pp"][name]), format_points(actual["floor_pp"][name])]
        row = "".join(rf"<td[^>]*>{re.escape(cell)}</td>" for cell in cells)
        assert re.search(row, page)
    figure = base64.b64encode((run_with_trust / "i0_trust.png").read_bytes()).decode()
    assert f"data:image/png;base64,{figure}" in page
    assert "does not narrow the interval" in page
    assert "<h2>Trust" not in (run / "report.html").read_text()


def test_report_contains_maps_and_histograms(run, run_with_trust):
    page = (run / "report.html").read_text()
    assert page.count(">uncertainty</text>") == 2
    assert "disagreement of poses</text>" in (run_with_trust / "report.html").read_text()
    (bars,) = re.findall(r'aria-label="disc: objects by diameter \(px\)[^>]*>(.*?)</svg>', page)
    rows = [r for n in range(2) for r in csv.DictReader((run / f"i{n}_objects.csv").read_text().splitlines())]
    assert sum(int(n) for n in re.findall(r": (\d+)</title>", bars)) == len(rows)
    for data in re.findall(r'href="data:image/jpeg;base64,([^"]+)"', page):
        Image.open(io.BytesIO(base64.b64decode(data))).load()


def test_pages_and_volumes_have_separate_histograms(run, tmp_path):
    stack = np.stack([np.asarray(Image.open(run.parent / f"i{n}.png")) for n in range(2)])
    tifffile.imwrite(tmp_path / "v.tif", stack, imagej=True, metadata={"axes": "ZYX"})
    images = [str(run.parent / "i0.png"), str(tmp_path / "v.tif")]
    out = tmp_path / "out"
    assert main(["apply", str(run / "model.vispe"), *images, "--objects", "disc", "-o", str(out)]) == 0
    page = (out / "report.html").read_text()
    for name, unit in (("i0", "pages"), ("v", "volumes")):
        (bars,) = re.findall(rf'aria-label="disc: objects by diameter \(px\), {unit}[^>]*>(.*?)</svg>', page)
        rows = list(csv.DictReader((out / f"{name}_objects.csv").read_text().splitlines()))
        assert sum(int(n) for n in re.findall(r": (\d+)</title>", bars)) == len(rows) > 1
    assert "those of discs of equal area (pages) or balls of equal volume (volumes), " in page
    assert "those of discs of equal area, " in (run / "report.html").read_text()


def test_material_statistics_have_confidence_intervals(run):
    page, report = (run / "report.html").read_text(), json.loads((run / "report.json").read_text())
    actual = report["images"][0]["materials"]["pages"][0]["patches"]
    low, high = actual["mean_intercept_ci95"]
    assert f"{actual['mean_intercept']:.3g} ({low:.3g} to {high:.3g}) px" in page


def test_html_report_equals_json_report(run):
    page, report = (run / "report.html").read_text(), json.loads((run / "report.json").read_text())
    for record in report["images"]:
        for name, fraction in record["fractions"].items():
            low, high = record["fractions_ci95"][name]
            assert f"{100 * fraction:.1f} ({100 * low:.1f} to {100 * high:.1f})" in page
        assert f"{record['mean_uncertainty']:.3f}" in page
        count = record["objects"]["classes"]["disc"]["count"]
        assert re.search(
            rf"<td class=left>{record['image'][-6:]}</td><td class=left>disc</td><td>{count}</td>", page
        )
    total = sum(r["objects"]["classes"]["disc"]["count"] for r in report["images"])
    assert f"objects: {total} disc" in page
    held_out = report["training"]["calibration"]["left_out"]
    assert f"{100 * held_out['balanced_accuracy']:.0f} %" in page
    assert "other.png" in page
    assert "1 image skipped" in page
    assert "mean intercept" in page
    assert report["versions"]["torch"] in page


def test_names_are_escaped_and_no_resource_is_external(run):
    page = (run / "report.html").read_text()
    assert "<ground>" not in page
    assert "&lt;ground&gt;" in page
    assert not re.findall(r"(?:src|href)=[\"'](?!data:)", page)
    assert "<script" not in page


def test_images_are_embedded(run):
    page = (run / "report.html").read_text()
    actual = re.findall(r'src="data:image/(\w+);base64,([^"]+)"', page)
    assert len(actual) == 2
    for kind, data in actual:
        with Image.open(io.BytesIO(base64.b64decode(data))) as image:
            assert image.format.lower() == kind
            assert max(image.size) <= 900


def test_calibration_has_recalls_of_held_out_scribbles(run):
    calibration = json.loads((run / "report.json").read_text())["training"]["calibration"]
    assert set(calibration["left_out"]["recall"]) == {"<ground>", "disc"}
    assert calibration["left_out"]["balanced_accuracy"] == pytest.approx(
        np.mean(list(calibration["left_out"]["recall"].values()))
    )
    assert 0.5 < calibration["left_out"]["balanced_accuracy"] <= 1


def test_number_of_embedded_images_is_limited(run):
    report = json.loads((run / "report.json").read_text())
    report["images"] = report["images"][:1] * (SHOWN + 5)
    page = report_page(run, report).html()
    assert page.count("<img") == SHOWN
    assert f"The first {SHOWN} of {SHOWN + 5} images" in page
    report["images"] = []
    assert "No image could be used" in report_page(run, report).html()


def test_verdict_counts_images_unlike_the_training_images(run):
    report = json.loads((run / "report.json").read_text())
    report["images"][1]["domain"] = {"score": 3.2, "differs": True, "pages": [3.2]}
    page = report_page(run, report).html()
    assert 'class="verdict bad"' in page
    assert "Check the result: 1 of 2 images differ from the training images" in page


def test_existing_reports_are_not_overwritten(run, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / "report.html").write_text("mine")
    code = main(
        ["segment", str(run.parent / "i0.png"), "--cluster", "2", "--features", "filters", "-o", str(out)]
    )
    assert code == 2
    assert "report.html" in capsys.readouterr().err
    assert (out / "report.html").read_text() == "mine"
