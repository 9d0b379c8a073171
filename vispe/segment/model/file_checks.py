"""Validation of model files, which are untrusted input, before anything is computed with them.

skops creates known types only and runs no code, but it does not check numbers. Compiled code uses some of
these numbers without further checks: a decision tree with a cycle never terminates, and a tree with branches
outside its array reads memory of other objects. So archives are checked before they are unpacked, and numbers
before they are used.
"""

import io
import json
import math
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vispe.errors import InputError, counted
from vispe.images.formats.size_limits import RATIO, machine_memory
from vispe.images.labels.class_values import LONGEST, has_controls, unique
from vispe.images.normalize import MODES
from vispe.segment.classify import out_of_distribution

TRUSTED = frozenset(
    {"sklearn.tree._tree.Tree", "sklearn.ensemble._hist_gradient_boosting.predictor.TreePredictor"}
)
"""Trusted types in addition to those of skops; their numbers are checked by `check_estimator`."""

MAX_TEMPERATURE = 20
"""Upper bound of the temperature of a classifier."""

_FREE = 100_000_000  # bytes to which any member may unpack, for any compression ratio
_LARGEST_SIGMA = 1000.0  # pixels
_MEMBER = re.compile(r"schema\.json|\d+\.npy")  # of the estimator
_PART = re.compile(r"card\.json|estimator\.skops|tensors\.safetensors")  # of the model file
_CARD_BYTES = 64_000_000
_TEXT, _DEPTH = 4096, 16  # upper bounds: characters of a string in a card, and nesting depth


