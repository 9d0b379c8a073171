"""Class priors: independent of order, accurate on simulated data, applied to labels, fractions and models."""

import json
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from tests.cases import cases
from tests.products import slow_except
from tests.segment.model.test_prediction import fit_classifier, predict, scene
from vispe.errors import OptionError
from vispe.segment import pipeline
from vispe.segment.classify import probability_histogram
from vispe.segment.classify.calibration import calibrate, calibration_error, calibration_note, label_scribbles
from vispe.segment.classify.class_prior import areas, estimate, interval, reweigh, tempered, weights
from vispe.segment.classify.pixel_classifier import KINDS, PixelClassifier
from vispe.segment.classify.probability_histogram import Counts, count, merge
from vispe.segment.features.feature_config import FeatureConfig
from vispe.segment.features.pixel_features import Features
from vispe.segment.model.model_file import load_model, save_model
from vispe.segment.model.prediction import estimate_areas
from vispe.segment.run.reports.image_record import vanishing_class_notes
from vispe.segment.types import PostProcessing


def mixture(shares, n=60_000, seed=0, distance=2.5):
    """Draw classes with these frequencies -> classes (n,), probabilities (K, n) float32 under equal priors."""
    rng = np.random.default_rng(seed)
    classes = rng.choice(len(shares), n, p=shares)
    centres = distance * np.eye(len(shares))
    x = centres[classes] + rng.normal(size=(n, len(shares)))
    log = -0.5 * ((x[:, None] - centres) ** 2).sum(-1)
    prob = np.exp(log - log.max(1, keepdims=True))
    return classes, (prob / prob.sum(1, keepdims=True)).T.astype(np.float32)


@cases("shares", [(0.97, 0.03), (0.5, 0.5), (0.7, 0.28, 0.02), (0.4, 0.3, 0.15, 0.1, 0.05)])
def test_class_frequencies_of_a_mixture_are_estimated(shares):
    classes, prob = mixture(shares)
    actual = count(prob)
    prior = estimate(actual)
    true = np.bincount(classes) / classes.size
    np.testing.assert_allclose(prior, true, atol=0.004)
    # the estimate is a fixed point of EM, computed with a direct sum over all pixels
    q = prob.astype(np.float64) * prior[:, None]
    np.testing.assert_allclose((q / q.sum(0)).mean(1), prior, atol=0.003)
    pixels, std = areas(actual, prior)
    assert pixels.sum() == pytest.approx(classes.size)
    hard = np.bincount((prob * prior[:, None].astype(np.float32)).argmax(0), minlength=len(shares))
    np.testing.assert_allclose(pixels, hard, atol=0.006 * classes.size)
    for k, frequency in enumerate(true):
        low, high = interval(pixels[k] / classes.size, std[k] / classes.size)
        assert 0 <= low <= frequency <= high <= 1


@pytest.mark.slow
@cases("classes", [2, 3, 9, 30])
def test_histograms_are_independent_of_order_and_splits(classes):
    shares = np.arange(1, classes + 1) / sum(range(1, classes + 1))
    _, prob = mixture(shares, 6003 if classes == 30 else 50_001, distance=1.5)
    prob[:, ::7] = 0  # no data
    expected, rng = count(prob), np.random.default_rng(1)
    cuts = np.sort(rng.integers(0, prob.shape[1], 9))
    histograms = [count(p) for p in np.split(prob[:, rng.permutation(prob.shape[1])], cuts, axis=1)]
    for actual in (
        merge(histograms),
        merge(histograms[::-1]),
        count(prob.reshape(classes, 3, -1)[..., ::-1]),
    ):
        assert actual.level == expected.level
        np.testing.assert_array_equal(actual.codes, expected.codes)
        np.testing.assert_array_equal(actual.counts, expected.counts)
        assert estimate(actual).tobytes() == estimate(expected).tobytes()
    assert expected.counts.sum() == (prob.sum(0) > 0).sum()
    assert len(expected.counts) <= 1 << 17


