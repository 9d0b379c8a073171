import io
import json
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import skops.io
from safetensors.numpy import save
from sklearn.feature_extraction.text import HashingVectorizer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer

from tests.cases import cases
from vispe.errors import InputError
from vispe.segment.classify.clustering import PixelClusters
from vispe.segment.classify.pixel_classifier import KINDS, PixelClassifier
from vispe.segment.features.feature_config import FeatureConfig
from vispe.segment.features.pixel_features import TokenBasis
from vispe.segment.model.archive import VERSION
from vispe.segment.model.model_file import Model, load_model, save_model


def data(seed=0):
    rng = np.random.default_rng(seed)
    return rng.random((120, 5)).astype(np.float32), rng.integers(1, 4, 120)


def train(classifier, basis=None, **changes):
    options = {
        "features": FeatureConfig(),
        "classifier": classifier,
        "names": ("matrix", "precipitate", "pore"),
        "colors": ((255, 0, 0), (0, 255, 0), (0, 0, 255)),
        "normalize": "image",
        "clip": (1.0, 99.0),
        "channels": 1,
        "seed": 5,
        "basis": basis,
        "notes": {"images": ["a.png"]},
    }
    return Model(**{**options, **changes})


def classifier_of(kind):
    features, classes = data()
    if kind == "kmeans":
        return PixelClusters(3, seed=5).fit(features, features[:, 0])
    return PixelClassifier(kind, 3, seed=5).fit(features, classes)


@cases("kind", [*KINDS, "kmeans"])
def test_model_round_trip_is_exact(kind, tmp_path):
    model = train(classifier_of(kind))
    path = save_model(tmp_path / "m.vispe", model)
    loaded = load_model(path)
    features, _ = data(1)
    np.testing.assert_array_equal(
        loaded.classifier.probabilities(features), model.classifier.probabilities(features)
    )
    for name in ("features", "names", "colors", "normalize", "clip", "channels", "seed", "basis", "notes"):
        assert getattr(loaded, name) == getattr(model, name)
    assert loaded.classifier.kind == kind


@pytest.mark.slow
@cases("kind", [*KINDS, "kmeans"])
def test_model_files_are_reproducible(kind, tmp_path):
    paths = [save_model(tmp_path / f"{i}.vispe", train(classifier_of(kind))) for i in range(2)]
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_token_basis_round_trip_is_exact(tmp_path):
    rng = np.random.default_rng(0)
    basis = TokenBasis.fit([rng.random((6, 7, 20)).astype(np.float32)], 8, 0)
    config = FeatureConfig(
        "tokens", model="test_vit", weights="random", fingerprint="ab", tile=64, token_shifts=1
    )
    path = save_model(tmp_path / "m.vispe", train(classifier_of("logistic"), basis, features=config))
    loaded = load_model(path)
    assert loaded.features == config
    for name, value in basis.tensors().items():
        np.testing.assert_array_equal(loaded.basis.tensors()[name], value)


def test_token_options_round_trip_is_exact(tmp_path):
    plain = FeatureConfig("tokens", model="test_vit", weights="random", token_shifts=1)
    dense = replace(plain, token_stride=8, token_shifts=2, layers=(1, -1))
    for name, config in (("plain", plain), ("dense", dense)):
        path = save_model(tmp_path / name, train(classifier_of("logistic"), features=config))
        assert load_model(path).features == config
        with zipfile.ZipFile(path) as archive:
            entries = json.loads(archive.read("card.json"))["features"]
        actual = {key: entries[key] for key in ("token_stride", "token_shifts", "layers") if key in entries}
        requested = {"token_stride": 8, "token_shifts": 2, "layers": [1, -1]}
        assert actual == ({"token_shifts": 1} if name == "plain" else requested)
    # earlier files had one shift, which was not stored
    (tmp_path / "old").write_bytes((tmp_path / "plain").read_bytes())
    rewrite(tmp_path / "old", card={"features": {k: v for k, v in entries.items() if k not in requested}})
    assert load_model(tmp_path / "old").features == plain
    for invalid in ({"layers": ["a"]}, {"token_stride": 0}, {"token_shifts": 1.5}):
        (tmp_path / "wrong").write_bytes((tmp_path / "dense").read_bytes())
        rewrite(tmp_path / "wrong", card={"features": {**entries, **invalid}})
        with pytest.raises(InputError, match=next(iter(invalid))):
            load_model(tmp_path / "wrong")


