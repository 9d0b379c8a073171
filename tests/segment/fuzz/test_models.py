"""Untrusted model files: nothing in them is executed, and each raises one error message."""

import hashlib
import io
import json
import pickle
import re
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import skops.io
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.numpy import save
from sklearn.ensemble import BaggingClassifier, RandomForestClassifier
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler

from tests.cases import cases
from tests.segment.fuzz import corpus
from vispe.cli.main import main
from vispe.errors import InputError, VispeError
from vispe.segment.classify.clustering import PixelClusters
from vispe.segment.classify.pixel_classifier import PixelClassifier
from vispe.segment.features.feature_config import FeatureConfig
from vispe.segment.model.estimator_file import TRUSTED
from vispe.segment.model.model_file import Model, load_model, save_model

RNG = np.random.default_rng(0)
X, Y = RNG.random((90, 26)).astype(np.float32), RNG.integers(1, 4, 90)
KINDS = ("ensemble", "logistic", "forest", "boosting", "kmeans", "spectral")


def fit_classifier(kind):
    """Return a classifier fitted to 26 features, the number of the filters."""
    if kind in ("kmeans", "spectral"):
        return PixelClusters(3, kind, seed=5).fit(X, X[:, 0])
    classifier = PixelClassifier(kind, 3, seed=5)
    if kind == "ensemble":
        classifier = PixelClassifier(kind, 3, seed=5, trees=3)
    if kind == "forest":
        classifier.estimator.set_params(n_estimators=3, n_jobs=1)
    if kind == "boosting":
        classifier.estimator.set_params(max_iter=4)
    return classifier.fit(X, Y)


def save_to(folder, classifier):
    """Save a model file with this classifier and return its path."""
    model = Model(
        FeatureConfig(),
        classifier,
        ("a", "b", "c"),
        None,
        "stack",
        (0.5, 99.5),
        1,
        5,
        None,
        {"images": ["x.png"]},
    )
    return save_model(folder / "m.vispe", model, force=True)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Bytes of a valid model file of each kind."""
    folder = tmp_path_factory.mktemp("models")
    return {kind: save_to(folder, fit_classifier(kind)).read_bytes() for kind in KINDS}


def write_modified(path, data, *, card=None, compression=zipfile.ZIP_STORED, **members):
    """Write a model file with modified members or entries of the card, and with correct checksums."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    contents |= {
        {"estimator": "estimator.skops", "tensors": "tensors.safetensors"}[k]: v for k, v in members.items()
    }
    new_card = json.loads(contents.pop("card.json"))
    new_card["sha256"] = {name: hashlib.sha256(part).hexdigest() for name, part in contents.items()}
    new_card |= card or {}
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("card.json", new_card if isinstance(new_card, bytes) else json.dumps(new_card))
        for name, part in contents.items():
            archive.writestr(name, part)
    return path


def assert_rejected(path, pattern):
    """Assert that loading raises a one-line message that names the file."""
    with pytest.raises(InputError, match=pattern) as caught:
        load_model(path)
    text = str(caught.value)
    assert str(path) in text
    assert "\n" not in text
    assert len(text) < 600 + len(str(path))


@cases("kind", KINDS)
def test_valid_models_load_and_predict_equally(tmp_path, plain, kind):
    (tmp_path / "m.vispe").write_bytes(plain[kind])
    actual = load_model(tmp_path / "m.vispe").classifier.probabilities(X)
    np.testing.assert_allclose(actual, fit_classifier(kind).probabilities(X), atol=1e-6)


def test_trusted_types_beyond_those_of_skops():
    assert sorted(TRUSTED) == [
        "sklearn.ensemble._hist_gradient_boosting.predictor.TreePredictor",
        "sklearn.tree._tree.Tree",
    ]


# --- code ---


class Payload:
    """An object that creates a file when unpickled."""

    def __init__(self, target):
        self.target = str(target)

    def __reduce__(self):
        return Path.touch, (Path(self.target),)


