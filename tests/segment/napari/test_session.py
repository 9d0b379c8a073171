"""Session of the plugin, without Qt and napari."""

import importlib.util
import sys

import numpy as np
import pytest

from tests.cases import cases
from vispe.images.read import Micrograph
from vispe.segment.features.feature_config import FeatureConfig
from vispe.segment.live import Live, micrograph
from vispe.segment.live.suggestions import suggest
from vispe.segment.model.model_file import load_model
from vispe.segment.napari.requests import FEATURES, FeatureSettings, WorkItem
from vispe.segment.napari.session import Session
from vispe.segment.pipeline import DEFAULT


def stack(pages: int = 1, h: int = 50, w: int = 61) -> tuple[Micrograph, np.ndarray]:
    """Make an image with a bright half, and labels on both halves of its first page."""
    rng = np.random.default_rng(0)
    grey = rng.normal(60, 10, (pages, h, w))
    grey[:, :, w // 2 :] += 80
    labels = np.zeros(grey.shape, np.uint8)
    labels[0, 10:13, 5:-5] = np.where(np.arange(5, w - 5) < w // 2, 1, 2)
    return micrograph(np.clip(grey, 0, 255).astype(np.uint8), "ZYX", "halves"), labels


def setup(image: Micrograph, **options) -> FeatureSettings:
    return FeatureSettings(image, "filters", **options)


def test_default_features_are_those_of_the_command_line():
    assert next(iter(FEATURES.values())) == DEFAULT
    assert FEATURES["filters"] == FeatureConfig()
    assert FEATURES["vispe_micro"].kind == "tokens"
    assert importlib.util.find_spec("vispe.segment.napari.session").submodule_search_locations is None
    assert "qtpy" not in sys.modules or importlib.util.find_spec("napari") is not None


def test_results_equal_those_of_live():
    image, labels = stack()
    session = Session()
    assert (session.model, session.nbytes) == (None, 0)
    result = session.answer(WorkItem(setup(image), 0, ("dark", "bright"), labels[0]))
    assert result.error is None
    expected = Live(image, features=FeatureConfig(), names=("dark", "bright")).update(labels[0])
    np.testing.assert_array_equal(result.pages[0].prob, expected.prob)
    assert (result.names, result.colors, result.notes) == (("dark", "bright"), None, ())
    fraction = 100 * (expected.labels == 2).mean()
    assert result.summary() == f"dark {100 - fraction:.1f} %, bright {fraction:.1f} %"
    assert result.seconds > 0
    assert session.nbytes > image.pages.size * 26 * 4


def test_features_are_reused_for_pages_and_names_but_not_settings(monkeypatch):
    image, labels = stack(3)
    features = []
    original = Live.__init__
    monkeypatch.setattr(
        Live, "__init__", lambda self, *a, **k: (features.append(k), original(self, *a, **k))[1]
    )
    session = Session()
    messages: list[float] = []
    first = session.answer(WorkItem(setup(image), 2, ("a", "b"), labels), messages.append)
    assert list(first.pages) == [2]
    assert sum(messages) == pytest.approx(1)
    messages.clear()
    all_pages = session.answer(WorkItem(setup(image), 1, ("a", "b"), labels, every=True), messages.append)
    assert list(all_pages.pages) == [0, 1, 2]
    assert sum(messages) == pytest.approx(1)
    np.testing.assert_allclose(all_pages.pages[2].prob, first.pages[2].prob, rtol=0, atol=1e-6)
    new_labels = labels[0].copy()
    new_labels[0, 0] = 3
    with_third_class = session.answer(WorkItem(setup(image), 0, ("a", "b"), new_labels))
    assert with_third_class.names == ("a", "b", "class 3")
    assert len(features) == 1
    with_forest = session.answer(WorkItem(FeatureSettings(image, "filters", "forest"), 0, ("a", "b"), labels))
    assert with_forest.error is None
    assert session.model.classifier.kind == "forest"
    assert len(features) == 2
    assert not setup(image).is_equivalent(None)
    assert not setup(image).is_equivalent(setup(stack()[0]))


def test_loaded_models_predict_without_labels_and_train_with_labels(tmp_path):
    image, labels = stack()
    session = Session()
    expected = session.answer(WorkItem(setup(image), 0, ("dark", "bright"), labels))
    Live(image, features=FeatureConfig(), names=("dark", "bright")).update(labels)
    live = Live(image, features=FeatureConfig(), names=("dark", "bright"), colors=((9, 9, 9), (8, 8, 8)))
    live.update(labels)
    model = load_model(live.save(tmp_path / "m.vispe"))
    session = Session()
    for page_labels in (None, np.zeros_like(labels)):
        result = session.answer(WorkItem(setup(image, model=model), 0, model.names, page_labels))
        np.testing.assert_array_equal(result.pages[0].prob, expected.pages[0].prob)
        assert result.colors == ((9, 9, 9), (8, 8, 8))
    retrained = session.answer(WorkItem(setup(image, model=model), 0, model.names, labels[:, ::-1]))
    assert retrained.error is None
    assert session.model is not model
    # settings of the model take precedence
    assert setup(image, model=model).is_equivalent(FeatureSettings(image, "vispe_micro", "forest", model))


def test_trust_is_reported_with_the_result():
    image, labels = stack(2, 64, 64)
    messages: list[float] = []
    result = Session().answer(
        WorkItem(setup(image), 0, ("dark", "bright"), labels, trust=True), messages.append
    )
    assert result.error is None
    assert result.trust.names == ("dark", "bright")
    np.testing.assert_array_equal(result.trust.labels, result.pages[0].labels)
    assert result.trust.disagreement.shape == (64, 64)
    assert "rotated" in result.trust.verdict
    assert sum(messages) == pytest.approx(1)


@cases(
    ("change", "text"),
    [
        ({"labels": None}, "there is no model yet. Label at least 2 classes"),
        ({"labels": np.ones((50, 61), int)}, r"need at least 2 labelled classes, got 1 \(dark\)"),
        ({"labels": np.ones((5, 6), int)}, "labels must be 50 x 61 for one page or 1 x 50 x 61 for all"),
        ({"names": ("same", "same")}, "two classes are named 'same'. Use distinct names"),
        ({"page": 4}, r"page 4 does not exist in halves, which has pages 0 to 0"),
    ],
)
def test_invalid_requests_return_a_one_line_error(change, text):
    image, labels = stack()
    result = Session().answer(
        WorkItem(**{"setup": setup(image), "names": ("dark", "bright"), "labels": labels, **change})
    )
    assert not result.pages
    assert "\n" not in result.error
    with pytest.raises(AssertionError, match=text):
        raise AssertionError(result.error)


@cases(
    ("error", "text"),
    [
        (MemoryError(), "out of memory. Close other layers, use the features 'filters' or crop the image."),
        (
            RuntimeError("can't allocate memory"),
            "out of memory. Close other layers, use the features 'filters' or crop the image.",
        ),
        (RuntimeError("two\n lines"), "unexpected RuntimeError: two lines."),
        (OSError("no disk"), "no disk"),
    ],
)
def test_exceptions_are_returned_as_errors(monkeypatch, error, text):
    image, labels = stack()

    def fail(*args):
        raise error

    monkeypatch.setattr(Live, "draw", fail)
    assert Session().answer(WorkItem(setup(image), labels=labels)).error == text


def test_suggestions_are_returned_with_the_page():
    image, labels = stack(2)
    session = Session()
    result = session.answer(WorkItem(setup(image), 1, ("dark", "bright"), labels, suggest=True))
    assert result.error is None
    live = Live(image, page=1, features=FeatureConfig(), names=("dark", "bright"))
    live.update(labels)
    assert result.suggestions == tuple(suggest(live))
    assert list(result.pages) == [1]
    assert session.answer(WorkItem(setup(image), 1, ("dark", "bright"), labels)).suggestions is None


def test_logistic_preview_precedes_the_ensemble_result():
    image, labels = stack()
    session, work = Session(), WorkItem(setup(image), 0, ("dark", "bright"), labels)
    preview, final = session.answers(work)
    assert (preview.preview, final.preview) == (True, False)
    logistic = Live(image, features=FeatureConfig(), classifier="logistic", names=("dark", "bright")).update(
        labels
    )
    np.testing.assert_array_equal(preview.pages[0].prob, logistic.prob)
    np.testing.assert_array_equal(final.pages[0].prob, Session().answer(work).pages[0].prob)
    assert session.model.classifier.kind == "ensemble"
    # one result: nothing faster, nothing to train, or all pages requested
    model = session.model
    for request in (
        WorkItem(setup(image, classifier="logistic"), 0, ("dark", "bright"), labels),
        WorkItem(setup(image, model=model), 0, model.names, np.zeros_like(labels)),
        WorkItem(setup(image), 0, ("dark", "bright"), labels, every=True),
    ):
        (result,) = session.answers(request)
        assert result.error is None
        assert not result.preview


def test_a_newer_request_supersedes_the_result_but_not_the_preview():
    image, labels = stack()
    session = Session()
    session.is_superseded = lambda: True
    preview, final = session.answers(WorkItem(setup(image), 0, ("dark", "bright"), labels))
    assert preview.preview
    assert preview.pages
    assert final.superseded
    assert not final.pages
    # a saved model is never that of a preview
    answers = session.answers(WorkItem(setup(image), 0, ("dark", "bright"), labels))
    assert next(answers).preview
    assert session.model.classifier.kind == "ensemble"


def test_requests_without_labels_do_not_use_the_preview_model():
    image, labels = stack()
    session, names = Session(), ("dark", "bright")
    next(session.answers(WorkItem(setup(image), 0, names, labels)))
    result = session.answer(WorkItem(setup(image), 0, names))
    expected = Session().answer(WorkItem(setup(image), 0, names, labels))
    np.testing.assert_array_equal(result.pages[0].prob, expected.pages[0].prob)


def test_erased_labels_restore_the_loaded_model():
    image, labels = stack(2)
    names, live = ("dark", "bright"), Live(image, features=FeatureConfig(), names=("dark", "bright"))
    live.update(labels)
    session, settings = Session(), setup(image, model=live.model)
    original = session.answer(WorkItem(settings, 0, names))
    session.answer(WorkItem(settings, 0, names, labels[0, :, ::-1]))
    restored = session.answer(WorkItem(settings, 0, names, np.zeros_like(labels[0])))
    np.testing.assert_array_equal(restored.pages[0].prob, original.pages[0].prob)
    request = WorkItem(settings, 1, names, labels[0, ::-1])
    actual, expected = session.answer(request), Session().answer(request)
    np.testing.assert_array_equal(actual.pages[1].prob, expected.pages[1].prob)


def test_errors_of_a_preview_are_returned_once():
    image, labels = stack()
    (result,) = Session().answers(WorkItem(setup(image), 0, ("dark", "bright"), labels.clip(0, 1)))
    assert "at least 2" in result.error