@cases("classes", [2, 3, 4, 5, 8, 9, 14])
def test_a_histogram_counts_each_pixel(classes):
    rng = np.random.default_rng(classes)
    prob = rng.integers(0, 3, (classes, 400)).astype(np.float32)
    prob = (prob / np.maximum(prob.sum(0), 1)).astype(np.float32)
    pixels = [count(column[:, None]) for column in prob.T]
    for column, pixel in zip(prob.T, pixels, strict=True):
        if column.any():
            np.testing.assert_allclose(pixel.probabilities()[0], column, atol=0.03)
    expected = Counter(tuple(pixel.codes[0]) for pixel in pixels if len(pixel.counts))
    actual = count(prob)
    assert [tuple(codes) for codes in actual.codes] == sorted(expected)
    assert dict(zip(map(tuple, actual.codes), actual.counts, strict=True)) == expected


def test_coarsened_histograms_are_independent_of_order(monkeypatch):
    monkeypatch.setattr(probability_histogram.coarsened, "__defaults__", (300,))
    _, prob = mixture((0.5, 0.3, 0.2), 20_000)
    expected = count(prob)
    assert 0 < expected.level < 7
    assert len(expected.counts) <= 300
    histograms = [count(part) for part in np.split(prob, 40, axis=1)]
    # histograms of small parts are finer than that of the image
    assert {part.level for part in histograms} != {expected.level}
    for actual in (merge(histograms), merge(histograms[::-1])):
        np.testing.assert_array_equal(actual.codes, expected.codes)
        np.testing.assert_array_equal(actual.counts, expected.counts)
    np.testing.assert_allclose(estimate(expected), (0.5, 0.3, 0.2), atol=0.03)


def test_quantised_odds_are_accurate_to_seven_percent():
    prob = np.geomspace(2.0**-15, 1, 999).astype(np.float32)
    for p in prob[:-1]:
        actual = count(np.array([[p], [1 - p]], np.float32)).probabilities()[0]
        if p < 0.5:
            assert actual[0] / actual[1] == pytest.approx(p / (1 - p), rel=0.07)


def test_estimates_for_empty_images_and_absent_classes():
    empty = count(np.zeros((3, 4, 5), np.float32))
    assert (len(empty.counts), estimate(empty).tolist()) == (0, [1 / 3] * 3)
    assert areas(empty, np.full(3, 1 / 3))[0].tolist() == [0, 0, 0]
    histogram = count(np.array([[0.9, 0.2], [0, 0], [0.1, 0.8]], np.float32))
    assert estimate(histogram)[1] == 0
    certain = count(np.array([[1.0, 1.0], [0.0, 0.0]], np.float32))
    np.testing.assert_allclose(estimate(certain), [1, 0])
    # a single certain pixel in a million does not get probability 0
    rare = estimate(Counts(count(np.float32([[1, 0.01], [0, 0.99]])).codes, np.array([1, 10**6])))
    assert rare.min() == pytest.approx(1e-3, rel=0.01)


def test_weights_and_temperature_follow_their_formulas():
    prior = np.array([0.81, 0.09, 0.1])
    np.testing.assert_allclose(weights(prior, "em"), prior / 0.81, rtol=1e-6)
    np.testing.assert_allclose(weights(prior, "sqrt"), np.sqrt(prior / 0.81), rtol=1e-6)
    assert weights(prior, "uniform") is None
    _, prob = mixture((0.6, 0.3, 0.1), 500)
    prob[:, 3] = 0
    original = prob.copy()
    actual = reweigh(prob, weights(prior, "em"))
    expected = original * prior[:, None]
    np.testing.assert_allclose(actual, expected / np.maximum(expected.sum(0), 1e-30), atol=1e-6)
    assert (actual[:, 3] == 0).all()
    softened = tempered(original, 2.0)
    root = np.sqrt(original.astype(np.float64))
    np.testing.assert_allclose(softened, root / np.maximum(root.sum(0), 1e-30), atol=1e-6)
    assert tempered(original, 1.0) is original


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "shares"), [("logistic", (0.9, 0.07, 0.03)), *((k, (0.4, 0.3, 0.3)) for k in KINDS)]
)
def test_classifiers_assume_equal_class_frequencies(kind, shares):
    """On balanced new pixels all classes have equal mean probability; for logistic also after unbalanced training."""
    rng = np.random.default_rng(0)
    classes = rng.choice([1, 2, 3], 4000, p=shares)
    features = (2.0 * np.eye(3)[classes - 1] + rng.normal(size=(4000, 3))).astype(np.float32)
    actual = PixelClassifier(kind, 3).fit(features, classes)
    fresh = np.repeat([1, 2, 3], 4000)
    prob = actual.probabilities(
        (2.0 * np.eye(3)[fresh - 1] + rng.normal(size=(12_000, 3))).astype(np.float32)
    )
    np.testing.assert_allclose(prob.mean(0), 1 / 3, atol=0.03)


