"""Reading of images, labels and masks in a run, from the command line to the report."""

import json
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image
from scipy import ndimage as ndi

from tests.cli.test_segment import vispe
from vispe.images.orientation import oriented
from vispe.segment.features.feature_config import FeatureConfig
from vispe.segment.live.paint.open_page import open_paint
from vispe.segment.pipeline import ReadOptions, apply, segment

FAST = "--features filters"
SLOW = pytest.mark.slow
H, W = 64, 96
RNG = np.random.default_rng(0)
FIELD = ndi.gaussian_filter(RNG.random((H, W)), 4)
TRUTH = (np.quantile(FIELD, 0.7) < FIELD).astype(np.uint8) + 1  # 30 % are of class 2
GREY = (TRUTH * 100 + RNG.normal(0, 8, TRUTH.shape)).clip(0, 255).astype(np.uint8)
SCRIBBLES = np.where(RNG.random(TRUTH.shape) < 0.05, TRUTH, 0).astype(np.uint8)


@pytest.fixture(autouse=True)
def working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Image.fromarray(GREY).save("a.png")
    Image.fromarray(SCRIBBLES).save("l.png")


def report(folder="out"):
    return json.loads(Path(folder, "report.json").read_text())


def result(name, folder="out"):
    path = next(Path(folder).glob(f"{name}_seg.*"))
    return tifffile.imread(path) if path.suffix == ".tif" else np.asarray(Image.open(path))


def agreement(labels, truth=TRUTH):
    counts = truth > 0
    return float((labels == truth)[counts].mean())


def save_tagged(name, array, tag):
    exif = Image.Exif()
    exif[274] = tag
    if name.endswith(".tif"):
        tifffile.imwrite(name, array, extratags=[(274, "H", 1, tag, True)])
    else:
        Image.fromarray(array).save(name, exif=exif, **({"quality": 95} if name.endswith("jpg") else {}))


@pytest.mark.parametrize(
    ("tag", "name"),
    [
        (3, "t.jpg"),
        (6, "t.tif"),
        *(pytest.param(*each, marks=SLOW) for each in ((2, "t.tif"), (4, "t.png"), (8, "t.jpg"))),
    ],
)
def test_labels_in_stored_orientation_match_and_are_noted(tag, name, capsys):
    save_tagged(name, GREY, tag)
    Image.fromarray(TRUTH - 1).save("truth.png")
    assert vispe(f"segment {name} --labels l.png {FAST} --truth truth.png -o out") == 0
    assert agreement(result("t")) > 0.95
    actual = report()["images"][0]
    assert actual["scores"]["miou"] > 0.9
    assert actual["orientation"] == {"tag": tag, "applied": False}
    note = f"{name} has the orientation tag {tag} "
    assert note in capsys.readouterr().err
    assert any(text.startswith(note) for text in actual["notes"])
    assert note in Path("out/report.html").read_text()


@pytest.mark.parametrize("tag", [6, pytest.param(3, marks=SLOW)])
def test_labels_in_displayed_orientation_match_if_the_tag_is_applied(tag):
    save_tagged("t.jpg", GREY, tag)
    oriented_arrays = [np.ascontiguousarray(oriented(a[None], tag)[0]) for a in (SCRIBBLES, TRUTH)]
    Image.fromarray(oriented_arrays[0]).save("l.png")
    assert vispe(f"segment t.jpg --labels l.png {FAST} --orientation tag -o out") == 0
    assert agreement(result("t"), oriented_arrays[1]) > 0.95
    assert vispe("apply out/model.vispe t.jpg --orientation tag -o more") == 0
    np.testing.assert_array_equal(result("t", "more"), result("t"))
    if tag == 6:  # detected from the sizes of labels and image
        assert vispe(f"segment t.jpg --labels l.png {FAST} -o stored") == 0
        assert agreement(result("t", "stored")) > 0.95


def _with_bar():
    bar = np.zeros((16, W), np.uint8)
    bar[4:12, 10:60] = 255
    Image.fromarray(np.concatenate([GREY, bar])).save("b.png")
    Image.fromarray(np.concatenate([SCRIBBLES, np.zeros_like(bar)])).save("l.png")
    mask = np.zeros((H + 16, W), np.uint8)
    mask[:H] = 1
    Image.fromarray(mask).save("keep.png")
    Image.fromarray(np.concatenate([TRUTH - 1, np.zeros_like(bar)])).save("truth.png")


