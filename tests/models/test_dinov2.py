"""The program that measures a retrofitted DINOv2, on a tiny student: rows, targets, table, and going on."""

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from tests.train.tiny import config
from vispe.evaluate.rotation.scribble_segmenter import TrainedSegmenter
from vispe.train.evaluate.mask_scores import score_masks
from vispe.train.evaluate.model_pair import ModelPair
from vispe.train.evaluate.probe_images import Settings
from vispe.train.retrofit.config import Teacher
from vispe.train.retrofit.student import load_student, load_teacher, make_student

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "eval"))
dinov2 = importlib.import_module("dinov2")
probe_images = importlib.import_module("dinov2_evaluation.probe_images")
scribbled = importlib.import_module("dinov2_evaluation.scribbled")
table = importlib.import_module("dinov2_evaluation.table")
targets = importlib.import_module("dinov2_evaluation.targets")
TINY = probe_images.Extent(2, 3, 1, 2, None, None, rotated=1, masks=1, budget=20, sizes=(32, 48))


@pytest.fixture(scope="module")
def micrographs(tmp_path_factory):
    """Two homogeneous sets of two frames, one of three classes; one frame of another set that is none."""
    folder = tmp_path_factory.mktemp("microscopy")
    rng = np.random.default_rng(0)
    for name, classes in (("bright", 3), ("dark", 2), ("layers", 2)):
        for part in ("images", "masks", *([] if name == "layers" else ["scribbles_corner"])):
            (folder / name / part).mkdir(parents=True)
        for k in range(1 if name == "layers" else 2):
            mask = np.kron(rng.integers(0, classes, (16, 16)), np.ones((4, 4))).astype(np.uint8)
            image = (40 + 70 * mask + rng.integers(0, 30, mask.shape)).astype(np.uint8)
            side = 40 if (name, k) == ("dark", 1) else 64  # too small for windows of 48 px
            Image.fromarray(image[:side]).save(folder / name / "images" / f"{k}.png")
            Image.fromarray(mask[:side]).save(folder / name / "masks" / f"{k}.png")
    return folder


@pytest.fixture(scope="module")
def student(tmp_path_factory):
    """The folder of a student that was not trained, whose teacher's weights lie in a file."""
    folder = tmp_path_factory.mktemp("students") / "first"
    folder.mkdir()
    tiny = config(folder).teacher
    random = load_teacher(tiny, seed=7).model
    save_file({k: v.contiguous() for k, v in random.state_dict().items()}, folder / "weights.safetensors")
    settings = config(
        folder, teacher=Teacher(tiny.name, str(folder / "weights.safetensors"), 32, tiny.options)
    )
    student = make_student(load_teacher(settings.teacher), settings.student)
    save_file({k: v.contiguous() for k, v in student.state_dict().items()}, folder / "student.safetensors")
    (folder / "card.json").write_text(
        # a number with more digits than results are written with
        json.dumps(
            {"config": settings.to_dict(), "blanked": [3, 11], "updates": 7, "last_line": {"loss": 1 / 7}}
        )
    )
    return folder


@pytest.fixture(scope="module")
def run(student, micrographs, tmp_path_factory):
    """A function that runs the program on few images, and its folder of results."""
    patch = pytest.MonkeyPatch()
    patch.setattr(dinov2, "FULL", TINY)
    patch.setattr(dinov2, "QUICK", TINY)
    out = tmp_path_factory.mktemp("out")

    def call(*args, students=(student,)):
        words = ["--students", *map(str, students), "--microscopy", str(micrographs), "--out", str(out)]
        patch.setattr(sys, "argv", ["dinov2.py", *words, *args])
        dinov2.main()
        return json.loads((out / "first.json").read_text())

    yield call, out
    patch.undo()


@pytest.fixture(scope="module")
def report(run, micrographs):
    return run[0]("--pool", str(micrographs), "--quick")


