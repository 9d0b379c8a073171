"""Linear classifier of `logistic` and `ensemble`: multinomial logistic regression of scikit-learn as plain arrays."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vispe.errors import InputError, counted

_CACHED = 1 << 14  # pixels whose standardised features fit into the CPU cache
_PENALTY = 0.01  # weight of half the squared weights relative to the mean loss of a pixel
_ARRAYS = ("mean", "weight", "bias", "classes")


@dataclass(frozen=True, eq=False)
class Linear:
    """A fitted `logistic`: the scores of features x are weight @ (x - mean) + bias.

    Attributes:
        mean: (f,) float32.
        weight: (k, f) float32, including the standardisation; k is 1 for two classes, else their number.
        bias: (k,) float32.
        classes: (2 or k,) int64, the labelled classes, 1..K. The probabilities of two classes are
            sigmoid(-score) and sigmoid(score); those of more classes are the softmax of their scores.
    """

    mean: Tensor
    weight: Tensor
    bias: Tensor
    classes: Tensor

    @classmethod
    def fit(
        cls, features: np.ndarray, classes: np.ndarray, scale: tuple[int, float] | None = None
    ) -> "Linear":
        """Fit to labelled pixels, with balanced class weights.

        Args:
            features: (n, f) float32, finite.
            classes: (n,) int, 1..K.
            scale: (n, factor); the first n standardised features are multiplied by the factor, which strengthens
                their penalty. None scales none.
        """
        from sklearn.linear_model import LogisticRegression
        from sklearn.preprocessing import StandardScaler

        factors = np.ones(features.shape[1])
        if scale is not None:
            factors[: scale[0]] = scale[1]
        scaler = StandardScaler()
        # C is relative to the sum of the losses: scale by n for a penalty relative to the mean
        model = LogisticRegression(C=1 / (_PENALTY * len(classes)), class_weight="balanced", max_iter=1000)
        standardised = scaler.fit_transform(features)
        with warnings.catch_warnings():
            # classes of a few pixels or objects each
            warnings.filterwarnings("ignore", "The number of unique classes")
            model.fit(standardised if scale is None else standardised * factors.astype(np.float32), classes)
        # fold the standardisation into the weights: coef @ ((x - mean) / scale * factors)
        arrays = scaler.mean_, model.coef_ * factors / scaler.scale_, model.intercept_
        return cls(
            *(torch.from_numpy(np.ascontiguousarray(a, np.float32)) for a in arrays),
            classes=torch.from_numpy(np.asarray(model.classes_, np.int64)),
        )

    @classmethod
    def from_tensors(cls, state: Mapping[str, np.ndarray], n_classes: int) -> "Linear":
        """Return the classifier that a model file stores.

        Raises:
            InputError: arrays that are missing, inconsistent or not finite.
        """
        missing = [name for name in _ARRAYS if f"linear.{name}" not in state]
        if missing:
            raise InputError(
                f"a logistic classifier without {', '.join(missing)} is not usable. Train it again."
            )
        arrays = [np.array(state[f"linear.{name}"]) for name in _ARRAYS]
        mean, weight, bias, classes = arrays
        # binary models of scikit-learn have one row of coefficients
        n_scores = 1 if classes.size == 2 else classes.size
        shapes_match = (
            mean.ndim == 1
            and weight.shape == (n_scores, mean.size)
            and bias.shape == (n_scores,)
            and classes.size > 1
        )
        classes_valid = (
            shapes_match and classes.dtype == np.int64 and classes.ndim == 1 and (np.diff(classes) > 0).all()
        )
        finite = all(np.isfinite(a).all() for a in arrays)
        if not (classes_valid and classes[0] >= 1 and classes[-1] <= n_classes and finite):
            shapes = ", ".join(f"{name} {array.shape}" for name, array in zip(_ARRAYS, arrays, strict=True))
            raise InputError(
                f"the arrays of a logistic classifier for {counted(n_classes, 'class')} are inconsistent ({shapes}) or "
                "not finite. Train it again."
            )
        parts = (torch.from_numpy(a.astype(np.float32)) for a in (mean, weight, bias))
        return cls(*parts, torch.from_numpy(classes))

    def tensors(self) -> dict[str, np.ndarray]:
        """Return the arrays that a model file stores."""
        return {f"linear.{name}": getattr(self, name).numpy() for name in _ARRAYS}

    def scores(self, planes: Tensor) -> Tensor:
        """Return scores (k, n) float32 of the first features, (f' <= f, n) with pixels last."""
        n_features = len(planes)
        out = torch.empty((len(self.bias), planes.shape[1]))
        for start in range(0, planes.shape[1], _CACHED):
            # centre first, then (k, f) @ (f, n) + bias per chunk of pixels, in the CPU cache
            part = planes[:, start : start + _CACHED] - self.mean[:n_features, None]
            torch.addmm(
                self.bias[:, None], self.weight[:, :n_features], part, out=out[:, start : start + _CACHED]
            )
        return out

    def probabilities(self, scores: Tensor, n_classes: int) -> Tensor:
        """Convert scores (k, ...) to probabilities (K, ...); classes without labels have 0."""
        columns = (self.classes - 1).tolist()
        empty = scores.new_empty if len(columns) == n_classes else scores.new_zeros
        out = empty((n_classes, *scores.shape[1:]))
        if len(scores) == 1:
            torch.sigmoid(scores[0], out=out[columns[1]])
            # two classes have a single score: complementary probabilities
            torch.sub(1, out[columns[1]], out=out[columns[0]])
        elif columns == list(range(n_classes)):
            torch.softmax(scores, 0, out=out)
        else:
            out[columns] = scores.softmax(0)
        return out