@pytest.mark.parametrize(
    "how",
    ["--crop :-16,:", *(pytest.param(each, marks=SLOW) for each in ("--crop 0:64,0:96", "--mask keep.png"))],
)
def test_excluded_pixels_are_ignored_in_all_results(how, capsys):
    _with_bar()
    extra_options = "--objects 2 --object-min-area 5 --materials --truth truth.png"
    assert vispe(f"segment b.png --labels l.png {FAST} {how} {extra_options} -o out") == 0
    actual, stderr = report()["images"][0], capsys.readouterr().err
    labels = result("b")
    assert labels.shape == (H + 16, W)
    assert not labels[H:].any()
    assert agreement(labels[:H]) > 0.95
    assert actual["fractions"]["class 2"] == pytest.approx(0.3, abs=0.03)
    assert actual["excluded_share"] == actual["no_data_share"] == pytest.approx(0.2)
    assert actual["scores"]["n_pixels"] < H * W
    assert actual["scores"]["fraction_mean_abs_error_pp"] < 1
    assert not tifffile.imread("out/b_objects.tif")[H:].any()
    assert not tifffile.imread("out/b_prob.tif")[:, H:].any()
    assert "20 % of the pixels of b.png" in stderr
    assert "20 % of the pixels of b.png are excluded" in Path("out/report.html").read_text()
    assert vispe(f"apply out/model.vispe b.png {how} -o more") == 0
    np.testing.assert_array_equal(result("b", "more"), labels)
    assert vispe(f"segment b.png --cluster 2 {FAST} {how} -o clusters") == 0
    assert not result("b", "clusters")[H:].any()
    assert sum(report("clusters")["images"][0]["fractions"].values()) == pytest.approx(1)


def test_crop_option_and_cropped_file_give_equal_fractions():
    _with_bar()
    filters = FeatureConfig("filters")
    segment("b.png", "cropped", labels="l.png", features=filters, reading=ReadOptions(crop=f"0:{H},:"))
    Image.fromarray(SCRIBBLES).save("own.png")
    segment("a.png", "cut", labels="own.png", features=filters)
    first, second = (report(name)["images"][0]["fractions"]["class 2"] for name in ("cropped", "cut"))
    assert first == pytest.approx(second, abs=0.01)


def test_transparent_pixels_are_ignored():
    alpha = np.full((H, W), 255, np.uint8)
    alpha[:, 60:] = 0
    Image.fromarray(np.dstack([np.where(alpha, GREY, 0), alpha])).save("m.png")
    Image.fromarray(np.where(alpha, SCRIBBLES, 0)).save("l.png")
    assert vispe(f"segment m.png --labels l.png {FAST} -o out") == 0
    assert not result("m")[:, 60:].any()
    fraction = (TRUTH[:, :60] == 2).mean()
    assert report()["images"][0]["fractions"]["class 2"] == pytest.approx(fraction, abs=0.03)


def test_masks_match_by_name_and_a_single_mask_applies_to_all():
    for name in ("a", "b"):
        Image.fromarray(GREY).save(f"{name}.png")
        mask = np.zeros((H, W), np.uint8)
        mask[:, : 48 if name == "a" else 24] = 255
        Image.fromarray(mask).save(f"{name}_mask.png")
    assert vispe(f"segment a.png --labels l.png {FAST} -o out") == 0
    apply(
        "out/model.vispe", ["a.png", "b.png"], "each", reading=ReadOptions(mask=["a_mask.png", "b_mask.png"])
    )
    assert [record["excluded_share"] for record in report("each")["images"]] == [0.5, 0.75]
    apply("out/model.vispe", ["a.png", "b.png"], "same", reading=ReadOptions(mask="a_mask.png"))
    assert [record["excluded_share"] for record in report("same")["images"]] == [0.5, 0.5]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--crop 0:64", "crop must be two ranges of pixels, rows and columns"),
        ("--crop 0:640,:", "rows must be a range within 0:64, the size of the image, got 0:640"),
        ("--mask l.jpg", "JPEG"),
        ("--mask small.png", "the mask is 9 x 9 pixels"),
        ("--mask none.png", "none.png"),
    ],
)
def test_invalid_crops_and_masks_are_rejected(words, message, capsys):
    Image.fromarray(SCRIBBLES).save("l.jpg")
    Image.fromarray(SCRIBBLES[:9, :9]).save("small.png")
    assert vispe(f"segment a.png --labels l.png {FAST} {words} -o out") == 2
    stderr = capsys.readouterr().err
    assert message in stderr
    assert not Path("out").exists()


@pytest.mark.parametrize("words", ["--crop :,:", "--mask l.png", "--orientation tag"])
def test_block_processing_rejects_unsupported_options(words, capsys):
    pytest.importorskip("zarr")
    tifffile.imwrite("a.tif", GREY)
    assert vispe(f"segment a.tif --labels l.png {FAST} {words} --memory 1GiB -o out") == 2
    assert (
        f"{words.split()[0][2:]} is not supported for images processed in blocks" in capsys.readouterr().err
    )


