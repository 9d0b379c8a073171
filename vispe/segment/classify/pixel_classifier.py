"""Pixel classifiers: from features of labelled pixels to class probabilities of all pixels.

All kinds are from scikit-learn, seeded, and with balanced class weights, so that the number of labelled pixels of a
class does not matter. Their probabilities are those of an image with equal class frequencies, and
`vispe.segment.classify.class_prior` adapts them to the frequencies of an image. For `logistic` this is exact for any
number of labels. Fully grown trees hardly depend on the weights, so for `forest` and `boosting` it is an approximation,
which needs similar numbers of labels for all classes.

- `ensemble`, the default: the mean of the probabilities of `logistic` and of extremely randomised trees
  (`vispe.segment.classify.estimators.trees`). More accurate than each of them alone on public micrographs
  (`eval/results/segment_ensemble.json`).
- `logistic`: multinomial on standardised features; the mean loss plus 0.01 times half the squared weights, so that
  the strength of the penalty does not depend on the number of labels. By far the fastest, and deterministic.
- `forest`: 100 trees. With filters alone it is better than `logistic` on five of seven sets of micrographs
  (`eval/results/segment_filters.json`), especially on thin and rare classes.
- `boosting`: 100 rounds of histogram gradient boosting, the slowest.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from vispe.errors import InputError, require
from vispe.segment.classify.class_prior import tempered
from vispe.segment.classify.estimators.linear import Linear
from vispe.segment.classify.estimators.threads import limit_threads
from vispe.segment.classify.estimators.trees import TREES, Trees
from vispe.utils.options import PositiveFloat, PositiveInt, checked

if TYPE_CHECKING:
    pass

Kind = Literal["ensemble", "logistic", "forest", "boosting"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""Kinds of `PixelClassifier`, the default first."""

FASTEST = "logistic"
"""Kind for interactive use."""

_CHUNK = 1 << 17  # pixels per prediction call: bounds the float64 copies that scikit-learn makes
_CACHED = 1 << 14  # pixels whose features fit into the CPU cache
_WITH_LINEAR = ("ensemble", "logistic")


