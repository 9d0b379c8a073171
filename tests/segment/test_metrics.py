"""Scores against manual calculations and scikit-learn."""

import json

import numpy as np
import pytest
from scipy.ndimage import distance_transform_edt
from sklearn.metrics import adjusted_rand_score, balanced_accuracy_score, f1_score, jaccard_score

from tests.cases import cases
from vispe.errors import InputError, ShapeError
from vispe.segment.metrics import adjusted_rand, apply_mapping, match_clusters, scores, summarize

RNG = np.random.default_rng(5)


def test_scores_equal_manual_calculation():
    truth = np.array([[1, 1, 1, 1], [2, 2, 2, 2], [2, 2, 0, 2]])
    pred = np.array([[1, 1, 1, 2], [2, 2, 2, 2], [2, 0, 1, 1]])
    actual = scores(pred, truth, 3, names=["m", "p", "q"])
    assert actual["n_pixels"] == 10
    assert actual["confusion"] == [[3, 1, 0], [1, 5, 0], [0, 0, 0]]
    assert actual["iou"] == {"m": 3 / 5, "p": 5 / 7, "q": None}
    assert actual["miou"] == pytest.approx((3 / 5 + 5 / 7) / 2)
    assert actual["dice"] == {"m": 6 / 8, "p": 10 / 12, "q": None}
    assert actual["mean_dice"] == pytest.approx((6 / 8 + 10 / 12) / 2)
    assert actual["pixel_accuracy"] == 0.8
    assert actual["balanced_accuracy"] == pytest.approx((3 / 4 + 5 / 6) / 2)
    assert actual["phase_fraction"]["truth"] == {"m": 0.4, "p": 0.6, "q": 0.0}
    assert actual["phase_fraction_error_pp"] == pytest.approx({"m": 0, "p": 0, "q": 0})
    json.dumps(actual, allow_nan=False)


