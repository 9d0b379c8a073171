"""Tutorial notebooks: all cells run, and their outputs are stored."""

import ast
import json
import re
from pathlib import Path

import pytest

from tests.cases import cases

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))
LARGEST = 300_000  # bytes


def cells(path, kind):
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == kind]


def text(cell):
    return "".join(cell["source"])


def test_there_are_four_notebooks():
    assert [path.stem for path in NOTEBOOKS] == [
        "audit-and-retrofit",
        "first-micrograph",
        "new-encoding",
        "vlm-scheme",
    ]


@cases("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_stored_outputs_are_complete_small_and_without_errors(path):
    assert path.stat().st_size < LARGEST
    code = cells(path, "code")
    counts = [cell["execution_count"] for cell in code]
    assert counts == list(range(1, len(code) + 1)), f"run python eval/notebooks.py {path.name}"
    outputs = [output for cell in code for output in cell["outputs"]]
    assert [o for o in outputs if o["output_type"] == "error" or o.get("name") == "stderr"] == []
    assert sum("image/png" in o.get("data", {}) for o in outputs) >= 2
    # a final expression without print would only show the repr of an object
    assert [o for o in outputs if o["output_type"] == "execute_result"] == []
    assert str(Path.home()) not in path.read_text()
    assert "/tmp/" not in path.read_text()


@cases("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_texts_are_short_with_a_title_and_a_final_next_steps_section(path):
    texts = [text(cell) for cell in cells(path, "markdown")]
    assert texts[0].startswith("# ")
    assert "**Next:**" in texts[-1]
    assert max(len(t.split()) for t in texts) < 110
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", "\n".join(texts)):
        assert (path.parent / target).is_file(), f"{path.name} links to {target}"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:FigureCanvasAgg is non-interactive")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebooks_run(path, tmp_path, monkeypatch, capsys):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pytest.importorskip("transformers" if path.stem == "vlm-scheme" else "skimage")
    monkeypatch.chdir(tmp_path)
    pyplot.close("all")  # figures of earlier tests
    space = {"__name__": "notebook"}
    drawn = 0
    for number, cell in enumerate(cells(path, "code"), 1):
        tree = ast.parse(text(cell), f"{path.stem} cell {number}")
        exec(compile(tree, f"{path.stem} cell {number}", "exec"), space)
        printed, figures = capsys.readouterr().out, len(pyplot.get_fignums())
        pyplot.close("all")
        drawn += figures
        stored = [o.get("name", "figure") for o in cell["outputs"]]
        assert (bool(printed), figures) == ("stdout" in stored, stored.count("figure")), (number, stored)
    assert drawn >= 2
