"""Few trees and folds for tests that do not test the classifier: fitting trees takes most of a run.

The classifier is the default one, and the same code runs. Tests that are marked slow, and those that use the fixture
`default_trees`, fit the default number of trees and of folds.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from vispe.segment.classify import calibration
from vispe.segment.classify.estimators.trees import TREES, Trees

DIVISOR = 4  # 8 of 32 trees
MIN_TREES = 3  # trees of a fold of the cross-validation
FEW_FOLDS = 2
FOLDS = calibration.FOLDS
ORIGINAL = vars(Trees)["fit"]


def fit_few(
    cls: type[Trees], features: np.ndarray, classes: np.ndarray, seed: int, count: int = TREES
) -> Any:
    """Fit a fraction of the trees."""
    return ORIGINAL.__func__(cls, features, classes, seed, min(count, max(count // DIVISOR, MIN_TREES)))


@pytest.fixture(scope="module", autouse=True)
def _few_trees() -> Iterator[None]:
    """Fit few trees, in few folds, in the tests of a module and in its fixtures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trees, "fit", classmethod(fit_few))
        patch.setattr(calibration, "FOLDS", FEW_FOLDS)
        yield


@pytest.fixture(autouse=True)
def _all_trees_in_long_tests(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("slow") or "default_trees" in request.fixturenames:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Trees, "fit", ORIGINAL)
            patch.setattr(calibration, "FOLDS", FOLDS)
            yield
    else:
        yield


@pytest.fixture
def default_trees() -> None:
    """Request the default number of trees and folds."""
