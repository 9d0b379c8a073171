import numpy as np
from sklearn.ensemble import ExtraTreesClassifier

from tests.cases import cases
from vispe.segment.classify.estimators import trees
from vispe.segment.classify.pixel_classifier import PixelClassifier


def make_data(count=400, seed=0):
    rng = np.random.default_rng(seed)
    classes = rng.integers(1, 4, count)
    features = rng.normal(classes[:, None] * np.array([1, 0.5, 0, 0]), 0.8, (count, 4)).astype(np.float32)
    return features, classes


@cases("most", [trees.PIXELS, 90])
def test_trees_are_independent_of_pixel_order(most, monkeypatch):
    monkeypatch.setattr(trees, "PIXELS", most)
    features, classes = make_data()
    fresh, _ = make_data(seed=1)
    expected = PixelClassifier("ensemble", 3).fit(features, classes).trees.probabilities(fresh)
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(len(classes))
        classifier = PixelClassifier("ensemble", 3).fit(features[order], classes[order])
        np.testing.assert_array_equal(classifier.trees.probabilities(fresh), expected)


def test_ensemble_is_the_mean_of_linear_classifier_and_trees():
    features, classes = make_data()
    fresh, _ = make_data(seed=1)
    classifier = PixelClassifier("ensemble", 3).fit(features, classes)
    linear = PixelClassifier("logistic", 3).fit(features, classes)
    weight = np.rint(2.0**32 / np.bincount(classes).clip(1))[classes]
    forest = ExtraTreesClassifier(trees.TREES, min_samples_leaf=2, random_state=0)
    forest.fit(features, classes, sample_weight=weight)
    expected = (linear.probabilities(fresh) + forest.predict_proba(fresh)) / 2
    np.testing.assert_allclose(classifier.probabilities(fresh), expected, atol=1e-6)
    np.testing.assert_allclose(classifier.planes(fresh.T.copy()).T, expected, atol=1e-6)
    classifier.temperature = 2.0
    softened = classifier.probabilities(fresh)
    np.testing.assert_allclose(
        softened, np.sqrt(expected) / np.sqrt(expected).sum(1, keepdims=True), atol=1e-6
    )


def test_large_label_sets_are_subsampled_evenly_per_class(monkeypatch):
    monkeypatch.setattr(trees, "PIXELS", 100)
    features, classes = make_data(5000)
    classes = np.where(np.arange(5000) < 20, 4, classes)
    index = trees._subset(features, classes)
    assert np.bincount(classes[index]).tolist() == [0, 25, 25, 25, 20]
    assert len(np.unique(index)) == len(index)
    sums = features.sum(1)
    for k in (1, 2, 3):
        actual, expected = np.sort(sums[index][classes[index] == k]), np.sort(sums[classes == k])
        assert actual[0] == expected[0]
        assert actual[-1] == expected[-1]
        np.testing.assert_allclose(np.median(actual), np.median(expected), atol=0.2)


def test_scale_weakens_the_first_features_of_the_linear_classifier():
    features, classes = make_data()
    plain = PixelClassifier("logistic", 3).fit(features, classes)
    unscaled = PixelClassifier("logistic", 3).fit(features, classes, scale=(2, 1.0))
    weaker = PixelClassifier("logistic", 3).fit(features, classes, scale=(2, 0.1))
    np.testing.assert_allclose(plain.linear.weight, unscaled.linear.weight, rtol=1e-4, atol=1e-6)
    assert abs(weaker.linear.weight[:, :2]).max() < 0.2 * abs(plain.linear.weight[:, :2]).max()
    assert abs(weaker.linear.weight[:, 2:]).max() > 0
