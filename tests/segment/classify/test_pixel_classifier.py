import sys

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from tests.cases import cases
from tests.products import partly
from vispe.errors import InputError, OptionError
from vispe.segment.classify.clustering import PixelClusters
from vispe.segment.classify.estimators import threads
from vispe.segment.classify.estimators.threads import import_early
from vispe.segment.classify.pixel_classifier import KINDS, PixelClassifier


def blobs(count=300, seed=0):
    rng = np.random.default_rng(seed)
    classes = rng.integers(1, 4, count)
    centres = np.array([[0, 0, 0, 0], [3, 0, 1, 0], [0, 3, 0, 1]], np.float32)
    return (centres[classes - 1] + rng.normal(0, 0.3, (count, 4))).astype(np.float32), classes


@cases("kind", KINDS)
def test_every_classifier_is_accurate_and_deterministic(kind):
    features, classes = blobs()
    first, second = (PixelClassifier(kind, 3, seed=7).fit(features, classes) for _ in range(2))
    fresh, expected = blobs(seed=1)
    prob = first.probabilities(fresh)
    assert prob.shape == (300, 3)
    assert prob.dtype == np.float32
    np.testing.assert_allclose(prob.sum(1), 1, atol=1e-5)
    assert (prob.argmax(1) + 1 == expected).mean() > 0.97
    np.testing.assert_array_equal(prob, second.probabilities(fresh))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_unlabelled_classes_have_probability_zero(kind):
    features, classes = blobs()
    classes = np.where(classes == 2, 4, classes)
    prob = PixelClassifier(kind, 5).fit(features, classes).probabilities(features)
    assert prob.shape == (300, 5)
    assert (prob[:, [1, 4]] == 0).all()
    assert (prob.argmax(1) + 1 == classes).mean() > 0.97


@cases("kind", KINDS)
def test_class_probabilities_are_independent_of_label_counts(kind):
    rng = np.random.default_rng(0)
    features = np.concatenate([rng.normal(-1, 1, (4000, 1)), rng.normal(1, 1, (200, 1))]).astype(np.float32)
    classes = np.repeat([1, 2], [4000, 200])
    actual = PixelClassifier("logistic", 2).fit(features, classes)
    middle = actual.probabilities(np.zeros((1, 1), np.float32))
    np.testing.assert_allclose(middle, 0.5, atol=0.05)


def test_chunked_prediction_equals_full_prediction(monkeypatch):
    features, classes = blobs()
    actual = PixelClassifier("logistic", 3).fit(features, classes)
    expected = actual.probabilities(features)
    monkeypatch.setattr("vispe.segment.classify.pixel_classifier._CHUNK", 7)
    monkeypatch.setattr("vispe.segment.classify.pixel_classifier._CACHED", 7)
    np.testing.assert_allclose(actual.probabilities(features), expected, atol=1e-6)


@partly(1)
@cases("kind", KINDS)
@cases("labelled_classes", [(1, 2, 3), (1, 3), (2, 5)])
def test_planes_are_the_transposed_probabilities(kind, labelled_classes, monkeypatch):
    features, classes = blobs()
    features = np.concatenate([features, np.full((300, 1), 0.7, np.float32), 1e-3 * features + 0.5], axis=1)
    selected = np.isin(classes, (1, 2, 3)[: len(labelled_classes)])
    features, classes = features[selected], np.array((0, *labelled_classes))[classes[selected]]
    actual = PixelClassifier(kind, 5, seed=1).fit(features, classes)
    expected = actual.probabilities(features).T
    monkeypatch.setattr("vispe.segment.classify.pixel_classifier._CACHED", 64)
    planes = actual.planes(np.ascontiguousarray(features.T))
    assert planes.dtype == np.float32
    np.testing.assert_allclose(planes, expected, atol=3e-6)
    assert (planes[[k for k in range(5) if k + 1 not in labelled_classes]] == 0).all()
    np.testing.assert_allclose(planes.sum(0), 1, atol=1e-6)


