"""Pixel classifiers: features of labelled pixels in, class probabilities of all pixels out.

Three kinds, all from scikit-learn, seeded, and balanced so that a class does not win by being drawn more:

- `logistic`: multinomial on standardised features, with scikit-learn's L2 strength (C = 1: half the squared weights
  against the summed loss). The default: the features of vispe_micro were learned for a linear classifier, and on
  synthetic tasks that it never saw it is better with it than a forest (`vispe/micro/vispe_micro.json`). The fastest by
  far, and free of random numbers.
- `forest`: 100 trees. With filters alone it is better than `logistic` on five of seven sets of micrographs
  (`eval/results/segment_filters.json`), above all on thin and rare classes.
- `boosting`: 100 rounds of histogram gradient boosting. The slowest; the best when labels are spread over the image.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from vispe.errors import InputError, OptionError, did_you_mean, require

KINDS = ("logistic", "forest", "boosting")
"""The classifiers that `PixelClassifier` knows, the default first."""

_FEW = 20_000
_CHUNK = 1 << 17  # pixels per prediction call: bounds the float64 copies that scikit-learn makes
_CACHED = 1 << 14  # pixels whose standardised features stay in the cache


class PixelClassifier:
    """A classifier of pixels with K classes, of which some may have no labels.

    Args:
        kind: one of `KINDS`.
        n_classes: K. A class that was never labelled keeps its column, with probability 0.
        seed: of the random numbers in `forest` and `boosting`.
        estimator: a fitted scikit-learn estimator, when the classifier comes from a model file.

    Raises:
        OptionError: unknown `kind`.
        MissingExtra: scikit-learn is not installed.
    """

    def __init__(self, kind: str, n_classes: int, *, seed: int = 0, estimator: Any = None) -> None:
        if kind not in KINDS:
            hint = did_you_mean(kind, KINDS)
            raise OptionError(f"classifier={kind!r} is not one of {', '.join(KINDS)}.{hint}")
        require("sklearn", "cli", "segmentation")
        self.kind = kind
        self.n_classes = n_classes
        self.estimator = estimator if estimator is not None else _build(kind, seed)

    def fit(self, features: np.ndarray, classes: np.ndarray, names: Sequence[str] = ()) -> "PixelClassifier":
        """Fit to labelled pixels.

        Args:
            features: (n, f) float32, finite.
            classes: (n,) int, 1..K.
            names: class names, for the error message.

        Raises:
            InputError: fewer than two different classes.
        """
        drawn = np.unique(classes)
        if len(drawn) < 2:
            listed = ", ".join(str(names[c - 1]) if names else str(c) for c in drawn) or "none"
            raise InputError(
                f"need at least 2 labelled classes, found {len(drawn)} ({listed}); draw the others."
            )
        with _threads(len(features)):
            self.estimator.fit(features, classes)
        return self

    def probabilities(self, features: np.ndarray) -> np.ndarray:
        """Predict (n, f) features -> (n, K) float32 probabilities, with bounded extra memory."""
        out = np.zeros((len(features), self.n_classes), np.float32)
        columns = np.asarray(self.estimator.classes_) - 1
        for start in range(0, len(features), _CHUNK):
            out[start : start + _CHUNK, columns] = self.estimator.predict_proba(
                features[start : start + _CHUNK]
            )
        return out

    def planes(self, features: np.ndarray) -> np.ndarray:
        """Predict (f, n) features, one row for each -> (K, n) float32 probabilities.

        As `probabilities`, with pixels last. `logistic` is computed here, as the same sums in another order
        (equal up to rounding): one matrix product for a few pixels at a time instead of scikit-learn's copies.
        """
        if self.kind != "logistic":
            out = np.empty((self.n_classes, features.shape[1]), np.float32)
            for start in range(0, features.shape[1], _CHUNK):
                part = np.ascontiguousarray(features[:, start : start + _CHUNK].T)
                out[:, start : start + _CHUNK] = self.probabilities(part).T
            return out
        mean, weight, bias = (torch.from_numpy(a.astype(np.float32)) for a in self.linear())
        out = torch.zeros((self.n_classes, features.shape[1]))
        columns = [int(c) - 1 for c in self.estimator.classes_]
        values = torch.from_numpy(features)
        for start in range(0, features.shape[1], _CACHED):
            score = torch.addmm(bias[:, None], weight, values[:, start : start + _CACHED] - mean[:, None])
            part = out[:, start : start + _CACHED]
            if len(score) == 1:  # two classes
                part[columns[1]] = score[0].sigmoid_()
                torch.sub(1, part[columns[1]], out=part[columns[0]])
            else:
                part[columns] = score.softmax(0)
        return out.numpy()

    def linear(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Give the fitted `logistic` as mean (f,), weight (k, f) and bias (k,), float64.

        The scores of features x are weight @ (x - mean) + bias; standardisation is part of the weights. k is 1
        for two classes, whose probabilities are sigmoid(-score) and sigmoid(score); for more, k is their number
        and the probabilities are the softmax. Classes are those of `estimator.classes_`.
        """
        scaler, model = self.estimator
        weight = np.asarray(model.coef_, np.float64) / np.asarray(scaler.scale_, np.float64)
        return np.asarray(scaler.mean_, np.float64), weight, np.asarray(model.intercept_, np.float64)


def _threads(count: int) -> AbstractContextManager[Any]:
    """Keep to one OpenMP thread for few pixels, where threads wait for each other longer than they work."""
    from threadpoolctl import threadpool_limits

    return threadpool_limits(limits=1 if count < _FEW else None, user_api="openmp")


def _build(kind: str, seed: int) -> Any:
    """Build an unfitted scikit-learn estimator."""
    if kind == "forest":
        from sklearn.ensemble import RandomForestClassifier

        return RandomForestClassifier(100, class_weight="balanced", random_state=seed, n_jobs=-1)
    if kind == "boosting":
        from sklearn.ensemble import HistGradientBoostingClassifier

        return HistGradientBoostingClassifier(
            class_weight="balanced", early_stopping=False, random_state=seed
        )
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), LogisticRegression(class_weight="balanced", max_iter=1000))