@pytest.mark.parametrize("count", [4, pytest.param(3, marks=SLOW)])
@pytest.mark.filterwarnings("ignore:.*stored as RGB")
def test_label_pages_decide_whether_planes_are_slices(count, capsys):
    stack = np.stack([np.roll(GREY, n, 1) for n in range(count)])
    label_pages = np.stack([np.roll(SCRIBBLES, n, 1) for n in range(count)])
    truth = np.stack([np.roll(TRUTH, n, 1) for n in range(count)])
    tifffile.imwrite("known.tif", stack, imagej=True, metadata={"axes": "ZYX"})
    tifffile.imwrite("plain.tif", stack)
    tifffile.imwrite("known_l.tif", label_pages, imagej=True, metadata={"axes": "ZYX"})
    tifffile.imwrite("plain_l.tif", label_pages)
    for number, (image, labels) in enumerate(
        [("known", "plain"), ("plain", "known"), ("plain", "plain"), ("known", "known")]
    ):
        assert vispe(f"segment {image}.tif --labels {labels}_l.tif {FAST} -o out{number}") == 0
        actual = result(image, f"out{number}")
        assert actual.shape == stack.shape
        assert agreement(actual, truth) > 0.95
        stderr = capsys.readouterr().err
        assert ("is read as a stack of" in stderr) == (image == "plain")
    assert vispe(f"segment plain.tif --cluster 2 {FAST} -o clusters") == 0
    assert "planes are read as one colour image" in capsys.readouterr().err


@pytest.mark.slow
def test_classes_can_be_selected_by_number():
    assert vispe(f"segment a.png --labels l.png {FAST} --objects 2 -o out") == 0
    assert list(report()["images"][0]["objects"]["classes"]) == ["class 2"]
    assert vispe("apply out/model.vispe a.png --objects 1 -o more") == 0
    assert list(report("more")["images"][0]["objects"]["classes"]) == ["class 1"]
    assert vispe(f"segment a.png --labels l.png {FAST} --classes 2,pore --objects 2 -o named") == 0
    assert list(report("named")["images"][0]["objects"]["classes"]) == ["2"]
    assert vispe(f"segment a.png --labels l.png {FAST} --objects 3 -o bad") == 2


def test_shapes_and_scribbles_refer_to_classes_by_number():
    ring = [[0, 0], [9, 0], [9, 9], [0, 9], [0, 0]]
    features = [
        {
            "type": "Feature",
            "geometry": {"type": "Polygon", "coordinates": [[[x + dx, y] for x, y in ring]]},
            "properties": {"classification": {"name": name}},
        }
        for name, dx in (("1", 0), ("2", 40))
    ]
    Path("s.geojson").write_text(json.dumps({"type": "FeatureCollection", "features": features}))
    scribbles = [{"class": k, "points": [[5, 20 * int(k)], [60, 20 * int(k)]]} for k in ("1", "2")]
    Path("s.json").write_text(json.dumps(scribbles))
    for name in ("s.geojson", "s.json"):
        assert vispe(f"segment a.png --labels {name} {FAST} --classes matrix,pore -o {name}_out") == 0
        assert list(report(f"{name}_out")["images"][0]["fractions"]) == ["matrix", "pore"]


def test_paint_and_suggest_exclude_the_same_pixels():
    _with_bar()
    window = open_paint("b.png", "painted", crop=":-16,:", features="filters")
    coordinates = [np.argwhere(k == TRUTH)[:: len(TRUTH)].tolist() for k in (1, 2)]
    scribbles = [{"class": k, "width": 1, "points": [[x, y]]} for k in (1, 2) for y, x in coordinates[k - 1]]
    assert window.update({"names": ["a", "b"], "strokes": scribbles})["ready"]
    assert not window.prediction.labels[H:].any()
    assert agreement(window.prediction.labels[:H]) > 0.9
    window.save()
    Image.fromarray(np.ones((H + 16, W), np.uint8)).save("ones.png")
    options = "--labels painted/b_strokes.json --mask ones.png --orientation stored"
    assert vispe(f"segment b.png {options} {FAST} --crop :-16,: -o same") == 0
    np.testing.assert_array_equal(result("b", "same"), window.prediction.labels)
    assert vispe(f"suggest b.png --labels l.png {FAST} --crop 0:{H},: -o suggested") == 0
    actual = json.loads(Path("suggested/b_suggest.json").read_text())["places"]
    assert actual
    assert all(record["y"] < H for record in actual)


def test_scribbles_on_images_with_an_orientation_tag_match():
    save_tagged("t.jpg", GREY, 6)
    window = open_paint("t.jpg", "painted", features="filters")
    assert window.image.shape == (H, W)
    Path("s.json").write_text(
        json.dumps(
            [{"class": int(TRUTH[y, x]), "points": [[x, y]]} for y in range(4, H, 9) for x in range(4, W, 9)]
        )
    )
    assert vispe(f"segment t.jpg --labels s.json {FAST} -o out") == 0
    assert agreement(result("t")) > 0.9
