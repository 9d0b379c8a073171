import json

import numpy as np
import pytest
import torch
from timm.models import VisionTransformer
from torch.nn.functional import interpolate

import vispe
from tests.evaluate.rotation.cases import F64, field
from vispe.errors import InputError, OptionError, ShapeError, UnknownName
from vispe.evaluate.rotation import (
    D4,
    GROUPS,
    RotationReport,
    VisionModel,
    equivariance,
    layer_curve,
    measure,
    position_r2,
    quadrant_gap,
    raw_intensity,
    scribble_classifier,
)
from vispe.evaluate.rotation.helpers import scribbles
from vispe.evaluate.rotation.plan import center_crop
from vispe.evaluate.rotation.scribble_segmenter import TrainedSegmenter, sample_at_pixels
from vispe.images.symmetry import D4Features, symmetrize

FEW = (0.0, 30.0, 90.0)


def tiny(pos="learn", symmetric=False, **options):
    torch.manual_seed(0)
    settings = {
        "img_size": 32,
        "patch_size": 4,
        "embed_dim": 24,
        "depth": 2,
        "num_heads": 2,
        "num_classes": 0,
    }
    kind = "learn" if pos == "learn" else "none"
    model = VisionTransformer(**settings, pos_embed=kind, dynamic_img_size=True, **options)
    if pos == "learn":
        torch.nn.init.normal_(model.pos_embed, std=0.5)
    elif pos != "none":
        vispe.convert(model, pos)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight *= 8
    return VisionModel((symmetrize(model) if symmetric else model).eval())


def sample(size, seed=0):
    return field(size, seed, finest=0.05).float()


def classes(image):
    return (image[0] > 0).numpy().astype(np.int64) + 1


def value(report, transform, metric, part="full"):
    actual = report.result.find(transform, metric, part)
    assert actual is not None, (transform, metric, part)
    return actual.values


@pytest.fixture(scope="module")
def everything():
    images = [sample((49, 52), k) for k in range(2)]
    progress_calls = []
    report = measure(
        tiny(),
        images,
        truths=[classes(x) for x in images],
        names=["dark", "bright"],
        image_names=["a", "b"],
        angles=FEW,
        subject="a small transformer",
        progress=lambda what, share: progress_calls.append((what, share)),
    )
    return report, images, progress_calls


def test_everything_that_applies_is_measured(everything):
    report, _, progress_calls = everything
    assert isinstance(report, RotationReport)
    measured = {(r.transform, r.metric, r.part) for r in report.result.rows}
    for expected in [
        ("D4", "error", "full"),
        ("D4", "error", "position code"),
        ("D4", "error", "raw intensity"),
        ("D4", "error", "random weights"),
        ("identity", "error", "full"),
        ("shuffled", "error", "full"),
        ("30°", "error", "full"),
        ("all angles", "error", "full"),
        ("roll, whole patches", "error", "full"),
        ("roll, parts of a patch", "error", "full"),
        ("crop shift, whole patches", "error", "full"),
        ("Lie rotation", "lie", "full"),
        ("none", "r2", "full"),
        ("shuffled positions", "r2", "full"),
        ("D4", "error", "layer 1"),
        ("D4", "error", "layer 0, position code"),
        ("none", "r2", "layer 0"),
        ("D4", "miou", "clusters refitted"),
        ("four corners", "quadrant_gap", "full"),
        ("D4", "miou", "full"),
        ("D4", "ari", "trained on all poses"),
        ("30°", "miou", "full"),
        ("roll, random phases", "miou", "full"),
        ("all poses", "accuracy_worst", "full"),
        ("all poses", "accuracy_worst", "trained on all poses"),
        ("all poses", "phase_spread", "bright"),
        ("all poses", "phase_error", "dark, trained on all poses"),
    ]:
        assert expected in measured, expected
    assert value(report, "identity", "error").tolist() == [0, 0]
    assert value(report, "D4", "error", "raw intensity").tolist() == [0, 0]
    assert set(GROUPS.values()) - {w for w, _ in progress_calls} == {GROUPS["fingerprint"]}
    assert [s for _, s in progress_calls] == sorted(s for _, s in progress_calls)
    assert progress_calls[-1] == ("", 1.0)
    assert report.fingerprint is not None
    assert report.fingerprint.n_images == 30
    assert report.fingerprint.snr > 10  # a learned table is the same in every window
    notes = " ".join(report.result.notes)
    assert "Images of 49 x 52 px: the last row was removed." in notes
    assert "The fingerprint is the mean of 30 windows of 36 x 36 px." in notes