def test_model_files_contain_json_and_arrays_only(tmp_path):
    path = save_model(tmp_path / "m.vispe", train(classifier_of("forest")))
    with zipfile.ZipFile(path) as archive:
        assert archive.namelist() == ["card.json", "estimator.skops"]
        card = json.loads(archive.read("card.json"))
        inner = zipfile.ZipFile(io.BytesIO(archive.read("estimator.skops")))
    assert card["classes"] == ["matrix", "precipitate", "pore"]
    assert set(card["versions"]) >= {"vispe", "numpy", "scikit-learn", "torch", "timm", "skops"}
    assert card["seed"] == 5
    assert all(name.endswith((".json", ".npy")) for name in inner.namelist())


def test_existing_files_are_not_overwritten_without_force(tmp_path):
    path = save_model(tmp_path / "m.vispe", train(classifier_of("logistic")))
    with pytest.raises(InputError, match="--force"):
        save_model(path, train(classifier_of("logistic")))
    save_model(path, train(classifier_of("logistic")), force=True)


def rewrite(path, **parts):
    """Replace members of a model file, with correct checksums unless the card is given."""
    import hashlib

    with zipfile.ZipFile(path) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    card = json.loads(contents["card.json"])
    card.update(parts.pop("card", {}))
    for name, value in parts.items():
        member = {"estimator": "estimator.skops", "tensors": "tensors.safetensors"}[name]
        contents[member] = value
        card["sha256"][member] = hashlib.sha256(value).hexdigest()
    contents["card.json"] = json.dumps(card).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, value in contents.items():
            archive.writestr(name, value)
    return path


@pytest.fixture
def path(tmp_path):
    return save_model(tmp_path / "m.vispe", train(classifier_of("logistic")))


@pytest.fixture
def forest(tmp_path):
    return save_model(tmp_path / "forest.vispe", train(classifier_of("forest")))


def test_logistic_models_contain_tensors_only(path):
    with zipfile.ZipFile(path) as archive:
        assert archive.namelist() == ["card.json", "tensors.safetensors"]
    invalid = save({"linear.mean": np.zeros(5, np.float32)})
    with pytest.raises(InputError, match="logistic classifier without weight, bias, classes"):
        load_model(rewrite(path, tensors=invalid))


@pytest.mark.parametrize("other", [VERSION + 1, VERSION - 1, None])
def test_other_format_versions_raise(path, other):
    with pytest.raises(InputError, match=rf"format_version={other} .*reads format_version={VERSION}"):
        load_model(rewrite(path, card={"format_version": other}))


def test_foreign_and_damaged_files_raise(path, tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        load_model(tmp_path / "gone.vispe")
    (tmp_path / "text.vispe").write_text("hello")
    with pytest.raises(InputError, match="not a complete vispe model file"):
        load_model(tmp_path / "text.vispe")
    (tmp_path / "cut.vispe").write_bytes(path.read_bytes()[:-200])
    with pytest.raises(InputError, match="not a complete vispe model file"):
        load_model(tmp_path / "cut.vispe")
    with zipfile.ZipFile(tmp_path / "zip.vispe", "w") as archive:
        archive.writestr("readme.txt", "hello")
    with pytest.raises(InputError, match=r"not a complete vispe model file.*card\.json"):
        load_model(tmp_path / "zip.vispe")
    card = json.loads(zipfile.ZipFile(path).read("card.json"))
    with pytest.raises(InputError, match=r"tensors\.safetensors does not match its checksum"):
        load_model(rewrite(path, card={"sha256": {"tensors.safetensors": "0" * 64}}))
    with pytest.raises(
        InputError, match=r"lists estimator\.skops, tensors\.safetensors, but it contains tensors"
    ):
        load_model(rewrite(path, card={"sha256": {**card["sha256"], "estimator.skops": "0" * 64}}))


def test_other_formats_raise(path):
    with pytest.raises(InputError, match=r"format='other\.thing', expected 'vispe\.segment'"):
        load_model(rewrite(path, card={"format": "other.thing"}))


def test_untrusted_types_raise(forest):
    bad = make_pipeline(FunctionTransformer(np.load), HashingVectorizer())
    bad.steps[0][1].func = data  # a function of this module, unknown to skops
    with pytest.raises(InputError, match=r"rejected: its estimator contains untrusted types"):
        load_model(rewrite(forest, estimator=skops.io.dumps(bad)))


def test_mismatched_estimators_raise(path, forest):
    with pytest.raises(InputError, match="declares 'boosting' but contains a RandomForestClassifier"):
        load_model(rewrite(forest, card={"classifier": "boosting"}))
    with pytest.raises(InputError, match=r"a classifier of kind 'logistic' with estimator\.skops"):
        load_model(rewrite(forest, card={"classifier": "logistic"}))
    with pytest.raises(InputError, match="classifier of kind 'magic'"):
        load_model(rewrite(path, card={"classifier": "magic"}))
