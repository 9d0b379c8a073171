"""Pixel classifiers: features of labelled pixels in, class probabilities of all pixels out.

Three kinds, all from scikit-learn, seeded, and balanced: each class weighs alike, so none wins by being drawn more.
Their probabilities are those of a picture in which all classes are equally frequent, and
`vispe.segment.classify.class_prior` brings them to the frequencies of a picture. For `logistic` this is so however much of
a class is drawn. Trees that are grown to the end hardly feel the weights, so `forest` and `boosting` come near it
where classes are drawn about alike.

- `logistic`: multinomial on standardised features; the mean loss plus 0.01 times half the squared weights, so that
  the strength of the penalty does not depend on how much was drawn. The default: the features of vispe_micro were
  learned for a linear classifier: on synthetic tasks that it never saw, a forest is as good where labels are spread
  over the picture, and worse where they lie in a corner (`vispe/backbones/micro/vispe_micro.json`). The fastest by
  far, and free of random numbers.
- `forest`: 100 trees. With filters alone it is better than `logistic` on five of seven sets of micrographs
  (`eval/results/segment_filters.json`), above all on thin and rare classes.
- `boosting`: 100 rounds of histogram gradient boosting. The slowest; the best when labels are spread over the image.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from importlib import import_module
from threading import Thread
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vispe.errors import InputError, OptionError, did_you_mean, require
from vispe.segment.classify.class_prior import tempered

KINDS = ("logistic", "forest", "boosting")
"""The classifiers that `PixelClassifier` knows, the default first."""

_MODULES = {"logistic": "sklearn.linear_model", "forest": "sklearn.ensemble", "boosting": "sklearn.ensemble"}
_FEW = 20_000
_CHUNK = 1 << 17  # pixels per prediction call: bounds the float64 copies that scikit-learn makes
_CACHED = 1 << 14  # pixels whose standardised features stay in the cache
_PENALTY = 0.01  # half the squared weights count so much against the mean loss of a pixel
_LINEAR = ("mean", "weight", "bias", "classes")


@dataclass(frozen=True, eq=False)
class Linear:
    """A fitted `logistic`: the scores of features x are weight @ (x - mean) + bias.

    Attributes:
        mean: (f,) float32.
        weight: (k, f) float32, with the standardisation in it; k is 1 for two classes, else their number.
        bias: (k,) float32.
        classes: (2 or k,) int64, the classes that were labelled, 1..K. Two have the probabilities sigmoid(-score) and
            sigmoid(score); more have the softmax of their scores.
    """

    mean: Tensor
    weight: Tensor
    bias: Tensor
    classes: Tensor

    def scores(self, planes: Tensor) -> Tensor:
        """Score the first of the features, (f' <= f, n) with pixels last -> (k, n) float32."""
        own = len(planes)
        out = torch.empty((len(self.bias), planes.shape[1]))
        for start in range(0, planes.shape[1], _CACHED):
            part = planes[:, start : start + _CACHED] - self.mean[:own, None]
            torch.addmm(self.bias[:, None], self.weight[:, :own], part, out=out[:, start : start + _CACHED])
        return out

    def probabilities(self, scores: Tensor, n_classes: int) -> Tensor:
        """Turn scores (k, ...) into probabilities (K, ...); a class without labels has 0."""
        out = scores.new_zeros((n_classes, *scores.shape[1:]))
        columns = (self.classes - 1).tolist()
        if len(scores) == 1:
            torch.sigmoid(scores[0], out=out[columns[1]])
            torch.sub(1, out[columns[1]], out=out[columns[0]])
        elif columns == list(range(n_classes)):
            torch.softmax(scores, 0, out=out)
        else:
            out[columns] = scores.softmax(0)
        return out


def import_early(kind: str) -> Thread:
    """Begin to import what `PixelClassifier(kind)` is fitted with: over a second, while pictures and features are busy.

    Nothing is raised here: where scikit-learn is missing or broken, `PixelClassifier` says so.
    """

    def load() -> None:
        with suppress(Exception):
            import_module(_MODULES[kind])

    thread = Thread(target=load)
    thread.start()
    return thread


class PixelClassifier:
    """A classifier of pixels with K classes, of which some may have no labels.

    Args:
        kind: one of `KINDS`.
        n_classes: K. A class that was never labelled keeps its column, with probability 0.
        seed: of the random numbers in `forest` and `boosting`.
        estimator: a fitted scikit-learn estimator, when a forest or boosting comes from a model file.
        state: the tensors of a fitted `logistic`, when it comes from a model file.
        temperature: T; all probabilities p become p^(1/T).

    Attributes:
        linear: the fitted `logistic`; None for the other kinds.
        estimator: the scikit-learn estimator of the other kinds; None for `logistic`.

    Raises:
        OptionError: unknown `kind`.
        MissingExtra: scikit-learn is not installed.
    """

    def __init__(
        self,
        kind: str,
        n_classes: int,
        *,
        seed: int = 0,
        estimator: Any = None,
        state: Mapping[str, np.ndarray] | None = None,
        temperature: float = 1.0,
    ) -> None:
        if kind not in KINDS:
            hint = did_you_mean(kind, KINDS)
            raise OptionError(f"classifier={kind!r} is not one of {', '.join(KINDS)}.{hint}")
        require("sklearn", "cli", "segmentation")
        self.kind = kind
        self.n_classes = n_classes
        self.temperature = temperature
        self.linear: Linear | None = None
        self.estimator = None
        if kind == "logistic" and state is not None:
            self.linear = _stored(state, n_classes)
        elif kind != "logistic":
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
            if self.estimator is None:
                self.linear = _fit_linear(features, classes)
            else:
                self.estimator.fit(features, classes)
        if self.kind == "forest":  # threads would add up the trees in the order in which they end
            self.estimator.set_params(n_jobs=1)
        return self

    def probabilities(self, features: np.ndarray) -> np.ndarray:
        """Predict (n, f) features -> (n, K) float32 probabilities, with bounded extra memory."""
        if self.estimator is None:
            return self.planes(features.T).T
        out = np.zeros((len(features), self.n_classes), np.float32)
        columns = np.asarray(self.estimator.classes_) - 1
        for start in range(0, len(features), _CHUNK):
            part = slice(start, start + _CHUNK)
            out[part, columns] = self.estimator.predict_proba(features[part])
        return tempered(out.T, self.temperature).T

    def planes(self, features: np.ndarray) -> np.ndarray:
        """Predict (f, n) features, one row for each -> (K, n) float32 probabilities.

        As `probabilities`, with pixels last. `logistic` is computed here: one matrix product for a few pixels at a
        time instead of scikit-learn's copies (equal up to rounding).
        """
        if self.estimator is not None:
            return by_chunks(features, self.n_classes, self.probabilities)
        return self.of_scores(self._fitted().scores(torch.from_numpy(features)))

    def of_scores(self, scores: Tensor) -> np.ndarray:
        """Turn the scores (k, ...) of `linear` into probabilities (K, ...) float32."""
        if self.temperature != 1:
            scores = scores / self.temperature
        return self._fitted().probabilities(scores, self.n_classes).numpy()

    def tensors(self) -> dict[str, np.ndarray]:
        """Return what a model file must keep beside the estimator."""
        if self.kind != "logistic":
            return {}
        return {f"linear.{name}": getattr(self._fitted(), name).numpy() for name in _LINEAR}

    def _fitted(self) -> Linear:
        if self.linear is None:
            raise InputError("the classifier was not fitted; call fit with labelled pixels first.")
        return self.linear


def by_chunks(
    features: np.ndarray, n_classes: int, predict: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """Predict (f, n) features with what takes (n, f), a few pixels at a time -> (K, n) float32."""
    out = np.empty((n_classes, features.shape[1]), np.float32)
    for start in range(0, features.shape[1], _CHUNK):
        part = np.ascontiguousarray(features[:, start : start + _CHUNK].T)
        out[:, start : start + _CHUNK] = predict(part).T
    return out


def _stored(state: Mapping[str, np.ndarray], n_classes: int) -> Linear:
    """Take a `Linear` from the tensors of a model file."""
    missing = [name for name in _LINEAR if f"linear.{name}" not in state]
    if missing:
        raise InputError(
            f"a logistic classifier without {', '.join(missing)} cannot be used; train it again."
        )
    arrays = [np.array(state[f"linear.{name}"]) for name in _LINEAR]
    mean, weight, bias, classes = arrays
    rows = 1 if classes.size == 2 else classes.size
    fits = mean.ndim == 1 and weight.shape == (rows, mean.size) and bias.shape == (rows,) and classes.size > 1
    drawn = fits and classes.dtype == np.int64 and classes.ndim == 1 and (np.diff(classes) > 0).all()
    finite = all(np.isfinite(a).all() for a in arrays)
    if not (drawn and classes[0] >= 1 and classes[-1] <= n_classes and finite):
        shapes = ", ".join(f"{name} {array.shape}" for name, array in zip(_LINEAR, arrays, strict=True))
        raise InputError(
            f"the numbers of a logistic classifier for {n_classes} classes do not fit together ({shapes}), or are not "
            "finite; train it again."
        )
    parts = (torch.from_numpy(a.astype(np.float32)) for a in (mean, weight, bias))
    return Linear(*parts, torch.from_numpy(classes))


def _threads(count: int) -> AbstractContextManager[Any]:
    """Keep to one thread for few pixels, where threads wait for each other longer than they work."""
    from threadpoolctl import threadpool_limits

    return threadpool_limits(limits=1 if count < _FEW else None)


def _build(kind: str, seed: int) -> Any:
    """Build an unfitted scikit-learn estimator."""
    if kind == "forest":
        from sklearn.ensemble import RandomForestClassifier

        return RandomForestClassifier(100, class_weight="balanced", random_state=seed, n_jobs=-1)
    from sklearn.ensemble import HistGradientBoostingClassifier

    return HistGradientBoostingClassifier(class_weight="balanced", early_stopping=False, random_state=seed)


def _fit_linear(features: np.ndarray, classes: np.ndarray) -> Linear:
    """Fit `logistic` with scikit-learn and keep its numbers."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    scaler = StandardScaler()
    model = LogisticRegression(C=1 / (_PENALTY * len(classes)), class_weight="balanced", max_iter=1000)
    model.fit(scaler.fit_transform(features), classes)
    arrays = scaler.mean_, model.coef_ / scaler.scale_, model.intercept_
    return Linear(
        *(torch.from_numpy(np.ascontiguousarray(a, np.float32)) for a in arrays),
        classes=torch.from_numpy(np.asarray(model.classes_, np.int64)),
    )
