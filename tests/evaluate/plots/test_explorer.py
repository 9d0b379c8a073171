"""`vispe.explore`: stored values are those of vispe, and the document works in a browser without a network."""

import base64
import html
import json
import re
import shutil
import subprocess

import numpy as np
import pytest

import vispe
from tests.cases import cases
from vispe.errors import (
    InputError,
    OptionError,
    UnknownEncoding,
    UnsupportedCombination,
    VispeError,
)
from vispe.evaluate.plots.explorer.pairwise_values import (
    HIDDEN,
    compressed,
    explorer_data,
    pairwise_values,
    variants,
)


def decoded(grid, side):
    """Return the stored values (heads, queries, keys)."""
    steps = np.frombuffer(base64.b64decode(grid["values"]), "<u2").astype(float)
    steps[steps == HIDDEN] = -np.inf
    values = grid["low"] + steps / (HIDDEN - 1) * (grid["high"] - grid["low"])
    if not grid["offsets"]:
        return values.reshape(-1, side * side, side * side)
    rows, columns = (c[None] - c[:, None] + side - 1 for c in np.divmod(np.arange(side * side), side))
    return values.reshape(-1, 2 * side - 1, 2 * side - 1)[:, rows, columns]


def changed_by_rotation(dense, side, row, column):
    """The largest change of the values of a query if the image is rotated by 90 degrees."""
    image = dense.reshape(-1, side, side, side, side)
    before = image[:, row, column]
    # np.rot90 moves the patch (r, c) to (side - 1 - c, r); the page rotates the other way
    after = np.rot90(image[:, column, side - 1 - row], 1, (1, 2))
    with np.errstate(invalid="ignore"):
        gap = np.where(before == after, 0, np.abs(before - after))
    return gap.max()


def test_values_of_a_bias_are_those_of_its_formula():
    meaning, dense = pairwise_values("alibi2d.local", 6, 6)
    cells = np.stack(np.divmod(np.arange(36), 6), 1)
    distance = np.linalg.norm(cells[:, None] - cells[None], axis=-1)
    np.testing.assert_allclose(dense, -distance[None], atol=1e-6)
    assert meaning == "added to the logits"


def test_similarities_of_a_rotation_are_one_at_the_query():
    meaning, dense = pairwise_values("rope_axial", 5, 5)
    assert dense.shape == (4, 25, 25)
    np.testing.assert_allclose(np.diagonal(dense, axis1=1, axis2=2), 1, atol=1e-6)
    assert meaning == "similarities of equal queries and keys"


def test_additive_encodings_show_cosine_similarities():
    table = (
        vispe.create_encoding("sincos2d", dim=256).table(vispe.Grid((4, 4)).positions())[0].double().numpy()
    )
    unit = table / np.linalg.norm(table, axis=1, keepdims=True)
    np.testing.assert_allclose(pairwise_values("sincos2d", 4, 4)[1][0], unit @ unit.T, atol=1e-6)


@cases(
    "spec",
    [
        "alibi2d",
        "alibi2d.geometric",
        "lookhere",
        "rope_axial",
        "rope_axial.vjepa2",
        "sincos2d",
        "gpsa",
    ],
)
def test_stored_values_are_those_of_the_encoding(spec):
    for side in (4, 7):
        _, dense = pairwise_values(spec, side, 4)
        grid = compressed(dense, side)
        np.testing.assert_allclose(decoded(grid, side), dense, atol=(grid["high"] - grid["low"]) / 60_000)


@cases(
    ("spec", "invariant"), [("alibi2d", True), ("kerple", True), ("lookhere", False), ("rope_axial", False)]
)
def test_rotation_changes_what_is_not_invariant(spec, invariant):
    assert (changed_by_rotation(pairwise_values(spec, 8, 8)[1], 8, 2, 5) < 1e-5) == invariant


def test_every_encoding_of_images_is_shown_or_refused():
    unsupported = set()
    for name in vispe.list_encodings(ndim=2):
        try:
            data = explorer_data([name], (3, 4), 4, 0, expand=False)[name]
        except VispeError:
            unsupported.add(name)
        else:
            assert list(data["default"]["grids"]) == ["3", "4"]
    samplers = set(vispe.list_encodings(ndim=2, kind="positions"))
    assert unsupported == samplers | {"none", "peg", "dynamic", "loope"}


def test_names_are_expanded_to_options_that_change_the_figure():
    assert {"alibi2d.local", "alibi2d(metric=manhattan)", "alibi2d(wrap=false)"} <= set(variants("alibi2d"))
    options = set(explorer_data(["alibi2d"], (3, 4), 4, 0, expand=True)["alibi2d"])
    assert {"default", ".local", "(metric=manhattan)", "(wrap=false)"} <= options
    assert ".dinosaw" not in options  # the default by another name
    assert "(normalize=reference)" not in options  # equals the default on the grid of its creation


