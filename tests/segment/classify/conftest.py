"""The classifier is the subject here: all trees and folds."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def _few_trees() -> None:
    """Replace the fixture of tests/segment: fit the default number of trees, in the default number of folds."""
