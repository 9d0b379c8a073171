"""CONTRIBUTING.md, SECURITY.md and the templates of issues name what exists."""

import re
from pathlib import Path

import pytest
import yaml

from tests.cases import cases

ROOT = Path(__file__).parents[1]
TEXTS = ("CONTRIBUTING.md", "SECURITY.md", ".github/pull_request_template.md")
TEMPLATES = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))


def test_the_class_that_is_shown_is_the_real_one():
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    real = (ROOT / "vispe/encodings/bias/decay/sandwich.py").read_text()
    lines = [line.removeprefix("   ") for line in code.splitlines()]
    lines = [line for line in lines if line.strip() not in ("", '"""', "def bias(self, pos, layer, x=None):")]
    assert len(lines) > 15
    assert [line for line in lines if line not in real] == []


@cases("name", TEXTS)
def test_files_that_are_named_exist(name):
    text = (ROOT / name).read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / target).exists(), target
    for path in re.findall(r"(?:`|python |pytest )((?:tests|eval|docs|vispe)/[\w/.-]+)", text):
        assert (ROOT / path).exists(), path


def test_the_rules_of_families_that_are_named_exist():
    import importlib

    rows = re.findall(
        r"^   \| .* \| `(\w+)\.py` \| (.*) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE
    )
    assert len(rows) == 6
    for module, rules in rows:
        families = importlib.import_module(f"vispe.hosts.transformers.language.families.{module}")
        for rule in re.findall(r"`(\w+)`", rules):
            assert type(getattr(families, rule)).__name__ == "ImageRule"


@cases("path", TEMPLATES, ids=lambda p: p.stem)
def test_templates_of_issues_are_forms(path):
    form = yaml.safe_load(path.read_text())
    if path.stem == "config":
        assert form == {"blank_issues_enabled": True}
        return
    assert form["name"]
    assert form["description"]
    kinds = [field["type"] for field in form["body"]]
    assert set(kinds) <= {"textarea", "input", "checkboxes", "dropdown", "markdown"}
    ids = [field["id"] for field in form["body"]]
    assert len(ids) == len(set(ids))
    assert any(field.get("validations", {}).get("required") for field in form["body"])


def test_one_case_is_selected_by_its_value(monkeypatch):
    ran = []

    @cases("scheme", ["vrope", "vrope_x"])
    @cases("family", ["fast_vlm", "llava"])
    def test(family, scheme):
        ran.append((family, scheme))

    monkeypatch.setenv("VISPE_CASE", "vrope")
    test()
    assert ran == [("fast_vlm", "vrope"), ("llava", "vrope")]
    monkeypatch.setenv("VISPE_CASE", "mrope")
    with pytest.raises(pytest.skip.Exception, match="none of 4 cases has the value mrope"):
        test()
