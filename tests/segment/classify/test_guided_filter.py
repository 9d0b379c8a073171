import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.cases import cases
from vispe.cli.main import main
from vispe.segment.classify.guided_filter import PENALTY, RADIUS, clean
from vispe.segment.features.feature_config import FeatureConfig
from vispe.segment.pipeline import PostProcessing, segment

FILTERS = FeatureConfig(sigmas=(1.0, 2.0))


def probabilities(shape, classes=3, seed=0):
    rng = np.random.default_rng(seed)
    prob = rng.random((classes, *shape)) ** 3
    return (
        (prob / prob.sum(0)).astype(np.float32),
        rng.random(shape).astype(np.float32),
        rng.random(shape) < 0.9,
    )


def naive(prob, grey, valid):
    """Compute the guided filter with plain loops: a least-squares line per window, averaged over windows of a pixel."""
    h, w = valid.shape
    reflected = [np.pad(np.arange(n), RADIUS, mode="symmetric") for n in (h, w)]
    windows = {}
    for y in range(h):
        for x in range(w):
            ys, xs = (r[c : c + 2 * RADIUS + 1] for r, c in zip(reflected, (y, x), strict=True))
            windows[y, x] = [(a, b) for a in ys for b in xs if valid[a, b]]
    filtered = np.zeros(prob.shape)
    for k, plane in enumerate(prob.astype(float)):
        lines = {}
        for pixel, inside in windows.items():
            g = np.array([grey[p] for p in inside], float)
            q = np.array([plane[p] for p in inside])
            if len(g):
                slope = np.mean((g - g.mean()) * (q - q.mean())) / (g.var() + PENALTY)
                lines[pixel] = slope, q.mean() - slope * g.mean()
        for pixel in zip(*np.nonzero(valid), strict=True):
            fits = np.mean([lines[p] for p in windows[pixel]], 0)
            filtered[k][pixel] = max(fits[0] * grey[pixel] + fits[1], 0)
    return filtered / np.where(valid, filtered.sum(0), 1)


def test_filter_equals_plain_loops():
    prob, grey, valid = probabilities((13, 17))
    prob = prob * valid
    expected = naive(prob, grey, valid)
    np.testing.assert_allclose(clean(prob.copy(), grey, valid), expected, atol=2e-6)


def test_probabilities_of_valid_pixels_sum_to_one():
    prob, grey, valid = probabilities((30, 41), 4, 1)
    actual = clean((prob * valid).astype(np.float32), grey, valid)
    np.testing.assert_allclose(actual.sum(0), valid, atol=1e-6)
    assert actual.min() >= 0
    assert actual.dtype == np.float32
    assert not clean(np.zeros((2, 9, 9), np.float32), grey[:9, :9], np.zeros((9, 9), bool)).any()


@cases("mirror", [False, True])
@cases("quarters", range(4))
def test_filter_is_exactly_d4_equivariant(quarters, mirror):
    def pose(array):
        array = np.rot90(array, quarters, (-2, -1))
        return (array[..., ::-1] if mirror else array).copy()

    prob, grey, valid = probabilities((37, 52))
    prob = prob * valid
    actual = clean(pose(prob), pose(grey), pose(valid))
    np.testing.assert_array_equal(actual, pose(clean(prob.copy(), grey, valid)))


def test_specks_are_removed_and_boundaries_move_to_edges():
    y, x = np.mgrid[:60, :80]
    truth = (x > 40) | ((y - 20) ** 2 + (x - 15) ** 2 < 81)
    grey = np.where(truth, 0.8, 0.2).astype(np.float32)
    noise = np.random.default_rng(0).random(truth.shape) < 0.1
    bright = np.where(np.roll(truth, 1, 1) ^ noise, 0.7, 0.3).astype(np.float32)
    prob = np.stack([1 - bright, bright])
    assert ((prob.argmax(0) > 0) != truth).mean() > 0.08
    np.testing.assert_array_equal(clean(prob, grey, np.ones(truth.shape, bool)).argmax(0) > 0, truth)


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(1)
    phase = (np.hypot(*(np.mgrid[:60, :90] % 30 - 15)) < 9).astype(np.uint8)
    grey = np.clip(90 + 60 * phase + rng.normal(0, 30, phase.shape), 0, 255).astype(np.uint8)
    scribbles = np.where(rng.random(phase.shape) < 0.05, phase + 1, 0).astype(np.uint8)
    for name, array in (("a", grey), ("a_labels", scribbles), ("mask", phase)):
        Image.fromarray(array).save(tmp_path / f"{name}.png")
        Image.fromarray(np.rot90(array)).save(tmp_path / f"turned_{name}.png")
    return tmp_path


def run(folder, out, image="a", post=None, tile=None):
    labels = folder / f"{image}_labels.png"
    features = FeatureConfig(sigmas=FILTERS.sigmas, tile=tile)
    post = PostProcessing(clean=True) if post is None else post
    segment([folder / f"{image}.png"], folder / out, labels=[labels], features=features, post=post)
    with Image.open(folder / out / f"{image}_seg.png") as actual:
        return np.array(actual)


@pytest.mark.slow
def test_result_is_independent_of_tiles_and_rotation_equivariant(folder):
    untiled = run(folder, "whole")
    np.testing.assert_array_equal(run(folder, "tiles", tile=32), untiled)
    np.testing.assert_array_equal(run(folder, "turned", "turned_a"), np.rot90(untiled))
    plain = run(folder, "plain", post=PostProcessing())
    assert 0 < (untiled != plain).mean() < 0.1


@pytest.mark.slow
def test_clean_is_an_option_of_segment_and_apply(folder, monkeypatch):
    monkeypatch.chdir(folder)
    command = "segment a.png --labels a_labels.png --features filters -o"
    assert main([*command.split(), "plain"]) == 0
    assert main(["apply", "plain/model.vispe", "a.png", "--clean", "-o", "one"]) == 0
    assert main([*command.split(), "two", "--clean"]) == 0
    first, second = (Path(name, "a_seg.png").read_bytes() for name in ("one", "two"))
    assert first == second != Path("plain/a_seg.png").read_bytes()
    assert json.loads(Path("one/report.json").read_text())["post"]["clean"] is True
