"""HTML report: a section exists if and only if its rows exist."""

import re

import numpy as np
import pytest
from matplotlib.figure import Figure

from tests.evaluate.rotation import rows as example_rows
from tests.evaluate.rotation.rows import NAN, POSES, report, row
from vispe.errors import counted
from vispe.evaluate.rotation.figures.html_report import HEAD, rotation_page
from vispe.evaluate.rotation.records import METRICS

ALWAYS = ["All records", "Settings and notes"]
STILL = np.zeros((4, 4), np.int64)
SECTIONS = {
    "Rotations by 90° and reflections": {"rows": example_rows.d4_rows()},
    "Rotations by any angle": {"rows": example_rows.angle_rows()},
    "Block by block": {"rows": example_rows.layer_rows()},
    "Shifts": {"rows": example_rows.shift_rows()},
    "Position in the frame": {"rows": example_rows.position_rows()},
    "Infinitesimal motions": {"rows": example_rows.lie_rows()},
    "Labels in every pose": {"rows": example_rows.label_rows()},
    "Effect of the orientation of the sample": {"rows": example_rows.pose_rows()},
    "Scribbles in one corner": {"rows": example_rows.quadrant_rows()},
    "Class of the whole image": {"rows": example_rows.score_rows()},
}
FIGURES = [1, 1, 1, 1, 0, 0, 2, 2, 1, 0]


@pytest.fixture
def unrendered(monkeypatch):
    """Figures are made but not painted, which takes most of the time."""
    monkeypatch.setattr(Figure, "savefig", lambda self, buffer, **options: buffer.write(b"image"))


def html(**options):
    return rotation_page(report(**options)).html()


def sections(text):
    return re.findall("<h2>(.*?)</h2>", text)


def lines(text, head):
    """Cells of the table that begins with `head`."""
    (table,) = [t for t in re.findall("<table>.*?</table>", text, flags=re.S) if f">{head[0]}</th>" in t and
                len(re.findall("<th", t)) == len(head)][:1]  # fmt: skip
    return [re.findall("<td[^>]*>(.*?)</td>", r) for r in re.findall("<tr.*?</tr>", table, flags=re.S)][1:]


@pytest.mark.parametrize(("name", "figures"), list(zip(SECTIONS, FIGURES, strict=True)))
@pytest.mark.usefixtures("unrendered")
def test_a_section_appears_with_its_rows_alone(name, figures):
    text = html(**SECTIONS[name])
    short = ["Summary"] if report(**SECTIONS[name]).headlines else []
    assert sections(text) == [*short, name, *ALWAYS]
    assert text.count("<img ") == figures
    assert f"All {counted(len(SECTIONS[name]['rows']), 'row')}" in text


@pytest.mark.usefixtures("unrendered")
def test_sections_of_images_alone():
    image = np.zeros((4, 4, 3))
    assert sections(html(poses={"identity": image, "rot90": image})) == [
        "Rotations by 90° and reflections",
        *ALWAYS,
    ]
    assert sections(html(labels={"identity": STILL, "rot90": STILL + 1})) == ["Labels in every pose", *ALWAYS]
    assert sections(html(fingerprint=example_rows.print_())) == ["Position in the frame", *ALWAYS]
    assert sections(html(picture=image)) == ALWAYS