def test_scribbles_are_connected_components_of_one_class_and_page():
    labels = np.zeros((2, 5, 6), int)
    labels[0, 0, :2], labels[0, 1, 2], labels[0, 1, 5], labels[0, 2, 0] = 1, 1, 1, 1
    labels[0, 2:4, 3], labels[0, 4, :], labels[1, 0, :] = 2, 1, 1
    positions = np.flatnonzero(labels)
    scribble_ids = label_scribbles(positions, labels.ravel()[positions], (5, 6))
    from skimage.measure import label

    expected = np.stack([label(page, connectivity=2) + 100 * z for z, page in enumerate(labels)]).ravel()[
        positions
    ]
    assert (
        len(np.unique(scribble_ids))
        == len(np.unique(expected))
        == len(set(zip(scribble_ids, expected, strict=True)))
        == 6
    )


def test_calibration_uses_held_out_scribbles_and_flattens():
    rng = np.random.default_rng(0)
    scribble_ids = np.repeat(np.arange(24), 40)
    classes = 1 + scribble_ids % 2
    stroke_offsets = rng.normal(size=(24, 8))[scribble_ids] * 1.5  # shared by the pixels of a scribble
    features = (
        stroke_offsets + 0.1 * rng.normal(size=(960, 8)) + np.eye(8)[0] * (classes[:, None] - 1)
    ).astype(np.float32)
    actual = PixelClassifier("logistic", 2).fit(features, classes)
    calibration = calibrate(actual, features, classes, scribble_ids, names=("dark", "bright"))
    assert calibration["folds"] == 5
    assert calibration["strokes"] == {"dark": 12, "bright": 12}
    assert actual.temperature == calibration["temperature"] > 1.1
    assert 0 <= calibration["expected_calibration_error"] <= 1
    assert calibration_note(calibration) is None
    training_error = calibration_error(actual.probabilities(features), classes, np.full(960, 1 / 960))
    assert calibration["before"] > training_error  # the error on training scribbles is too small
    classifier = PixelClassifier("logistic", 2).fit(features, classes)
    calibration = calibrate(
        classifier, features, classes, np.where(classes == 1, 0, scribble_ids), names=("dark", "bright")
    )
    assert (classifier.temperature, calibration["expected_calibration_error"]) == (1.0, None)
    assert "class 'dark' has one scribble" in calibration_note(calibration)


@pytest.mark.slow
@cases("kind", ["logistic", "forest"])
def test_labels_are_weighted_by_the_prior_of_their_page(kind):
    page, valid = scene(75, 90, holes=True)
    features = Features(FeatureConfig(tile=40))
    classifier = fit_classifier(features, page, valid, kind, 3)
    plain = predict(features, page, valid, classifier, PostProcessing(prior="uniform"))
    assert plain.areas is None
    prior = estimate(count(plain.prob))
    for prior_kind in ("sqrt", "em"):
        actual = predict(features, page, valid, classifier, PostProcessing(prior=prior_kind))
        np.testing.assert_array_equal(actual.areas.priors[0], prior)
        expected = reweigh(plain.prob.copy(), weights(prior, prior_kind))
        np.testing.assert_array_equal(actual.prob, expected)
        np.testing.assert_array_equal(actual.labels[valid], expected.argmax(0)[valid] + 1)
        top = np.sort(expected, axis=0)[-2:]
        np.testing.assert_array_equal(actual.uncertainty[valid], (1 - (top[1] - top[0]))[valid])
        rotated = predict(
            features,
            np.rot90(page).copy(),
            np.rot90(valid).copy(),
            classifier,
            PostProcessing(prior=prior_kind),
        )
        np.testing.assert_allclose(rotated.areas.priors[0], prior, atol=1e-4)
    assert (
        predict(features, page, valid, classifier).prob.tobytes()
        == predict(features, page, valid, classifier, PostProcessing(prior="sqrt")).prob.tobytes()
    )