def schema_of(data):
    """Return the parsed schema and the members of an estimator file."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    return json.loads(parts["schema.json"]), parts


def pack_estimator(parts, schema=None, extra=()):
    """Return an estimator file with these members."""
    stream = io.BytesIO()
    if schema is not None:
        parts = {**parts, "schema.json": json.dumps(schema).encode()}
    with zipfile.ZipFile(stream, "w") as archive:
        for name, part in [*parts.items(), *extra]:
            archive.writestr(name, part)
    return stream.getvalue()


def estimator_of(data):
    """Return the estimator file in a model file."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return archive.read("estimator.skops")


def test_pickles_in_any_member_are_never_loaded(tmp_path, plain):
    sentinel = tmp_path / "ran"
    attack = pickle.dumps(Payload(sentinel))
    (tmp_path / "p.vispe").write_bytes(attack)
    assert_rejected(tmp_path / "p.vispe", "not a complete vispe model file")
    for kind, member in (("forest", "estimator"), ("logistic", "tensors")):
        path = write_modified(tmp_path / "m.vispe", plain[kind], **{member: attack})
        assert_rejected(path, "is damaged: (its estimator cannot be read|.*header)|is damaged")
    _, parts = schema_of(estimator_of(plain["forest"]))
    array = next(name for name in parts if name.endswith(".npy"))
    stream = io.BytesIO()
    np.save(stream, np.array([Payload(sentinel)], object), allow_pickle=True)
    for payload in (attack, stream.getvalue()):
        path = write_modified(
            tmp_path / "m.vispe", plain["forest"], estimator=pack_estimator({**parts, array: payload})
        )
        assert_rejected(path, r"cannot load the estimator|was rejected|is damaged")
    assert not sentinel.exists()


CALLS = {
    "function": {
        "__class__": "system",
        "__module__": "os",
        "__loader__": "FunctionNode",
        "content": "os.system",
    },
    "type": {"__class__": "Popen", "__module__": "subprocess", "__loader__": "TypeNode"},
    "object": {"__class__": "Popen", "__module__": "subprocess", "__loader__": "ObjectNode", "content": None},
    "import": {"__class__": "x", "__module__": "antigravity", "__loader__": "ObjectNode", "content": None},
    "reduce": {
        "__class__": "Tree",
        "__module__": "os",
        "__loader__": "LossNode",
        "__reduce__": {"args": {"__class__": "str", "__module__": "builtins", "__loader__": "JsonNode"}},
        "content": {"__class__": "dict", "__module__": "builtins", "__loader__": "DictNode", "content": {}},
    },
    "unknown": {"__class__": "x", "__module__": "os", "__loader__": "PickleNode", "content": "eA=="},
    "operator": {
        "__class__": "methodcaller",
        "__module__": "operator",
        "__loader__": "OperatorFuncNode",
        "attrs": {"__class__": "tuple", "__module__": "builtins", "__loader__": "TupleNode", "content": []},
    },
}


@cases("name", CALLS)
def test_untrusted_types_and_functions_raise(tmp_path, plain, name, monkeypatch):
    def never(*_, **__):
        raise AssertionError("something was executed")

    for function in ("os.system", "subprocess.Popen.__init__", "builtins.eval", "builtins.exec"):
        monkeypatch.setattr(function, never)
    schema, parts = schema_of(estimator_of(plain["forest"]))
    for root in (True, False):
        node = {"__id__": 987654321, **CALLS[name]}
        if not root:
            node, inner = schema, node
            node["content"]["content"]["base_estimator_"] = inner
        new_schema = {**node, "protocol": schema["protocol"], "_skops_version": schema["_skops_version"]}
        path = write_modified(
            tmp_path / "m.vispe", plain["forest"], estimator=pack_estimator(parts, new_schema)
        )
        assert_rejected(
            path,
            r"rejected: its estimator contains untrusted types|its estimator cannot be read|cannot load the estimator",
        )


