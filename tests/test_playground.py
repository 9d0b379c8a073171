"""Playground: the page is small, loads nothing from the network, and works in a browser."""

import re
import sys
from pathlib import Path

import pytest

from tests.evaluate.plots.test_explorer import check_in_chromium

SITE = Path(__file__).parents[1] / "docs" / "site"


@pytest.fixture(scope="module")
def page():
    sys.path.insert(0, str(SITE))
    try:
        import playground_page
    finally:
        sys.path.remove(str(SITE))
    return playground_page.playground_page()


def test_the_page_is_small_and_loads_nothing(page):
    assert len(page) < 500_000
    assert "http" not in page
    assert not re.search(r"\b(fetch|XMLHttpRequest|eval)\b", page)


def test_the_page_works_in_chromium(page, tmp_path):
    figure = page[page.index("<style>") : page.rindex("</script>")] + "</script>"
    assert "\n\n" not in figure, "Markdown would end the element at an empty line"
    check_in_chromium(figure, tmp_path)
