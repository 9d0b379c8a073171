"""Spectral clustering of a sample of pixels, and the exact nearest-neighbour rule that carries it to all others.

The sample becomes a graph: each point is joined to its nearest neighbours, and parts without any link by the shortest
one there is. The leading eigenvectors of the normalised adjacency put the points of one crowd close together whatever
its shape, and k-means on their rows of unit length finds the crowds (Ng, Jordan and Weiss 2001). The single links keep
the graph in one piece, so that the vectors are unique, and a small part that lies apart comes after the large ones.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from scipy.sparse import csr_array

POINTS = 4096
"""Different pixels in the graph, at most."""

NEIGHBOURS = 10
"""Nearest neighbours that each of them is joined to."""

LEADING = 8
"""Eigenvectors that are always computed, so that a number of clusters gives the same result asked for or chosen."""

_ROWS = 256  # pixels whose distances to all points are held at once: they stay in the cache
_DENSE = 600  # fewer points than this: all eigenvectors by the dense solver


def eigenvectors(points: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Embed points by their nearest-neighbour graph.

    Args:
        points: (n, f) float64, all different, n > 2.
        count: number of clusters that will be asked for.
        seed: of the starting vector of the iterative solver.

    Returns:
        (n, min(max(count, LEADING), n - 1)) float64, eigenvectors of the adjacency that is normalised on both sides,
        the largest eigenvalue first; the largest entry of each is positive.
    """
    from scipy.linalg import eigh
    from scipy.sparse import diags_array
    from scipy.sparse.linalg import eigsh
    from sklearn.neighbors import kneighbors_graph

    size = len(points)
    graph = kneighbors_graph(points, min(NEIGHBOURS, size - 1))
    graph = _joined(points, (graph + graph.T) / 2)
    scale = diags_array(1 / np.sqrt(np.asarray(graph.sum(1)).ravel()))
    normal = (scale @ graph @ scale).tocsr()
    wanted = min(max(count, LEADING), size - 1)
    if size < _DENSE or wanted > size // 8:
        vectors = eigh(normal.toarray(), subset_by_index=(size - wanted, size - 1))[1]
    else:
        start = np.random.default_rng(seed).random(size) + 0.5
        vectors = eigsh(normal, wanted, which="LA", v0=start, ncv=6 * wanted, tol=1e-9, maxiter=100 * size)[1]
    vectors = vectors[:, ::-1]
    largest = np.abs(vectors).argmax(0)
    return vectors * np.sign(vectors[largest, np.arange(wanted)])


def _joined(points: np.ndarray, graph: "csr_array") -> "csr_array":
    """Join each part of a graph to the point outside that is nearest to it, until there is one part."""
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
            near = NearestNeighbors(n_neighbors=1, algorithm="brute").fit(points[outside])
            distance, found = near.kneighbors(points[inside])
            closest = distance[:, 0].argmin()
            links[number] = inside[closest], outside[found[closest, 0]]
        links = np.unique(np.sort(links, 1), axis=0)
        link = csr_array((np.ones(len(links)), (links[:, 0], links[:, 1])), shape=graph.shape)
        graph = graph + link + link.T


def cut(vectors: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Cut embedded points into clusters -> (n,) int64, 0 to count - 1.

    Args:
        vectors: of `eigenvectors`, at least `count` columns.
        count: number of clusters.
        seed: of k-means, restarted 10 times.
    """
    from sklearn.cluster import KMeans

    rows = vectors[:, :count]
    rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), np.finfo(np.float64).tiny)
    return KMeans(count, n_init=10, random_state=seed).fit_predict(rows).astype(np.int64)


class NearestPoint:
    """Distance of pixels to the nearest point of each cluster, exactly.

    Args:
        points: (n, f) float32.
        clusters: (n,) int, 0 to K - 1.
        count: K. A cluster without points is infinitely far.
        width: mean squared distance between a point and the one next to it.
    """

    def __init__(self, points: np.ndarray, clusters: np.ndarray, count: int, width: float) -> None:
        self.points, self.clusters, self.width = points, np.asarray(clusters, np.int64), width
        order = np.argsort(self.clusters, kind="stable")
        sorted_points = torch.from_numpy(np.ascontiguousarray(points[order], np.float32))
        norms = sorted_points.square().sum(1, keepdim=True)
        # times (x, 1) it is the squared distance less |x|^2
        self._product = torch.cat([-2 * sorted_points, norms], 1).T
        self._ends = np.cumsum(np.bincount(self.clusters, minlength=count)).tolist()

    @classmethod
    def fit(cls, points: np.ndarray, clusters: np.ndarray, count: int) -> "NearestPoint":
        """Take the points, and measure how far apart they lie."""
        from sklearn.neighbors import NearestNeighbors

        near = NearestNeighbors(n_neighbors=1, algorithm="brute").fit(points).kneighbors()[0]
        width = max(float((near.astype(np.float64) ** 2).mean()), float(np.finfo(np.float32).tiny))
        return cls(points, clusters, count, width)

    def squared(self, features: np.ndarray) -> np.ndarray:
        """Give (n, f) features -> (n, K) float64 squared distances to the nearest point of each cluster."""
        out = np.full((len(features), len(self._ends)), np.inf)
        for start in range(0, len(features), _ROWS):
            rows = torch.from_numpy(np.ascontiguousarray(features[start : start + _ROWS], np.float32))
            found = torch.cat([rows, rows.new_ones(len(rows), 1)], 1) @ self._product
            own = rows.square().sum(1)
            for k, (first, last) in enumerate(zip([0, *self._ends], self._ends, strict=False)):
                if first < last:
                    out[start : start + _ROWS, k] = (found[:, first:last].amin(1) + own).clamp_min_(0)
        return out

    def tensors(self) -> dict[str, np.ndarray]:
        """Return what a model file keeps."""
        return {
            "cluster.points": self.points.astype(np.float32),
            "cluster.of": self.clusters,
            "cluster.width": np.array([self.width]),
        }