@cases("shape", [(37, 53), (3, 17, 29), (1, 1)])
def test_scores_equal_scikit_learn(shape):
    truth, pred = RNG.integers(1, 5, shape), RNG.integers(1, 5, shape)
    ignore = RNG.random(shape) < 0.3
    ignore.flat[0] = False
    actual = scores(pred, truth, 4, ignore=ignore)
    t, p = truth[~ignore], pred[~ignore]
    present = np.union1d(t, p)
    assert actual["miou"] == pytest.approx(jaccard_score(t, p, labels=present, average="macro"))
    assert actual["mean_dice"] == pytest.approx(f1_score(t, p, labels=present, average="macro"))
    assert actual["pixel_accuracy"] == pytest.approx((t == p).mean())
    if shape != (1, 1):
        assert actual["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(t, p))
    error = [100 * ((p == c).mean() - (t == c).mean()) for c in range(1, 5)]
    assert list(actual["phase_fraction_error_pp"].values()) == pytest.approx(error)
    assert actual["phase_fraction_max_abs_error_pp"] == pytest.approx(max(map(abs, error)))
    assert adjusted_rand(pred, truth, ignore=ignore) == pytest.approx(adjusted_rand_score(t, p))


def test_perfect_predictions_score_1_and_absent_classes_none():
    truth = RNG.integers(1, 4, (21, 34))
    actual = scores(truth, truth, 5)
    assert (
        actual["miou"] == actual["mean_dice"] == actual["mean_boundary_f1"] == actual["pixel_accuracy"] == 1
    )
    assert actual["iou"]["class 4"] is None
    assert actual["phase_fraction_mean_abs_error_pp"] == 0
    ones = np.ones((5, 7), int)
    assert scores(ones, ones, 2)["mean_boundary_f1"] is None
    assert scores(ones, ones + 1, 2)["miou"] == 0


def naive_boundary_f1(pred, truth, valid, c, reach):
    def edge(page):
        out = np.zeros(page.shape, bool)
        for y, x in np.ndindex(page.shape):
            for v, u in ((y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)):
                if 0 <= v < page.shape[0] and 0 <= u < page.shape[1]:
                    out[y, x] |= page[v, u] > 0 and page[y, x] > 0 and page[v, u] != page[y, x]
        return out & (page == c)

    a, b = edge(pred), edge(truth)
    hit = [
        (x & valid & (distance_transform_edt(~y) <= reach)).sum() if y.any() else 0
        for x, y in ((a, b), (b, a))
    ]
    n = [(a & valid).sum(), (b & valid).sum()]
    precision, recall = (h / m if m else 0 for h, m in zip(hit, n, strict=True))
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


@cases("reach", [-1, np.nan])
def test_invalid_boundary_tolerances_raise(reach):
    with pytest.raises(InputError, match=r"boundary_px must be 0 or larger"):
        scores(np.ones((2, 3), int), np.ones((2, 3), int), 1, boundary_px=reach)


@cases("reach", [0, 1, 2, 3.5])
def test_boundary_f1_equals_a_naive_loop(reach):
    truth = np.ones((31, 45), int)
    truth[8:20, 10:30] = 2
    truth[25:, :] = 3
    pred = np.roll(truth, (1, 2), (0, 1))
    pred[0, :9] = 0
    ignore = RNG.random(truth.shape) < 0.2
    valid = ~ignore & (pred > 0) & (truth > 0)
    actual = scores(pred, truth, 3, ignore=ignore, boundary_px=reach)
    expected = [naive_boundary_f1(pred, truth, valid, c, reach) for c in (1, 2, 3)]
    assert list(actual["boundary_f1"].values()) == pytest.approx(expected)
    assert actual["mean_boundary_f1"] == pytest.approx(np.mean(expected))


def test_ignored_pixels_create_no_boundaries():
    truth = np.ones((20, 20), int)
    truth[:, 10:] = 2
    ignore = np.zeros(truth.shape, bool)
    ignore[3:6, 2:5] = True
    pred = truth.copy()
    pred[15:18, 2:5] = 0
    actual = scores(pred, truth, 2, ignore=ignore)
    assert actual["mean_boundary_f1"] == 1


def test_invalid_inputs_raise():
    a = np.ones((4, 5), int)
    with pytest.raises(ShapeError, match=r"the prediction has shape \(4, 5\), but truth has \(5, 4\)"):
        scores(a, a.T, 2)
    with pytest.raises(ShapeError, match=r"but ignore has \(2, 2\)"):
        scores(a, a, 2, ignore=np.ones((2, 2), bool))
    with pytest.raises(ShapeError, match=r"must have shape \(h, w\) or \(z, h, w\), got \(20,\)"):
        scores(a.ravel(), a.ravel(), 2)
    with pytest.raises(InputError, match=r"the prediction contains 3, outside 0 to n_classes=2"):
        scores(a * 3, a, 2)
    with pytest.raises(InputError, match=r"the truth contains -1, outside"):
        scores(a, -a, 2)
    with pytest.raises(InputError, match=r"the truth has dtype float64"):
        scores(a, a * 1.0, 2)
    with pytest.raises(InputError, match=r"got 1 names for n_classes=2"):
        scores(a, a, 2, names=["x"])
    with pytest.raises(InputError, match=r"no pixel to score"):
        scores(a, a, 2, ignore=a > 0)
    with pytest.raises(InputError, match=r"no pixel to score"):
        adjusted_rand(a, a * 0)


def test_clusters_are_matched_one_to_one():
    truth = RNG.integers(1, 5, (40, 30))
    shuffled = np.array([0, 3, 1, 4, 2])[truth]
    mapping = match_clusters(shuffled, truth, 4)
    assert mapping == {3: 1, 1: 2, 4: 3, 2: 4}
    np.testing.assert_array_equal(apply_mapping(shuffled, mapping), truth)
    assert adjusted_rand(shuffled, truth) == 1


def test_matching_is_optimal_not_greedy():
    truth = np.repeat([1, 2], [60, 40])[None]
    pred = np.concatenate([np.repeat([1, 2], [30, 30]), np.repeat([1], [40])])[None]
    mapping = match_clusters(pred, truth, 2)
    assert mapping == {1: 2, 2: 1}
    assert scores(apply_mapping(pred, mapping), truth, 2)["miou"] == pytest.approx((30 / 60 + 40 / 70) / 2)


def test_more_or_fewer_clusters_than_classes_are_matched():
    truth = np.repeat([1, 2], [30, 30])[None]
    pred = np.repeat([1, 2, 3, 4], [28, 2, 29, 1])[None]
    mapping = match_clusters(pred, truth, 2)
    assert mapping == {1: 1, 2: 3, 3: 2, 4: 4}
    actual = scores(apply_mapping(pred, mapping), truth, 4)
    assert actual["iou"]["class 3"] == 0
    assert match_clusters(np.ones((3, 4), int), np.full((3, 4), 3), 3) == {1: 3}
    assert (apply_mapping(np.zeros((2, 2), int), {1: 3}) == 0).all()
    for cluster, mapping in ((7, {1: 3}), (2, {1: 3, 3: 1}), (-1, {1: 3})):
        with pytest.raises(
            InputError, match=f"the label map contains cluster {cluster}, but the mapping has"
        ):
            apply_mapping(np.full((2, 2), cluster), mapping)
    with pytest.raises(InputError, match=r"the ground truth contains class 3, but n_classes=2"):
        match_clusters(np.full((2, 2), 4), np.full((2, 2), 3), 2)


def test_summary_statistics_equal_numpy():
    results = [{"miou": v, "iou": {"a.b": v / 2, "c": None}, "e": {"f": -v}} for v in (0.2, 0.4, 0.9)]
    actual = summarize(results, "miou")
    assert actual["n"] == 3
    assert actual["mean"] == pytest.approx(0.5)
    assert actual["median"] == 0.4
    assert actual["std"] == pytest.approx(np.std([0.2, 0.4, 0.9], ddof=1))
    assert actual["worst"] == 0.2
    assert actual["ci95"] == [pytest.approx(0.2), pytest.approx(0.9)]
    assert actual == summarize(results, "miou", seed=0)
    assert summarize(results, "iou.a.b")["worst"] == 0.1
    assert summarize(results, "e.f", higher_is_better=False)["worst"] == -0.9
    assert summarize(results, "iou.c") == {
        "n": 0, "mean": None, "median": None, "std": None, "worst": None, "ci95": None
    }  # fmt: skip
    assert summarize(results[:1], "miou")["std"] is None
    assert summarize(results[:1], "miou")["ci95"] is None  # no interval from a single image
    with pytest.raises(InputError, match=r"unknown score 'mioo'. Available scores: miou, iou, e"):
        summarize(results, "mioo")


def test_confidence_interval_covers_the_mean():
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(100):
        low, high = summarize([{"x": v} for v in rng.normal(1, 1, 30)], "x")["ci95"]
        inside += low <= 1 <= high
    assert 86 <= inside <= 100
