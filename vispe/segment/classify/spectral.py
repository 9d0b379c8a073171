"""Spectral clustering of a sample of pixels, and the exact nearest-neighbour rule that assigns all other pixels.

The sample becomes a graph: each point is connected to its nearest neighbours, and disconnected components by their
shortest link. The leading eigenvectors of the normalised adjacency map each cluster close together regardless of
its shape, and k-means on their normalised rows finds the clusters (Ng, Jordan and Weiss 2001). The links
between components make the graph connected, so that the eigenvectors are unique, and a small separate
component ranks after the large components.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from scipy.sparse import csr_array

POINTS = 4096
"""Upper bound of distinct pixels in the graph."""

NEIGHBOURS = 10
"""Number of nearest neighbours of each pixel."""

LEADING = 8
"""Minimal number of eigenvectors, so that K clusters are equal whether K is specified or chosen."""

_ROWS = 256  # pixels per block of distances to all points, to fit into the CPU cache
_DENSE = 600  # below this number of points the dense solver is used


def eigenvectors(points: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Embed points by the leading eigenvectors of their nearest-neighbour graph.

    Args:
        points: (n, f) float64, distinct, n > 2.
        count: number of clusters.
        seed: seed of the starting vector of the iterative solver.

    Returns:
        (n, min(max(count, LEADING), n - 1)) float64, eigenvectors of the symmetrically normalised adjacency,
        the largest eigenvalue first; the largest entry of each is positive.
    """
    from scipy.linalg import eigh
    from scipy.sparse import diags_array
    from scipy.sparse.linalg import eigsh
    from sklearn.neighbors import kneighbors_graph

    size = len(points)
    graph = kneighbors_graph(points, min(NEIGHBOURS, size - 1))
    graph = _joined(points, (graph + graph.T) / 2)
    # D^-1/2 A D^-1/2 with the degrees D
    scale = diags_array(1 / np.sqrt(np.asarray(graph.sum(1)).ravel()))
    normal = (scale @ graph @ scale).tocsr()
    n_vectors = min(max(count, LEADING), size - 1)
    if size < _DENSE or n_vectors > size // 8:
        vectors = eigh(normal.toarray(), subset_by_index=(size - n_vectors, size - 1))[1]
    else:
        start = np.random.default_rng(seed).random(size) + 0.5
        vectors = eigsh(
            normal, n_vectors, which="LA", v0=start, ncv=6 * n_vectors, tol=1e-9, maxiter=100 * size
        )[1]
    vectors = vectors[:, ::-1]
    # eigenvectors are defined up to their sign: fix it by the largest entry
    largest = np.abs(vectors).argmax(0)
    return vectors * np.sign(vectors[largest, np.arange(n_vectors)])


def _joined(points: np.ndarray, graph: "csr_array") -> "csr_array":
    """Connect each component of a graph to its nearest point outside, until the graph is connected."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import connected_components
    from sklearn.neighbors import NearestNeighbors

    while True:
        count, part = connected_components(graph, directed=False)
        if count == 1:
            return graph
        links = np.empty((count, 2), np.int64)
        for number in range(count):
            inside, outside = np.flatnonzero(part == number), np.flatnonzero(part != number)
            search = NearestNeighbors(n_neighbors=1, algorithm="brute").fit(points[outside])
            distance, neighbour = search.kneighbors(points[inside])
            closest = distance[:, 0].argmin()
            links[number] = inside[closest], outside[neighbour[closest, 0]]
        links = np.unique(np.sort(links, 1), axis=0)
        link = csr_array((np.ones(len(links)), (links[:, 0], links[:, 1])), shape=graph.shape)
        graph = graph + link + link.T


def cut(vectors: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Cluster embedded points; return (n,) int64 from 0 to count - 1.

    Args:
        vectors: result of `eigenvectors`, at least `count` columns.
        count: number of clusters.
        seed: seed of k-means, restarted 10 times.
    """
    from sklearn.cluster import KMeans

    rows = vectors[:, :count]
    rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), np.finfo(np.float64).tiny)
    return KMeans(count, n_init=10, random_state=seed).fit_predict(rows).astype(np.int64)


class NearestPoint:
    """Exact distance of pixels to the nearest point of each cluster.

    Args:
        points: (n, f) float32.
        clusters: (n,) int, 0 to K - 1.
        count: K. A cluster without points has infinite distance.
        width: mean squared distance between a point and its nearest neighbour.
    """

    def __init__(self, points: np.ndarray, clusters: np.ndarray, count: int, width: float) -> None:
        self.points, self.clusters, self.width = points, np.asarray(clusters, np.int64), width
        order = np.argsort(self.clusters, kind="stable")
        sorted_points = torch.from_numpy(np.ascontiguousarray(points[order], np.float32))
        norms = sorted_points.square().sum(1, keepdim=True)
        # (x, 1) @ product = squared distance - |x|^2
        self._product = torch.cat([-2 * sorted_points, norms], 1).T
        self._ends = np.cumsum(np.bincount(self.clusters, minlength=count)).tolist()

    @classmethod
    def fit(cls, points: np.ndarray, clusters: np.ndarray, count: int) -> "NearestPoint":
        """Store the points and compute the mean squared nearest-neighbour distance."""
        from sklearn.neighbors import NearestNeighbors

        distances = NearestNeighbors(n_neighbors=1, algorithm="brute").fit(points).kneighbors()[0]
        width = max(float((distances.astype(np.float64) ** 2).mean()), float(np.finfo(np.float32).tiny))
        return cls(points, clusters, count, width)

    def squared(self, features: np.ndarray) -> np.ndarray:
        """Return squared distances (n, K) float64 of features (n, f) to the nearest point of each cluster."""
        out = np.full((len(features), len(self._ends)), np.inf)
        for start in range(0, len(features), _ROWS):
            rows = torch.from_numpy(np.ascontiguousarray(features[start : start + _ROWS], np.float32))
            products = torch.cat([rows, rows.new_ones(len(rows), 1)], 1) @ self._product
            norms = rows.square().sum(1)
            for k, (first, last) in enumerate(zip([0, *self._ends], self._ends, strict=False)):
                if first < last:
                    out[start : start + _ROWS, k] = (products[:, first:last].amin(1) + norms).clamp_min_(0)
        return out

    def tensors(self) -> dict[str, np.ndarray]:
        """Return the arrays of a model file."""
        return {
            "cluster.points": self.points.astype(np.float32),
            "cluster.of": self.clusters,
            "cluster.width": np.array([self.width]),
        }
