"""The correlation of similarity and distance, against loops with scipy, and models whose result is known."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.stats import pearsonr, spearmanr

from vispe import Grid
from vispe.errors import OptionError, ShapeError
from vispe.evaluate.features.similarity_distance import similarity_distance_correlation

correlate = similarity_distance_correlation


def slow(x, shape, spacing, method, distance, cells):
    positions = [np.array(c) * np.array(spacing) for c in itertools.product(*map(range, shape))]
    x = x - x.mean(0)
    similar, distances = [], []
    for i, j in itertools.combinations(range(len(x)), 2):
        similar.append(round(float(x[i] @ x[j] / np.linalg.norm(x[i]) / np.linalg.norm(x[j])), 9))
        step = np.abs(positions[cells[i]] - positions[cells[j]])
        distances.append(round(float(step.sum() if distance == "manhattan" else np.linalg.norm(step)), 9))
    return -(spearmanr if method == "spearman" else pearsonr)(similar, distances).statistic


@pytest.mark.parametrize("method", ["spearman", "pearson"])
@pytest.mark.parametrize("distance", ["euclidean", "manhattan"])
@pytest.mark.parametrize(
    ("shape", "spacing"),
    [((3, 5), (1.0, 1.0)), ((4, 2), (2.0, 0.5)), ((7,), (1.0,)), ((2, 3, 2), (5.0, 1.0, 1.0))],
)
def test_values(shape, spacing, method, distance):
    rng = np.random.default_rng(0)
    n = math.prod(shape)
    x = rng.normal(size=(3, n, 6)) + 40  # far from the origin: centring matters
    x[:, : n // 2] += rng.normal(size=(3, 1, 6))
    cells = np.stack([rng.permutation(n) for _ in range(3)])
    grid = Grid(shape, spacing=spacing)
    for order in (None, cells, cells[0]):
        index = np.broadcast_to(np.arange(n) if order is None else order, (3, n))
        expected = [slow(x[b], shape, spacing, method, distance, index[b]) for b in range(3)]
        actual = correlate(x, grid, method, distance, cells=order)
        np.testing.assert_allclose(actual.values, expected, atol=1e-9)
        assert actual.mean == pytest.approx(np.mean(expected))
        assert actual.standard_error == pytest.approx(np.std(expected, ddof=1) / 3**0.5)
    one = correlate(torch.from_numpy(x[1]).float(), grid, method, distance)
    np.testing.assert_allclose(one.values, [correlate(x, grid, method, distance).values[1]], atol=1e-4)


def test_position_and_content_are_separated_by_permuted_patches():
    """Features that follow the grid, and features that follow the content."""
    rng = np.random.default_rng(1)
    coords = Grid((6, 7)).positions().coords[0].numpy()
    smooth = np.concatenate([coords, rng.normal(scale=0.1, size=(42, 2))], 1)
    order = rng.permutation(42)
    position, content = smooth, smooth[order]
    # the cell that the content at each cell comes from
    assert correlate(position, (6, 7)).mean > 0.6
    assert abs(correlate(position, (6, 7), cells=order).mean) < 0.15
    assert abs(correlate(content, (6, 7)).mean) < 0.15
    assert correlate(content, (6, 7), cells=order).mean > 0.6
    assert correlate(-position * 3 + 8, (6, 7)).mean == pytest.approx(correlate(position, (6, 7)).mean)


def test_undefined_values_are_missing():
    x = np.random.default_rng(2).normal(size=(3, 6, 4))
    x[1] = x[1, :1]
    actual = correlate(x, (2, 3))
    assert np.isnan(actual.values).tolist() == [False, True, False]
    assert actual.mean == pytest.approx(np.nanmean(actual.values))
    single = correlate(x[:1], (2, 3))
    assert math.isnan(single.standard_error)
    assert single.mean == single.values[0]
    assert math.isnan(correlate(x[:1, :1], (1, 1)).mean)
    assert math.isnan(correlate(x[:1, :2], (1, 2)).mean)  # one pair


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            (np.zeros((2, 7, 3)), (2, 3)),
            ShapeError,
            r"features must be \(b, 6, d\) .*got \(2, 7, 3\)\. Remove prefix",
        ),
        ((np.zeros(6), (2, 3)), ShapeError, r"features must be \(b, 6, d\)"),
        ((np.full((6, 3), np.nan), (2, 3)), ShapeError, "features must be finite, got NaN"),
        (
            (np.zeros((6, 3)), (2, 3), "kendall"),
            OptionError,
            "method must be one of spearman, pearson, got 'kendall'",
        ),
        (
            (np.zeros((6, 3)), (2, 3), "pearson", "cosine"),
            OptionError,
            "distance must be one of euclidean, manhattan",
        ),
    ],
)
def test_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        correlate(*arguments)


@pytest.mark.parametrize(
    "cells", [np.arange(6) + 1, np.arange(6) - 1, np.arange(5), np.arange(6.0), np.zeros((3, 6), int)]
)
def test_wrong_cells(cells):
    with pytest.raises(ShapeError, match="cells must be integers from 0 to 5"):
        correlate(np.random.default_rng(0).normal(size=(2, 6, 3)), (2, 3), cells=cells)
