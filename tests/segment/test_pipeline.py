import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from vispe.errors import InputError, OptionError
from vispe.segment.features.feature_config import FeatureConfig
from vispe.segment.model import prediction
from vispe.segment.model.model_file import load_model
from vispe.segment.pipeline import MODEL_NAME, LabelOptions, PostProcessing, ScoreOptions, apply, segment
from vispe.segment.run.reports.run_report import ProgressCallbacks

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "microscopy"


def scene(height=60, width=83, seed=0):
    """Make dark discs on a bright, noisy background -> (image uint8, mask 0/1, scribbles 0/1/2)."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    mask = np.zeros((height, width), np.uint8)
    for _ in range(8):
        cy, cx = rng.integers(0, height), rng.integers(0, width)
        mask |= ((y - cy) ** 2 + (x - cx) ** 2 < 64).astype(np.uint8)
    grey = np.where(mask, 80, 170) + rng.normal(0, 12, mask.shape)
    scribbles = np.where(rng.random(mask.shape) < 0.06, mask + 1, 0).astype(np.uint8)
    return np.clip(grey, 0, 255).astype(np.uint8), mask, scribbles


@pytest.fixture
def folder(tmp_path):
    for name, array in zip(("a", "mask", "drawn"), scene(), strict=True):
        Image.fromarray(array).save(tmp_path / f"{name}.png")
    return tmp_path


def run(folder, **options):
    options = {"labels": [folder / "drawn.png"], "classifier": "logistic", **options}
    return segment([folder / "a.png"], folder / "out", **options)


def write_images(tmp_path, count=3):
    (tmp_path / "images").mkdir()
    (tmp_path / "labels").mkdir()
    (tmp_path / "masks").mkdir()
    for number in range(count):
        grey, mask, scribbles = scene(seed=number)
        Image.fromarray(grey).save(tmp_path / "images" / f"i{number}.png")
        Image.fromarray(mask).save(tmp_path / "masks" / f"i{number}.png")
        if number != 1:
            Image.fromarray(scribbles).save(tmp_path / "labels" / f"i{number}_labels.png")
    return tmp_path


def test_segment_writes_maps_scores_and_a_model(folder):
    report = run(
        folder, labelling=LabelOptions(["ground", "disc"]), scoring=ScoreOptions([folder / "mask.png"])
    )
    out = folder / "out"
    assert {p.name for p in out.iterdir()} == {
        "a_seg.png",
        "a_prob.tif",
        "a_uncertainty.png",
        "a_overlay.png",
        "model.vispe",
        "report.json",
        "report.csv",
        "report.html",
    }
    grey, _, scribbles = scene()
    labels = np.asarray(Image.open(out / "a_seg.png"))
    prob = tifffile.imread(out / "a_prob.tif").squeeze()
    assert labels.dtype == np.uint8
    assert labels.shape == grey.shape
    assert prob.shape == (2, *grey.shape)
    np.testing.assert_allclose(prob.sum(0), 1, atol=1e-5)
    np.testing.assert_array_equal(labels, prob.argmax(0) + 1)
    uncertainty = np.asarray(Image.open(out / "a_uncertainty.png")) / 255
    np.testing.assert_allclose(uncertainty, 1 - np.abs(prob[0] - prob[1]), atol=1 / 255)
    report_json = json.loads((out / "report.json").read_text())
    assert report_json == json.loads(json.dumps(report.as_dict()))
    record = report_json["images"][0]
    assert record["scores"]["miou"] > 0.9
    assert record["scores"]["n_pixels"] == int((scribbles == 0).sum())
    assert record["map_fractions"]["disc"] == pytest.approx((labels == 2).mean())
    low, high = record["fractions_ci95"]["disc"]
    assert low <= record["fractions"]["disc"] <= high
    assert report_json["training"]["labelled_pixels"] == {
        "ground": int((scribbles == 1).sum()),
        "disc": int((scribbles == 2).sum()),
    }
    assert report_json["peak_memory_mb"]["process"] > 10
    assert report_json["versions"]["vispe"]
    assert report_json["device"] == "cpu" or torch.cuda.is_available()
    assert "miou" in (out / "report.csv").read_text().splitlines()[0]


def test_labelled_pixels_can_be_included_in_scores(folder):
    report = run(folder, scoring=ScoreOptions([folder / "mask.png"], include_labelled=True))
    assert report.images[0]["scores"]["n_pixels"] == 60 * 83


@pytest.mark.parametrize(
    "kind",
    ["ensemble", "logistic", *(pytest.param(k, marks=pytest.mark.slow) for k in ("forest", "boosting"))],
)
def test_repeated_runs_and_saved_models_give_identical_results(folder, kind):
    run(folder, classifier=kind)
    segment([folder / "a.png"], folder / "second", labels=[folder / "drawn.png"], classifier=kind)
    apply(folder / "out" / MODEL_NAME, [folder / "a.png"], folder / "third")
    for name in ("a_seg.png", "a_prob.tif", "a_uncertainty.png", "a_overlay.png"):
        first = (folder / "out" / name).read_bytes()
        assert (folder / "second" / name).read_bytes() == first
        assert (folder / "third" / name).read_bytes() == first
    assert (folder / "second" / MODEL_NAME).read_bytes() == (folder / "out" / MODEL_NAME).read_bytes()


@pytest.mark.parametrize("channels", [1, 3])
def test_segmentation_is_rotation_equivariant(folder, channels):
    rng = np.random.default_rng(0)
    # even sides are padded equally on both ends
    grey, scribbles = (np.asarray(Image.open(folder / f"{name}.png"))[:, :82] for name in ("a", "drawn"))
    image = np.clip(grey[..., None] + rng.normal(0, 30, (*grey.shape, channels)), 0, 255).astype(np.uint8)
    actual = []
    for turns in range(4):
        name = f"{channels}_{turns}"
        Image.fromarray(np.rot90(image, turns).squeeze()).save(folder / f"{name}.png")
        Image.fromarray(np.rot90(scribbles, turns)).save(folder / f"{name}_labels.png")
        segment([folder / f"{name}.png"], folder / name, labels=[folder / f"{name}_labels.png"])
        labels = np.asarray(Image.open(folder / name / f"{name}_seg.png"))
        actual.append(np.rot90(labels, -turns))
    assert load_model(folder / name / MODEL_NAME).classifier.kind == "ensemble"
    for rotated_back in actual[1:]:
        np.testing.assert_array_equal(rotated_back, actual[0])


def test_filters_are_independent_of_the_tile_size(folder):
    run(folder, features=FeatureConfig())
    run_in_tiles = segment(
        [folder / "a.png"],
        folder / "tiles",
        labels=[folder / "drawn.png"],
        classifier="logistic",
        features=FeatureConfig(tile=24),
    )
    assert run_in_tiles.images[0]["tile_disagreement"] is None
    untiled, tiled = (tifffile.imread(folder / name / "a_prob.tif") for name in ("out", "tiles"))
    np.testing.assert_allclose(untiled, tiled, atol=1e-5)


@pytest.mark.slow
def test_several_images_share_one_classifier(tmp_path):
    write_images(tmp_path)
    report = segment(
        [tmp_path / "images"],
        tmp_path / "out",
        labels=[tmp_path / "labels"],
        classifier="logistic",
        scoring=ScoreOptions([tmp_path / "masks"]),
    )
    assert [Path(r["image"]).stem for r in report.images] == ["i0", "i1", "i2"]
    assert report.images[1]["labels"] is None
    assert report.summary()["miou"]["n"] == 3
    assert report.summary()["miou"]["worst"] > 0.85
    total = sum(int((scene(seed=n)[2] > 0).sum()) for n in (0, 2))
    assert sum(report.run["training"]["labelled_pixels"].values()) == total


@pytest.mark.slow
def test_tokens_and_filters_can_be_combined(folder):
    features = FeatureConfig("both", model="test_vit", weights="random", tile=32)
    report = run(folder, features=features, scoring=ScoreOptions([folder / "mask.png"]))
    record = report.images[0]
    assert 0 <= record["tile_disagreement"] <= 1
    assert record["overlap_pixels"] > 0
    apply(folder / "out" / MODEL_NAME, [folder / "a.png"], folder / "again")
    first, second = (tifffile.imread(folder / name / "a_prob.tif") for name in ("out", "again"))
    np.testing.assert_allclose(first, second, atol=1e-6)


def test_model_file_stores_the_token_density(folder):
    features = FeatureConfig(
        "tokens", model="test_vit", weights="random", token_stride=8, token_shifts=2, layers=(2, -1)
    )
    run(folder, features=features)
    apply(folder / "out" / MODEL_NAME, [folder / "a.png"], folder / "again")
    first, second = (tifffile.imread(folder / name / "a_prob.tif") for name in ("out", "again"))
    np.testing.assert_allclose(first, second, atol=1e-6)
    run(folder, features=replace(features, token_stride=None, token_shifts=1), force=True)
    assert not np.allclose(tifffile.imread(folder / "out" / "a_prob.tif"), first, atol=1e-3)


@pytest.mark.slow
def test_clusters_need_no_labels_and_are_matched_to_the_truth(folder):
    report = segment(
        [folder / "a.png"], folder / "out", cluster=2, scoring=ScoreOptions([folder / "mask.png"])
    )
    actual = report.images[0]["scores"]
    assert actual["cluster_to_class"] == {"1": 2, "2": 1}  # the dark cluster first; discs are class 2
    assert actual["miou"] > 0.6
    assert 0 < actual["adjusted_rand"] <= 1
    apply(folder / "out" / MODEL_NAME, [folder / "a.png"], folder / "again")
    assert (folder / "again" / "a_seg.png").read_bytes() == (folder / "out" / "a_seg.png").read_bytes()


def test_stacks_keep_their_pages(tmp_path):
    pages = np.stack([scene(seed=s)[0] for s in range(3)])
    tifffile.imwrite(tmp_path / "s.tif", pages, imagej=True, metadata={"axes": "ZYX"})
    Image.fromarray(scene(seed=1)[2]).save(tmp_path / "l.png")
    report = segment(
        [tmp_path / "s.tif"],
        tmp_path / "out",
        labels=[tmp_path / "l.png"],
        labelling=LabelOptions(label_page=1),
        classifier="logistic",
    )
    labels = tifffile.imread(tmp_path / "out" / "s_seg.tif")
    assert labels.shape == pages.shape
    assert report.images[0]["pages"] == 3
    for page, seed in zip(labels, range(3), strict=True):
        assert (page - 1 == scene(seed=seed)[1]).mean() > 0.93
    assert any("overlay" in note and "page 1 of 3" in note for note in report.images[0]["notes"])


def test_invalid_pixels_are_labelled_zero(folder):
    grey = scene()[0].astype(np.float32)
    grey[10:20, 30:50] = np.nan
    tifffile.imwrite(folder / "n.tif", grey)
    report = segment([folder / "n.tif"], folder / "out", labels=[folder / "drawn.png"], classifier="logistic")
    labels = np.asarray(Image.open(folder / "out" / "n_seg.png"))
    np.testing.assert_array_equal(labels == 0, np.isnan(grey))
    assert report.images[0]["no_data_share"] == pytest.approx(200 / grey.size)
    assert any("no data" in note for note in report.notes)  # labels drawn on them


def test_components_below_min_area_are_removed(folder):
    from skimage.measure import label

    run(folder, post=PostProcessing(smooth=1, min_area=30))
    labels = np.asarray(Image.open(folder / "out" / "a_seg.png"))
    patches = label(labels, background=0, connectivity=2)
    assert np.bincount(patches.ravel())[1:].min() >= 30
    with pytest.raises(OptionError, match="smooth needs an integer of 0 or more, got smooth=-1"):
        PostProcessing(smooth=-1)


def test_out_of_memory_halves_the_tile_with_a_note(folder, monkeypatch):
    original = prediction.predict_page

    def fail_for_large_tiles(page, valid, features, *args):
        if features.tile is None or features.tile > 128:
            raise MemoryError
        return original(page, valid, features, *args)

    monkeypatch.setattr(prediction, "predict_page", fail_for_large_tiles)
    report = run(folder)
    assert report.notes == [
        "out of memory: the tile was halved to 256 px.",
        "out of memory: the tile was halved to 128 px.",
    ]
    assert report.images[0]["tile"] == 128


def test_out_of_memory_at_the_smallest_tile_raises(folder, monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(prediction, "predict_page", fail)
    with pytest.raises(InputError, match="out of memory even with tiles of 64 px on cpu"):
        run(folder, device="cpu")


def test_progress_callbacks_receive_all_events(tmp_path):
    write_images(tmp_path)
    events = []

    class EventRecorder(ProgressCallbacks):
        def start(self, what, total):
            events.append((what, total))

        def step(self, share):
            events.append(share)

        def done(self, record):
            events.append(Path(record["image"]).stem)

    segment(
        [tmp_path / "images"],
        tmp_path / "out",
        labels=[tmp_path / "labels"],
        classifier="logistic",
        watch=EventRecorder(),
    )
    last = events.index(("segmenting", 3))
    assert events[last + 1 :] == [1.0, "i0", 1.0, "i1", 1.0, "i2"]


@pytest.mark.slow
def test_killed_runs_leave_only_complete_images(tmp_path):
    write_images(tmp_path, count=6)
    program = textwrap.dedent(
        f"""
        import sys, time
        from pathlib import Path
        from vispe.segment import pipeline
        from vispe.segment.run.reports.run_report import ProgressCallbacks

        class Slow(ProgressCallbacks):
            def done(self, record):
                time.sleep(0.05)

            def step(self, share):
                time.sleep(0.2)

        root = Path({str(tmp_path)!r})
        pipeline.segment([root / "images"], root / "out", labels=[root / "labels"], classifier="logistic",
                         watch=Slow())
        """
    )
    process = subprocess.Popen([sys.executable, "-c", program])
    out = tmp_path / "out"
    limit = time.monotonic() + 60
    while not (out / "i1_seg.png").exists() and time.monotonic() < limit:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL if os.name == "posix" else signal.SIGTERM)
    process.wait()
    finished = sorted(p.stem.removesuffix("_seg") for p in out.glob("[!.]*_seg.png"))
    assert finished[:2] == ["i0", "i1"]
    for stem in finished:
        assert (np.asarray(Image.open(out / f"{stem}_seg.png")) > 0).all()
        assert tifffile.imread(out / f"{stem}_prob.tif").squeeze().shape == (2, 60, 83)
        Image.open(out / f"{stem}_overlay.png").load()
    report = json.loads((out / "report.json").read_text())
    assert len(report["images"]) >= 1
    remaining = [tmp_path / "images" / f"i{n}.png" for n in range(6) if f"i{n}" not in finished]
    assert apply(out / MODEL_NAME, remaining, tmp_path / "rest").exit_code == 0


@pytest.mark.skipif(not SHARED.exists(), reason="the shared micrographs are not on this machine")
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "reference"), [("logistic", 0.850), ("forest", 0.852)])
def test_stained_nuclei_reach_the_reference_score(tmp_path, kind, reference):
    root = SHARED / "nuclei_histology_dsb2018"
    actual = []
    for path in sorted((root / "images").glob("*.png"))[:4]:
        report = segment(
            [path],
            tmp_path / path.stem,
            labels=[root / "scribbles" / path.name],
            classifier=kind,
            scoring=ScoreOptions([root / "masks" / path.name], include_labelled=True),
        )
        actual.append(report.images[0]["scores"]["miou"])
    assert np.mean(actual) > reference - 0.03


@pytest.mark.slow
def test_duplicate_folders_count_once_and_equal_names_raise(tmp_path):
    grey, _, scribbles = scene()
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        Image.fromarray(grey).save(tmp_path / folder / "a.png")
    Image.fromarray(scribbles).save(tmp_path / "a_labels.png")
    labels, features = [tmp_path / "a_labels.png"], FeatureConfig(sigmas=(1.0,))
    paths = [tmp_path / "one", tmp_path / "one" / ".." / "one", tmp_path / "one" / "a.png"]
    report = segment(paths, tmp_path / "out", labels=labels, features=features)
    assert [Path(record["image"]).name for record in report.images] == ["a.png"]
    for images in ([tmp_path / "one", tmp_path / "two"], [str(tmp_path / "*" / "a.png")]):
        with pytest.raises(
            InputError, match=r"same name .*a_seg\.png\. Rename an input or use separate folders"
        ):
            apply(tmp_path / "out" / "model.vispe", images, tmp_path / "other")
    assert not (tmp_path / "other").exists()