def test_estimators_that_could_call_functions_raise(tmp_path, plain):
    steps = make_pipeline(StandardScaler(), FunctionTransformer(np.exp)).fit(X)
    for kind, estimator in (
        ("kmeans", steps),
        ("kmeans", Pipeline([("a", steps)], memory=str(tmp_path / "cache"))),
        ("forest", BaggingClassifier(n_estimators=2).fit(X, Y)),
        ("forest", RandomForestClassifier(2)),
    ):
        path = write_modified(tmp_path / "m.vispe", plain[kind], estimator=skops.io.dumps(estimator))
        assert_rejected(
            path, r"was rejected: its \w+ classifier was not written by vispe|contains a BaggingClassifier"
        )
    assert not (tmp_path / "cache").exists()


@cases("name", ["../../../tmp/evil.npy", "/etc/evil", "evil.py", "1.npy/../x"])
def test_members_with_paths_outside_the_archive_raise(tmp_path, plain, name):
    _, parts = schema_of(estimator_of(plain["forest"]))
    path = write_modified(
        tmp_path / "m.vispe", plain["forest"], estimator=pack_estimator(parts, extra=[(name, b"x")])
    )
    assert_rejected(path, rf"was rejected: its estimator contains {re.escape(repr(name))}")
    files_before = sorted(tmp_path.iterdir())
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("../../elsewhere.txt", "x")
    with pytest.raises(InputError):
        load_model(path)
    assert sorted(tmp_path.iterdir()) == files_before


# --- sizes ---


def test_members_with_extreme_compression_ratios_raise(tmp_path, plain, monkeypatch):
    monkeypatch.setattr("vispe.segment.model.archive._FREE", 1_000_000)
    for member in ("estimator", "tensors"):
        data = {member: bytes(3_000_000)}
        path = write_modified(tmp_path / "m.vispe", plain["forest"], compression=zipfile.ZIP_DEFLATED, **data)
        assert_rejected(path, rf"was rejected: {member}\.\w+ would unpack from \d+ to 3000000 bytes")
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("schema.json", b" " * 3_000_000)
    path = write_modified(tmp_path / "m.vispe", plain["forest"], estimator=stream.getvalue())
    assert_rejected(path, r"was rejected: schema\.json would unpack")


def test_oversized_array_headers_and_deep_schemas_raise(tmp_path, plain):
    _, parts = schema_of(estimator_of(plain["forest"]))
    array = next(name for name in parts if name.endswith(".npy"))
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "<f8", "fortran_order": False, "shape": (10**13,)})
    path = write_modified(
        tmp_path / "m.vispe", plain["forest"], estimator=pack_estimator({**parts, array: stream.getvalue()})
    )
    assert_rejected(path, "cannot load the estimator|was rejected")
    nested = {**parts, "schema.json": b'{"a":' * 100_000}
    path = write_modified(tmp_path / "m.vispe", plain["forest"], estimator=pack_estimator(nested))
    assert_rejected(path, "its estimator cannot be read")


# --- numbers ---


@cases("what", ["circle", "outside", "negative", "feature", "half", "value", "threshold"])
def test_forests_with_invalid_nodes_raise(tmp_path, plain, what):
    forest = fit_classifier("forest").estimator
    tree = forest.estimators_[1].tree_
    state = tree.__getstate__()
    nodes = state["nodes"].copy()
    values = state["values"].copy()
    if what in ("circle", "outside", "negative"):
        nodes["left_child"][0] = {"circle": 0, "outside": 10**9, "negative": -7}[what]
    elif what == "feature":
        nodes["feature"][0] = 10**6
    elif what == "half":
        nodes["right_child"][0] = -1
    elif what == "threshold":
        nodes["threshold"][0] = np.nan
    else:
        values[-1] = np.nan
    tree.__setstate__({**state, "nodes": nodes, "values": values})
    path = write_modified(tmp_path / "m.vispe", plain["forest"], estimator=skops.io.dumps(forest))
    assert_rejected(path, r"its forest classifier was not written by vispe \((branches|a branch|leaves)")


