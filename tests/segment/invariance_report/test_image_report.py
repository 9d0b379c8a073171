import csv
import json
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from tests.cases import cases
from vispe.cli.main import main
from vispe.errors import InputError
from vispe.segment.features.feature_config import FeatureConfig
from vispe.segment.features.pixel_features import Features
from vispe.segment.invariance_report import RUNS, image_report, measure_invariance
from vispe.segment.invariance_report.figure import plot_trust, rendered
from vispe.segment.model import prediction
from vispe.segment.model.model_file import load_model
from vispe.segment.model.prediction import predict_page
from vispe.segment.overlays import uncertainty_image
from vispe.segment.pipeline import apply, segment
from vispe.segment.run.reports.run_report import ProgressCallbacks
from vispe.segment.types import PostProcessing


def scene(seed=0, height=64, width=96):
    """Make a noisy image of dark discs on a bright background, and its scribbles."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    mask = np.zeros((height, width), bool)
    for _ in range(6):
        mask |= (y - rng.integers(height)) ** 2 + (x - rng.integers(width)) ** 2 < 80
    grey = np.where(mask, 80, 150) + rng.normal(0, 25, mask.shape)
    scribbles = np.where(rng.random(mask.shape) < 0.05, 1 + mask, 0).astype(np.uint8)
    return np.clip(grey, 0, 255).astype(np.uint8), scribbles


def vispe(command):
    return main(command.split())


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, array in zip(("a", "drawn"), scene(), strict=True):
        Image.fromarray(array).save(tmp_path / f"{name}.png")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def without_figure(monkeypatch):
    """Replace the figure: it takes a second, and most tests do not use it."""
    monkeypatch.setattr(image_report, "plot_trust", lambda *_: None)
    monkeypatch.setattr(image_report, "rendered", lambda _: np.zeros((1, 1, 3), np.uint8))


@pytest.mark.slow
def test_trust_adds_a_figure_a_map_and_columns(folder, capsys):
    command = "segment a.png --labels drawn.png --features filters --classes ground,disc"
    assert vispe(f"{command} -o plain") == 0
    assert "trust" not in capsys.readouterr().out
    assert vispe(f"{command} --trust -o out") == 0
    line = capsys.readouterr().out.strip()
    report = json.loads(Path("out/report.json").read_text())
    record = report["images"][0]
    actual = record["trust"]
    assert line.endswith(f"; trust: {actual['brief']} -> out/a_seg.png")
    assert {p.name for p in Path("out").iterdir()} - {p.name for p in Path("plain").iterdir()} == {
        "a_trust.png",
        "a_disagreement.png",
    }
    for name in ("a_seg.png", "a_prob.tif", "a_uncertainty.png", "a_overlay.png"):
        assert Path("out", name).read_bytes() == Path("plain", name).read_bytes()
    assert record["files"]["trust"] == "out/a_trust.png"
    assert record["files"]["disagreement"] == "out/a_disagreement.png"
    assert "trust" not in json.loads(Path("plain/report.json").read_text())["images"][0]
    with Image.open("out/a_trust.png") as figure:
        assert min(figure.size) > 800
    (row,) = csv.DictReader(Path("out/report.csv").read_text().splitlines())
    assert row["trust.dependence"] == actual["dependence"]
    assert float(row["trust.spread_pp.disc"]) == actual["spread_pp"]["disc"]
    assert float(row["trust.floor_pp.ground"]) == actual["floor_pp"]["ground"]
    assert [p["family"] for p in actual["poses"]] == ["turned"] * 3 + ["mirrored"] * 4 + ["shifted"] * 3
    assert actual["page"] == 0
    assert actual["classes"]["disc"]["fraction"] == pytest.approx(record["map_fractions"]["disc"])
    assert 0 < actual["seconds"] <= record["seconds"]
    assert vispe(f"{command} --trust -o plain") == 2
    assert "plain/a_seg.png" in capsys.readouterr().err


@pytest.mark.slow
def test_result_files_equal_the_library_result(folder, without_figure):
    segment(["a.png"], "out", labels=["drawn.png"], features=FeatureConfig())
    report = apply("out/model.vispe", ["a.png"], "more", post=PostProcessing(smooth=1), trust=True)
    loaded = load_model("out/model.vispe")
    features = Features(loaded.features, seed=loaded.seed, basis=loaded.basis)
    grey = scene()[0].astype(np.float32)
    low, high = np.percentile(grey, loaded.clip)
    page = np.clip((grey - np.float32(low)) / np.float32(high - low), 0, 1)[..., None]

    def predict(page, valid):
        return predict_page(
            page, valid, features, loaded.classifier, PostProcessing(smooth=1), lambda share: None
        )

    actual = measure_invariance(page, np.ones(grey.shape, bool), predict, loaded.names)
    record = report.images[0]["trust"]
    for key, value in actual.to_dict().items():
        assert record[key] == value, key
    np.testing.assert_array_equal(
        np.asarray(Image.open("more/a_disagreement.png")), uncertainty_image(actual.disagreement)
    )
    assert actual.level == "steady"  # filters are rotation-equivariant
    assert record["agreement_by_family"]["turned"] > 0.999


def test_trust_report_of_a_stack_is_that_of_its_middle_page(folder, without_figure):
    pages = np.stack([scene(seed)[0] for seed in range(3)])
    tifffile.imwrite("s.tif", pages, imagej=True, metadata={"axes": "ZYX"})
    segment(["a.png"], "out", labels=["drawn.png"], features=FeatureConfig())
    report = apply("out/model.vispe", ["s.tif"], "more", trust=True)
    record = report.images[0]
    assert record["trust"]["page"] == 1
    assert "the trust report of s.tif is that of page 1 of 3 (from 0)." in record["notes"]
    labels = tifffile.imread("more/s_seg.tif")[1]
    assert record["trust"]["classes"]["class 2"]["fraction"] == pytest.approx((labels == 2).mean())
    assert np.asarray(Image.open("more/s_disagreement.png")).shape == labels.shape


def test_existing_trust_files_are_not_overwritten(folder, without_figure):
    segment(["a.png"], "out", labels=["drawn.png"], features=FeatureConfig())
    Path("more").mkdir()
    Path("more/a_disagreement.png").write_bytes(b"mine")
    with pytest.raises(InputError, match=r"a_disagreement\.png exists; add --force"):
        apply("out/model.vispe", ["a.png"], "more", trust=True)
    assert Path("more/a_disagreement.png").read_bytes() == b"mine"
    apply("out/model.vispe", ["a.png"], "more")  # which writes no such file
    apply("out/model.vispe", ["a.png"], "more", trust=True, force=True)
    Image.open("more/a_disagreement.png").load()


@pytest.mark.slow
def test_out_of_memory_restarts_all_poses_with_smaller_tiles(folder, without_figure, monkeypatch):
    segment(["a.png"], "out", labels=["drawn.png"], features=FeatureConfig())
    small = apply("out/model.vispe", ["a.png"], "small", tile=256, trust=True).images[0]["trust"]
    original, calls = prediction.predict_page, []

    def fail_once(page, valid, features, *args):
        calls.append(features.tile)
        if len(calls) == 5:
            raise MemoryError
        return original(page, valid, features, *args)

    monkeypatch.setattr(prediction, "predict_page", fail_once)
    report = apply("out/model.vispe", ["a.png"], "more", trust=True)
    assert report.notes == ["out of memory: the tile was halved to 256 px."]
    assert calls == [None] * 5 + [256] * (RUNS + 1)
    for key, value in report.images[0]["trust"].items():
        assert key == "seconds" or value == small[key], key


@pytest.mark.slow
@pytest.mark.parametrize("size", [(64, 96), (40, 30)])
def test_progress_covers_every_pose(folder, without_figure, size):
    events = []

    class StepRecorder(ProgressCallbacks):
        def step(self, share):
            events.append(share)

    segment(["a.png"], "out", labels=["drawn.png"], features=FeatureConfig())
    Image.fromarray(scene(1, *size)[0]).save("b.png")
    report = apply("out/model.vispe", ["b.png"], "more", trust=True, watch=StepRecorder())
    assert sum(events) == pytest.approx(1)
    assert bool(report.images[0]["trust"]["notes"]) == (size == (40, 30))


@pytest.mark.slow
def test_trust_supports_clusters(folder, without_figure, capsys):
    assert vispe("segment a.png --cluster 2 --trust -o out --json") == 0
    actual = json.loads(capsys.readouterr().out)["images"][0]["trust"]
    assert list(actual["classes"]) == ["cluster 1", "cluster 2"]


def test_trust_supports_text_prompts(folder, without_figure, capsys):
    from tests.segment.text.common import planted  # imports open_clip

    model = planted(folder / "planted")  # classifies patches of 8 px by grey level, independent of position
    mask = np.zeros((64, 80), bool)
    mask[:, 24:56] = True
    Image.fromarray(np.where(mask, 190, 40).astype(np.uint8)).save("b.png")
    assert vispe(f"segment b.png --text dark bright --model local-dir:{model} --trust -o out --json") == 0
    actual = json.loads(capsys.readouterr().out)["images"][0]["trust"]
    assert actual["classes"]["bright"]["fraction"] == pytest.approx(0.4)
    assert actual["agreement_by_family"]["turned"] == actual["agreement_by_family"]["mirrored"] == 1
    assert actual["agreement_by_family"]["shifted"] < 1


@pytest.mark.slow
def test_vispe_micro_is_equivariant_on_images_of_whole_patches(folder, without_figure):
    report = segment(["a.png"], "out", labels=["drawn.png"], trust=True)
    actual = report.images[0]["trust"]
    assert report.run["model"] == "vispe_micro"
    for family in ("turned", "mirrored"):
        assert actual["agreement_by_family"][family] > 1 - 3 / 64 / 96  # a tie may fall either way in float32
    assert actual["agreement_by_family"]["shifted"] < 1
    Image.fromarray(scene(1, 64, 83)[0]).save("b.png")  # 13 px to whole patches: 6 left, 7 right
    actual = apply("out/model.vispe", ["b.png"], "more", trust=True).images[0]["trust"]
    agreement = {p["name"]: p["agreement"] for p in actual["poses"]}
    assert agreement["vflip"] > 1 - 3 / 64 / 83
    assert agreement["hflip"] < agreement["vflip"]


def test_learned_position_embeddings_are_detected(folder, without_figure):
    tokens = FeatureConfig("tokens", model="test_vit", weights="random")
    actual = segment(["a.png"], "out", labels=["drawn.png"], features=tokens, trust=True).images[0]["trust"]
    assert actual["agreement_by_family"]["turned"] < 0.97
    assert actual["inside_changed"] > 0.005
    assert actual["dependence"] != "steady"


@cases(("size", "count"), [((30, 200), 1), ((1300, 20), 2), ((40, 50), 20)])
def test_figure_supports_any_size_and_class_count(size, count):
    page = np.random.default_rng(0).random((*size, 2), np.float32)
    valid = np.ones(size, bool)
    valid[: size[0] // 2, :9] = False

    def predict(p, v):
        rows = np.arange(len(p))[:, None] / len(p)
        return np.where(v, 1 + (count * (p[..., 0] + rows) / 2.001).astype(int), 0)

    names = [f"a $name$ that is rather long for a legend, {k}" for k in range(count)]
    actual = measure_invariance(page, valid, predict, names)
    figure = plot_trust(actual, page, title="_x_$y$.png")
    image = rendered(figure)
    headline = figure.texts[0].get_window_extent()
    assert all(ax.get_tightbbox().y1 <= headline.y0 for ax in figure.axes)
    assert image.dtype == np.uint8
    assert image.shape[2] == 3
    assert (image == 255).all(-1).mean() < 0.97


def test_figure_supports_pages_without_data():
    page = np.zeros((20, 30, 1), np.float32)
    actual = measure_invariance(page, np.zeros((20, 30), bool), lambda p, v: np.zeros(v.shape, int), ["x"])
    assert rendered(plot_trust(actual, page)).ndim == 3
