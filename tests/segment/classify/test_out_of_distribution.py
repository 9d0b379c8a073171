"""Feature distribution of training pages: scores, sums and limits against explicit formulas."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.spatial.distance import mahalanobis

from tests.cases import cases
from vispe.segment.classify.out_of_distribution import (
    COMPONENTS,
    MARGIN,
    MARGIN_ONE,
    FeatureDistribution,
    feature_sums,
    fit_distribution,
    is_consistent,
)
from vispe.segment.features.sample_grid import Sample


def page(seed=0, patches=40, width=20, shift=0.0, std=1.0):
    """Make patches of 30 points whose features are mixtures of 6 sources."""
    rng = np.random.default_rng(seed)
    mixing = np.random.default_rng(99).normal(size=(6, width))
    points = rng.normal(size=(patches, 1, 6)) * 0.5 + rng.normal(size=(patches, 30, 6)) * std + shift
    features = (points @ mixing).reshape(-1, width).astype(np.float32) + 3
    return Sample(features, np.repeat(np.arange(patches), 30), np.arange(patches) * 4 // patches)


def make_distribution(m=3, f=5, seed=1):
    rng = np.random.default_rng(seed)
    return FeatureDistribution(
        rng.normal(size=f).astype(np.float32),
        rng.normal(size=(m, f)).astype(np.float32),
        rng.normal(size=2 * m),
        rng.normal(size=(2 * m, 2 * m)),
        np.array([2.0, 0.5]),
        1,
    )


def test_codes_are_quantised_components_clipped_at_four():
    domain, features = make_distribution(), np.random.default_rng(2).normal(size=(4, 7, 5)).astype(np.float32)
    actual = domain.codes(features)
    assert actual.shape == (4, 7, 3)
    assert actual.dtype == np.int16
    for index in np.ndindex(4, 7):
        components = domain.components.astype(float) @ (features[index].astype(float) - domain.mean)
        assert np.abs(actual[index] / 1024 - components.clip(-4, 4)).max() < 1 / 1024
    assert domain.codes(features[:0]).shape == (0, 7, 3)


def test_score_is_the_whitened_distance_of_means_from_the_centre():
    domain = make_distribution()
    codes = np.random.default_rng(3).integers(-4096, 4097, (31, 3)).astype(np.int16)
    sums = feature_sums(codes)
    z = codes / 1024
    means = np.concatenate([z.mean(0), np.abs(z).mean(0)])
    expected = np.linalg.norm((means - domain.center) @ domain.whitening)
    assert domain.score(sums) == pytest.approx(expected / 2.0, rel=1e-12)
    assert domain.patches(np.stack([sums, 0 * sums]))[0] == pytest.approx(expected / 0.5, rel=1e-12)
    assert np.isnan(domain.patches(np.stack([sums, 0 * sums]))[1])
    assert domain.score(0 * sums) is None


def test_sums_are_additive_over_parts():
    codes = np.random.default_rng(4).integers(-4096, 4097, (97, 3)).astype(np.int16)
    order = np.random.default_rng(5).permutation(97)
    total = sum(feature_sums(codes[indices]) for indices in np.array_split(order, 7))
    assert np.array_equal(total, feature_sums(codes))


def test_score_is_a_mahalanobis_distance_of_patch_means():
    sample = page(width=5, patches=400)
    domain = fit_distribution([sample])
    z = domain.codes(sample.features).astype(float) / 1024
    moments = np.concatenate([z, np.abs(z)], 1)
    means = np.stack([moments[sample.patch == k].mean(0) for k in range(400)])
    covariance = np.cov(means.T)
    covariance = 0.9 * covariance + 0.1 * np.diag(np.diag(covariance))
    covariance += 0.02 * np.trace(covariance) / 10 * np.eye(10)
    other_codes = domain.codes(page(7, width=5, shift=0.3).features)
    other_mean = np.concatenate([other_codes, np.abs(other_codes)], 1).mean(0) / 1024
    expected = mahalanobis(other_mean, moments.mean(0), np.linalg.inv(covariance)) / np.sqrt(10)
    assert domain.score(feature_sums(other_codes)) * domain.limits[0] == pytest.approx(expected, rel=1e-6)


@cases(("count", "margin"), [(1, MARGIN_ONE), (3, MARGIN), (12, MARGIN)])
def test_limit_is_the_largest_held_out_distance_times_a_margin(count, margin):
    pages = [page(seed) for seed in range(count)]
    domain = fit_distribution(pages)

    def select(sample, expected):
        keep = expected[sample.patch]
        return Sample(
            sample.features[keep], (np.cumsum(expected) - 1)[sample.patch[keep]], sample.part[expected]
        )

    if count == 1:
        folds = [
            ([select(pages[0], pages[0].part != k)], select(pages[0], pages[0].part == k)) for k in range(4)
        ]
    else:
        held_out_pages = {3: range(3), 12: [0, 2, 3, 5, 6, 8, 9, 11]}[count]
        folds = [
            ([p for i, p in enumerate(pages) if i != held_out], pages[held_out])
            for held_out in held_out_pages
        ]
    distances = []
    for training, held_out in folds:
        actual = fit_distribution(training)
        distances.append(actual.score(feature_sums(actual.codes(held_out.features))) * actual.limits[0])
    assert domain.limits[0] == pytest.approx(margin * max(distances), rel=1e-9)
    assert domain.pages == count


def test_only_dissimilar_images_exceed_the_limit():
    domain = fit_distribution([page(seed) for seed in range(4)])
    score = lambda sample: domain.score(feature_sums(domain.codes(sample.features)))  # noqa: E731 - used here alone
    assert max(score(page(seed)) for seed in range(10, 30)) < 1
    assert score(page(50, shift=3)) > 1
    assert score(page(51, std=3)) > 1


def test_distribution_is_deterministic_and_small():
    first, second = (fit_distribution([page(0, width=64)]) for _ in range(2))
    assert len(first.components) == COMPONENTS
    for name, value in first.tensors().items():
        assert np.array_equal(value, second.tensors()[name])
    assert sum(value.nbytes for value in first.tensors().values()) < 10_000
    reloaded = FeatureDistribution.from_tensors(first.tensors())
    codes = first.codes(page(3, width=64).features)
    assert reloaded.score(feature_sums(codes)) == first.score(feature_sums(codes))


def test_constant_features_are_supported():
    sample = page()
    flat = replace(
        sample, features=np.concatenate([sample.features, np.full((len(sample.patch), 3), 7, np.float32)], 1)
    )
    domain = fit_distribution([flat])
    assert np.isfinite(domain.whitening).all()
    assert domain.score(feature_sums(domain.codes(flat.features))) < 1


def test_samples_without_parts_to_hold_out_give_none():
    assert fit_distribution([]) is None
    sample = page()
    assert fit_distribution([replace(sample, part=np.zeros_like(sample.part))]) is None


@cases(
    "change",
    [
        {"mean": np.zeros(6, np.float32)},
        {"center": np.zeros(5)},
        {"whitening": np.zeros((6, 5))},
        {"limits": np.array([1.0, 0.0])},
        {"limits": np.ones(3)},
        {"pages": np.array([0])},
        {"components": np.zeros(5, np.float32)},
    ],
)
def test_inconsistent_arrays_are_detected(change):
    tensors = make_distribution().tensors()
    assert is_consistent(tensors)
    assert not is_consistent({**tensors, **change})
    assert not is_consistent({k: v for k, v in tensors.items() if k not in change})
