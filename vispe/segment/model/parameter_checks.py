"""Validation of the parameters of a classifier from a model file, before anything is computed with them.

skops creates known types only and runs no code, but it does not check numbers. Compiled code uses some of these
numbers without further checks: a decision tree with a cycle never terminates, and a tree with branches outside its
array reads memory of other objects.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vispe.errors import InputError, short
from vispe.segment.classify import out_of_distribution


def check_tensors(path: Path, tensors: Mapping[str, np.ndarray], n_classes: int) -> None:
    """Reject arrays that are not finite, and inconsistent arrays of clusters or of a basis.

    Raises:
        InputError: names the array.
    """
    for name, value in tensors.items():
        if value.dtype.kind not in "biuf" or not np.isfinite(value).all():
            raise InputError(
                f"{path} is damaged: its array {name} contains non-finite values. Train the model again."
            )
    basis, domain = (
        {key.removeprefix(start): value for key, value in tensors.items() if key.startswith(start)}
        for start in ("basis.", "domain.")
    )
    consistent = _are_clusters(tensors, n_classes) and (not basis or _is_basis(basis))
    if not consistent or (domain and not out_of_distribution.is_consistent(domain)):
        raise InputError(f"{path} is damaged: its arrays are inconsistent. Train the model again.")


def _are_clusters(tensors: Mapping[str, np.ndarray], n_classes: int) -> bool:
    """Return whether the arrays of clusters, if there are any, are consistent."""
    if (order := tensors.get("cluster.order")) is not None:
        width = tensors.get("cluster.width", np.zeros(0))
        is_permutation = order.ndim == 1 and np.array_equal(np.sort(order), np.arange(n_classes))
        if not is_permutation or width.shape != (1,) or width[0] <= 0:
            return False
    if (points := tensors.get("cluster.points")) is None:
        return True
    cluster_of = tensors.get("cluster.of", np.zeros(0))
    if points.ndim != 2 or cluster_of.shape != points.shape[:1] or cluster_of.dtype.kind not in "iu":
        return False
    return bool(cluster_of.size and cluster_of.min() >= 0 and cluster_of.max() < n_classes)


def _is_basis(arrays: Mapping[str, np.ndarray]) -> bool:
    """Return whether the arrays of a `TokenBasis` are consistent."""
    if set(arrays) != {"mean", "components", "scale"} or arrays["components"].ndim != 2:
        return False
    count, width = arrays["components"].shape
    shapes = arrays["mean"].shape == (width,) and arrays["scale"].shape == (count,)
    return bool(shapes and (arrays["scale"] > 0).all())


def check_estimator(path: Path, estimator: Any, kind: str, n_classes: int) -> None:
    """Reject a fitted estimator with unexpected components or invalid numbers.

    Args:
        path: the model file.
        estimator: scikit-learn estimator, as loaded.
        kind: 'forest', 'boosting', 'kmeans' or 'spectral'.
        n_classes: K.

    Raises:
        InputError: describes the problem.
    """
    check = {"forest": _forest, "boosting": _boosting}.get(kind, _clusters)
    try:
        problem = check(estimator, n_classes)
    except (AttributeError, TypeError, ValueError, KeyError, IndexError, OverflowError) as error:
        problem = short(error)
    if problem:
        raise InputError(
            f"{path} was rejected: its {kind} classifier was not written by vispe ({problem}). Train the model again."
        )


def _forest(forest: Any, n_classes: int) -> str | None:
    from sklearn.tree import DecisionTreeClassifier

    width = forest.n_features_in_
    count = len(forest.classes_)
    if not _classes(forest.classes_, n_classes) or forest.n_classes_ != count or forest.n_outputs_ != 1:
        return "its classes"
    if not isinstance(forest.estimators_, list) or not forest.estimators_:
        return "its trees"
    for tree in forest.estimators_:
        if type(tree) is not DecisionTreeClassifier:
            return f"a {type(tree).__name__} instead of a tree"
        inner = tree.tree_
        same = inner.n_features == width == tree.n_features_in_ and inner.n_outputs == tree.n_outputs_ == 1
        if not same or list(inner.n_classes) != [count] or tree.n_classes_ != count:
            return "a tree with other features or classes"
        leaf = inner.children_left == -1
        if not (leaf == (inner.children_right == -1)).all():
            return "a branch with one child"
        children = inner.children_left, inner.children_right
        if not _downward(leaf, children, inner.feature, width) or not np.isfinite(inner.threshold).all():
            return "branches to invalid nodes"
        if not np.isfinite(inner.value).all() or (inner.value < 0).any() or not inner.value.sum(axis=2).all():
            return "leaves without probabilities"
    forest.set_params(n_jobs=-1, verbose=0)  # number of threads and verbosity of the file are ignored
    return None


def _boosting(boosting: Any, n_classes: int) -> str | None:
    from sklearn.ensemble._hist_gradient_boosting.common import PREDICTOR_RECORD_DTYPE
    from sklearn.ensemble._hist_gradient_boosting.predictor import TreePredictor

    width = boosting.n_features_in_
    columns = len(boosting.classes_) if len(boosting.classes_) > 2 else 1
    if not _classes(boosting.classes_, n_classes) or boosting.n_trees_per_iteration_ != columns:
        return "its classes"
    if boosting._preprocessor is not None or boosting.is_categorical_ is not None:
        return "it expects non-numeric features"
    baseline = np.asarray(boosting._baseline_prediction)
    if baseline.size != columns or not _reals(baseline, baseline.shape):
        return "its baseline"
    if type(boosting._loss).__name__ not in ("HalfBinomialLoss", "HalfMultinomialLoss"):
        return "its loss"
    for trees in boosting._predictors:
        if len(trees) != columns:
            return "its trees"
        for tree in trees:
            if type(tree) is not TreePredictor:
                return f"a {type(tree).__name__} instead of a tree"
            nodes = tree.nodes
            if nodes.dtype != PREDICTOR_RECORD_DTYPE or nodes.ndim != 1 or not nodes.size:
                return "nodes of another type"
            leaf = nodes["is_leaf"] != 0
            children = nodes["left"].astype(np.int64), nodes["right"].astype(np.int64)
            if not _downward(leaf, children, nodes["feature_idx"], width) or nodes["is_categorical"].any():
                return "branches to invalid nodes"
            if not np.isfinite(nodes["value"]).all() or np.isnan(nodes["num_threshold"]).any():
                return "leaves without numbers"
    boosting.set_params(verbose=0)
    return None


def _clusters(pipeline: Any, n_classes: int) -> str | None:
    from sklearn.cluster import KMeans
    from sklearn.preprocessing import StandardScaler

    steps = [step for _, step in pipeline.steps]
    kinds = [type(step) for step in steps]
    if kinds not in ([StandardScaler], [StandardScaler, KMeans]) or pipeline.memory is not None:
        return "steps " + ", ".join(type(s).__name__ for s in steps)
    scaler = steps[0]
    shape = (scaler.n_features_in_,)
    for name in ("mean_", "scale_"):
        if not _reals(getattr(scaler, name), shape):
            return f"its {name}"
    if not (scaler.scale_ > 0).all():
        return "its scale_"
    if len(steps) == 2:
        if not _reals(steps[1].cluster_centers_, (n_classes, *shape)):
            return "its centres"
        steps[1]._n_threads = 1
    pipeline.set_params(verbose=False)
    return None


def _downward(leaf: np.ndarray, children: Sequence[np.ndarray], feature: np.ndarray, width: int) -> bool:
    """Return whether each branch has valid features and later nodes as children, so that every path terminates."""
    inner = np.flatnonzero(~leaf)
    terminates = all((c[inner] > inner).all() and (c[inner] < len(leaf)).all() for c in children)
    return bool(terminates and (feature[inner] >= 0).all() and (feature[inner] < width).all())


def _classes(values_of_classes: Any, n_classes: int) -> bool:
    values = np.asarray(values_of_classes)
    ascending = (
        values.ndim == 1 and values.dtype.kind in "iu" and values.size > 1 and (np.diff(values) > 0).all()
    )
    return bool(ascending and values[0] >= 1 and values[-1] <= n_classes)


def _reals(value: Any, shape: tuple[int, ...]) -> bool:
    array = np.asarray(value)
    return array.shape == shape and array.dtype.kind == "f" and bool(np.isfinite(array).all())