def replace_element(array, index, value):
    """Return a copy of an array with one element replaced."""
    copy = array.copy()
    copy[index] = value
    return copy


ENSEMBLES = {
    "circle": lambda t: {"trees.left": replace_element(t["trees.left"], 0, 0)},
    "outside": lambda t: {"trees.right": replace_element(t["trees.right"], 0, 10**6)},
    "next tree": lambda t: {"trees.right": replace_element(t["trees.right"], 0, t["trees.sizes"][0])},
    "negative": lambda t: {"trees.left": replace_element(t["trees.left"], 0, -7)},
    "half": lambda t: {"trees.right": replace_element(t["trees.right"], 0, -1)},
    "feature": lambda t: {"trees.feature": replace_element(t["trees.feature"], 0, 26)},
    "threshold": lambda t: {"trees.threshold": replace_element(t["trees.threshold"], 0, np.nan)},
    "value": lambda t: {"trees.value": replace_element(t["trees.value"], -1, 9)},
    "negative value": lambda t: {"trees.value": -t["trees.value"]},
    "sizes": lambda t: {"trees.sizes": t["trees.sizes"] + 1},
    "no size": lambda t: {"trees.sizes": np.append(t["trees.sizes"], 0)},
    "no trees": lambda t: {"trees.sizes": t["trees.sizes"][:0]},
    "shape": lambda t: {"trees.left": t["trees.left"][None]},
    "type": lambda t: {"trees.left": t["trees.left"].astype(float)},
    "class": lambda t: {"trees.classes": np.array([1, 2, 9])},
    "other classes": lambda t: {"linear.classes": np.array([1, 2]), "linear.weight": t["linear.weight"][:1],
                                "linear.bias": t["linear.bias"][:1]},
    "width": lambda t: {"trees.width": np.array([99])},
    "widths": lambda t: {"trees.width": np.array([26, 26])},
}  # fmt: skip


@cases("what", ENSEMBLES)
def test_ensembles_of_inconsistent_arrays_raise(tmp_path, plain, what):
    from safetensors.numpy import load

    with zipfile.ZipFile(io.BytesIO(plain["ensemble"])) as archive:
        assert archive.namelist() == ["card.json", "tensors.safetensors"]
        tensors = load(archive.read("tensors.safetensors"))
    path = write_modified(
        tmp_path / "m.vispe", plain["ensemble"], tensors=save({**tensors, **ENSEMBLES[what](tensors)})
    )
    with pytest.raises(InputError, match=r"inconsistent|non-finite"):
        load_model(path)
    del tensors["trees.feature"]
    path = write_modified(tmp_path / "m.vispe", plain["ensemble"], tensors=save(tensors))
    with pytest.raises(InputError, match=r"without trees\.feature"):
        load_model(path)


@cases("what", ["circle", "outside", "feature", "category", "value", "baseline", "loss", "kind"])
def test_boosting_with_invalid_nodes_raises(tmp_path, plain, what):
    boosting = fit_classifier("boosting").estimator
    nodes = boosting._predictors[2][1].nodes
    if what in ("circle", "outside"):
        nodes["right"][0] = 0 if what == "circle" else 4_000_000_000
    elif what == "feature":
        nodes["feature_idx"][0] = 26
    elif what == "category":
        nodes["is_categorical"][0] = 1
    elif what == "value":
        nodes["value"][-1] = np.inf
    elif what == "baseline":
        boosting._baseline_prediction = np.full((1, 3), np.nan)
    elif what == "loss":
        boosting._preprocessor = FunctionTransformer(np.exp)
    else:
        boosting._predictors[0] = boosting._predictors[0][:2]
    path = write_modified(tmp_path / "m.vispe", plain["boosting"], estimator=skops.io.dumps(boosting))
    assert_rejected(path, "its boosting classifier was not written by vispe")