def test_every_question_has_a_row_at_every_size(report):
    rows = [(r["question"], r.get("kind", r.get("set")), r["size"]) for r in report["rows"]]
    looks = [("look", kind, size) for size in (32, 48) for kind in probe_images.KINDS]
    assert [row for row in rows if row[0] == "look"] == looks
    assert [row for row in rows if row[0] == "turned"] == [("turned", None, size) for size in (32, 48)]
    sets = [(r["set"], r["homogeneous"]) for r in report["rows"] if r["question"] == "scribbles"]
    assert sets == [("bright", True), ("dark", True), ("layers", False)]
    values = {size: targets.look(report["rows"], "micrographs", size) for size in (32, 48)}
    # 'layers' shows position, one frame is small
    assert [values[size]["pictures"] for size in (32, 48)] == [
        4,
        3,
    ]
    assert values[48]["grids"] == [[6, 6]]
    for kind in probe_images.PLACELESS:
        r2 = targets.look(report["rows"], kind, 32)["r2"]
        assert r2.keys() == {"before", "blanked", "after", "filters"}
        assert r2["after"].keys() >= {"lr+ud", "radial", "shuffled", "by picture"}


def test_results_name_weights_and_no_path_of_this_machine(report, student, run):
    assert report["quick"] is True
    assert report["teacher"]["file"] == "weights.safetensors"
    assert report["teacher"]["sha256"] == dinov2.sha256(student / "weights.safetensors")
    assert report["student"]["sha256"] == dinov2.sha256(student / "student.safetensors")
    assert report["student"]["config"]["student"]["pos_embed"] == "alibi2d"
    assert report["student"]["config"]["loss"]["distill"] == 1.0
    assert report["student"]["updates"] == 7
    text = (run[1] / "first.json").read_text()
    assert str(student.parent) not in text
    assert str(run[1]) not in text
    assert str(ROOT) not in text
    assert (run[1] / "dinov2.png").stat().st_size > 10_000


def test_the_mean_of_each_position_is_removed():
    metrics = importlib.import_module("dinov2_evaluation.metrics")
    y, x = torch.meshgrid(torch.linspace(-1, 1, 9), torch.linspace(-1, 1, 12), indexing="ij")
    pattern = torch.stack([y, x * y, x**5 - y**2, torch.full_like(x, 3.0)])
    content = torch.randn(6, 4, 9, 12, generator=torch.Generator().manual_seed(0))
    actual = torch.stack(metrics.placeless(list(content + pattern)))
    # the mean over patches stays; of the content only what six images share smoothly goes
    expected = content + pattern.mean((1, 2), keepdim=True)
    assert float((actual - expected).square().mean()) < 0.05
    metric_maps = torch.stack(metrics.placeless([pattern.double()] * 2))
    torch.testing.assert_close(metric_maps[0], pattern.mean((1, 2), keepdim=True).expand_as(pattern).double())
    other = metrics.placeless([pattern, content[0][:, :5]])  # another shape is not mixed in
    assert [tuple(m.shape) for m in other] == [(4, 9, 12), (4, 5, 12)]


@pytest.mark.slow
def test_a_stopped_run_resumes_without_repetitions(report, run, micrographs, monkeypatch):
    call, out = run
    other_rows = [r for r in report["rows"] if r.get("kind") != "noise" or r["size"] != 48]
    (out / "first.json").write_text(json.dumps(report | {"rows": other_rows}))
    requested = []
    looked_at = dinov2.metrics.looked_at

    def spy(pair, kind, size, *args):
        requested.append((kind, size))
        return looked_at(pair, kind, size, *args)

    monkeypatch.setattr(dinov2.metrics, "looked_at", spy)
    second = call("--pool", str(micrographs), "--quick")
    assert requested == [("noise", 48)]
    result = [targets.look(r["rows"], "noise", 48) for r in (report, second)]
    assert [f | {"cpu_s": 0} for f in result] == [result[0] | {"cpu_s": 0}] * 2
    with pytest.raises(SystemExit, match="other weights, versions or numbers of images"):
        call()  # not quick


