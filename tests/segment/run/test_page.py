"""The page of a run: it says what the report says, and needs no other file."""

import base64
import io
import json
import re

import numpy as np
import pytest
from PIL import Image

from tests.segment.test_pipeline import scene
from vispe.cli.main import main
from vispe.segment.run.page import SHOWN, report_page


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    for number in range(2):
        grey, _, drawn = scene(seed=number)
        Image.fromarray(grey).save(folder / f"i{number}.png")
        Image.fromarray(drawn).save(folder / f"i{number}_labels.png")
    Image.fromarray(np.zeros((5, 4, 3), np.uint8)).save(folder / "other.png")
    names = [str(folder / f"{name}.png") for name in ("i0", "i1", "other")]
    labels = ",".join(str(folder / f"i{n}_labels.png") for n in range(2))
    words = ["segment", *names, "--labels", labels, "--classes", "<ground>,disc", "--features", "filters"]
    main([*words, "--objects", "disc", "--materials", "-o", str(folder / "out")])
    return folder / "out"


def test_it_says_what_the_report_says(run):
    page, report = (run / "report.html").read_text(), json.loads((run / "report.json").read_text())
    for record in report["images"]:
        for name, share in record["fractions"].items():
            low, high = record["fractions_ci95"][name]
            assert f"{100 * share:.1f} ({100 * low:.1f} to {100 * high:.1f})" in page
        assert f"{record['mean_uncertainty']:.3f}" in page
        count = record["objects"]["classes"]["disc"]["count"]
        assert re.search(
            rf"<td class=left>{record['image'][-6:]}</td><td class=left>disc</td><td>{count}</td>", page
        )
    total = sum(r["objects"]["classes"]["disc"]["count"] for r in report["images"])
    assert f"objects: {total} disc" in page
    left_out = report["training"]["calibration"]["left_out"]
    assert f"{100 * left_out['balanced_accuracy']:.0f} %" in page
    assert "other.png" in page
    assert "1 image(s) were left out" in page
    assert "mean intercept" in page
    assert report["versions"]["torch"] in page


def test_names_are_text_and_nothing_is_fetched(run):
    page = (run / "report.html").read_text()
    assert "<ground>" not in page
    assert "&lt;ground&gt;" in page
    assert not re.findall(r"(?:src|href)=[\"'](?!data:)", page)
    assert "<script" not in page


def test_pictures_are_inside(run):
    page = (run / "report.html").read_text()
    found = re.findall(r'src="data:image/(\w+);base64,([^"]+)"', page)
    assert len(found) == 2
    for kind, data in found:
        with Image.open(io.BytesIO(base64.b64decode(data))) as image:
            assert image.format.lower() == kind
            assert max(image.size) <= 900


def test_strokes_left_out(run):
    facts = json.loads((run / "report.json").read_text())["training"]["calibration"]
    assert set(facts["left_out"]["recall"]) == {"<ground>", "disc"}
    assert facts["left_out"]["balanced_accuracy"] == pytest.approx(
        np.mean(list(facts["left_out"]["recall"].values()))
    )
    assert 0.5 < facts["left_out"]["balanced_accuracy"] <= 1


def test_many_images_are_not_all_pictures(run):
    report = json.loads((run / "report.json").read_text())
    report["images"] = report["images"][:1] * (SHOWN + 5)
    page = report_page(run, report).html()
    assert page.count("<img") == SHOWN
    assert f"The first {SHOWN} of {SHOWN + 5} images" in page
    report["images"] = []
    assert "No image could be used" in report_page(run, report).html()


def test_an_image_unlike_training_is_said_first(run):
    report = json.loads((run / "report.json").read_text())
    report["images"][1]["domain"] = {"score": 3.2, "differs": True, "pages": [3.2]}
    page = report_page(run, report).html()
    assert 'class="verdict bad"' in page
    assert "Look closely: 1 of 2 images differ from the training images" in page


def test_a_page_is_not_overwritten(run, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / "report.html").write_text("mine")
    code = main(
        ["segment", str(run.parent / "i0.png"), "--cluster", "2", "--features", "filters", "-o", str(out)]
    )
    assert code == 2
    assert "report.html" in capsys.readouterr().err
    assert (out / "report.html").read_text() == "mine"
