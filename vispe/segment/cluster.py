"""Segmentation without labels: k-means on the features of pixels, with cluster numbers that stay the same.

Clusters are ordered by mean grey level, from dark to bright, so that a repeated run, or a run on a similar
image, gives a phase the same number.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from vispe.errors import InputError, OptionError, require

if TYPE_CHECKING:
    from sklearn.pipeline import Pipeline

SAMPLE = 50_000
"""Pixels that k-means is fitted on, drawn at random from all images together."""


class PixelClusters:
    """K clusters of pixels on standardised features.

    Args:
        n_classes: K, 2 to 255.
        seed: of the starting points; k-means++ is restarted 10 times and the best result is kept.
        estimator: a fitted pipeline, when it comes from a model file.
        state: the tensors that belong to it.

    Raises:
        OptionError: K outside 2..255.
        MissingExtra: scikit-learn is not installed.
    """

    kind = "kmeans"

    def __init__(
        self,
        n_classes: int,
        *,
        seed: int = 0,
        estimator: "Pipeline | None" = None,
        state: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        if not 2 <= n_classes <= 255:
            raise OptionError(f"cluster={n_classes} must lie between 2 and 255; give the number of phases.")
        self.n_classes = n_classes
        require("sklearn", "cli", "segmentation")
        self.estimator = estimator or _build(n_classes, seed)
        self._order = state["cluster.order"] if state else np.arange(n_classes)
        self._width = float(state["cluster.width"][0]) if state else 1.0

    def fit(self, features: np.ndarray, grey: np.ndarray) -> "PixelClusters":
        """Fit to a sample of pixels.

        Args:
            features: (n, f) float32, finite.
            grey: (n,) grey levels, for the order of the clusters.

        Raises:
            InputError: fewer different pixels than clusters.
        """
        different = len(np.unique(features, axis=0))
        if different < self.n_classes:
            raise InputError(
                f"cluster={self.n_classes} asks for more clusters than there are different pixels ({different}); "
                "ask for fewer."
            )
        found = self.estimator.fit_predict(features)
        count = np.bincount(found, minlength=self.n_classes)
        mean = np.bincount(found, grey, minlength=self.n_classes) / np.maximum(count, 1)
        self._order = np.argsort(mean, kind="stable")
        self._width = max(
            float(self.estimator[-1].inertia_) / len(features), float(np.finfo(np.float32).tiny)
        )
        return self

    def probabilities(self, features: np.ndarray) -> np.ndarray:
        """Give (n, f) features -> (n, K) float32 memberships that sum to 1.

        Membership falls with the squared distance to the cluster centre, in units of the mean squared
        distance of the sample; the largest one is the nearest centre.
        """
        squared = self.estimator.transform(features)[:, self._order].astype(np.float64) ** 2
        squared -= squared.min(axis=1, keepdims=True)
        weight = np.exp(-squared / self._width)
        return (weight / weight.sum(axis=1, keepdims=True)).astype(np.float32)

    def tensors(self) -> dict[str, np.ndarray]:
        """Return what a model file must keep beside the estimator."""
        return {"cluster.order": np.asarray(self._order, np.int64), "cluster.width": np.array([self._width])}


def _build(n_classes: int, seed: int) -> "Pipeline":
    """Build an unfitted scikit-learn estimator."""
    from sklearn.cluster import KMeans
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), KMeans(n_classes, n_init=10, random_state=seed))