def test_targets_are_met_or_missed_by_the_rows(report):
    result = {c["key"]: c for c in report["targets"]}
    assert len(result) == 6 + 6 + 12 + 3
    rows = report["rows"]
    noise = targets.look(rows, "noise", 32)["r2"]["after"]["lr+ud"]
    assert result["r2 noise 32"]["value"] == pytest.approx(noise)
    assert result["r2 noise 32"]["met"] == (noise <= 0.05)
    row = targets.look(rows, "synthetic", 48)
    assert result["cosine synthetic 48"]["value"] == pytest.approx(np.mean(row["cosine_blanked"]), abs=1e-4)
    assert result["cosine synthetic 48"]["met"] == (np.mean(row["cosine_blanked"]) >= 0.95)
    corner = [r["corner"] for r in rows if r["question"] == "scribbles" and r["homogeneous"]]
    before, after = (np.mean([v for c in corner for v in c[side]]) for side in ("before", "after"))
    assert result["corner"]["value"] == pytest.approx(after, abs=1e-4)
    assert result["corner"]["limit"] == pytest.approx(before, abs=1e-4)
    assert result["corner"]["met"] == (after <= before)
    gain = report["student minus teacher"]["miou"]
    assert gain["n"] == 5
    assert gain["mean"] == pytest.approx(result["miou"]["value"] - result["miou"]["limit"], abs=1e-4)
    text = table.markdown([report])
    assert "first (quick: few images)" in text
    assert "cosine of what is the same in all patches, micrographs" in text
    assert f"{sum(c['met'] for c in result.values())} of {len(result)}" in text


def test_a_student_equal_to_its_teacher_has_similarity_one(student):
    _, teacher, _ = load_student(student)
    same = ModelPair(teacher, teacher, [])
    settings = Settings(8, 0, teacher.mean, teacher.std)
    noise = probe_images.load_images("noise", 32, settings, TINY, [], None)
    row = dinov2.metrics.looked_at(same, "noise", 32, noise, settings, TINY)
    assert row["cosine_blanked"] == pytest.approx([1, 1])
    assert row["cosine_centred"] == pytest.approx([1, 1])
    assert max(row["cosine_constant"]) < 0.999
    assert row["r2"]["before"] == row["r2"]["after"] == row["r2"]["blanked"]
    assert row["rank"]["before"] == row["rank"]["after"]


@pytest.mark.slow
def test_scores_of_scribbles_are_those_of_the_evaluation_of_a_retrofit(student, micrographs):
    after, before, card = load_student(student)
    settings = Settings(8, 48, before.mean, before.std)
    frames = [f for f in probe_images.frames_of(micrographs, TINY) if f.group == "bright"]
    actual = scribbled.scribbled(ModelPair(before, after, card["blanked"]), frames, 48, settings, 20)
    images = scribbled.CentreWindows([settings.normalized(f.image) for f in frames], 8, 48)
    truths = scribbled.CentreWindows([f.truth for f in frames], 8, 48)
    sources = {"before": before, "after": after}
    expected = score_masks(sources, images, truths, 3, budget=20)
    for name in sources:
        assert actual["own"][name] == pytest.approx(expected.own[name], abs=1e-9)
        assert actual["corner"][name] == pytest.approx(expected.corner[name], abs=1e-9, nan_ok=True)


def test_labels_of_one_map_are_those_of_the_trained_segmenter_and_a_map_alongside_it_is_used():
    make = torch.Generator().manual_seed(0)
    coarse = torch.randn(5, 4, 6, generator=make, dtype=torch.float64)
    marks = np.zeros((16, 24), np.int64)
    marks[::5, ::3] = 1 + np.arange(32).reshape(4, 8) % 3
    result = scribbled.labels([coarse], marks)
    assert np.array_equal(result, TrainedSegmenter(None, [coarse], [marks]).labels(coarse, marks.shape))
    telling = torch.from_numpy(np.tile(1.0 + np.arange(24) % 2, (16, 1)))[None]
    two = np.where(marks > 0, telling[0].numpy(), 0).astype(np.int64)
    beside = scribbled.labels([coarse * 1e-3, telling], two)
    assert (beside == telling[0].numpy()).mean() > 0.9
    assert (scribbled.labels([coarse], two) == telling[0].numpy()).mean() < 0.8


def test_folders_of_one_name_are_refused(run, student):
    with pytest.raises(SystemExit):
        run[0](students=(student, student))
