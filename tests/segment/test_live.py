"""Live segmentation: results equal those of the command line."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.cases import cases
from vispe.errors import InputError, OptionError, ShapeError
from vispe.images.normalize import normalize
from vispe.images.read import Micrograph
from vispe.segment import pipeline
from vispe.segment.classify.calibration import calibrate, label_scribbles
from vispe.segment.classify.pixel_classifier import PixelClassifier
from vispe.segment.features.feature_cache import CachedFeatures
from vispe.segment.features.feature_config import FeatureConfig
from vispe.segment.features.pixel_features import Features
from vispe.segment.live import Live, micrograph
from vispe.segment.model.model_file import Model, load_model
from vispe.segment.model.prediction import predict_page
from vispe.segment.types import PostProcessing

FILTERS = FeatureConfig(sigmas=(1.0, 4.0))
TILED = FeatureConfig("both", sigmas=(1.0, 2.0), model="vispe_micro", tile=64)
TOKENS = FeatureConfig(
    "both", sigmas=(1.0,), model="vit_tiny_patch16_224", weights="random", components=5, tile=64
)


def synthetic_image(h: int, w: int, seed: int = 0) -> np.ndarray:
    """Make bright discs on a dark, noisy background; uint8."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:h, :w]
    out = np.full((h, w), 60.0)
    for _ in range(6):
        cy, cx, r = rng.integers(0, h), rng.integers(0, w), rng.integers(6, 14)
        out[(y - cy) ** 2 + (x - cx) ** 2 < r * r] = 150
    return np.clip(out + rng.normal(0, 12, out.shape), 0, 255).astype(np.uint8)


def scribbles(grey: np.ndarray, classes: int = 2, seed: int = 0) -> np.ndarray:
    """Make a few scribbles across the image, labelled by grey level; uint8."""
    rng = np.random.default_rng(seed)
    truth = 1 + np.digitize(grey, np.quantile(grey, np.linspace(0, 1, classes + 1)[1:-1]))
    out = np.zeros(grey.shape, np.uint8)
    for row in rng.choice(grey.shape[0], 4, replace=False):
        out[row, 5:-5] = truth[row, 5:-5]
    return out


def segment_uncached(
    image: Micrograph,
    labels: np.ndarray,
    config: FeatureConfig,
    kind: str,
    post: PostProcessing | None = None,
):
    """Segment one image as the command does, with the same public functions but without caches."""
    features = Features(config)
    pages, _ = normalize(image)
    labelled = [
        (p, v) for p, v, page_labels in zip(pages, image.valid, labels, strict=True) if page_labels.any()
    ]
    features.fit(labelled)
    masks = (labels > 0) & image.valid
    actual = [
        features.prepare(p, v).gather(m) for p, v, m in zip(pages, image.valid, masks, strict=True) if m.any()
    ]
    classifier = PixelClassifier(kind, int(labels.max()))
    classes = labels[masks].astype(np.int64)
    scale = features.filter_scale(image.channels)
    classifier.fit(np.concatenate(actual), classes, scale=scale)
    scribble_ids = label_scribbles(np.flatnonzero(masks), classes, masks.shape[1:])
    calibrate(classifier, np.concatenate(actual), classes, scribble_ids, scale=scale)
    return [
        predict_page(p, v, features, classifier, post or PostProcessing(), lambda share: None)
        for p, v in zip(pages, image.valid, strict=True)
    ], classifier


def assert_predictions_close(actual, expected, atol: float = 1e-5) -> None:
    np.testing.assert_allclose(actual.prob, expected.prob, rtol=0, atol=atol)
    top = np.sort(expected.prob, 0)
    unambiguous = top[-1] - top[-2] > 2 * atol
    np.testing.assert_array_equal(actual.labels[unambiguous], expected.labels[unambiguous])
    np.testing.assert_allclose(actual.uncertainty, expected.uncertainty, rtol=0, atol=2 * atol)
    assert (actual.overlap, actual.notes) == (expected.overlap, expected.notes)


TIMM = pytest.param(TOKENS, id="tokens", marks=pytest.mark.slow)  # importing timm takes seconds


