"""CONTRIBUTING.md, SECURITY.md and the issue templates refer to existing files and names."""

import re
from pathlib import Path

import pytest
import yaml

from tests.cases import cases

ROOT = Path(__file__).parents[1]
TEXTS = ("CONTRIBUTING.md", "SECURITY.md", ".github/pull_request_template.md")
TEMPLATES = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))


def test_the_example_class_equals_the_source():
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    real = (ROOT / "vispe/encodings/bias/decay/sandwich.py").read_text()
    lines = [line.removeprefix("   ") for line in code.splitlines()]
    lines = [line for line in lines if line.strip() not in ("", '"""', "def bias(self, pos, layer, x=None):")]
    assert len(lines) > 15
    assert [line for line in lines if line not in real] == []


@cases("name", TEXTS)
def test_referenced_files_exist(name):
    text = (ROOT / name).read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / target).exists(), target
    for path in re.findall(r"(?:`|python |pytest )((?:tests|eval|docs|vispe)/[\w/.-]+)", text):
        assert (ROOT / path).exists(), path


def test_referenced_family_rules_exist():
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
def test_issue_templates_are_valid_forms(path):
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


def test_vispe_case_selects_cases_by_value(monkeypatch):
    executed = []

    @cases("scheme", ["vrope", "vrope_x"])
    @cases("family", ["fast_vlm", "llava"])
    def test(family, scheme):
        executed.append((family, scheme))

    monkeypatch.setenv("VISPE_CASE", "vrope")
    test()
    assert executed == [("fast_vlm", "vrope"), ("llava", "vrope")]
    monkeypatch.setenv("VISPE_CASE", "mrope")
    with pytest.raises(pytest.skip.Exception, match="none of 4 cases has the value mrope"):
        test()
