"""Gallery of results: the page agrees with the program, and scribbles follow their rule."""

import importlib
import json
import sys
from pathlib import Path

import pytest

from tests.cases import cases

ROOT = Path(__file__).parents[1]
NAMES = ["ihc", "cell", "coins", "retina", "hubble_deep_field", "brick"]


@pytest.fixture(scope="module")
def program():
    sys.path.insert(0, str(ROOT / "eval"))
    try:
        return importlib.import_module("results_gallery")
    finally:
        sys.path.remove(str(ROOT / "eval"))


@pytest.fixture(scope="module")
def results(program):
    return json.loads(program.RESULT.read_text())["rows"]


def test_the_page_has_the_numbers_commands_and_figures_of_the_program(program, results):
    page = program.PAGE.read_text()
    assert list(results) == list(program.EXAMPLES) == NAMES
    assert f"{program.START}\n{program.table(results)}\n{program.END}" in page
    for name in NAMES:
        assert f"```bash\nvispe {' '.join(program.words(name, 'out'))}\n```" in page.replace(" \\\n   ", "")
        assert f"../../figures/{program.figure_file(name).name}" in page


def test_the_figures_are_small(program):
    sizes = [program.figure_file(name).stat().st_size for name in NAMES]
    assert min(sizes) > 20_000
    assert sum(sizes) < 1_500_000


def test_object_counts_equal_manual_counts(results):
    known = {name: row["objects"] for name, row in results.items() if row.get("objects", {}).get("known")}
    assert {name: objects["count"] for name, objects in known.items()} == {"cell": 1, "coins": 24}
    assert all(objects["count"] == objects["known"] for objects in known.values())


@cases("name", ["cell", "coins", "brick"])
def test_scribbles_follow_the_rule(program, name):
    strokes = program.scribbles(name)
    assert json.loads(program.scribble_file(name).read_text()) == strokes
    example = program.EXAMPLES[name]
    assert [s["class"] for s in strokes] == [label for label in example.classes for _ in range(example.count)]


@pytest.mark.slow
def test_the_command_reproduces_the_numbers_of_the_page(program, results, tmp_path):
    words = program.words("coins", str(tmp_path))
    words[3] = str(program.scribble_file("coins"))
    assert program.command(words) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["objects"]["classes"]["coin"]["count"] == 24
    # other versions of scikit-learn draw other trees
    expected = results["coins"]["classes"]["coin"]["map"]
    assert report["images"][0]["map_fractions"]["coin"] == pytest.approx(expected, abs=0.005)