@cases("labelled_classes", [(1, 2, 3), (1, 3), (2, 5)])
def test_logistic_equals_scikit_learn(labelled_classes):
    features, classes = blobs()
    features = features * np.array([1, 10, 0.1, 1], np.float32) + np.array([0, 5, 1, 100], np.float32)
    selected = np.isin(classes, (1, 2, 3)[: len(labelled_classes)])
    features, classes = features[selected], np.array((0, *labelled_classes))[classes[selected]]
    logistic = LogisticRegression(C=100 / len(classes), class_weight="balanced", max_iter=1000)
    expected = make_pipeline(StandardScaler(), logistic).fit(features, classes).predict_proba(features)
    actual = PixelClassifier("logistic", 5).fit(features, classes)
    columns = [c - 1 for c in labelled_classes]
    np.testing.assert_allclose(actual.probabilities(features)[:, columns], expected, atol=1e-5)
    first = actual.linear.scores(torch.from_numpy(features[:, :2].T.copy()))
    offsets = actual.linear.weight[:, 2:] @ (
        torch.from_numpy(features.T[2:].copy()) - actual.linear.mean[2:, None]
    )
    prob = actual.linear.probabilities(first + offsets, 5).T.numpy()
    np.testing.assert_allclose(prob[:, columns], expected, atol=1e-5)


def test_logistic_is_restored_from_its_tensors():
    features, classes = blobs()
    actual = PixelClassifier("logistic", 3).fit(features, classes)
    state = actual.tensors()
    reloaded = PixelClassifier("logistic", 3, state=state)
    np.testing.assert_array_equal(reloaded.probabilities(features), actual.probabilities(features))
    for name, value in (
        ("mean", np.zeros(5)),
        ("weight", state["linear.weight"][:2]),
        ("bias", np.array([np.nan, 0, 0])),
        ("classes", np.array([1, 2, 4])),
        ("classes", np.array([1, 1, 2])),
        ("classes", np.array([1.0, 2.0, 3.0])),
        ("classes", np.array([], np.int64)),
    ):
        with pytest.raises(InputError, match="for 3 classes are inconsistent"):
            PixelClassifier("logistic", 3, state=state | {f"linear.{name}": value})
    del state["linear.bias"]
    with pytest.raises(InputError, match="a logistic classifier without bias"):
        PixelClassifier("logistic", 3, state=state)
    with pytest.raises(InputError, match="is not fitted"):
        PixelClassifier("logistic", 3).probabilities(features)


def test_invalid_arguments_raise():
    with pytest.raises(OptionError, match=r"kind must be one of .* got 'florest'\. Did you mean 'forest'"):
        PixelClassifier("florest", 2)
    with pytest.raises(InputError, match=r"need at least 2 labelled classes, got 1 \(matrix\)"):
        PixelClassifier("logistic", 2).fit(np.zeros((3, 2), np.float32), np.ones(3, int), ("matrix", "hole"))


def test_clusters_are_ordered_by_brightness_for_any_seed():
    features, classes = blobs()
    grey = np.array([0.9, 0.1, 0.5])[classes - 1]
    for seed in range(3):
        prob = PixelClusters(3, seed=seed).fit(features, grey).probabilities(features)
        np.testing.assert_allclose(prob.sum(1), 1, atol=1e-5)
        np.testing.assert_array_equal(prob.argmax(1) + 1, np.array([3, 1, 2])[classes - 1])


def test_invalid_numbers_of_clusters_raise():
    with pytest.raises(
        OptionError, match="n_classes needs an integer from 2 to 255, or auto, got n_classes=1"
    ):
        PixelClusters(1)
    with pytest.raises(InputError, match=r"exceeds the number of distinct pixels \(2\)"):
        PixelClusters(3).fit(np.repeat(np.eye(2, dtype=np.float32), 5, 0), np.zeros(10))


def test_early_imports_ignore_modules_that_fail(tmp_path, monkeypatch):
    (tmp_path / "early_whole.py").write_text("VALUE = 3\n")
    (tmp_path / "early_broken.py").write_text("raise RuntimeError('broken')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(threads, "_MODULES", {"logistic": "early_whole", "forest": "early_broken"})
    for kind in ("logistic", "forest", "no such kind"):
        import_early(kind).join()
    assert sys.modules.pop("early_whole").VALUE == 3
    assert "early_broken" not in sys.modules
