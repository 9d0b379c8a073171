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
    consistent = True
    if "cluster.order" in tensors:
        width = tensors.get("cluster.width", np.zeros(0))
        consistent = np.array_equal(np.sort(tensors["cluster.order"], axis=None), np.arange(n_classes))
        consistent = (
            consistent and tensors["cluster.order"].ndim == 1 and width.shape == (1,) and width[0] > 0
        )
    if "cluster.points" in tensors:
        points, cluster_of = tensors["cluster.points"], tensors.get("cluster.of", np.zeros(0))
        consistent = (
            consistent
            and points.ndim == 2
            and cluster_of.shape == points.shape[:1]
            and cluster_of.dtype.kind in "iu"
        )
        consistent = (
            consistent and bool(cluster_of.size) and cluster_of.min() >= 0 and cluster_of.max() < n_classes
        )
    basis = {k.removeprefix("basis."): v for k, v in tensors.items() if k.startswith("basis.")}
    if basis:
        consistent = (
            consistent and set(basis) == {"mean", "components", "scale"} and basis["components"].ndim == 2
        )
        consistent = consistent and basis["mean"].shape == basis["components"].shape[1:]
        consistent = (
            consistent
            and basis["scale"].shape == basis["components"].shape[:1]
            and (basis["scale"] > 0).all()
        )
    domain_arrays = {k.removeprefix("domain."): v for k, v in tensors.items() if k.startswith("domain.")}
    if not (consistent and (not domain_arrays or out_of_distribution.is_consistent(domain_arrays))):
        raise InputError(f"{path} is damaged: its arrays are inconsistent. Train the model again.")


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