def test_specs_are_shown_alone_in_sums_or_without_variants():
    figure = vispe.explore("alibi2d.local", "rope_axial(temperature=10)", sizes=(3,))
    assert repr(figure) == "Explorer of alibi2d.local, rope_axial(temperature=10)"
    assert (
        repr(vispe.explore("alibi2d", "kerple", sizes=(3,), variants=False)) == "Explorer of alibi2d, kerple"
    )
    assert re.search(r" and \d more$", repr(vispe.explore("alibi2d", sizes=(3,))))
    assert repr(vispe.explore("alibi2d+kerple", sizes=(3,))) == "Explorer of alibi2d+kerple"


@cases(
    ("specs", "options", "error", "words"),
    [
        ([], {}, OptionError, r"text, got \(\)\. Use explore\('alibi2d'\)"),
        ([3], {}, OptionError, r"specs must be encodings as text, got \(3,\)"),
        (["alibi"], {}, UnsupportedCombination, "alibi needs a grid with 1 axis, got 2 axes"),
        (["alibi2"], {}, UnknownEncoding, "Did you mean 'alibi2d'"),
        (["alibi2d"], {"sizes": (1,)}, OptionError, "sizes needs a list"),
        (["alibi2d"], {"sizes": ()}, OptionError, "sizes needs a list"),
        (["alibi2d"], {"num_heads": 0}, OptionError, "num_heads needs an integer above 0"),
        (["alibi2d"], {"variants": 1}, OptionError, "variants"),
        (["alibi2d(layers=[3])"], {}, UnsupportedCombination, "in this block, got layer=0"),
        (["jitter"], {}, UnsupportedCombination, "jitter has no values for each pair of patches"),
        (["rope_axial+alibi2d"], {}, UnsupportedCombination, r"\(bias, rotation\)"),
    ],
)
def test_invalid_calls(specs, options, error, words):
    with pytest.raises(error, match=words):
        vispe.explore(*specs, **options)


def test_saved_documents_are_complete_and_not_replaced(tmp_path):
    figure = vispe.explore("alibi2d.local", sizes=(3,))
    path = figure.save(tmp_path / "a.html")
    text = path.read_text(encoding="utf-8")
    assert text == figure.html
    assert text.startswith("<!doctype html>")
    assert not re.search(r"https?:|\bfetch\b|XMLHttpRequest", text)
    with pytest.raises(InputError, match="exists"):
        figure.save(path)
    assert figure.save(path, force=True) == path


def test_notebooks_show_the_document_in_a_frame():
    figure = vispe.explore("alibi2d.local", sizes=(3,))
    (source,) = re.findall(r'^<iframe srcdoc="([^"]+)"', figure._repr_html_())
    assert html.unescape(source) == figure.html


DRIVER = """
const set = (name, value) => {
  const field = document.querySelector(`select[name=${name}]`);
  field.value = value;
  field.dispatchEvent(new Event("input"));
};
const view = document.querySelector(".vispe-explorer"), rows = [];
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


def check_in_chromium(figure, folder):
    """Use the figure in a browser: choose encodings, a larger grid, another query by keyboard, and the difference."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no Chromium is installed")
    names = ("alibi2d", "rope_axial", "lookhere", "kerple")
    driver = DRIVER.replace("SPECS", json.dumps([(name, "default") for name in names]))
    path = folder / "page.html"
    path.write_text(f"<meta charset=utf-8>{figure}<script>{driver}</script>", encoding="utf-8")
    command = [
        *(browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"),
        *("--virtual-time-budget=4000", "--dump-dom", path.as_uri()),
    ]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    title = re.search(r"<title>done (.*?)</title>", process.stdout, re.DOTALL)
    assert title, process.stdout[:300] + process.stderr[-300:]
    *rows, larger, shifted, focused, label = json.loads(html.unescape(title[1]))
    for name, (changed, heads, text) in zip(names, rows, strict=True):
        expected = changed_by_rotation(pairwise_values(name, 8, 8)[1], 8, 2, 5)
        if np.isfinite(expected):
            assert float(changed) == pytest.approx(expected, abs=1e-3)
        else:
            assert changed == "Infinity"
        assert heads == (1 if name == "alibi2d" else 4)
        assert "Query at row 2, column 5" in text
    assert "row 4, column 11" in larger[2]
    assert "row 4, column 12" in shifted[2]
    assert focused  # redrawing must not take the keyboard focus away
    assert label.startswith("head 0: ")
