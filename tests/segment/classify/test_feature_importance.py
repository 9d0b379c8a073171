import numpy as np
import pytest

from vispe.segment.classify.feature_importance import PIXELS, feature_groups, feature_importance
from vispe.segment.classify.pixel_classifier import PixelClassifier


@pytest.mark.slow
def test_most_discriminative_group_is_first():
    generator = np.random.default_rng(0)
    classes = np.repeat([1, 2, 4], [900, 40, 3 * PIXELS])
    features = generator.normal(size=(len(classes), 5)).astype(np.float32)
    features[:, 3] += 3 * classes
    groups = {"noise": np.array([0, 1, 2]), "signal": np.array([3]), "model": np.array([4])}
    for kind in ("ensemble", "logistic", "forest"):
        classifier = PixelClassifier(kind, 4, seed=0).fit(features, classes)
        original = features.copy()
        importance = feature_importance(classifier, features, classes, groups, seed=1)
        np.testing.assert_array_equal(features, original)
        assert next(iter(importance)) == "signal"
        assert importance["signal"] > 0.3
        # trees fit noise in their own training pixels
        assert max(abs(importance["noise"]), abs(importance["model"])) < importance["signal"] / 2
        assert importance == feature_importance(classifier, features, classes, groups, seed=1)


def test_filters_of_all_channels_share_a_group():
    names = ["c0.intensity", "c0.hessian_large_4", "c1.intensity", "c1.hessian_large_4"]
    groups = feature_groups(names, 7, "vispe_micro")
    assert {name: columns.tolist() for name, columns in groups.items()} == {
        "intensity": [0, 2],
        "hessian_large, 4 px": [1, 3],
        "vispe_micro": [4, 5, 6],
    }
    assert list(feature_groups([], 2, "vit")) == ["vit"]
    assert list(feature_groups(["intensity"], 1, None)) == ["intensity"]