@cases("name", ["cluster_centers_", "mean_", "scale_", "zero"])
def test_clusters_with_nan_or_zero_scale_raise(tmp_path, plain, name):
    pipeline = fit_classifier("kmeans").estimator
    step = pipeline[-1] if name == "cluster_centers_" else pipeline[0]
    if name == "zero":
        step.scale_[3] = 0
    else:
        getattr(step, name).flat[2] = np.nan
    path = write_modified(tmp_path / "m.vispe", plain["kmeans"], estimator=skops.io.dumps(pipeline))
    assert_rejected(path, "its kmeans classifier was not written by vispe")


@cases(
    ("kind", "tensors"),
    [
        ("logistic", {"linear.weight": np.full((3, 26), np.nan)}),
        ("logistic", {"linear.weight": np.ones((3, 25))}),
        ("logistic", {"linear.classes": np.array([1, 2, 9])}),
        ("logistic", {"linear.classes": np.array([0, 1, 2])}),
        ("kmeans", {"cluster.order": np.array([0, 1, 1])}),
        ("kmeans", {"cluster.order": np.array([0, 1, 7])}),
        ("kmeans", {"cluster.width": np.array([0.0])}),
        ("kmeans", {"cluster.width": np.array([np.inf])}),
        ("spectral", {"cluster.of": np.full(90, 5)}),
        ("spectral", {"cluster.of": np.zeros(7, int)}),
        ("forest", {"basis.mean": np.zeros(4, np.float32)}),
        ("logistic", {"basis.odd": np.zeros(4, np.float32)}),
    ],
)
def test_inconsistent_tensors_raise(tmp_path, plain, kind, tensors):
    with zipfile.ZipFile(io.BytesIO(plain[kind])) as archive:
        has_tensors = "tensors.safetensors" in archive.namelist()
        from safetensors.numpy import load

        arrays = load(archive.read("tensors.safetensors")) if has_tensors else {}
    path = write_modified(tmp_path / "m.vispe", plain[kind], tensors=save({**arrays, **tensors}))
    with pytest.raises(InputError, match=r"are inconsistent|non-finite values|not finite"):
        load_model(path)


CARDS = {
    "count": ({"n_classes": 2}, "classes=.* must be 2 distinct names"),
    "many": ({"n_classes": 10**30}, "n_classes=1000000000000000000000000000000"),
    "text": ({"n_classes": "3"}, "n_classes='3'"),
    "escape": ({"classes": ["a", "b\x1b[2J", "c"]}, "names without control characters"),
    "lines": ({"classes": ["a", "b\nc", "d"]}, "names without control characters"),
    "surrogate": ({"classes": ["a", "\ud800", "c"]}, "names without control characters"),
    "same": ({"classes": ["a", "a", "c"]}, "3 distinct names"),
    "colours": ({"colors": [[0, 0, 300]] * 3}, "colors="),
    "clip": ({"clip": [50, 1e400]}, "clip="),
    "normalize": ({"normalize": "__import__('os')"}, "normalize="),
    "channels": ({"channels": -1}, "channels=-1"),
    "seed": ({"seed": 2**80}, "seed="),
    "sigma": ({"features": {"kind": "filters", "sigmas": [1e9]}}, "sigmas"),
    "sigmas": ({"features": {"kind": "filters", "sigmas": [1.0] * 1000}}, "sigmas"),
    "option": (
        {"features": {"kind": "filters", "sigmas": [1.0], "execute": "x"}},
        "are inconsistent|execute",
    ),
    "kind": ({"features": {"kind": "magic", "sigmas": [1.0]}}, "magic"),
    "model": ({"features": {"kind": "both", "sigmas": [1.0], "model": "a\x1b[2J"}}, "model is a string"),
    "training": ({"training": []}, "training="),
    "checksums": ({"sha256": None}, "has no checksums"),
    "classifier": ({"classifier": ["forest"]}, "classifier="),
    "versions": ({"versions": 3, "format_version": 99}, "format_version=99"),
}