@pytest.mark.parametrize(
    "config", [pytest.param(FILTERS, id="filters"), pytest.param(TILED, id="vispe_micro"), TIMM]
)
@pytest.mark.parametrize("classes", [2, 3])
def test_update_equals_the_uncached_computation(config, classes):
    grey = synthetic_image(91, 75)
    labels = scribbles(grey, classes)
    image = micrograph(grey)
    (expected,), classifier = segment_uncached(image, labels[None], config, "logistic")
    live = Live(image, features=config, classifier="logistic")
    actual = live.update(labels)
    assert_predictions_close(actual, expected)
    for name in ("mean", "weight", "bias", "classes"):  # the gathered features are identical
        np.testing.assert_array_equal(
            getattr(live.model.classifier.linear, name), getattr(classifier.linear, name)
        )


@pytest.mark.slow
@cases("kind", ["logistic", "ensemble"])
def test_results_equal_those_of_the_command_and_saved_model(tmp_path, kind):
    from PIL import Image

    grey = synthetic_image(80, 101)
    labels = scribbles(grey, 3)
    Image.fromarray(grey).save(tmp_path / "a.png")
    Image.fromarray(labels).save(tmp_path / "a_labels.png")
    pipeline.segment(
        [tmp_path / "a.png"], tmp_path / "out", labels=[tmp_path / "a_labels.png"], features=TILED,
        classifier=kind,
    )  # fmt: skip
    live = Live(micrograph(grey), features=TILED, classifier=kind)
    actual = live.update(labels)
    command_model = load_model(tmp_path / "out" / "model.vispe")
    np.testing.assert_array_equal(live.model.classifier.linear.weight, command_model.classifier.linear.weight)
    assert live.model.features == command_model.features
    assert (live.model.names, live.model.normalize, live.model.clip) == (
        command_model.names,
        "stack",
        (0.5, 99.5),
    )
    segmentation = np.asarray(Image.open(tmp_path / "out" / "a_seg.png"))
    unambiguous = np.abs(np.diff(np.sort(actual.prob, 0)[-2:], axis=0)[0]) > 1e-4
    np.testing.assert_array_equal(actual.labels[unambiguous], segmentation[unambiguous])

    live.save(tmp_path / "mine.vispe")
    pipeline.apply(tmp_path / "mine.vispe", [tmp_path / "a.png"], tmp_path / "again")
    reloaded = np.asarray(Image.open(tmp_path / "again" / "a_seg.png"))
    np.testing.assert_array_equal(reloaded[unambiguous], segmentation[unambiguous])
    with pytest.raises(InputError, match="exists; add --force"):
        live.save(tmp_path / "mine.vispe")
    live.save(tmp_path / "mine.vispe", force=True)


def test_loaded_models_predict_and_can_be_retrained(tmp_path):
    grey = synthetic_image(64, 70)
    first = Live(micrograph(grey), features=FILTERS, names=("ground", "disc"), colors=((1, 2, 3), (4, 5, 6)))
    expected = first.update(scribbles(grey))
    first.save(tmp_path / "m.vispe")
    live = Live(micrograph(grey), model=tmp_path / "m.vispe")
    assert (live.names, live.colors, live.ready) == (("ground", "disc"), ((1, 2, 3), (4, 5, 6)), True)
    np.testing.assert_array_equal(live.predict().prob, expected.prob)
    new_labels = scribbles(grey, seed=1)
    np.testing.assert_array_equal(live.update(new_labels).prob, first.update(new_labels).prob)
    with pytest.raises(OptionError, match="features, seed cannot be combined with a model"):
        Live(micrograph(grey), model=tmp_path / "m.vispe", features=FILTERS, seed=1)
    with pytest.raises(InputError, match=r"image has 3 channels, but the model was trained with 1"):
        Live(micrograph(np.stack([grey] * 3, -1), "YXC"), model=tmp_path / "m.vispe")