@pytest.mark.parametrize("rendered", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_everything_together_in_one_order(rendered, request):
    if not rendered:
        request.getfixturevalue("unrendered")
    rows = [r for section in SECTIONS.values() for r in section["rows"]]
    image = np.zeros((4, 4, 3))
    text = html(rows=rows, picture=image, poses={"identity": image, "rot90": image},
                labels={"identity": STILL, "rot90": STILL}, fingerprint=example_rows.print_())  # fmt: skip
    assert sections(text) == ["Summary", *SECTIONS, *ALWAYS]
    assert text.count("<img ") == sum(FIGURES) + 3
    assert not re.search(r"https?:|url\(|@import|<script", text)


@pytest.mark.usefixtures("unrendered")
def test_the_headline_table_holds_mean_interval_floor_and_effect():
    measured = report(rows=[*example_rows.d4_rows(), *example_rows.angle_rows()])
    actual = lines(rotation_page(measured).html(), HEAD)
    assert [line[:3] for line in actual] == [
        [r.transform, METRICS[r.metric].title, r.part] for r in measured.headlines
    ]
    low, high = measured.result.find("D4", "error").summary().interval
    assert actual[0] == [
        "D4",
        METRICS["error"].title,
        "full",
        "0.7",
        f"{low:.3g} to {high:.3g}",
        "0.71",
        "",
        "",
        "6",
    ]
    (angles,) = [line for line in actual if line[0] == "all angles"]
    assert angles[3] == "0.6"
    assert angles[5:] == ["0.61", "0.3", "0.3", "6"]


@pytest.mark.usefixtures("unrendered")
def test_every_image_has_its_line():
    text = html(rows=example_rows.d4_rows(3), n=3)
    assert "<summary>The headline for each image</summary>" in text
    for k in range(3):
        assert f"<td class=left>image {k}</td><td>{0.69 + 0.01 * k:.3g}</td>" in text
    assert "they need 5 images" in text


@pytest.mark.usefixtures("unrendered")
def test_one_image_and_missing_numbers():
    text = html(rows=[row("D4", "error", NAN, 1), *(row(g, "error", 0.2, 1) for g in POSES)], n=1)
    assert "cannot be judged" in text
    assert "verdict plain" in text
    assert "1 image. " in text
    assert ["D4", METRICS["error"].title, "full", "-", "", "-", "", "", "0 of 1"] in lines(text, HEAD)


@pytest.mark.parametrize(
    ("error", "r2", "tone"),
    [(0.01, 0.01, "good"), (0.1, 0.01, "mild"), (0.01, 0.2, "mild"), (0.1, 0.7, "bad"), (0.4, None, "bad"),
     (None, -3.0, "good"), (NAN, 0.01, "good")],
)  # fmt: skip
@pytest.mark.usefixtures("unrendered")
def test_the_tone_is_that_of_the_worst_number(error, r2, tone):
    rows = [] if error is None else [row("D4", "error", error, 1)]
    rows += [] if r2 is None else [row("none", "r2", r2, 1)]
    text = html(rows=rows, n=1)
    assert f'<p class="verdict {tone}">Features ' in text


@pytest.mark.slow
@pytest.mark.usefixtures("unrendered")
def test_remedy_and_verdict_of_labels():
    text = html(rows=example_rows.d4_rows())
    assert "Replace it" not in text
    assert "replace it by an isotropic one" in text
    text = html(rows=[*example_rows.label_rows(), *example_rows.pose_rows()])
    sentence = "Labels under rotation and reflection: mIoU 90.0 % with those of the original image"
    assert f'<p class="verdict plain">{sentence}; accuracy: 50.0 points' in text
    assert '<p class="verdict plain">0 rows measured</p>' in html()


def test_words_of_users_are_no_markup():
    from vispe.evaluate.rotation.report import RotationReport
    from vispe.evaluate.rotation.result import RotationResult

    evil = "<script>&\"'$\\frac"
    actual = RotationResult(
        (
            row("all poses", "phase_spread", 3.0, 2, evil),
            row("D4", "miou", 0.5, 2),
            row("D4", "error", 0.5, 2),
        ),
        (evil, "b"),
        {evil: evil, "shifts": [[1, 2]], "none": None},
        (evil,),
    )
    labels = {"identity": STILL + 1, "rot90": STILL + 2}
    text = rotation_page(RotationReport(evil, actual, labels=labels, names=(evil, "_b"))).html()
    assert "<script" not in text
    assert text.count("&lt;script&gt;") >= 7
    assert "[[1, 2]]" in text
    assert "null" in text