@cases("name", CARDS)
def test_cards_with_invalid_entries_raise(tmp_path, plain, name):
    card, pattern = CARDS[name]
    path = write_modified(tmp_path / "m.vispe", plain["logistic"], card=card)
    with pytest.raises(VispeError, match=pattern) as caught:
        load_model(path)
    assert "\x1b" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_cards_that_are_not_json_objects_raise(tmp_path, plain):
    for text in ("[" * 100_000, "[]", "null", '{"format": 1' + "0" * 6000 + "}", "\xff"):
        path = tmp_path / "m.vispe"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("card.json", text.encode("latin-1"))
        assert_rejected(path, "not a complete vispe model file|is not a segmentation model")


@cases("weights", ["../evil.pth", "/dev/zero"])
def test_weights_named_in_a_card_are_never_unpickled(tmp_path, plain, monkeypatch, capsys, weights):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    monkeypatch.chdir(tmp_path / "in")
    sentinel = tmp_path / "ran"
    for weights_path in (tmp_path / "evil.pth", Path("evil.pth")):
        weights_path.write_bytes(pickle.dumps(Payload(sentinel), protocol=2))
    for model in ("test_vit", "vispe_micro"):
        features = {"kind": "both", "sigmas": [1.0], "model": model, "weights": weights}
        path = write_modified(Path("m.vispe"), plain["logistic"], card={"features": features})
        Image.fromarray(corpus.grey()).save("a.png")
        assert main(["apply", str(path), "a.png", "-o", "out"]) == 2
        message = capsys.readouterr().err
        assert message.count("\n") == 1, message
        assert message.startswith("vispe: ")
    assert not sentinel.exists()
    assert not Path("out").exists()


# --- damage ---


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(kind=st.sampled_from(KINDS), seed=st.integers(0, 10**6))
def test_damaged_models_raise_or_predict_equally(tmp_path, plain, kind, seed):
    check_damaged(tmp_path, plain[kind], seed, 2)


@pytest.mark.slow
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(kind=st.sampled_from(KINDS), seed=st.integers(0, 10**6))
def test_damaged_models_raise_or_predict_equally_300_examples(tmp_path, plain, kind, seed):
    check_damaged(tmp_path, plain[kind], seed, 6)


def check_damaged(folder, data, seed, count):
    """Check that damaged copies of a model file raise or predict as the original."""
    path = folder / "m.vispe"
    for damage, corrupted in corpus.damaged(data, count, seed):
        path.write_bytes(corrupted)
        try:
            actual = load_model(path)
        except VispeError:
            continue
        path.write_bytes(data)
        expected = load_model(path).classifier.probabilities(X[:9])
        np.testing.assert_allclose(
            actual.classifier.probabilities(X[:9]), expected, atol=1e-6, err_msg=damage
        )


# --- untrusted cards: lengths, unknown members, downloads ---


LONG = {
    "a class of 10 MB": (
        {"classes": ["a" * 10_000_000, "b", "c"]},
        "classes=.* names of up to 200 characters",
    ),
    "a turned name": ({"classes": ["a\u202egnp.b", "b", "c"]}, "names without control characters"),
    "a mark": ({"classes": ["a\ufeff", "b", "c"]}, "names without control characters"),
    "a note of 1 MB": (
        {"training": {"x": "y" * 1_000_000}},
        "x in its card is a string of 1000000 characters",
    ),
    "a key of 1 MB": (
        {"y" * 1_000_000: 1},
        "a key of the object in its card is a string of 1000000 characters",
    ),
    "a version of 1 MB": ({"versions": {"vispe": "1" * 1_000_000}}, "vispe in its card is a string"),
    "a large number": ({"training": {"x": 1 << 80}}, "x in its card is a number beyond 2\\^63"),
    "a deep list": ({"training": {"x": json.loads("[" * 40 + "]" * 40)}}, "nested more than 16 deep"),
    "NaN": ({"training": {"x": float("nan")}}, "x in its card is not a finite number"),
}


