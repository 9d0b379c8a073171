"""Segmentation without labels: clusters of pixels, with numbers that stay the same.

Two methods, both on standardised features of a sample of pixels from all images together: k-means, and spectral
clustering, which finds clusters of any shape (`vispe.segment.classify.spectral`). Clusters are ordered by mean grey
level, from dark to bright, so that a repeated run, or a run on a similar image, gives a phase the same number.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from vispe.errors import InputError, OptionError, did_you_mean, require
from vispe.segment.classify import spectral
from vispe.segment.classify.cluster_count import CHOICES, Choice, choose

if TYPE_CHECKING:
    from sklearn.pipeline import Pipeline

SAMPLE = 50_000
"""Pixels that clusters are found on, drawn at random from all images together."""

METHODS = ("kmeans", "spectral")
"""The methods that `PixelClusters` knows, the default first."""

SCORED = 5000
"""Pixels of the sample that the silhouette is measured on."""


class PixelClusters:
    """K clusters of pixels on standardised features.

    Args:
        n_classes: K, 2 to 255; `'auto'` takes as many of `CHOICES` as the grey levels have peaks, if these are 3 or
            more, else the one whose mean silhouette is the largest, of equal ones the smallest. Known after `fit`.
        method: one of `METHODS`.
        seed: of the sample and the starting points; k-means++ is restarted 10 times and the best result is kept.
        estimator: a fitted pipeline, when it comes from a model file.
        state: the tensors that belong to it.

    Raises:
        OptionError: K outside 2..255, or an unknown method.
        MissingExtra: scikit-learn is not installed.
    """

    def __init__(
        self,
        n_classes: int | Literal["auto"],
        method: str = METHODS[0],
        *,
        seed: int = 0,
        estimator: "Pipeline | None" = None,
        state: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        if method not in METHODS:
            hint = did_you_mean(method, METHODS)
            raise OptionError(f"cluster_method={method!r} is not one of {', '.join(METHODS)}.{hint}")
        if n_classes != "auto" and (isinstance(n_classes, str) or not 2 <= n_classes <= 255):
            raise OptionError(f"cluster={n_classes} must lie between 2 and 255; give the number of phases.")
        require("sklearn", "cli", "segmentation")
        self.kind, self.seed = method, seed
        self.choice: Choice | None = None
        self._asked, self.n_classes = n_classes, 0 if n_classes == "auto" else n_classes
        self.estimator = estimator
        self._order, self._width = np.arange(self.n_classes), 1.0
        self._near: spectral.NearestPoint | None = None
        if state is not None:
            self._order, self._width = state["cluster.order"], float(state["cluster.width"][0])
            if method == "spectral":
                points, of = state["cluster.points"], state["cluster.of"]
                self._near = spectral.NearestPoint(points, of, self.n_classes, self._width)

    def fit(self, features: np.ndarray, grey: np.ndarray) -> "PixelClusters":
        """Fit to a sample of pixels.

        Args:
            features: (n, f) float32, finite.
            grey: (n,) grey levels, for the order of the clusters.

        Raises:
            InputError: fewer different pixels than clusters.
        """
        different, first = np.unique(features, axis=0, return_index=True)
        least = 2 if self._asked == "auto" else self._asked
        if len(different) < least:
            raise InputError(
                f"cluster={self._asked} asks for more clusters than there are different pixels ({len(different)}); "
                "ask for fewer."
            )
        random, everything = np.random.default_rng(self.seed), grey
        if self.kind == "spectral":
            chosen = random.permutation(np.sort(first))[: spectral.POINTS]
            features, grey = features[chosen], grey[chosen]
        fits = {}
        if self._asked == "auto":
            part = features[random.permutation(len(features))[:SCORED]] if self.kind == "kmeans" else features
            part = part if len(np.unique(part, axis=0)) > 1 else different[:SCORED]
            counts = [k for k in CHOICES if k <= len(np.unique(part, axis=0))]
            fits = self._fits(part, counts)
            scores = _silhouettes(part, {k: found for k, (_, found) in fits.items()})
            self.choice = choose(scores, everything)
            self.n_classes = self.choice.n_classes
        if self.kind == "kmeans" or not fits:
            fits = self._fits(features, [self.n_classes])
        self.estimator, found = fits[self.n_classes]
        count = np.bincount(found, minlength=self.n_classes)
        mean = np.bincount(found, grey, minlength=self.n_classes) / np.maximum(count, 1)
        self._order = np.argsort(mean, kind="stable")
        if self.kind == "spectral":
            self._near = spectral.NearestPoint.fit(self.estimator.transform(features), found, self.n_classes)
            self._width = self._near.width
        else:
            inertia = float(self.estimator[-1].inertia_) / len(features)
            self._width = max(inertia, float(np.finfo(np.float32).tiny))
        return self

    def probabilities(self, features: np.ndarray) -> np.ndarray:
        """Give (n, f) features -> (n, K) float32 memberships that sum to 1.

        Membership falls with the squared distance to the cluster: for k-means to its centre, in units of the mean
        squared distance in the sample; for spectral clusters to their nearest pixel of the graph, in units of the mean
        squared distance between such neighbours. The largest one is the nearest cluster.
        """
        if self.estimator is None:
            raise InputError("the clusters were not fitted; call fit first.")
        if self._near is not None:
            squared = self._near.squared(self.estimator.transform(features))
        else:
            squared = self.estimator.transform(features).astype(np.float64) ** 2
        squared = squared[:, self._order]
        squared -= squared.min(axis=1, keepdims=True)
        weight = np.exp(-squared / self._width)
        return (weight / weight.sum(axis=1, keepdims=True)).astype(np.float32)

    def _fits(self, features: np.ndarray, counts: list[int]) -> "dict[int, tuple[Pipeline, np.ndarray]]":
        return (_kmeans if self.kind == "kmeans" else _spectral)(features, counts, self.seed)

    def tensors(self) -> dict[str, np.ndarray]:
        """Return what a model file must keep beside the estimator."""
        own = {"cluster.order": np.asarray(self._order, np.int64), "cluster.width": np.array([self._width])}
        return own | (self._near.tensors() if self._near is not None else {})

    def facts(self) -> dict[str, Any]:
        """Return what a report says about the choice of K; empty where K was given."""
        return {} if self.choice is None else self.choice.facts()

    def note(self) -> str | None:
        """Say in a sentence which K was chosen and why; None where it was given."""
        return None if self.choice is None else self.choice.note()


def _kmeans(features: np.ndarray, counts: list[int], seed: int) -> "dict[int, tuple[Pipeline, np.ndarray]]":
    """Cluster (n, f) features into each number of clusters -> the fitted pipeline and (n,) clusters from 0."""
    from sklearn.cluster import KMeans
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    fits = {}
    for k in counts:
        estimator = make_pipeline(StandardScaler(), KMeans(k, n_init=10, random_state=seed))
        fits[k] = estimator, estimator.fit_predict(features)
    return fits


def _spectral(features: np.ndarray, counts: list[int], seed: int) -> "dict[int, tuple[Pipeline, np.ndarray]]":
    """As `_kmeans` on (n, f) different features; the pipeline only standardises."""
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    estimator = make_pipeline(StandardScaler())
    points = estimator.fit_transform(features).astype(np.float64)
    if len(points) < 3:
        return {k: (estimator, np.arange(k)) for k in counts}
    vectors = spectral.eigenvectors(points, max(counts), seed)
    # as many clusters as points: there is an eigenvector less, and nothing to decide
    whole = len(points)
    return {k: (estimator, np.arange(k) if k == whole else spectral.cut(vectors, k, seed)) for k in counts}


def _silhouettes(features: np.ndarray, found: Mapping[int, np.ndarray]) -> dict[int, float]:
    """Give the mean silhouette of each clustering of (n, f) features, standardised, Euclidean.

    It is -1 where every pixel, or all of them together, is a cluster.
    """
    from sklearn.metrics import silhouette_score
    from sklearn.preprocessing import StandardScaler

    points = StandardScaler().fit_transform(features)
    scores = {}
    for k, clusters in found.items():
        defined = 2 <= len(np.unique(clusters)) < len(points)
        scores[k] = float(silhouette_score(points, clusters)) if defined else -1.0
    return scores