def test_rows_are_those_of_the_functions_on_the_fitted_images(everything):
    report, images, _ = everything
    f, fitted = tiny(), [x[:, :48] for x in images]
    truths = [classes(x) for x in fitted]
    for actual in (
        *equivariance(f, fitted),
        *layer_curve(f, fitted),
        *position_r2(f, fitted),
        *quadrant_gap(scribble_classifier(f), fitted, truths, 2, budget=100),
    ):
        unchanged = [
            r
            for r in report.result.rows
            if (r.transform, r.metric, r.part, r.control)
            == (actual.transform, actual.metric, actual.part, actual.control)
        ]
        assert len(unchanged) == 1
        np.testing.assert_array_equal(unchanged[0].values, actual.values)


def test_maps_and_labels_of_the_first_image(everything):
    report, images, _ = everything
    assert report.picture.shape == (48, 52, 3)
    assert (report.picture.min(), report.picture.max()) == (0, 1)
    assert list(report.poses) == list(report.labels) == [g.name for g in D4]
    for colours in report.poses.values():
        assert colours.shape == (12, 13, 3)
        assert colours.min() >= 0
        assert colours.max() <= 1
    assert not np.allclose(report.poses["rot90"], report.poses["identity"], atol=0.05)
    agree = [(report.labels[g.name] == report.labels["identity"]).mean() for g in D4]
    assert agree[0] == 1
    assert min(agree) < 1
    assert (report.labels["identity"] == classes(images[0][:, :48])).mean() > 0.7


def test_json_has_every_number_of_every_image(everything, tmp_path):
    report, _, _ = everything
    read = json.loads(report.write_json(tmp_path / "r.json").read_text())
    assert read["subject"] == "a small transformer"
    assert read["images"] == ["a", "b"]
    assert read["classes"] == ["dark", "bright"]
    assert read["settings"]["angles"] == list(FEW)
    assert len(read["rows"]) == len(report.result.rows)
    for actual, row in zip(read["rows"], report.result.rows, strict=True):
        expected = [None if np.isnan(v) else v for v in row.values]
        assert (actual["transform"], actual["metric"], actual["values"]) == (
            row.transform,
            row.metric,
            expected,
        )
        assert set(actual.get("floors", {})) == set(row.floors)
    assert len(read["fingerprint"]["channel_r2"]) == 24
    assert read["verdict"] == report.result.verdict
    with pytest.raises(InputError, match="exists"):
        report.write_json(tmp_path / "r.json")


@pytest.mark.slow
def test_summary_names_the_responsible_part():
    images = [sample((24, 24))]

    def short(f):
        return measure(f, images, metrics=["d4", "position"])

    learned = short(tiny("learn"))
    assert "strong" in learned.result.verdict
    assert learned.result.remedy.startswith("The position code breaks the symmetry")
    plain = short(tiny("none"))
    assert value(plain, "D4", "error", "position code").max() < 1e-5
    assert plain.result.remedy.startswith("The patch kernel breaks the symmetry")
    exact = short(tiny("alibi2d", symmetric=True))
    assert value(exact, "D4", "error").max() < 1e-5
    assert exact.result.remedy == ""
    assert "features under rotation and reflection: invariant" in exact.verdict
    averaged = short(D4Features(tiny("learn")))
    assert value(averaged, "D4", "error").max() < 1e-6
    assert "position code alone is unknown" in " ".join(averaged.result.notes)
    raw = short(raw_intensity)
    assert value(raw, "D4", "error").tolist() == [0]
    assert raw.result.settings["patch"] == 1


