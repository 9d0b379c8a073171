"""HTML reports: one self-contained file, in which user text is escaped."""

import base64
import io
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
from matplotlib.figure import Figure
from PIL import Image

from vispe.errors import VispeError
from vispe.utils.report.html_page import Page


class _Reader(HTMLParser):
    """Collect text, images and links, and check that tags are closed in order."""

    VOID = ("meta", "img")

    def __init__(self):
        super().__init__()
        self.open, self.text, self.images, self.links = [], [], [], []

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)
        attributes = dict(attrs)
        if tag == "img":
            self.images.append(attributes)
        self.links += [attributes[k] for k in ("href", "src") if k in attributes]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def _read(page):
    reader = _Reader()
    reader.feed(page.html())
    assert reader.open == []
    return reader


def _page():
    page = Page("a<b> & 'c'", "Rotation report", "mild <i>dependence</i>", "mild")
    page.section("Features & more")
    page.text("Five < six.")
    page.text("")
    page.table([["transform", "mean"], ["rot90 <x>", "0.41"], ["identity", "0"]], quiet=[1])
    page.table([["a"], ["1"]], folded="every image")
    figure = Figure(figsize=(1, 1))
    figure.add_subplot().plot([0, 1])
    page.figure(figure, 'The "curve" <here>')
    return page


def test_all_text_is_included_and_escaped():
    reader = _read(_page())
    text = "".join(reader.text)
    for words in ("Rotation report: a<b> & 'c'", "mild <i>dependence</i>", "Features & more", "Five < six.",
                  "rot90 <x>", "0.41", "every image"):  # fmt: skip
        assert words in text, words
    assert "<i>" not in _page().html().replace("&lt;i&gt;", "")


def test_images_are_embedded_and_nothing_is_fetched():
    reader = _read(_page())
    (image,) = reader.images
    assert image["alt"] == 'The "curve" <here>'
    kind, data = image["src"].split(",", 1)
    assert kind == "data:image/png;base64"
    assert base64.b64decode(data).startswith(b"\x89PNG")
    assert reader.links == [image["src"]]
    assert not re.search(r"https?:|url\(|@import|<script", _page().html())


def test_tables_with_rows_of_unequal_length_raise():
    with pytest.raises(VispeError, match=r"rows of equal length, got \[2, 1\]"):
        Page("m", "k", "v").table([["a", "b"], ["1"]])


def test_a_file_is_not_overwritten_without_force(tmp_path):
    path = _page().write(tmp_path / "report.html")
    assert path.read_text(encoding="utf-8") == _page().html()
    with pytest.raises(VispeError, match=r"report\.html"):
        _page().write(path)
    Page("m", "k", "other").write(path, force=True)
    assert "other" in path.read_text(encoding="utf-8")


def test_a_report_with_every_section_prints_on_at_most_four_pages(tmp_path):
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no Chromium is installed")
    page = Page("steel.png", "Segmentation", "matrix 80.0 %, carbide 20.0 % of the map.")
    image = io.BytesIO()
    Image.new("RGB", (1000, 800), (90, 120, 150)).save(image, "JPEG")
    for number in range(8):
        page.section(f"Section {number}")
        page.text("A sentence about the numbers of the table and the figure below it. " * 4, soft=True)
        page.table(
            [["image", "class", "area", "diameter"], *[["steel.png", "carbide", "20.0 %", "7.1 µm"]] * 6]
        )
        if number % 2:
            page.image(image.getvalue(), "classes")
    page.write(tmp_path / "report.html")
    command = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--print-to-pdf={tmp_path / 'report.pdf'}",
    ]
    subprocess.run(
        [*command, (tmp_path / "report.html").as_uri()], check=True, capture_output=True, timeout=120
    )
    pages = re.findall(rb"/Type\s*/Page[^s]", (tmp_path / "report.pdf").read_bytes())
    assert 1 <= len(pages) <= 4
