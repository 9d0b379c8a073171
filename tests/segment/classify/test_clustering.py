import importlib.util
import json
import zipfile

import numpy as np
import pytest
import skops.io
import tifffile
from PIL import Image

from tests.cases import cases
from tests.products import slow_except
from vispe.cli.main import main, parse
from vispe.errors import InputError, MissingExtra, OptionError
from vispe.segment.classify import clustering
from vispe.segment.classify.clustering import METHODS, PixelClusters
from vispe.segment.features.feature_config import FeatureConfig
from vispe.segment.model.model_file import Model, load_model, save_model
from vispe.segment.pipeline import MODEL_NAME, LabelOptions, ReadOptions, apply, segment

FILTERS = FeatureConfig(sigmas=(1.0, 2.0))


def blobs(count=3, each=150, seed=0):
    """Make clusters of features -> features (n, 4) float32, cluster indices (n,) from 0."""
    rng = np.random.default_rng(seed)
    centres = 6 * rng.permutation(np.eye(4)[:count] + np.arange(count)[:, None] * 0.1)
    cluster_ids = np.repeat(np.arange(count), each)
    return (centres[cluster_ids] + rng.normal(0, 0.4, (len(cluster_ids), 4))).astype(np.float32), cluster_ids


def scene(seed=0, shape=(30, 41), levels=(60, 130, 200)):
    """Make a noisy image of three phases -> image (h, w) uint8, phases (h, w) from 0."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[: shape[0], : shape[1]]
    phase = np.zeros(shape, int)
    for k, (cy, cx) in ((1, rng.integers(6, 9, 2)), (2, rng.integers(20, 24, 2))):
        phase[(y - cy) ** 2 + (x - cx) ** 2 < 36] = k
    grey = np.take(levels, phase) + rng.normal(0, 4, shape)
    return np.clip(grey, 0, 255).astype(np.uint8), phase


def model_of(classifier):
    names = tuple(f"cluster {k + 1}" for k in range(classifier.n_classes))
    return Model(FILTERS, classifier, names, None, "stack", (0.5, 99.5), 1, 0, None, {})


# --- the number of clusters ---


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("count", [2, 3, 4])
def test_automatic_number_of_clusters_equals_the_requested_number(method, count):
    features, cluster_ids = blobs(count)
    grey = np.array([0.7, 0.1, 0.4, 0.9])[cluster_ids]
    automatic = PixelClusters("auto", method).fit(features, grey)
    assert automatic.n_classes == count
    assert list(automatic.choice.silhouette) == list(range(2, 9))
    assert max(automatic.choice.silhouette.values()) == automatic.choice.silhouette[count]
    requested = PixelClusters(count, method).fit(features, grey)
    np.testing.assert_array_equal(automatic.probabilities(features), requested.probabilities(features))
    for name, value in requested.tensors().items():
        np.testing.assert_array_equal(automatic.tensors()[name], value)
    peaks = np.sort(np.unique(grey))
    facts = automatic.facts()
    assert facts["silhouette"] == {str(k): v for k, v in automatic.choice.silhouette.items()}
    np.testing.assert_allclose(facts["grey_peaks"], peaks, atol=0.01)
    scores = f"(2: {automatic.choice.silhouette[2]:.3f}, 3: "
    if count == 2:
        assert facts["chosen_by"] == "silhouette"
        assert automatic.note().startswith(f"K = 2 chosen: it has the largest silhouette {scores}")
        assert "; grey levels have 2 peaks; use cluster=K for another number." in automatic.note()
    else:
        assert facts["chosen_by"] == "grey peaks"
        start = f"K = {count} chosen: grey levels have {count} peaks; the silhouette is largest for {count} {scores}"
        assert automatic.note().startswith(start)
    assert requested.facts() == {}
    assert requested.note() is None


def test_silhouette_uses_a_sample_and_clusters_use_all_pixels(monkeypatch):
    from sklearn.cluster import KMeans
    from sklearn.metrics import silhouette_score
    from sklearn.preprocessing import StandardScaler

    monkeypatch.setattr(clustering, "SCORED", 90)
    features, cluster_ids = blobs(3)
    actual = PixelClusters("auto", seed=4).fit(features, cluster_ids)
    sample = features[np.random.default_rng(4).permutation(len(features))[:90]]
    points = StandardScaler().fit_transform(sample)
    for k in (2, 3, 5):
        expected = KMeans(k, n_init=10, random_state=4).fit_predict(points)
        assert actual.choice.silhouette[k] == pytest.approx(silhouette_score(points, expected), abs=1e-6)
    assert actual.estimator[-1].labels_.shape == (450,)


@cases("method", METHODS)
@cases("different", [2, 3])
def test_cluster_counts_are_limited_by_distinct_pixels(method, different):
    features = np.repeat(np.eye(different, dtype=np.float32), 9, 0)
    actual = PixelClusters("auto", method).fit(features, features[:, 0])
    assert list(actual.choice.silhouette) == list(range(2, different + 1))
    assert actual.n_classes in actual.choice.silhouette
    with pytest.raises(InputError, match=r"cluster=auto exceeds the number of distinct pixels \(1\)"):
        PixelClusters("auto", method).fit(features[:9], features[:9, 0])


def test_invalid_arguments_raise():
    with pytest.raises(OptionError, match=r"method must be one of .* got 'kmeens'\. Did you mean 'kmeans'"):
        PixelClusters(2, "kmeens")
    for value in (1, 256, "three"):
        with pytest.raises(OptionError, match="n_classes needs an integer from 2 to 255, or auto"):
            PixelClusters(value)
    with pytest.raises(InputError, match="the clusters are not fitted"):
        PixelClusters(2).probabilities(np.zeros((1, 2), np.float32))


def test_missing_scikit_learn_raises(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"segmentation needs the package 'sklearn'.*vispe\[cli\]"):
        PixelClusters(2)


# --- order and model file ---


@cases("method", METHODS)
def test_clusters_are_ordered_by_brightness_for_any_seed(method):
    features, cluster_ids = blobs(3)
    grey = np.array([0.9, 0.1, 0.5])[cluster_ids]
    for seed in range(3):
        prob = PixelClusters(3, method, seed=seed).fit(features, grey).probabilities(features)
        assert prob.dtype == np.float32
        np.testing.assert_allclose(prob.sum(1), 1, atol=1e-5)
        np.testing.assert_array_equal(prob.argmax(1), np.array([2, 0, 1])[cluster_ids])


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_saved_cluster_models_predict_equally(method, tmp_path):
    features, cluster_ids = blobs(3)
    paths = [
        save_model(
            tmp_path / f"{i}.vispe", model_of(PixelClusters("auto", method).fit(features, cluster_ids))
        )
        for i in range(2)
    ]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    loaded = load_model(paths[0]).classifier
    new, _ = blobs(3, seed=7)
    expected = PixelClusters("auto", method).fit(features, cluster_ids).probabilities(new)
    np.testing.assert_array_equal(loaded.probabilities(new), expected)
    assert (loaded.kind, loaded.n_classes) == (method, 3)
    with zipfile.ZipFile(paths[0]) as archive:
        assert skops.io.get_untrusted_types(data=archive.read("estimator.skops")) == []
        assert json.loads(archive.read("card.json"))["classifier"] == method


# --- end to end ---


@pytest.fixture
def folder(tmp_path):
    for name, seed in (("a", 0), ("b", 1)):
        Image.fromarray(scene(seed)[0]).save(tmp_path / f"{name}.png")
    return tmp_path


@pytest.mark.parametrize("method", slow_except(METHODS, METHODS[:1]))
def test_one_model_segments_all_images_and_new_images(folder, method):
    report = segment(
        [folder / "a.png", folder / "b.png"],
        folder / "out",
        cluster="auto",
        cluster_method=method,
        features=FILTERS,
        seed=1,
    )
    training = report.run["training"]
    count = load_model(folder / "out" / MODEL_NAME).classifier.n_classes
    assert set(training["silhouette"]) == {str(k) for k in range(2, 9)}
    # three phases, which the silhouette of these features misses
    assert (count, len(training["grey_peaks"]), training["chosen_by"]) == (3, 3, "grey peaks")
    with Image.open(folder / "out" / "clusters.png") as chart:
        assert chart.size == (800, 300)
    assert sum(note.startswith(f"K = {count} chosen: ") for note in report.notes) == 1
    assert json.loads((folder / "out" / "report.json").read_text())["notes"] == report.notes
    for name in ("a", "b"):
        apply(folder / "out" / MODEL_NAME, [folder / f"{name}.png"], folder / f"{name}_new")
        for ending in ("seg.png", "prob.tif"):
            first, second = (folder / out / f"{name}_{ending}" for out in ("out", f"{name}_new"))
            assert first.read_bytes() == second.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_clusters_are_consistent_across_pages_and_ordered(tmp_path, method):
    pages, phases = (np.stack(arrays) for arrays in zip(*(scene(seed) for seed in range(3)), strict=True))
    tifffile.imwrite(tmp_path / "s.tif", pages, imagej=True, metadata={"axes": "ZYX"})
    segment(
        [tmp_path / "s.tif"],
        tmp_path / "out",
        cluster=4,
        cluster_method=method,
        features=FILTERS,
        reading=ReadOptions(normalize="none"),
    )
    labels = tifffile.imread(tmp_path / "out" / "s_seg.tif")
    means = [pages[labels == k].mean() for k in range(1, 5)]
    assert means == sorted(means)
    actual = [
        tuple(np.bincount(page[phase == k]).argmax() for k in (0, 2))
        for page, phase in zip(labels, phases, strict=True)
    ]
    assert actual[0] == actual[1] == actual[2]
    assert actual[0][0] < actual[0][1] == 4


def test_options_without_effect_raise(folder):
    with pytest.raises(OptionError, match=r"cluster_method='spectral' has no effect on labels"):
        segment([folder / "a.png"], folder / "o", labels=[folder / "b.png"], cluster_method="spectral")
    with pytest.raises(OptionError, match=r"classifier='forest' has no effect on clusters"):
        segment([folder / "a.png"], folder / "o", cluster=2, classifier="forest", labelling=LabelOptions())


# --- the command ---


@cases(
    ("words", "expected"),
    [
        ("a.png --cluster -o o", "auto"),
        ("--cluster a.png -o o", "auto"),
        ("-o o --cluster a.png", "auto"),
        ("a.png -o o --cluster", "auto"),
        ("a.png -o o --cluster --force", "auto"),
        ("--cluster 3 a.png -o o", 3),
        ("a.png --cluster 12 -o o", 12),
        ("a.png --cluster=4 -o o", 4),
        ("a.png --cluster auto -o o", "auto"),
        ("--cluster=auto a.png -o o", "auto"),
        ("a.png -o o --config c.yaml", "auto"),
        ("a.png -o o --config k.yaml", 5),
        ("a.png -o o --config k.yaml --cluster", "auto"),
        ("a.png -o o --config c.yaml --cluster 2", 2),
        ("a.png -o o", None),
    ],
)
def test_number_of_clusters_is_optional(tmp_path, monkeypatch, words, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text("cluster: auto\n")
    (tmp_path / "k.yaml").write_text("cluster: 5\n")
    _, options = parse("segment", words.split())
    assert options["cluster"] == expected
    assert options["images"] == ["a.png"]
    assert options["out"] == "o"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "a.png --cluster=three -o o",
            "segment: --cluster must be an integer or 'auto', got 'three'.",
        ),
        ("a.png --cluster 2.5 -o o", "segment: --cluster must be an integer or 'auto', got '2.5'."),
        (
            "a.png --cluster -1 -o o",
            "segment: --cluster needs an integer from 2 to 255, or auto, got --cluster -1.",
        ),
        (
            "--cluster 3 --cluster-method ward a.png -o o",
            "--cluster-method must be 'kmeans' or 'spectral', got 'ward'.",
        ),
    ],
)
def test_invalid_numbers_of_clusters_are_rejected_in_one_line(folder, monkeypatch, capsys, words, message):
    monkeypatch.chdir(folder)
    assert main(["segment", *words.split()]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) == 1


@pytest.mark.slow
def test_chosen_number_of_clusters_is_reported_once(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    words = "segment --cluster a.png b.png --features filters -o out"
    assert main(words.split()) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 2
    assert err.count("K = 3 chosen: grey levels have 3 peaks; the silhouette is largest for ") == 1


@pytest.mark.slow
def test_cluster_count_figure_is_not_an_image_of_later_runs(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    words = ["segment", ".", "--features", "filters", "-o", ".", "--cluster"]
    assert main(words) == 0
    assert main([*words, "--force"]) == 0
    assert not (folder / "clusters_seg.png").exists()
    # without the model of a run alongside, it is an ordinary image
    (folder / "own").mkdir()
    (folder / "clusters.png").rename(folder / "own" / "clusters.png")
    assert main(["apply", "model.vispe", "own", "-o", "other"]) == 2
    assert "own/clusters.png has 3 channels," in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_cluster_count_figure_is_not_overwritten(folder, capsys):
    words = ["segment", f"{folder}/a.png", "--features", "filters", "-o", f"{folder}/out", "--cluster"]
    (folder / "out").mkdir()
    chart = folder / "out" / "clusters.png"
    chart.write_bytes(b"mine")
    assert main(words) == 2
    assert "clusters.png exists; add --force" in " ".join(capsys.readouterr().err.split())
    assert main([*words, "3"]) == 0
    assert chart.read_bytes() == b"mine"
    assert main([*words, "--force"]) == 0
    assert chart.read_bytes()[1:4] == b"PNG"