def test_the_short_table_speaks_plainly(everything):
    report, _, _ = everything
    table = report.to_markdown()
    assert len(table.splitlines()) == len(report.headlines) + 2
    assert "rotated by quarter turns and mirrored" in table
    assert "area of bright" in table
    assert "resampling alone" in table
    for word in ("D4", "equivariance", "roll"):
        assert word not in table


def test_a_callable_and_its_patch_are_measured():
    def blocks(images):
        return torch.nn.functional.avg_pool2d(images, 4)

    images = [sample((34, 40)), sample((50, 46), 1)]
    report = measure(blocks, images, quick=True, size=32, angles=(0.0, 90.0))
    assert report.result.settings["patch"] == 4
    assert value(report, "D4", "error").max() < 1e-6
    assert report.fingerprint is not None
    assert report.labels == {}
    note = " ".join(report.result.notes)
    assert "Without masks accuracy was not measured" in note
    assert "Skipped by quick: shift, lie, layers" in note
    assert "There is no control of random weights" in note
    with pytest.raises(ShapeError, match=r"got \(8, 8\) cells for an image of \(33, 32\) px.*patch"):
        measure(blocks, [sample((33, 32))])


def test_features_without_a_derivative_are_noted():
    def cut_off(images):
        return torch.from_numpy(images.detach().numpy().copy())

    report = measure(cut_off, [sample((20, 20))], metrics=["lie", "layers"])
    assert report.result.rows == ()
    note = " ".join(report.result.notes)
    assert "no curve over layers" in note
    assert "The Lie derivative was not measured: the features have no derivative" in note
    with pytest.raises(InputError, match="measure: no images"):
        measure(cut_off, [])
    constant = measure(lambda x: torch.rand(1, 2, 5, 5), [sample((20, 20))], metrics=["lie"])
    assert "the features do not depend on the image differentiably" in " ".join(constant.result.notes)


def test_a_segmenter_alone():
    def bright(image):
        return classes(image)

    images = [sample((40, 44)), sample((44, 40), 1)]
    report = measure(None, images, segmenter=bright, n_classes=2, angles=FEW)
    assert report.fingerprint is None
    assert report.poses == {}
    assert value(report, "D4", "miou").tolist() == [1, 1]
    assert value(report, "roll, random phases", "miou").tolist() == [1, 1]
    assert value(report, "all poses", "phase_spread", "class 1").max() < 3
    assert list(report.labels) == [g.name for g in D4]
    assert report.labels["identity"].shape == (40, 44)  # nothing was cut: there are no patches
    assert report.verdict.startswith("labels under rotation and reflection: mIoU 100.0 %")
    scored = measure(
        None, images, segmenter=bright, truths=[classes(x) for x in images], n_classes=2, quick=True
    )
    assert value(scored, "all poses", "accuracy_worst").min() > 0.9
    assert "5 points" not in scored.verdict


def test_images_too_small_for_an_angle_are_skipped():
    sizes = [(40, 40), (12, 12)]
    pooled = measure(
        lambda x: torch.nn.functional.avg_pool2d(x, 4),
        [sample(s) for s in sizes],
        patch_size=4,
        angles=(30.0,),
        metrics=["angles", "shift"],
    )
    actual = value(pooled, "30°", "error")
    assert np.isfinite(actual[0])
    assert np.isfinite(actual[1]) or "too small" in " ".join(pooled.result.notes)
    crops = value(pooled, "crop shift, whole patches", "error")
    assert np.isfinite(crops[0])
    assert np.isnan(crops[1])
    assert "Images of 12 x 12 px are too small for two windows" in " ".join(pooled.result.notes)