def test_cluster_models_predict_and_text_models_raise(tmp_path):
    from PIL import Image

    grey = synthetic_image(48, 56)
    Image.fromarray(grey).save(tmp_path / "a.png")
    pipeline.segment([tmp_path / "a.png"], tmp_path / "out", cluster=2, features=FILTERS)
    live = Live(micrograph(grey), model=tmp_path / "out" / "model.vispe")
    segmentation = np.asarray(Image.open(tmp_path / "out" / "a_seg.png"))
    assert (live.predict().labels == segmentation).mean() > 0.999
    assert live.update(scribbles(grey)).prob.shape == (2, 48, 56)
    assert live.model.classifier.kind == "ensemble"
    text_model = Model(
        object(), live.model.classifier, ("a", "b"), None, "stack", (0.5, 99.5), None, 0, None, {}
    )
    with pytest.raises(InputError, match="classifies by text prompts"):
        Live(micrograph(grey), model=text_model)


@pytest.mark.slow
def test_updates_depend_on_the_current_labels_only():
    grey = synthetic_image(70, 64)
    image = micrograph(grey)
    live = Live(image, features=TILED)
    three_classes, two_classes = scribbles(grey, 3), scribbles(grey, 2, seed=3)
    live.update(three_classes)
    actual = live.update(two_classes)
    assert len(live.names) == 3  # class names are not removed, as the colours of a palette
    assert (actual.prob[2] == 0).all()
    fresh = Live(image, features=TILED).update(two_classes)
    np.testing.assert_array_equal(actual.prob[:2], fresh.prob)
    np.testing.assert_array_equal(
        live.update(three_classes).prob, Live(image, features=TILED).update(three_classes).prob
    )


@pytest.mark.slow
@pytest.mark.parametrize("config", [pytest.param(TILED, id="vispe_micro"), TIMM])
def test_pages_of_a_stack_share_one_classifier(config):
    pages = np.stack([synthetic_image(66, 80, seed) for seed in range(3)])
    image = micrograph(pages, "ZYX", "stack.tif")
    labels = np.zeros(pages.shape, np.uint8)
    labels[0], labels[2] = scribbles(pages[0]), scribbles(pages[2], seed=1)
    expected, _ = segment_uncached(image, labels, config, "logistic")
    live = Live(image, page=1, features=config, classifier="logistic")
    assert_predictions_close(live.update(labels), expected[1])
    live.select_page(2)
    assert_predictions_close(live.predict(), expected[2])
    assert_predictions_close(live.predict(0), expected[0])
    single_page = np.zeros(pages.shape, np.uint8)
    single_page[2] = labels[2]
    fresh = Live(image, page=2, features=config, classifier="logistic").update(single_page)
    live.draw(np.zeros_like(labels[0]), page=0)
    np.testing.assert_array_equal(live.update(labels[2]).prob, fresh.prob)
    assert live.model.notes["pages"] == [2]
    assert live.model.notes["images"] == ["stack.tif"]


@pytest.mark.parametrize("kind", [pytest.param("forest", marks=pytest.mark.slow), "boosting"])
def test_tree_classifiers_equal_those_of_the_command(kind):
    grey = synthetic_image(40, 37)
    labels = scribbles(grey)
    image = micrograph(grey)
    (expected,), _ = segment_uncached(
        image, labels[None], FILTERS, kind, PostProcessing(smooth=1, min_area=4)
    )
    actual = Live(image, features=FILTERS, classifier=kind, post=PostProcessing(smooth=1, min_area=4)).update(
        labels
    )
    np.testing.assert_array_equal(actual.prob, expected.prob)
    np.testing.assert_array_equal(actual.labels, expected.labels)


def test_invalid_pixels_and_colour_images_are_supported():
    grey = synthetic_image(60, 72).astype(np.float32)
    labels = scribbles(grey)
    grey[10:20, 30:50] = np.nan
    grey[0, 0] = np.inf
    image = micrograph(grey)
    messages: list[str] = []
    live = Live(image, features=TILED, classifier="logistic", watch=messages.append)
    actual = live.update(labels)
    (expected,), _ = segment_uncached(image, labels[None], TILED, "logistic")
    assert_predictions_close(actual, expected)
    assert (actual.labels[10:20, 30:50] == 0).all()
    n_invalid = int((labels[~image.valid[0]] > 0).sum())
    assert n_invalid
    assert messages == live.notes
    assert f"{n_invalid} labelled pixels of page 0 have no data and are ignored." in messages

    colour = np.stack([synthetic_image(48, 50, s) for s in range(3)], -1)
    image = micrograph(colour, "YXC")
    (expected,), _ = segment_uncached(image, scribbles(colour[..., 0])[None], TILED, "logistic")
    live = Live(image, features=TILED, classifier="logistic")
    assert_predictions_close(live.update(scribbles(colour[..., 0])), expected)