def check_archive(path: Path, data: bytes | None = None) -> None:
    """Reject a zip file with an excessive compression ratio, or with unknown members.

    Args:
        path: the model file.
        data: the estimator inside it; None checks the model file itself.

    Raises:
        InputError: the archive is rejected. A file that is not an archive raises zipfile's own errors.
    """
    memory = machine_memory()
    with zipfile.ZipFile(path if data is None else io.BytesIO(data)) as archive:
        names = archive.namelist()
        known = _PART if data is None else _MEMBER
        is_model = data is not None or "card.json" in names  # otherwise it is not a model file
        unknown = [n[:100] for n in names if is_model and not known.fullmatch(n)]
        if unknown or len(set(names)) < len(names):
            listed = ", ".join(repr(n) for n in unknown[:3]) or "a duplicate name"
            what = "it" if data is None else "its estimator"
            raise InputError(f"{path} was rejected: {what} contains {listed}, unknown in models of vispe.")
        for info in archive.infolist():
            excessive = info.file_size > max(_FREE, RATIO * info.compress_size)
            if excessive or (memory is not None and info.file_size > memory // 2):
                raise InputError(
                    f"{path} was rejected: {info.filename} would unpack from {info.compress_size} to {info.file_size} "
                    "bytes. Train the model again."
                )


def read_card(data: bytes) -> object:
    """Parse the card of a model file; ValueError if it is not JSON, too long, or has duplicate keys."""
    if len(data) > _CARD_BYTES:
        raise ValueError(f"its card has {len(data)} bytes, more than {_CARD_BYTES}")
    return json.loads(data, object_pairs_hook=unique)


def _check_texts(path: Path, value: object, where: str, depth: int = 0) -> None:
    """Reject overlong strings, extreme numbers and deeply nested objects."""
    problem = None
    if depth > _DEPTH:
        problem = f"is nested more than {_DEPTH} deep"
    elif isinstance(value, str) and len(value) > _TEXT:
        problem = f"is a string of {counted(len(value), 'character')}, more than {_TEXT}"
    elif isinstance(value, int) and abs(value) >= 1 << 63:
        problem = "is a number beyond 2^63"
    elif isinstance(value, float) and not math.isfinite(value):
        problem = "is not a finite number"
    if problem is not None:
        raise InputError(f"{path} was rejected: {where[:80]} in its card {problem}.")
    if isinstance(value, Mapping):
        for key, element in value.items():
            _check_texts(path, key, f"a key of {where}", depth + 1)
            _check_texts(path, element, str(key), depth + 1)
    elif isinstance(value, list):
        for element in value:
            _check_texts(path, element, where, depth + 1)


def check_card(path: Path, card: Mapping[str, Any]) -> None:
    """Reject a card with missing entries, or entries of the wrong type or out of range.

    Raises:
        InputError: names the entry.
    """
    names, count = card.get("classes"), card.get("n_classes")

    def require(key: str, valid: bool, expected: str) -> None:
        if not valid:
            value_text = repr(card.get(key))[:80]
            raise InputError(
                f"{path} is damaged: {key}={value_text} in its card must be {expected}. Train the model again."
            )

    require("classifier", isinstance(card.get("classifier"), str), "a name")
    require("n_classes", _is_integer(count, 1, 255), "an integer from 1 to 255")
    texts = _are_strings(names) and len(names) == count and all(names) and len(set(names)) == len(names)
    require("classes", texts, f"{count} distinct names")
    require("classes", all(len(name) <= LONGEST for name in names), f"names of up to {LONGEST} characters")
    require("classes", not any(map(has_controls, names)), "names without control characters")
    colors, clip, channels = card.get("colors"), card.get("clip"), card.get("channels", 0)
    valid = colors is None or _is_list(
        colors, count, lambda c: _is_list(c, 3, lambda v: _is_integer(v, 0, 255))
    )
    require("colors", valid, f"{counted(count, 'colour')} of three integers from 0 to 255, or null")
    require("normalize", card.get("normalize") in MODES, " or ".join(MODES))
    require("clip", _is_list(clip, 2, _is_finite) and 0 <= clip[0] < clip[1] <= 100, "two percentiles")
    require("channels", channels is None or _is_integer(channels, 1, 10_000), "a number of channels")
    require("seed", _is_integer(card.get("seed"), 0, (1 << 32) - 1), "an integer below 2^32")
    temperature = card.get("temperature", 1.0)
    require(
        "temperature",
        _is_finite(temperature) and 1 <= temperature <= MAX_TEMPERATURE,
        f"a number from 1 to {MAX_TEMPERATURE}",
    )
    require("training", isinstance(card.get("training"), dict), "an object")
    features = card.get("features")
    require("features", isinstance(features, dict), "an object")
    for key in ("kind", "model", "pos_embed", "weights", "fingerprint", "readout"):
        value = features.get(key)
        valid = value is None or (isinstance(value, str) and value.isprintable() and 0 < len(value) < 4096)
        require("features", valid, f"an object whose {key} is a string or null")
    for key in ("tile", "components", "token_stride", "token_shifts"):
        valid = features.get(key) is None or _is_integer(features[key], 1, 1 << 20)
        require("features", valid, f"an object whose {key} is an integer, or null")
    blocks = features.get("layers")
    valid = blocks is None or (
        _is_list(blocks, None, lambda b: _is_integer(b, -4096, 4095)) and len(blocks) <= 4096
    )
    require("features", valid, "an object whose layers is a list of integers, or null")
    sigmas = features.get("sigmas", [])
    valid = _is_list(sigmas, None, lambda s: _is_finite(s) and 0 < s <= _LARGEST_SIGMA) and len(sigmas) <= 64
    require("features", valid, f"an object whose sigmas are up to 64 numbers up to {_LARGEST_SIGMA:g}")
    objects = card.get("object_classes")
    require(
        "object_classes", objects is None or _is_object_classes(objects), "an object with names and options"
    )
    _check_texts(path, card, "the object")


def _is_object_classes(entry: object) -> bool:
    """Return whether an entry of a card describes a classifier of objects; `ObjectOptions` checks its options."""
    if not isinstance(entry, dict) or not isinstance(entry.get("facts"), dict):
        return False
    limits = entry["facts"].get("mean_grey", [0, 0])
    if not isinstance(entry["facts"].get("examples"), dict) or not _is_list(limits, 2, _is_finite):
        return False
    names, options = entry.get("names"), entry.get("options")
    texts = _are_strings(names) and 2 <= len(names) <= 255 and len(set(names)) == len(names)
    valid = texts and all(0 < len(name) <= LONGEST and not has_controls(name) for name in names)
    valid = valid and entry.get("unit") in ("px", "um") and isinstance(entry.get("volumes"), bool)
    return valid and isinstance(options, dict) and _are_strings(options.get("classes"))


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
        problem = " ".join(str(error).split()) or type(error).__name__
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


def _is_integer(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_list(value: object, count: int | None, fits: Callable[[Any], bool]) -> bool:
    """Return whether a value is a list of `count` elements (None: any number) that all satisfy `fits`."""
    sized = isinstance(value, list) and count in (None, len(value))
    return sized and all(map(fits, value))


def _is_finite(value: object) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) < 1e300
        and math.isfinite(value)
    )


def _are_strings(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(v, str) for v in value)