def test_images_are_cut_about_their_middle_and_never_resized():
    image = torch.arange(3 * 23 * 30, dtype=F64).reshape(3, 23, 30)
    unchanged, note = center_crop(image[:, :20, :28], 4, None)
    assert note == ""
    assert torch.equal(unchanged, image[:, :20, :28])
    cropped, note = center_crop(image, 4, None)
    assert torch.equal(cropped, image[:, 1:21, 1:29])  # 22 rows of 23, then by equal margins
    assert "the last row was removed" in note
    assert "height was cropped from 22 to 20 px" in note
    assert "width was cropped from 30 to 28 px" in note
    window, note = center_crop(image, 4, 16)
    assert torch.equal(window, image[:, 3:19, 7:23])
    assert note.startswith("the middle 16 x 16 px were used.")
    truth, _ = center_crop(image[0], None, 16)
    assert torch.equal(truth, image[0, 3:19, 7:23])
    with pytest.raises(ShapeError, match=r"at least one patch of 4 px, got \(3, 30\) px"):
        center_crop(image[:, :3], 4, None)


def test_a_classifier_of_tokens_equals_one_of_enlarged_features():
    f, image = tiny(), sample((32, 40))
    truth = classes(image)
    truth[:10, :12] = 3
    marks = scribbles(truth, np.ones(truth.shape, bool), 30, np.random.default_rng(0))
    maps = f(image[None]).detach().double()[0]
    full = interpolate(maps[None], image.shape[-2:], mode="bilinear", align_corners=False)[0].permute(1, 2, 0)
    np.testing.assert_allclose(sample_at_pixels(maps, marks > 0), full.numpy()[marks > 0], atol=1e-12)
    s = TrainedSegmenter(f, [maps], [marks])
    expected = s._model.predict(full.reshape(-1, full.shape[-1]).numpy()).reshape(truth.shape)
    np.testing.assert_array_equal(s(image), expected)
    two = np.where(marks == 3, 0, marks)
    s = TrainedSegmenter(f, [maps], [two])
    expected = s._model.predict(full.reshape(-1, full.shape[-1]).numpy()).reshape(truth.shape)
    np.testing.assert_array_equal(s(image), expected)
    every = TrainedSegmenter.of_image(f, image, two, D4)
    assert every(image).shape == truth.shape
    with pytest.raises(InputError, match="must have two classes"):
        TrainedSegmenter(f, [maps], [np.where(marks == 1, 1, 0)])


def test_wrong_requests_are_refused():
    x = sample((16, 16))
    with pytest.raises(OptionError, match="f and segmenter are None"):
        measure(None, [x])
    with pytest.raises(InputError, match="measure: no images"):
        measure(raw_intensity, [])
    with pytest.raises(UnknownName, match=r"unknown metric, got 'angle'. Did you mean 'angles'"):
        measure(raw_intensity, [x], metrics=["angle"])
    with pytest.raises(OptionError, match="metric 'quadrant' is not applicable"):
        measure(raw_intensity, [x], metrics=["quadrant"])
    with pytest.raises(OptionError, match="metric 'd4' is not applicable"):
        measure(None, [x], segmenter=classes, n_classes=2, metrics=["d4"])
    with pytest.raises(InputError, match="truths` must have one entry per image, got 1 for 2 images"):
        measure(raw_intensity, [x, x], truths=[classes(x)])
    with pytest.raises(OptionError, match="number of classes of the segmenter is unknown"):
        measure(None, [x], segmenter=classes)
    with pytest.raises(OptionError, match="names` must have 2 entries, got 3"):
        measure(None, [x], segmenter=classes, n_classes=2, names=["a", "b", "c"])
    with pytest.raises(OptionError, match=r"names` must have one entry per class, got \[\]"):
        measure(None, [x], segmenter=classes, names=[])
    with pytest.raises(OptionError, match="angles` must be finite degrees"):
        measure(raw_intensity, [x], angles=[])
    with pytest.raises(InputError, match="accepts only images of 32 x 32 px, got 16 x 16 px for image 0"):
        measure(tiny(), [x], size=32, exact=True, metrics=["d4"])
