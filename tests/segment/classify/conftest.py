"""Tests of classifiers: default number of trees and folds."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def _few_trees() -> None:
    """Replace the fixture of tests/segment: fit the default number of trees, in the default number of folds."""