class PixelClassifier:
    """Classifier of pixels with K classes, of which some may have no labels.

    Args:
        kind: one of `KINDS`.
        n_classes: K. A class without labels has a column with probability 0.
        seed: seed of the random numbers of all kinds but `logistic`.
        estimator: a fitted scikit-learn estimator, when a forest or boosting is loaded from a model file.
        state: the tensors of a fitted `logistic` or `ensemble`, when loaded from a model file.
        temperature: T; all probabilities p become p^(1/T).
        trees: number of trees of an `ensemble`.

    Attributes:
        linear: the fitted linear classifier of `logistic` and `ensemble`; None for the other kinds.
        trees: the fitted trees of `ensemble`; None for the other kinds.
        estimator: the scikit-learn estimator of `forest` and `boosting`; None for the other kinds.

    Raises:
        OptionError: unknown `kind`.
        MissingExtra: scikit-learn is not installed.
    """

    @checked
    def __init__(
        self,
        kind: Kind,
        n_classes: PositiveInt,
        *,
        seed: int = 0,
        estimator: Any = None,
        state: Mapping[str, np.ndarray] | None = None,
        temperature: PositiveFloat = 1.0,
        trees: PositiveInt = TREES,
    ) -> None:
        require("sklearn", "cli", "segmentation")
        self.kind, self._seed, self._n_trees = kind, seed, trees
        self.n_classes = n_classes
        self.temperature = temperature
        self.linear: Linear | None = None
        self.trees: Trees | None = None
        self.estimator = None
        if kind in _WITH_LINEAR and state is not None:
            self.linear = Linear.from_tensors(state, n_classes)
        if kind not in _WITH_LINEAR:
            self.estimator = estimator if estimator is not None else _build(kind, seed)
        if kind == "ensemble" and state is not None:
            self.trees = Trees.from_tensors(state, n_classes)
            same_classes = np.array_equal(self._fitted().classes.numpy(), self.trees.classes)
            if not same_classes or len(self._fitted().mean) != self.trees.width[0]:
                raise InputError(
                    "the parts of an ensemble have inconsistent classes or features. Train it again."
                )

    @property
    def is_linear(self) -> bool:
        """Whether the probabilities depend on the scores of `linear` only."""
        return self.kind == "logistic"

    def fit(
        self,
        features: np.ndarray,
        classes: np.ndarray,
        names: Sequence[str] = (),
        scale: tuple[int, float] | None = None,
    ) -> "PixelClassifier":
        """Fit to labelled pixels.

        Args:
            features: (n, f) float32, finite.
            classes: (n,) int, 1..K.
            names: class names, for the error message.
            scale: (n, factor); the linear classifier multiplies the first n standardised features by the factor,
                which strengthens their penalty. None scales none.

        Raises:
            InputError: fewer than two classes.
        """
        labelled = np.unique(classes)
        if len(labelled) < 2:
            listed = ", ".join(str(names[c - 1]) if names else str(c) for c in labelled) or "none"
            raise InputError(
                f"need at least 2 labelled classes, got {len(labelled)} ({listed}). Label the others."
            )
        with limit_threads(self.kind, len(features)):
            if self.kind in _WITH_LINEAR:
                self.linear = Linear.fit(features, classes, scale)
            if self.kind == "ensemble":
                self.trees = Trees.fit(features, classes, self._seed, self._n_trees)
            elif self.estimator is not None:
                self.estimator.fit(features, classes)
        if self.kind == "forest":  # with threads, trees are summed in completion order: not deterministic
            self.estimator.set_params(n_jobs=1)
        return self

    def probabilities(self, features: np.ndarray) -> np.ndarray:
        """Return probabilities (n, K) float32 of features (n, f), with bounded extra memory."""
        if self.is_linear:
            return self.planes(features.T).T
        out = np.zeros((len(features), self.n_classes), np.float32)
        columns = (
            np.asarray(self._fitted().classes if self.estimator is None else self.estimator.classes_) - 1
        )
        for start in range(0, len(features), _CHUNK):
            part = slice(start, start + _CHUNK)
            # classes without labels have no column in the estimator
            out[part, columns] = self._labelled_probabilities(features[part])
        return tempered(out.T, self.temperature).T

    def _labelled_probabilities(self, features: np.ndarray) -> np.ndarray:
        """Return probabilities (n, k) of the k labelled classes from features (n, f), at temperature 1."""
        if self.trees is None:
            return self.estimator.predict_proba(features)
        linear = self._fitted()
        scores = linear.scores(torch.from_numpy(features).T)
        of_linear = linear.probabilities(scores, self.n_classes)[linear.classes - 1].numpy().T
        return (self.trees.probabilities(features) + of_linear) / 2

    def planes(self, features: np.ndarray) -> np.ndarray:
        """Return probabilities (K, n) float32 of features (f, n): as `probabilities`, with pixels last.

        `logistic` is computed here: one matrix product for a few pixels at a time instead of scikit-learn's copies
        (equal up to rounding).

        Raises:
            InputError: not fitted.
        """
        if not self.is_linear:
            return self.of_parts([features])
        return self.probabilities_from_scores(self._fitted().scores(torch.from_numpy(features)))

    def of_parts(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Return probabilities (K, n) float32 of parts of the features, each (f', n)."""
        # scikit-learn's predictors cost more per call than a chunk in the CPU cache saves
        chunk = _CHUNK if self.trees is None else _CACHED
        return predict_in_chunks(parts, self.n_classes, self.probabilities, chunk)

    def probabilities_from_scores(self, scores: Tensor) -> np.ndarray:
        """Convert scores (k, ...) of `linear` to probabilities (K, ...) float32."""
        if self.temperature != 1:
            scores = scores / self.temperature
        return self._fitted().probabilities(scores, self.n_classes).numpy()

    def tensors(self) -> dict[str, np.ndarray]:
        """Return the arrays that a model file stores in addition to the estimator."""
        if self.kind not in _WITH_LINEAR:
            return {}
        arrays = self._fitted().tensors()
        return arrays if self.trees is None else arrays | self.trees.tensors()

    def _fitted(self) -> Linear:
        if self.linear is None:
            raise InputError("the classifier is not fitted. Call fit with labelled pixels first.")
        return self.linear


def predict_in_chunks(
    parts: Sequence[np.ndarray],
    n_classes: int,
    predict: Callable[[np.ndarray], np.ndarray],
    chunk_size: int = _CHUNK,
) -> np.ndarray:
    """Apply a function of features (n, f) to parts of the features, each (f', n); return (K, n) float32."""
    n = parts[0].shape[1]
    out = np.empty((n_classes, n), np.float32)
    ends = np.cumsum([len(part) for part in parts])
    for start in range(0, n, chunk_size):
        chunk = slice(start, min(start + chunk_size, n))
        features = np.empty((chunk.stop - start, ends[-1]), parts[0].dtype)
        for part, end in zip(parts, ends, strict=True):
            features[:, end - len(part) : end] = part[:, chunk].T
        out[:, chunk] = predict(features).T
    return out


def _build(kind: str, seed: int) -> Any:
    if kind == "forest":
        from sklearn.ensemble import RandomForestClassifier

        return RandomForestClassifier(100, class_weight="balanced", random_state=seed, n_jobs=-1)
    from sklearn.ensemble import HistGradientBoostingClassifier

    return HistGradientBoostingClassifier(class_weight="balanced", early_stopping=False, random_state=seed)
