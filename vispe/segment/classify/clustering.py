"""Unsupervised segmentation: pixel clusters with stable numbering.

Two methods, both on standardised features of a sample of pixels from all images together: k-means, and spectral
clustering, which finds clusters of any shape (`vispe.segment.classify.spectral`). Clusters are ordered by mean grey
level, from dark to bright, so that a repeated run, or a run on a similar image, assigns a phase the same number.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import numpy as np

from vispe.errors import InputError, require
from vispe.segment.classify import spectral
from vispe.segment.classify.cluster_count import CHOICES, Choice, choose
from vispe.utils.interval import Interval
from vispe.utils.options import checked

if TYPE_CHECKING:
    from sklearn.pipeline import Pipeline

SAMPLE = 50_000
"""Number of pixels used for clustering, drawn at random from all images together."""

Number = Annotated[int, Interval(least=2, most=255)] | Literal["auto"]
Method = Literal["kmeans", "spectral"]
METHODS: tuple[Method, ...] = get_args(Method)
"""Methods of `PixelClusters`, the default first."""

SCORED = 5000
"""Number of pixels of the sample used for the silhouette."""


class PixelClusters:
    """K clusters of pixels on standardised features.

    Args:
        n_classes: K, 2 to 255; `'auto'` uses the number of grey-level peaks if it is in `CHOICES` and at least 3, else
            the K with the largest mean silhouette (the smallest such K). Set by `fit`.
        method: one of `METHODS`.
        seed: seed of the sample and the initialisation; the best of 10 runs of k-means++ is used.
        estimator: a fitted pipeline, when loaded from a model file.
        state: the tensors of the model file.

    Raises:
        OptionError: K outside 2..255, or an unknown method.
        MissingExtra: scikit-learn is not installed.
    """

    @checked
    def __init__(
        self,
        n_classes: Number,
        method: Method = "kmeans",
        *,
        seed: int = 0,
        estimator: Any = None,
        state: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        require("sklearn", "cli", "segmentation")
        self.kind, self.seed = method, seed
        self.choice: Choice | None = None
        self._requested, self.n_classes = n_classes, 0 if n_classes == "auto" else n_classes
        self.estimator = estimator
        self._order, self._width = np.arange(self.n_classes), 1.0
        self._near: spectral.NearestPoint | None = None
        if state is not None:
            self._order, self._width = state["cluster.order"], float(state["cluster.width"][0])
            if method == "spectral":
                points, clusters = state["cluster.points"], state["cluster.of"]
                self._near = spectral.NearestPoint(points, clusters, self.n_classes, self._width)

    def fit(self, features: np.ndarray, grey: np.ndarray) -> "PixelClusters":
        """Fit to a sample of pixels.

        Args:
            features: (n, f) float32, finite.
            grey: (n,) grey levels, which define the order of the clusters.

        Raises:
            InputError: fewer distinct pixels than clusters.
        """
        # duplicate pixels carry no information: they only count against the number of clusters
        distinct, first = np.unique(features, axis=0, return_index=True)
        minimum = 2 if self._requested == "auto" else self._requested
        if len(distinct) < minimum:
            raise InputError(
                f"cluster={self._requested} exceeds the number of distinct pixels ({len(distinct)}). "
                "Use fewer clusters."
            )
        rng, all_grey = np.random.default_rng(self.seed), grey
        # the graph needs distinct points: equal points have distance 0 and would be linked to each other only
        if self.kind == "spectral":
            chosen = rng.permutation(np.sort(first))[: spectral.POINTS]
            features, grey = features[chosen], grey[chosen]
        fits = {}
        if self._requested == "auto":
            # silhouettes are quadratic in the number of pixels: score a subset
            subset = features[rng.permutation(len(features))[:SCORED]] if self.kind == "kmeans" else features
            subset = subset if len(np.unique(subset, axis=0)) > 1 else distinct[:SCORED]
            counts = [k for k in CHOICES if k <= len(np.unique(subset, axis=0))]
            fits = self._fits(subset, counts)
            scores = _silhouettes(subset, {k: clusters for k, (_, clusters) in fits.items()})
            self.choice = choose(scores, all_grey)
            self.n_classes = self.choice.n_classes
        if self.kind == "kmeans" or not fits:
            fits = self._fits(features, [self.n_classes])
        self.estimator, clusters = fits[self.n_classes]
        count = np.bincount(clusters, minlength=self.n_classes)
        mean = np.bincount(clusters, grey, minlength=self.n_classes) / np.maximum(count, 1)
        # stable numbering: by mean grey level, dark to bright
        self._order = np.argsort(mean, kind="stable")
        if self.kind == "spectral":
            self._near = spectral.NearestPoint.fit(
                self.estimator.transform(features), clusters, self.n_classes
            )
            self._width = self._near.width
        else:
            # inertia: sum of squared distances to the nearest centre, over all pixels
            inertia = float(self.estimator[-1].inertia_) / len(features)
            self._width = max(inertia, float(np.finfo(np.float32).tiny))
        return self

    def probabilities(self, features: np.ndarray) -> np.ndarray:
        """Return memberships (n, K) float32 of features (n, f); rows sum to 1.

        Membership decreases with the squared distance to the cluster: for k-means to its centre, in units of the mean
        squared distance in the sample; for spectral clusters to their nearest pixel of the graph, in units of the mean
        squared distance between such neighbours. The largest membership belongs to the nearest cluster.

        Raises:
            InputError: not fitted.
        """
        if self.estimator is None:
            raise InputError("the clusters are not fitted. Call fit first.")
        if self._near is not None:
            squared = self._near.squared(self.estimator.transform(features))
        else:
            # KMeans.transform returns distances, not their squares
            squared = self.estimator.transform(features).astype(np.float64) ** 2
        squared = squared[:, self._order]
        # subtract the minimum before exp, so that at least one weight is 1: (n, K)
        squared -= squared.min(axis=1, keepdims=True)
        weight = np.exp(-squared / self._width)
        return (weight / weight.sum(axis=1, keepdims=True)).astype(np.float32)

    def _fits(self, features: np.ndarray, counts: list[int]) -> "dict[int, tuple[Pipeline, np.ndarray]]":
        return (_kmeans if self.kind == "kmeans" else _spectral)(features, counts, self.seed)

    def tensors(self) -> dict[str, np.ndarray]:
        """Return the arrays that a model file stores in addition to the estimator."""
        arrays = {
            "cluster.order": np.asarray(self._order, np.int64),
            "cluster.width": np.array([self._width]),
        }
        return arrays | (self._near.tensors() if self._near is not None else {})

    def facts(self) -> dict[str, Any]:
        """Return the choice of K for the report; empty if K was specified."""
        return {} if self.choice is None else self.choice.facts()

    def note(self) -> str | None:
        """Return a sentence on the choice of K; None if K was specified."""
        return None if self.choice is None else self.choice.note()


def _kmeans(features: np.ndarray, counts: list[int], seed: int) -> "dict[int, tuple[Pipeline, np.ndarray]]":
    """Cluster features (n, f) for each number of clusters; return the fitted pipeline and clusters (n,) from 0."""
    from sklearn.cluster import KMeans
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    fits = {}
    for k in counts:
        estimator = make_pipeline(StandardScaler(), KMeans(k, n_init=10, random_state=seed))
        fits[k] = estimator, estimator.fit_predict(features)
    return fits


def _spectral(features: np.ndarray, counts: list[int], seed: int) -> "dict[int, tuple[Pipeline, np.ndarray]]":
    """Like `_kmeans`, for distinct features (n, f); the pipeline only standardises."""
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    estimator = make_pipeline(StandardScaler())
    points = estimator.fit_transform(features).astype(np.float64)
    if len(points) < 3:
        return {k: (estimator, np.arange(k)) for k in counts}
    vectors = spectral.eigenvectors(points, max(counts), seed)
    # with one cluster per point there is one eigenvector too few, and no clustering is needed
    n_points = len(points)
    return {k: (estimator, np.arange(k) if k == n_points else spectral.cut(vectors, k, seed)) for k in counts}


def _silhouettes(features: np.ndarray, clusterings: Mapping[int, np.ndarray]) -> dict[int, float]:
    """Return the mean Euclidean silhouette of each clustering of standardised features (n, f).

    It is -1 where undefined: for a single cluster, or one cluster per pixel.
    """
    from sklearn.metrics import silhouette_score
    from sklearn.preprocessing import StandardScaler

    points = StandardScaler().fit_transform(features)
    scores = {}
    for k, clusters in clusterings.items():
        defined = 2 <= len(np.unique(clusters)) < len(points)
        scores[k] = float(silhouette_score(points, clusters)) if defined else -1.0
    return scores
