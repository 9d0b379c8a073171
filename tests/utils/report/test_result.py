"""Results: Markdown, grades and tones of verdicts, and HTML pages, each with a single implementation."""

import ast
import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from matplotlib.figure import Figure

import vispe
from vispe.errors import InputError
from vispe.utils.report.result import (
    Drawing,
    Grades,
    Note,
    Result,
    Rows,
    Section,
    report_page,
    settings_section,
)

PACKAGE = Path(vispe.__file__).parent
GRADES = Grades(0.1, 0.5, ("low", "middle", "high"))


@dataclass(frozen=True)
class Counted(Result):
    values: tuple[int, ...]

    @property
    def verdict(self):
        return f"{len(self.values)} values"

    def table(self, unit="px"):
        return [["name", unit], *([f"value {k}", str(v)] for k, v in enumerate(self.values))]

    def to_dict(self):
        return {"values": list(self.values)}


class LeftAligned(Counted):
    left = None


@pytest.mark.parametrize(
    ("value", "word", "tone"),
    [(-3.0, "low", "good"), (0.0999, "low", "good"), (0.1, "middle", "mild"), (0.5, "high", "bad"),
     (float("inf"), "high", "bad")],
)  # fmt: skip
def test_grades_use_the_largest_bound_reached(value, word, tone):
    assert (GRADES.word(value), GRADES.tone(value)) == (word, tone)


def test_nan_has_the_plain_tone():
    assert GRADES.tone(float("nan")) == "plain"


def test_markdown_renders_the_table_with_its_options():
    assert Counted((7,)).to_markdown(unit="nm").splitlines() == [
        "| name    | nm |",
        "|---------|---:|",
        "| value 0 |  7 |",
    ]
    assert LeftAligned((7,)).to_markdown().splitlines()[2] == "| value 0 | 7  |"


def test_json_files_are_not_overwritten(tmp_path):
    file = Counted((1,)).write_json(tmp_path / "a.json")
    with pytest.raises(InputError, match="exists"):
        Counted((2,)).write_json(file)
    assert json.loads(Counted((2,)).write_json(file, force=True).read_text()) == {"values": [2]}


def test_sections_are_in_order_and_absent_ones_are_skipped():
    figure = Figure(figsize=(1, 1))
    sections = [
        Section("", "Introduction.", None, Note("A note.")),
        None,
        Section("Numbers", Rows([["a"], ["1"]], quiet=(0,)), Drawing(figure, "A curve")),
        settings_section(["Remark."], {"angle": 15, "name": "π"}, Note("Last.")),
    ]
    text = report_page("vit", "Audit", "no effect", "good", sections).html()
    assert '<p class="verdict good">No effect</p>' in text
    assert re.findall("<h2>(.*?)</h2>", text) == ["Numbers", "Settings and notes"]
    order = ("Introduction.", "A note.", "Numbers", "A curve", "Remark.", "angle", "Last.")
    positions = [text.index(words) for words in order]
    assert positions == sorted(positions)
    assert "<p class=soft>A note.</p>" in text
    assert ">15</td>" in text
    assert ">π</td>" in text


def test_reports_without_settings_have_no_settings_table():
    text = report_page("vit", "Audit", "no effect", "good", [settings_section(["Remark."], {})]).html()
    assert "<table" not in text


def _definitions(name):
    for path in sorted(PACKAGE.rglob("*.py")):
        code = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(code)) if f"def {name}(" in code else ():
            if isinstance(node, ast.FunctionDef) and node.name == name:
                yield path.relative_to(PACKAGE).as_posix()


def test_only_the_base_class_writes_markdown():
    assert list(_definitions("to_markdown")) == ["utils/report/result.py"]


def test_only_report_page_creates_pages_of_measurements():
    modules = [
        path.relative_to(PACKAGE).as_posix()
        for path in sorted(PACKAGE.rglob("*.py"))
        if re.search(r"(?<![\w.>] )\bPage\((?!\w*\))", path.read_text(encoding="utf-8"))
    ]
    measuring = [m for m in modules if not m.startswith(("segment/", "images/", "utils/report/html_page.py"))]
    assert measuring == ["utils/report/result.py"]
