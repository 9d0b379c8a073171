import numpy as np
from scipy.signal import find_peaks
from scipy.stats import gaussian_kde

from tests.cases import cases
from vispe.segment.classify.cluster_count import choose, grey_peaks
from vispe.segment.classify.cluster_count_figure import plot_choice

SCORES = {2: 0.5, 3: 0.4, 4: 0.3, 5: 0.3, 6: 0.2, 7: 0.2, 8: 0.1}


def levels(positions, std=0.03, each=400, seed=0):
    return np.random.default_rng(seed).normal(np.repeat(positions, each), std)


@cases("positions", [[0.5], [0.2, 0.8], [0.1, 0.5, 0.8], [0, 0.2, 0.5, 0.7, 1], np.arange(6) / 5])
def test_peaks_equal_those_of_a_kernel_density_estimate(positions):
    grey = levels(positions, 0.02)
    actual, grid, density = grey_peaks(grey)
    low, high = np.percentile(grey, (0.5, 99.5))
    expected = gaussian_kde(grey, 0.05 * (high - low) / grey.std(ddof=1))(grid)
    np.testing.assert_allclose(density, expected / expected.max(), atol=0.02)
    assert len(find_peaks(expected, prominence=0.1 * expected.max())[0]) == len(positions) == len(actual)
    if len(positions) > 1:
        np.testing.assert_allclose(actual, positions, atol=0.03)


def test_peaks_are_equivariant_to_scale_and_offset():
    grey = levels([0.1, 0.4, 0.9])
    peaks, scaled_peaks = grey_peaks(grey)[0], grey_peaks(250 * grey - 40)[0]
    np.testing.assert_allclose(scaled_peaks, 250 * peaks - 40)


def test_rare_phases_are_peaks_and_outliers_are_not():
    grey = np.concatenate([levels([0.2, 0.6], each=2000), levels([1.0], each=150)])
    assert len(grey_peaks(grey)[0]) == 3
    assert len(grey_peaks(np.append(levels([0.2, 0.6], each=2000), [5.0] * 3))[0]) == 2


def test_constant_images_have_one_peak():
    actual, grid, density = grey_peaks(np.full(9, 0.25))
    assert actual.tolist() == [0.25]
    assert grid.shape == density.shape == (256,)


@cases(
    ("count", "expected", "by"),
    [(1, 2, "silhouette"), (2, 2, "silhouette"), (3, 3, "grey peaks"), (6, 6, "grey peaks")],
)
def test_three_or_more_peaks_take_precedence_over_the_silhouette(count, expected, by):
    actual = choose(SCORES, levels(np.linspace(0, 1, count), 0.01))
    assert (len(actual.peaks), actual.n_classes, actual.by) == (count, expected, by)
    assert actual.facts()["chosen_by"] == by
    assert actual.note().startswith(f"K = {expected} chosen: ")
    assert plot_choice(actual).shape == (300, 800, 3)


def test_only_scored_numbers_are_chosen():
    assert choose({2: 0.1, 3: 0.2}, levels(np.linspace(0, 1, 5), 0.01)).n_classes == 3
    # ties of the silhouette: smallest number
    assert choose({2: 0.3, 3: 0.3}, levels([0.2, 0.8])).n_classes == 2
