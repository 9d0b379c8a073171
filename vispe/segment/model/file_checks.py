"""Model files may come from anywhere: what they hold is checked before anything computes with it.

skops makes sure that only known types are built, and runs no code. It does not look at numbers, and some of them steer
compiled code without further checks: a decision tree whose branches lead in a circle never ends, and one whose branches
lead out of its array reads foreign memory. So archives are checked before they are unpacked, and numbers before use.
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

from vispe.errors import InputError
from vispe.images.formats.size_limits import RATIO, machine_memory
from vispe.images.labels.class_values import LONGEST, has_controls, unique
from vispe.images.normalize import MODES
from vispe.segment.classify import out_of_distribution

TRUSTED = frozenset(
    {"sklearn.tree._tree.Tree", "sklearn.ensemble._hist_gradient_boosting.predictor.TreePredictor"}
)
"""Types that are built beside those that skops trusts by itself; their numbers are checked by `check_estimator`."""

HOTTEST = 20
"""Highest temperature that calibration gives a classifier."""

_FREE = 100_000_000  # bytes that a member may unpack to, however small it is packed
_LARGEST_SIGMA = 1000.0  # pixels
_MEMBER = re.compile(r"schema\.json|\d+\.npy")  # of the estimator
_PART = re.compile(r"card\.json|estimator\.skops|tensors\.safetensors")  # of the model file
_CARD_BYTES = 64_000_000
_TEXT, _DEPTH = 4096, 16  # characters of any text of a card at most, and levels of its objects and lists


def check_archive(path: Path, data: bytes | None = None) -> None:
    """Refuse a zip file that unpacks to far more than it is, or holds members that no model has.

    Args:
        path: the model file.
        data: the estimator inside it; None checks the model file itself.

    Raises:
        InputError: refused; zipfile's own errors for a file that is no archive.
    """
    memory = machine_memory()
    with zipfile.ZipFile(path if data is None else io.BytesIO(data)) as archive:
        names = archive.namelist()
        known = _PART if data is None else _MEMBER
        own = data is not None or "card.json" in names  # else it is no model file at all
        strange = [n[:100] for n in names if own and not known.fullmatch(n)]
        if strange or len(set(names)) < len(names):
            listed = ", ".join(repr(n) for n in strange[:3]) or "a name twice"
            what = "it" if data is None else "its estimator"
            raise InputError(f"{path} was refused: {what} holds {listed}, which no model of vispe has.")
        for info in archive.infolist():
            bomb = info.file_size > max(_FREE, RATIO * info.compress_size)
            if bomb or (memory is not None and info.file_size > memory // 2):
                raise InputError(
                    f"{path} was refused: {info.filename} would unpack from {info.compress_size} to {info.file_size} "
                    "bytes; train it again."
                )


def read_card(data: bytes) -> object:
    """Parse the card of a model file; ValueError for one that is no JSON, far too long, or says a thing twice."""
    if len(data) > _CARD_BYTES:
        raise ValueError(f"its card has {len(data)} bytes, more than {_CARD_BYTES}")
    return json.loads(data, object_pairs_hook=unique)


def _check_texts(path: Path, value: object, where: str, depth: int = 0) -> None:
    """Refuse texts and numbers that are far too long, and objects in objects without end."""
    problem = None
    if depth > _DEPTH:
        problem = f"is nested more than {_DEPTH} deep"
    elif isinstance(value, str) and len(value) > _TEXT:
        problem = f"is a text of {len(value)} characters, more than {_TEXT}"
    elif isinstance(value, int) and abs(value) >= 1 << 63:
        problem = "is a number beyond 2^63"
    elif isinstance(value, float) and not math.isfinite(value):
        problem = "is no finite number"
    if problem is not None:
        raise InputError(f"{path} was refused: {where[:80]} in its card {problem}.")
    if isinstance(value, Mapping):
        for key, one in value.items():
            _check_texts(path, key, f"a key of {where}", depth + 1)
            _check_texts(path, one, str(key), depth + 1)
    elif isinstance(value, list):
        for one in value:
            _check_texts(path, one, where, depth + 1)


def check_card(path: Path, card: Mapping[str, Any]) -> None:
    """Refuse a card whose entries are missing, of the wrong type, or out of range.

    Raises:
        InputError: naming the entry.
    """
    names, count = card.get("classes"), card.get("n_classes")

    def require(key: str, fits: bool, wanted: str) -> None:
        if not fits:
            shown = repr(card.get(key))[:80]
            raise InputError(f"{path} is damaged: {key}={shown} in its card must be {wanted}; train again.")

    require("classifier", isinstance(card.get("classifier"), str), "a name")
    require("n_classes", _whole(count, 1, 255), "a whole number from 1 to 255")
    texts = _texts(names) and len(names) == count and all(names) and len(set(names)) == len(names)
    require("classes", texts, f"{count} different names")
    require("classes", all(len(name) <= LONGEST for name in names), f"names of up to {LONGEST} characters")
    require("classes", not any(map(has_controls, names)), "names without control characters")
    colors, clip, channels = card.get("colors"), card.get("clip"), card.get("channels", 0)
    fits = colors is None or _list(colors, count, lambda c: _list(c, 3, lambda v: _whole(v, 0, 255)))
    require("colors", fits, f"{count} colours of three whole numbers from 0 to 255, or null")
    require("normalize", card.get("normalize") in MODES, " or ".join(MODES))
    require("clip", _list(clip, 2, _finite) and 0 <= clip[0] < clip[1] <= 100, "two percentiles")
    require("channels", channels is None or _whole(channels, 1, 10_000), "a number of channels")
    require("seed", _whole(card.get("seed"), 0, (1 << 32) - 1), "a whole number below 2^32")
    heat = card.get("temperature", 1.0)
    require("temperature", _finite(heat) and 1 <= heat <= HOTTEST, f"a number from 1 to {HOTTEST}")
    require("training", isinstance(card.get("training"), dict), "an object")
    features = card.get("features")
    require("features", isinstance(features, dict), "an object")
    for key in ("kind", "model", "pos_embed", "weights", "fingerprint", "readout"):
        value = features.get(key)
        fits = value is None or (isinstance(value, str) and value.isprintable() and 0 < len(value) < 4096)
        require("features", fits, f"an object whose {key} is a text or null")
    for key in ("tile", "components", "token_stride", "token_shifts"):
        fits = features.get(key) is None or _whole(features[key], 1, 1 << 20)
        require("features", fits, f"an object whose {key} is a whole number, or null")
    blocks = features.get("layers")
    fits = blocks is None or (_list(blocks, None, lambda b: _whole(b, -4096, 4095)) and len(blocks) <= 4096)
    require("features", fits, "an object whose layers is a list of whole numbers, or null")
    sigmas = features.get("sigmas", [])
    fits = _list(sigmas, None, lambda s: _finite(s) and 0 < s <= _LARGEST_SIGMA) and len(sigmas) <= 64
    require("features", fits, f"an object whose sigmas are up to 64 numbers up to {_LARGEST_SIGMA:g}")
    _check_texts(path, card, "the object")


def check_tensors(path: Path, tensors: Mapping[str, np.ndarray], n_classes: int) -> None:
    """Refuse arrays that are not finite, and those of clusters or of a basis that do not fit together.

    Raises:
        InputError: naming the array.
    """
    for name, value in tensors.items():
        if value.dtype.kind not in "biuf" or not np.isfinite(value).all():
            raise InputError(f"{path} is damaged: its array {name} is not of finite numbers; train it again.")
    fits = True
    if "cluster.order" in tensors:
        width = tensors.get("cluster.width", np.zeros(0))
        fits = np.array_equal(np.sort(tensors["cluster.order"], axis=None), np.arange(n_classes))
        fits = fits and tensors["cluster.order"].ndim == 1 and width.shape == (1,) and width[0] > 0
    if "cluster.points" in tensors:
        points, of = tensors["cluster.points"], tensors.get("cluster.of", np.zeros(0))
        fits = fits and points.ndim == 2 and of.shape == points.shape[:1] and of.dtype.kind in "iu"
        fits = fits and bool(of.size) and of.min() >= 0 and of.max() < n_classes
    basis = {k.removeprefix("basis."): v for k, v in tensors.items() if k.startswith("basis.")}
    if basis:
        fits = fits and set(basis) == {"mean", "components", "scale"} and basis["components"].ndim == 2
        fits = fits and basis["mean"].shape == basis["components"].shape[1:]
        fits = fits and basis["scale"].shape == basis["components"].shape[:1] and (basis["scale"] > 0).all()
    seen = {k.removeprefix("domain."): v for k, v in tensors.items() if k.startswith("domain.")}
    if not (fits and (not seen or out_of_distribution.fits(seen))):
        raise InputError(f"{path} is damaged: its arrays do not fit together; train it again.")


def check_estimator(path: Path, estimator: Any, kind: str, n_classes: int) -> None:
    """Refuse a fitted estimator whose parts are not those that vispe makes, or whose numbers lead astray.

    Args:
        path: the model file.
        estimator: of scikit-learn, as loaded.
        kind: 'forest', 'boosting', 'kmeans' or 'spectral'.
        n_classes: K.

    Raises:
        InputError: what is wrong.
    """
    check = {"forest": _forest, "boosting": _boosting}.get(kind, _clusters)
    try:
        problem = check(estimator, n_classes)
    except (AttributeError, TypeError, ValueError, KeyError, IndexError, OverflowError) as error:
        problem = " ".join(str(error).split()) or type(error).__name__
    if problem:
        raise InputError(
            f"{path} was refused: its {kind} classifier is not one that vispe makes ({problem}); train it again."
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
            return f"a {type(tree).__name__} for a tree"
        inner = tree.tree_
        same = inner.n_features == width == tree.n_features_in_ and inner.n_outputs == tree.n_outputs_ == 1
        if not same or list(inner.n_classes) != [count] or tree.n_classes_ != count:
            return "a tree of other features or classes"
        leaf = inner.children_left == -1
        if not (leaf == (inner.children_right == -1)).all():
            return "a branch with one end"
        children = inner.children_left, inner.children_right
        if not _downward(leaf, children, inner.feature, width) or not np.isfinite(inner.threshold).all():
            return "branches that lead nowhere"
        if not np.isfinite(inner.value).all() or (inner.value < 0).any() or not inner.value.sum(axis=2).all():
            return "leaves that hold no probabilities"
    forest.set_params(n_jobs=-1, verbose=0)  # what a file says about this machine does not count
    return None


def _boosting(boosting: Any, n_classes: int) -> str | None:
    from sklearn.ensemble._hist_gradient_boosting.common import PREDICTOR_RECORD_DTYPE
    from sklearn.ensemble._hist_gradient_boosting.predictor import TreePredictor

    width = boosting.n_features_in_
    columns = len(boosting.classes_) if len(boosting.classes_) > 2 else 1
    if not _classes(boosting.classes_, n_classes) or boosting.n_trees_per_iteration_ != columns:
        return "its classes"
    if boosting._preprocessor is not None or boosting.is_categorical_ is not None:
        return "it expects other features than numbers"
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
                return f"a {type(tree).__name__} for a tree"
            nodes = tree.nodes
            if nodes.dtype != PREDICTOR_RECORD_DTYPE or nodes.ndim != 1 or not nodes.size:
                return "nodes of another kind"
            leaf = nodes["is_leaf"] != 0
            children = nodes["left"].astype(np.int64), nodes["right"].astype(np.int64)
            if not _downward(leaf, children, nodes["feature_idx"], width) or nodes["is_categorical"].any():
                return "branches that lead nowhere"
            if not np.isfinite(nodes["value"]).all() or np.isnan(nodes["num_threshold"]).any():
                return "leaves that hold no numbers"
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
    """Tell whether each branch leads to later nodes of the array, so that every path ends, and asks a real feature."""
    inner = np.flatnonzero(~leaf)
    ends = all((c[inner] > inner).all() and (c[inner] < len(leaf)).all() for c in children)
    return bool(ends and (feature[inner] >= 0).all() and (feature[inner] < width).all())


def _classes(found: Any, n_classes: int) -> bool:
    values = np.asarray(found)
    fits = values.ndim == 1 and values.dtype.kind in "iu" and values.size > 1 and (np.diff(values) > 0).all()
    return bool(fits and values[0] >= 1 and values[-1] <= n_classes)


def _reals(value: Any, shape: tuple[int, ...]) -> bool:
    array = np.asarray(value)
    return array.shape == shape and array.dtype.kind == "f" and bool(np.isfinite(array).all())


def _whole(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _list(value: object, count: int | None, fits: Callable[[Any], bool]) -> bool:
    """Tell whether a value is a list of so many things that all fit; None is any number."""
    sized = isinstance(value, list) and count in (None, len(value))
    return sized and all(map(fits, value))


def _finite(value: object) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) < 1e300
        and math.isfinite(value)
    )


def _texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(v, str) for v in value)