@pytest.fixture
def rare(tmp_path):
    """A noisy image with a class of 4 % of the area, its scribbles and its truth."""
    rng = np.random.default_rng(0)
    truth = np.zeros((160, 200), np.uint8)
    for y, x in rng.integers(8, 150, (18, 2)):
        truth[y - 4 : y + 4, x - 4 : x + 4] = 1
    grey = np.clip(90 + 60 * truth + rng.normal(0, 32, truth.shape), 0, 255).astype(np.uint8)
    scribbles = np.zeros_like(truth)
    for k, expected in ((0, 12), (1, 8)):
        for y, x in rng.permutation(np.argwhere(truth == k))[:expected]:
            scribble = scribbles[y, max(x - 3, 0) : x + 4]
            scribble[truth[y, max(x - 3, 0) : x + 4] == k] = k + 1
    for name, values in {"a": grey, "a_labels": scribbles, "a_truth": truth}.items():
        Image.fromarray(values).save(tmp_path / f"{name}.png")
    return tmp_path


def test_report_has_fractions_with_intervals_and_calibration(rare):
    def run(out, **post):
        return pipeline.segment(
            [rare / "a.png"], rare / out, labels=[rare / "a_labels.png"], post=PostProcessing(**post),
            features=FeatureConfig(sigmas=(1.0, 2.0)), scoring=pipeline.ScoreOptions([rare / "a_truth.png"]),
        ).as_dict()  # fmt: skip

    plain, actual = run("plain", prior="uniform"), run("sqrt")
    uniform_record, record = plain["images"][0], actual["images"][0]
    true = float((np.asarray(Image.open(rare / "a_truth.png")) > 0).mean())
    assert abs(record["fractions"]["class 2"] - true) < abs(uniform_record["fractions"]["class 2"] - true)
    low, high = record["fractions_ci95"]["class 2"]
    assert low <= true <= high
    assert low <= record["fractions"]["class 2"] <= high
    assert uniform_record["fractions_ci95"] is None
    assert uniform_record["fractions"] == uniform_record["map_fractions"]
    labels = np.asarray(Image.open(rare / "sqrt" / "a_seg.png"))
    assert record["map_fractions"]["class 2"] == (labels == 2).mean()
    assert record["scores"]["fraction_error_pp"]["class 2"] == pytest.approx(
        100 * (record["fractions"]["class 2"] - true)
    )
    assert actual["summary"]["fraction_mean_abs_error_pp"]["n"] == 1
    assert actual["summary"]["miou"]["ci95"] is None
    assert (actual["post"]["prior"], plain["post"]["prior"]) == ("sqrt", "uniform")
    calibration = actual["training"]["calibration"]
    assert calibration["folds"] == 5
    assert 0 <= calibration["expected_calibration_error"] < 0.5
    header, row = (rare / "sqrt" / "report.csv").read_text().splitlines()
    cells = dict(zip(header.split(","), row.split(","), strict=True))
    assert float(cells["fraction_low.class 2"]) == low
    assert float(cells["fraction_high.class 2"]) == high
    assert float(cells["expected_calibration_error"]) == calibration["expected_calibration_error"]


@pytest.mark.slow
def test_boosting_has_fractions_but_no_intervals(rare):
    report = pipeline.segment(
        [rare / "a.png"], rare / "out", labels=[rare / "a_labels.png"], classifier="boosting",
        features=FeatureConfig(sigmas=(1.0,)),
    )  # fmt: skip
    record = report.images[0]
    assert record["fractions_ci95"] is None
    assert sum(record["fractions"].values()) == pytest.approx(1)
    assert record["priors"][0]["class 2"] < 0.5
    assert "fraction_low" not in (rare / "out" / "report.csv").read_text()


