"""The playground: stored values are those of vispe, and the page works in a browser without a network."""

import base64
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.cases import cases

SITE = Path(__file__).parents[1] / "docs" / "site"


@pytest.fixture(scope="module")
def playground():
    sys.path.insert(0, str(SITE))
    try:
        import playground_page
    finally:
        sys.path.remove(str(SITE))
    return playground_page


def changed_by_rotation(dense, side, row, column):
    """The largest change of the values of a query if the image is rotated by 90 degrees."""
    image = dense.reshape(-1, side, side, side, side)
    before = image[:, row, column]
    # np.rot90 moves the patch (r, c) to (side - 1 - c, r); the page rotates the other way
    after = np.rot90(image[:, column, side - 1 - row], 1, (1, 2))
    with np.errstate(invalid="ignore"):
        gap = np.where(before == after, 0, np.abs(before - after))
    return gap.max()


def test_stored_values_are_those_of_the_encoding(playground):
    for name, variants in playground.VARIANTS.items():
        for options in variants:
            for side in playground.SIDES:
                _, dense = playground.values(name + options, side)
                grid = playground.encoded(dense, side)
                steps = np.frombuffer(base64.b64decode(grid["values"]), "<u2").astype(float)
                steps[steps == playground.HIDDEN] = -np.inf
                actual = grid["low"] + steps / (playground.HIDDEN - 1) * (grid["high"] - grid["low"])
                if grid["offsets"]:
                    cells = np.divmod(np.arange(side * side), side)
                    rows, columns = (c[None] - c[:, None] + side - 1 for c in cells)
                    actual = actual.reshape(-1, 2 * side - 1, 2 * side - 1)[:, rows, columns]
                else:
                    actual = actual.reshape(-1, side * side, side * side)
                actual = np.broadcast_to(actual, dense.shape)
                np.testing.assert_allclose(actual, dense, atol=(grid["high"] - grid["low"]) / 60_000)


@cases(
    ("spec", "invariant"), [("alibi2d", True), ("kerple", True), ("lookhere", False), ("rope_axial", False)]
)
def test_rotation_changes_what_is_not_invariant(playground, spec, invariant):
    _, dense = playground.values(spec, 8)
    assert (changed_by_rotation(dense, 8, 2, 5) < 1e-5) == invariant


def test_the_page_is_small_and_loads_nothing(playground):
    page, script = playground.playground_page(), (SITE / "playground.js").read_text()
    assert len(page) < 2_000_000
    assert len(script.splitlines()) <= 200
    assert "http" not in page + script
    assert not re.search(r"\b(fetch|import|XMLHttpRequest|eval)\b", script)


DRIVER = """
const set = (name, value) => {
  const field = document.querySelector(`select[name=${name}]`);
  field.value = value;
  field.dispatchEvent(new Event("input"));
};
const view = document.getElementById("playground-view"), rows = [];
const note = () => {
  const text = view.querySelector("output").textContent;
  rows.push([view.dataset.changed, view.querySelectorAll("canvas").length, text]);
};
for (const [name, option] of SPECS) { set("name", name); set("option", option); note(); }
view.querySelector("button[data-value='16']").click(); note();
const canvas = view.querySelector("canvas");
canvas.focus();
canvas.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" })); note();
rows.push(document.activeElement === canvas);
view.querySelector("button[data-value='difference']").click();
rows.push(canvas.getAttribute("aria-label"));
document.title = "done " + JSON.stringify(rows);
"""


def test_in_chromium(playground, tmp_path):
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no Chromium is installed")
    specs = [
        ("alibi2d", "default"),
        ("rope_axial", "default"),
        ("lookhere", "default"),
        ("kerple", "default"),
    ]
    body = playground.playground_page().partition("<div")[2].replace("../site/playground.js", "playground.js")
    shutil.copy(SITE / "playground.js", tmp_path)
    driver = DRIVER.replace("SPECS", json.dumps(specs))
    (tmp_path / "page.html").write_text(f"<meta charset=utf-8><div{body}<script>{driver}</script>")
    command = [
        *(browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"),
        *("--virtual-time-budget=4000", "--dump-dom", (tmp_path / "page.html").as_uri()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    title = re.search(r"<title>done (.*?)</title>", done.stdout, re.DOTALL)
    assert title, done.stdout[:300] + done.stderr[-300:]
    *rows, larger, moved, focused, label = json.loads(title[1].replace("&amp;", "&"))
    for (name, _), (changed, heads, text) in zip(specs, rows, strict=True):
        expected = changed_by_rotation(playground.values(name, 8)[1], 8, 2, 5)
        if np.isfinite(expected):
            assert float(changed) == pytest.approx(expected, abs=1e-3)
        else:
            assert changed == "Infinity"
        assert heads == (1 if name == "alibi2d" else 4)
        assert "Query at row 2, column 5" in text
    assert "row 4, column 11" in larger[2]
    assert "row 4, column 12" in moved[2]
    assert focused  # redrawing must not take the keyboard focus away
    assert label.startswith("head 0: ")
