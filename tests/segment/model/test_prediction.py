import numpy as np
import torch

from tests.cases import cases
from tests.products import partly
from vispe.segment.classify.clustering import PixelClusters
from vispe.segment.classify.pixel_classifier import PixelClassifier
from vispe.segment.features.feature_config import FeatureConfig
from vispe.segment.features.pixel_features import Features
from vispe.segment.model.prediction import predict_page
from vispe.segment.model.uncertainty import most_probable
from vispe.segment.types import PostProcessing


def scene(height=75, width=101, channels=1, holes=False):
    rng = np.random.default_rng(3)
    page = rng.random((height, width, channels), np.float32)
    page[20:50, 30:70] += 1
    valid = np.ones((height, width), bool)
    if holes:
        valid[10:33, 60:80] = False
        valid[70, 5] = False
    return page / 2, valid


def fit_classifier(features, page, valid, kind="logistic", classes=3):
    labelled = (np.random.default_rng(0).random(valid.shape) < 0.1) & valid
    actual = features.prepare(page, valid).gather(labelled)
    grey = page[labelled].mean(-1)
    if kind == "kmeans":
        return PixelClusters(classes).fit(actual, grey)
    levels = np.quantile(grey, np.linspace(0, 1, classes + 1)[1:-1])
    return PixelClassifier(kind, classes).fit(actual, 1 + np.searchsorted(levels, grey))


def predict(features, page, valid, classifier, post=None):
    return predict_page(page, valid, features, classifier, post or PostProcessing(), lambda share: None)


@partly(1)
@cases("channels", [1, 2])
@cases("holes", [False, True])
@cases(("kind", "classes"), [("ensemble", 3), ("logistic", 2), ("logistic", 4), ("forest", 3), ("kmeans", 3)])
def test_page_predictions_equal_pixel_predictions(kind, classes, holes, channels):
    page, valid = scene(channels=channels, holes=holes)
    features = Features(FeatureConfig(tile=40))
    classifier = fit_classifier(features, page, valid, kind, classes)
    plain = PostProcessing() if kind == "kmeans" else PostProcessing(prior="uniform")
    actual = predict(features, page, valid, classifier, plain)
    pixels = features.prepare(page, valid).gather(valid)
    np.testing.assert_allclose(actual.prob[:, valid].T, classifier.probabilities(pixels), atol=2e-6)
    assert (actual.prob[:, ~valid] == 0).all()
    assert (actual.labels[~valid] == 0).all()
    assert np.isnan(actual.uncertainty[~valid]).all()
    np.testing.assert_array_equal(actual.labels[valid], actual.prob.argmax(0)[valid] + 1)
    assert actual.overlap == actual.disagreeing == 0


def test_predictions_are_identical_for_any_thread_count():
    page, valid = scene(holes=True)
    num_threads, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            features = Features(FeatureConfig(tile=32))
            classifier = fit_classifier(features, page, valid)
            results.append(predict(features, page, valid, classifier).prob.tobytes())
    finally:
        torch.set_num_threads(num_threads)
    assert results[0] == results[1] == results[2]


@cases("classes", [2, 3, 7])
def test_ties_select_the_first_class(classes):
    prob = np.random.default_rng(0).integers(0, 4, (classes, 37, 5)).astype(np.float32) / 8
    valid = np.random.default_rng(1).random((37, 5)) < 0.8
    labels, uncertainty = most_probable(prob, valid)
    assert labels.dtype == np.uint8
    assert uncertainty.dtype == np.float32
    np.testing.assert_array_equal(labels, np.where(valid, prob.argmax(0) + 1, 0))
    sorted_prob = np.sort(prob, axis=0)
    np.testing.assert_array_equal(
        uncertainty, np.where(valid, 1 - (sorted_prob[-1] - sorted_prob[-2]), np.nan)
    )


def test_chunked_decision_equals_that_of_the_page(monkeypatch):
    prob, valid = np.random.default_rng(0).random((4, 30, 11), np.float32), np.ones((30, 11), bool)
    complete = most_probable(prob, valid)
    monkeypatch.setattr("vispe.segment.model.uncertainty._PIXELS", 7)
    for actual, expected in zip(most_probable(prob, valid), complete, strict=True):
        np.testing.assert_array_equal(actual, expected)


@cases("holes", [False, True])
def test_gathered_features_equal_those_of_the_page(holes):
    page, valid = scene(channels=2, holes=holes)
    expected = Features(FeatureConfig()).prepare(page, valid).compute(0)
    prepared = Features(FeatureConfig(tile=24)).prepare(page, valid)
    for fraction in (0.2, 0.002):
        mask = (np.random.default_rng(5).random(valid.shape) < fraction) & valid
        np.testing.assert_allclose(prepared.gather(mask), expected[:, mask].T, atol=1e-7, rtol=0)
    mask[:] = False
    mask[60, 3] = True
    np.testing.assert_allclose(prepared.gather(mask), expected[:, mask].T, atol=1e-7, rtol=0)