@cases("case", LONG)
def test_cards_with_oversized_entries_raise(tmp_path, plain, case):
    card, pattern = LONG[case]
    assert_rejected(write_modified(tmp_path / "m.vispe", plain["logistic"], card=card), pattern)


def test_deeply_nested_cards_raise(tmp_path, plain):
    path = write_modified(tmp_path / "m.vispe", plain["logistic"])
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    parts["card.json"] = parts["card.json"].rstrip()[:-1] + b', "x": ' + b"[" * 99_999 + b"]" * 99_999 + b"}"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in parts.items():
            archive.writestr(name, data)
    assert_rejected(path, "is not a complete vispe model file|nested more than 16")


@cases("name", ["estimator.pkl", "../../x", "/tmp/x", "card.json.bak", "tensors.safetensors/x", "x" * 500])
def test_unknown_members_raise(tmp_path, plain, name):
    path = write_modified(tmp_path / "m.vispe", plain["logistic"])
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(name, b"x")
    assert_rejected(path, "was rejected: it contains '.*', unknown in models of vispe")


@pytest.mark.filterwarnings("ignore:Duplicate name")
@cases("name", ["card.json", "tensors.safetensors"])
def test_duplicate_members_raise(tmp_path, plain, name):
    path = write_modified(tmp_path / "m.vispe", plain["logistic"])
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(name, archive.read(name))
    assert_rejected(path, "was rejected: it contains a duplicate name")


def test_duplicate_keys_in_a_card_raise(tmp_path, plain):
    path = write_modified(tmp_path / "m.vispe", plain["logistic"])
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    parts["card.json"] = parts["card.json"].rstrip()[:-1] + b', "seed": 9}'
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in parts.items():
            archive.writestr(name, data)
    assert_rejected(path, "duplicate key 'seed'")


def test_class_names_above_200_characters_raise_on_save(tmp_path):
    model = Model(
        FeatureConfig(),
        fit_classifier("logistic"),
        ("a" * 200, "b", "c"),
        None,
        "stack",
        (0.5, 99.5),
        1,
        5,
        None,
        {},
    )
    load_model(save_model(tmp_path / "m.vispe", model))
    with pytest.raises(InputError, match="names of up to 200 characters"):
        save_model(tmp_path / "n.vispe", replace(model, names=("a" * 201, "b", "c")))
    assert not (tmp_path / "n.vispe").exists()


@cases("name", ["vit_tiny_patch16_224", "hf-hub:somebody/something"])
def test_apply_contacts_no_server_without_allow_download(tmp_path, plain, monkeypatch, capsys, name):
    requested = []
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(
        "vispe.backbones.hub.unreachable", lambda address: requested.append(address) or "nobody answers"
    )
    monkeypatch.setattr("torch.hub.get_dir", lambda: str(tmp_path))
    with zipfile.ZipFile(io.BytesIO(plain["logistic"])) as archive:
        features = json.loads(archive.read("card.json"))["features"]
    card = {"features": {**features, "kind": "tokens", "model": name}}
    path = write_modified(tmp_path / "m.vispe", plain["logistic"], card=card)
    Image.fromarray(np.zeros((20, 30), np.uint8)).save(tmp_path / "a.png")
    argv = ["apply", str(path), str(tmp_path / "a.png"), "-o", str(tmp_path / "out")]
    assert main(argv) == 2
    message = capsys.readouterr().err
    assert f"the pretrained weights of {name} are not on this disk" in message
    assert "--allow-download" in message
    assert requested == []
    assert not (tmp_path / "out").exists()
    assert main([*argv, "--allow-download"]) == 2
    assert "nobody answers" in capsys.readouterr().err
    assert len(requested) == 1