def test_clusters_have_no_prior(rare):
    with pytest.raises(OptionError, match="prior='em' has no effect on clusters and text prompts"):
        pipeline.segment([rare / "a.png"], rare / "out", cluster=2, post=PostProcessing(prior="em"))
    with pytest.raises(
        OptionError, match=r"prior must be one of sqrt, em, uniform, got 'squrt'\. Did you mean 'sqrt'"
    ):
        PostProcessing(prior="squrt")
    assert not (rare / "out").exists()
    report = pipeline.segment([rare / "a.png"], rare / "out", cluster=2, features=FeatureConfig())
    assert report.images[0]["fractions_ci95"] is None


@pytest.mark.parametrize("kind", slow_except(["logistic", "forest"], ["logistic"]))
def test_temperature_is_stored_in_the_model_file(rare, kind):
    pipeline.segment(
        [rare / "a.png"],
        rare / "out",
        labels=[rare / "a_labels.png"],
        classifier=kind,
        features=FeatureConfig(),
    )
    model = load_model(rare / "out" / "model.vispe")
    model.classifier.temperature = 2.5
    actual = load_model(save_model(rare / "hot.vispe", model)).classifier
    assert actual.temperature == 2.5
    features = np.random.default_rng(0).normal(100, 50, (200, 26)).astype(np.float32)
    hot = actual.probabilities(features)
    model.classifier.temperature = 1.0
    plain = model.classifier.probabilities(features).astype(np.float64) ** 0.4
    np.testing.assert_allclose(hot, plain / plain.sum(1, keepdims=True), atol=1e-5)
    save_model(rare / "plain.vispe", model)
    assert load_model(rare / "plain.vispe").classifier.temperature == 1


@pytest.mark.slow
def test_cards_without_temperature_load_and_invalid_ones_raise(rare, tmp_path):
    from vispe.segment.model.card_checks import check_card

    pipeline.segment([rare / "a.png"], rare / "out", labels=[rare / "a_labels.png"], features=FeatureConfig())
    import zipfile

    with zipfile.ZipFile(rare / "out" / "model.vispe") as archive:
        card = json.loads(archive.read("card.json"))
    check_card(tmp_path, {key: value for key, value in card.items() if key != "temperature"})
    for invalid in (0, 0.5, -1, 21, "1", None, True):
        with pytest.raises(Exception, match=r"temperature=.* in its card must be a number from 1 to 20"):
            check_card(tmp_path, {**card, "temperature": invalid})


def test_classes_nearly_removed_by_the_prior_are_noted():
    rng = np.random.default_rng(0)
    grey = rng.normal(size=100_000)
    likely = (1 / (1 + np.exp(0.9 - 0.6 * grey))).astype(np.float32)  # classes that are hard to distinguish
    actual = estimate_areas(count(np.stack([1 - likely, likely])))
    assert actual.unweighed[1] > 0.05 * len(grey)
    assert actual.pixels[1] < 0.1 * actual.unweighed[1]
    (note,) = vanishing_class_notes(actual, ("matrix", "pores"))
    assert "class 'pores' is most probable for" in note
    assert "but only 0.0 % remain" in note
    assert "prior=uniform" in note
    assert vanishing_class_notes(None, ("matrix", "pores")) == []
    total = actual + actual
    assert np.array_equal(total.unweighed, 2 * actual.unweighed)
    certain = np.where(rng.random(100_000) < 0.3, 0.99, 0.01).astype(np.float32)
    assert (
        vanishing_class_notes(estimate_areas(count(np.stack([1 - certain, certain]))), ("matrix", "pores"))
        == []
    )


def test_calibration_error_uses_bins_of_equal_width():
    rng = np.random.default_rng(0)
    top = rng.uniform(0.5, 1, 3000).astype(np.float32)
    prob, classes = np.stack([top, 1 - top], 1), rng.integers(1, 3, 3000)
    # correct above a confidence of 14 / 15, wrong in the bin below: merged bins would cancel
    classes[top > 14 / 15], classes[(top > 13 / 15) & (top <= 14 / 15)] = 1, 2
    weight = rng.uniform(size=3000)
    weight /= weight.sum()
    expected = 0.0
    for k in range(15):
        inside = (k / 15 <= top) & ((top < (k + 1) / 15) | (k == 14))
        expected += abs((weight * (top - (classes == 1)))[inside].sum())
    assert calibration_error(prob, classes, weight) == pytest.approx(expected, abs=2e-4)
