import numpy as np
import pytest
from sklearn.cluster import KMeans
from sklearn.datasets import make_moons

from tests.cases import cases
from vispe.segment.classify import spectral
from vispe.segment.classify.clustering import PixelClusters
from vispe.segment.classify.spectral import LEADING, NearestPoint, cut, eigenvectors
from vispe.segment.metrics import adjusted_rand


def make_clusters(sizes, std=0.3, seed=0):
    """Make distant clusters of points -> points (n, 2), cluster indices (n,) from 0."""
    rng = np.random.default_rng(seed)
    cluster_ids = np.repeat(np.arange(len(sizes)), sizes)
    angle = 2 * np.pi * cluster_ids / len(sizes)
    return 5 * np.stack([np.cos(angle), np.sin(angle)], 1) + rng.normal(
        0, std, (len(cluster_ids), 2)
    ), cluster_ids


def are_equal(actual, expected):
    """Return whether two clusterings are equal up to permutation of labels."""
    return adjusted_rand(actual[None] + 1, expected[None] + 1) == 1


def test_two_moons_are_separated_unlike_by_k_means():
    points, moon = make_moons(400, noise=0.04, random_state=0)
    assert are_equal(cut(eigenvectors(points, 2, 0), 2, 0), moon)
    assert not are_equal(KMeans(2, n_init=10, random_state=0).fit_predict(points).astype(np.int64), moon)


@cases("count", [2, 3, 5])
def test_connected_components_are_clusters_and_outliers_are_not(count):
    points, cluster_ids = make_clusters([60 + 15 * g for g in range(count)])
    actual = cut(eigenvectors(points, count, 0), count, 0)
    assert are_equal(actual, cluster_ids)
    strays = np.array([[40.0, 40.0], [-50.0, 10.0], [0.0, 70.0]])
    actual = cut(eigenvectors(np.concatenate([points, strays]), count, 0), count, 0)
    assert are_equal(actual[:-3], cluster_ids)


def test_eigenvectors_are_those_of_the_normalised_adjacency():
    from sklearn.neighbors import kneighbors_graph

    points = np.random.default_rng(0).random((37, 3))
    graph = kneighbors_graph(points, 10).toarray()
    graph = (graph + graph.T) / 2
    root = np.sqrt(graph.sum(1))
    normal = graph / np.outer(root, root)
    vectors = eigenvectors(points, 4, 0)
    assert vectors.shape == (37, LEADING)
    np.testing.assert_allclose(vectors.T @ vectors, np.eye(LEADING), atol=1e-9)
    values = np.diag(vectors.T @ normal @ vectors)
    np.testing.assert_allclose(normal @ vectors, vectors * values, atol=1e-9)
    np.testing.assert_allclose(values, np.linalg.eigvalsh(normal)[::-1][:LEADING], atol=1e-9)
    np.testing.assert_allclose(vectors[:, 0], root / np.linalg.norm(root), atol=1e-9)


def test_components_are_joined_by_their_shortest_edges():
    from scipy.sparse import csr_array

    points = np.array([[0.0], [1.0], [5.0], [6.0], [20.0], [22.0]])
    pairs = [(0, 1), (2, 3), (4, 5)]
    graph = np.zeros((6, 6))
    for i, j in pairs:
        graph[i, j] = graph[j, i] = 0.5
    joined = spectral._joined(points, csr_array(graph)).toarray()
    for i, j in ((1, 2), (3, 4)):
        graph[i, j] = graph[j, i] = 1
    np.testing.assert_array_equal(joined, graph)


def test_sparse_and_dense_solvers_agree(monkeypatch):
    points, _ = make_clusters([230, 220, 250], std=1.2)
    sparse = eigenvectors(points, 3, 0)
    np.testing.assert_array_equal(eigenvectors(points, 3, 0), sparse)
    monkeypatch.setattr(spectral, "_DENSE", 10_000)
    np.testing.assert_allclose(sparse, eigenvectors(points, 3, 0), atol=1e-6)


@cases("count", [1, 255, 256, 700])
def test_distances_are_to_the_nearest_point_of_each_cluster(count):
    rng = np.random.default_rng(count)
    points, pixels = (rng.normal(0, 2, (n, 7)).astype(np.float32) for n in (90, count))
    cluster_ids = rng.choice([0, 1, 3], 90)
    nearest = NearestPoint(points, cluster_ids, 4, 1.0)
    actual = nearest.squared(pixels)
    distances = ((pixels[:, None].astype(np.float64) - points) ** 2).sum(-1)
    for k in (0, 1, 3):
        np.testing.assert_allclose(actual[:, k], distances[:, cluster_ids == k].min(1), rtol=1e-4, atol=1e-4)
    assert np.isinf(actual[:, 2]).all()
    assert actual.shape == (count, 4)


def test_width_is_the_mean_squared_distance_of_neighbours():
    points = np.array([[0.0], [1.0], [3.0], [3.5]], np.float32)
    assert NearestPoint.fit(points, np.array([0, 0, 1, 1]), 2).width == pytest.approx(
        (1 + 1 + 0.25 + 0.25) / 4
    )


def test_pixels_are_assigned_to_their_nearest_graph_node(monkeypatch):
    monkeypatch.setattr(spectral, "POINTS", 450)
    points, moon = make_moons(900, noise=0.04, random_state=1)
    features = points.astype(np.float32)
    clusters = PixelClusters(2, "spectral").fit(features, points[:, 1])
    assert clusters.tensors()["cluster.points"].shape == (450, 2)
    prob = clusters.probabilities(features)
    assert are_equal(prob.argmax(1), moon)
    np.testing.assert_allclose(prob.sum(1), 1, atol=1e-6)
    pixel_clusters = PixelClusters(2, "spectral").fit(features, points[:, 1])
    np.testing.assert_array_equal(pixel_clusters.probabilities(features), prob)


def test_more_duplicates_than_neighbours_are_supported():
    points, cluster_ids = make_clusters([40, 50], std=0.4)
    features = np.repeat(points, 30, 0).astype(np.float32)
    clusters = PixelClusters(2, "spectral").fit(features, features[:, 0])
    assert are_equal(clusters.probabilities(points.astype(np.float32)).argmax(1), cluster_ids)


@cases("different", [2, 3, 4])
def test_number_of_clusters_may_equal_number_of_distinct_pixels(different):
    features = np.repeat(np.eye(different, dtype=np.float32), 5, 0)
    grey = features @ np.arange(different)[::-1]
    actual = PixelClusters(different, "spectral").fit(features, grey).probabilities(features).argmax(1)
    np.testing.assert_array_equal(actual, np.repeat(np.arange(different)[::-1], 5))
