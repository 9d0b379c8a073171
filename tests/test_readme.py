"""README: Python blocks run, generated tables are up to date, commands exist."""

import importlib.util
import re
import shlex
from pathlib import Path

from tests.cases import cases
from vispe.cli.main import COMMANDS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@cases("code", blocks("python"), ids=lambda c: c.strip().splitlines()[-1][:40])
def test_python_blocks_run(code):
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})


def test_generated_parts_are_up_to_date():
    location = importlib.util.spec_from_file_location("readme_tables", ROOT / "eval" / "tables.py")
    module = importlib.util.module_from_spec(location)
    location.loader.exec_module(module)
    for page in module.PAGES:
        assert "| " in page.read_text()
        assert module.updated(page.read_text()) == page.read_text(), f"{page.name}: run python eval/tables.py"


def test_readme_is_short():
    assert len(README.splitlines()) < 150


def test_commands_exist():
    lines = [line.removeprefix("$ ") for block in blocks("console") for line in block.splitlines()]
    lines += [part for block in blocks("bash") for part in block.split("&&")]
    for words in (shlex.split(line, comments=True) for line in lines):
        if words and words[0] == "vispe":
            assert words[1] in COMMANDS


def test_images_exist():
    for image in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", README):
        assert (ROOT / image).stat().st_size > 10_000


def test_every_public_name_is_in_the_changelog_or_readme():
    import vispe

    text = README + (ROOT / "CHANGELOG.md").read_text()
    assert [n for n in vispe.__all__ if n not in text] == []
