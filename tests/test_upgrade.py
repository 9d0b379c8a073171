"""Upgrade page: every new name exists, and no old name does."""

import importlib
import inspect
import re
from pathlib import Path

from tests.cases import cases
from vispe.cli.main import COMMANDS, load_command
from vispe.encodings.registry import encoding_class

PAGE = (Path(__file__).parents[1] / "docs" / "reference" / "upgrade.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))


def rows(title):
    """Return the cells of the table of a section."""
    lines = re.findall(r"^\| (`.*) \|$", SECTIONS[title], re.MULTILINE)
    return [[cell.strip("`") for cell in line.split(" | ")] for line in lines]


def resolve(path):
    """Return the object of a dotted path: a module, or an attribute of one or of a class."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("vispe"):
                raise
            continue
        for name in parts[end:]:
            value = getattr(value, name)
        return value
    raise ImportError(path)


def exists(path, module):
    """Return whether a module, or an attribute, can be imported."""
    try:
        importlib.import_module(path) if module else resolve(path)
    except (ImportError, AttributeError):
        return False
    return True


@cases("title", ["Classes, functions and attributes", "Modules"])
def test_new_names_exist_and_old_ones_do_not(title):
    module = title == "Modules"
    assert len(rows(title)) > 30
    assert [new for _, new in rows(title) if not exists(new, module)] == []
    assert [old for old, _ in rows(title) if exists(old, module)] == []


def test_new_options_exist_and_old_ones_do_not():
    wrong = []
    for owner, old, new in rows("Options"):
        if owner.startswith("vispe "):
            assert owner.removeprefix("vispe ") in COMMANDS
            function = load_command(owner.removeprefix("vispe "))[0]
        else:
            function = resolve(owner) if "." in owner else encoding_class(owner)
        parameters = inspect.signature(function).parameters
        if new not in parameters or old in parameters:
            wrong.append((owner, old, new))
    assert len(rows("Options")) > 30
    assert not wrong