def test_other_pages_are_segmented_with_the_model():
    grey = synthetic_image(64, 80)
    live = Live(micrograph(grey), features=TILED)
    live.update(scribbles(grey))
    page, valid = live.normalized()
    rotated = live.segment(np.ascontiguousarray(np.rot90(page)), np.ascontiguousarray(np.rot90(valid)))
    assert rotated.prob.shape == (2, 80, 64)
    assert (np.rot90(live.predict().labels) == rotated.labels).mean() > 0.97


def test_memory_is_reported_and_limited():
    grey = synthetic_image(96, 128)
    live = Live(micrograph(grey), features=TILED)
    pages = grey.size * 4
    assert live.nbytes == pages
    live.compute()
    tiles = 2 * 3 * 64 * 64  # of 64 px with at least an eighth of overlap
    assert live.nbytes == pages + 4 * (11 * grey.size + tiles * 32 // 4)
    live.compute()
    with pytest.raises(InputError, match=r"features of 96 x 128 px need 0.0 GiB of memory, limit 0.0 GiB"):
        Live(micrograph(grey), features=TILED, memory=1000).compute()


def test_features_are_computed_once(monkeypatch):
    calls = []
    original = CachedFeatures._load

    def load(self, config):
        model = original(self, config)
        call = type(model).__call__
        monkeypatch.setattr(type(model), "__call__", lambda *a, **k: (calls.append(1), call(*a, **k))[1])
        return model

    monkeypatch.setattr(CachedFeatures, "_load", load)
    grey = synthetic_image(64, 64)
    live = Live(micrograph(grey), features=TILED)
    live.update(scribbles(grey))
    assert len(calls) == 1
    live.update(scribbles(grey, seed=1))
    live.predict()
    assert len(calls) == 1


@pytest.mark.parametrize(
    "config", [pytest.param(FILTERS, id="filters"), pytest.param(TILED, id="vispe_micro"), TIMM]
)
def test_features_are_gathered_for_new_labels_only(monkeypatch, config):
    grey = synthetic_image(96, 70)
    live, n_gathered = Live(micrograph(grey), features=config), []
    look_up = live._look_up
    monkeypatch.setattr(live, "_look_up", lambda page, i: (n_gathered.append(len(i)), look_up(page, i))[1])
    labels = scribbles(grey)
    live.draw(labels)
    live.fit()
    modified = labels.copy()
    modified[:, 20:30], modified[50] = 0, 1
    new = ((modified > 0) & (labels == 0)).sum()
    for drawing in (modified, modified, labels):
        live.draw(drawing)
        live.fit()
        fresh = Live(micrograph(grey), features=config)
        fresh.draw(drawing)
        fresh.fit()
        np.testing.assert_array_equal(
            live.gather_labelled(live.labelled()), fresh.gather_labelled(fresh.labelled())
        )
    assert n_gathered == [(labels > 0).sum(), new, ((labels > 0) & (modified == 0)).sum()]


@cases(
    ("labels", "error", "text"),
    [
        (
            np.zeros((9, 8), int),
            ShapeError,
            r"labels must be 40 x 37 for one page or 1 x 40 x 37 for all, got shape",
        ),
        (np.zeros((40, 37)), InputError, "labels must be integers, 0 = unlabelled, got float64"),
        (
            np.full((40, 37), 21),
            InputError,
            "labels must be 1 to 20, 0 = unlabelled, got 21 to 21. Label",
        ),
        (np.full((40, 37), -1), InputError, "labels must be 1 to 20, 0 = unlabelled, got -1 to -1"),
        (
            np.full((40, 37), 2),
            InputError,
            r"need at least 2 labelled classes, got 1 \(disc\). Label the others",
        ),
        (np.zeros((40, 37), int), InputError, r"need at least 2 labelled classes, got 0 \(none\)"),
    ],
)
def test_invalid_labels_raise(labels, error, text):
    live = Live(micrograph(synthetic_image(40, 37)), features=FILTERS, names=("ground", "disc"))
    with pytest.raises(error, match=text):
        live.update(labels)
    assert not live.ready


def test_prediction_without_a_model_and_unknown_pages_raise(tmp_path):
    live = Live(micrograph(synthetic_image(40, 37)), features=FILTERS)
    for call in (live.predict, lambda: live.save(tmp_path / "m.vispe")):
        with pytest.raises(InputError, match=r"there is no model yet\. Label at least 2 classes"):
            call()
    with pytest.raises(InputError, match=r"page 1 does not exist in image, which has pages 0 to 0"):
        live.select_page(1)
    with pytest.raises(InputError, match="page -1 does not exist"):
        live.predict(-1)
    with pytest.raises(
        OptionError, match="filters_3d needs neighbouring pages, but a live session uses a single page"
    ):
        Live(micrograph(synthetic_image(40, 37)), features=FeatureConfig(filters_3d=True))
    with pytest.raises(OptionError, match=r"kind must be one of .* got 'forrest'"):
        Live(micrograph(synthetic_image(40, 37)), classifier="forrest")


def test_arrays_are_converted_to_micrographs():
    grey = synthetic_image(12, 15)
    assert micrograph(grey).pages.shape == (1, 12, 15, 1)
    np.testing.assert_array_equal(micrograph(grey > 100).pages[0, ..., 0], (grey > 100) * np.uint8(255))
    array_5d = np.arange(2 * 3 * 4 * 5 * 3).reshape(2, 3, 4, 5, 3).astype(">u2")
    image = micrograph(array_5d, "TZYXC", "t")
    assert image.pages.dtype == np.uint16
    assert image.path == Path("t")
    np.testing.assert_array_equal(image.pages, array_5d.reshape(6, 4, 5, 3))
    np.testing.assert_array_equal(micrograph(array_5d[0, 0], "CYX").pages[0, ..., 1], array_5d[0, 0, 1])
    with pytest.raises(
        ShapeError, match=r"axes=YX must have one letter per dimension, with Y and X, for an array of shape"
    ):
        micrograph(array_5d[0])
    with pytest.raises(ShapeError, match="axes=ZZX"):
        micrograph(array_5d[0, 0], "ZZX")
    with pytest.raises(InputError, match="image has dtype complex64 instead of grey levels"):
        micrograph(np.zeros((4, 4), np.complex64))
    with pytest.raises(InputError, match="image has no data"):
        micrograph(np.full((4, 4), np.nan))


def test_models_contain_a_summary_of_their_labelled_pages(tmp_path):
    rng = np.random.default_rng(4)
    grey = np.rint(100 + 40 * np.sin(np.mgrid[:150, :170][1] / 9) + rng.normal(0, 9, (150, 170))).astype(
        np.uint8
    )
    labels = np.zeros(grey.shape, np.uint8)
    labels[20:24, 10:60], labels[90:94, 20:70] = 1, 2
    Image.fromarray(grey).save(tmp_path / "a.png")
    Image.fromarray(labels).save(tmp_path / "l.png")
    live = Live(micrograph(grey), features=FeatureConfig(sigmas=(1.0, 2.0)))
    live.update(labels)
    first = live.model.domain
    assert first is not None
    labels[100:104, 100:140] = 1
    live.update(labels)
    assert live.model.domain is first  # pages are the same
    pipeline.segment(
        [tmp_path / "a.png"], tmp_path / "out", labels=[tmp_path / "l.png"], features=live.model.features
    )
    expected = load_model(tmp_path / "out" / pipeline.MODEL_NAME).domain
    for name, value in live.model.domain.tensors().items():
        np.testing.assert_array_equal(value, expected.tensors()[name])
