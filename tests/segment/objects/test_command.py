import csv
import json

import numpy as np
import pytest
import roifile
import tifffile
from PIL import Image
from scipy.ndimage import grey_dilation, grey_erosion
from skimage.measure import label, regionprops

from tests.segment.test_pipeline import scene
from vispe.cli.main import main
from vispe.errors import InputError, OptionError
from vispe.images.annotations.annotation_files import read_shapes
from vispe.images.read import read_image
from vispe.images.write import write_instances
from vispe.segment.features.feature_config import FeatureConfig
from vispe.segment.overlays import PALETTE
from vispe.segment.pipeline import ObjectOptions, apply, segment
from vispe.segment.run.reports.run_report import ProgressCallbacks

FAST = ["--features", "filters", "--classes", "ground,disc"]


@pytest.fixture
def folder(tmp_path):
    for number in range(2):
        grey, _, scribbles = scene(seed=number)
        Image.fromarray(grey).save(tmp_path / f"i{number}.png")
        Image.fromarray(scribbles).save(tmp_path / f"i{number}_labels.png")
    return tmp_path


def rows_of(path):
    with path.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


@pytest.mark.slow
def test_batches_have_tables_maps_and_summaries(folder, capsys):
    images = [str(folder / f"i{n}.png") for n in range(2)]
    labels = ["--labels", ",".join(str(folder / f"i{n}_labels.png") for n in range(2))]
    out = folder / "out"
    object_options = ["--objects", "disc", "--object-min-area", "5", "--touching", "keep", "-o", str(out)]
    assert main(["segment", *images, *labels, *FAST, *object_options]) == 0
    assert "objects: " in capsys.readouterr().out
    all_rows = []
    report = json.loads((out / "report.json").read_text())
    for n, record in enumerate(report["images"]):
        actual = tifffile.imread(out / f"i{n}_objects.tif")
        components = label(np.asarray(Image.open(out / f"i{n}_seg.png")) == 2, connectivity=2)
        sizes = np.bincount(components.ravel())[1:]
        assert actual.dtype == np.uint16
        assert actual.shape == components.shape
        assert np.array_equal(actual > 0, np.append(0, sizes >= 5)[components] > 0)
        rows = rows_of(out / f"i{n}_objects.csv")
        assert [int(r["area_px"]) for r in rows] == [p.area for p in regionprops(actual)]
        assert {r["area_um2"] for r in rows} == {""}
        assert {r["page"] for r in rows} == {"0"}
        assert record["objects"]["classes"]["disc"]["count"] == len(rows) > 1
        assert record["objects"]["left_out"]["smaller"] == (sizes < 5).sum()
        mean = np.mean([float(r["equivalent_diameter_px"]) for r in rows])
        size = record["objects"]["classes"]["disc"]["equivalent_diameter_px"]
        assert size["mean"] == pytest.approx(mean)
        assert size["ci95"][0] <= mean <= size["ci95"][1]
        all_rows += rows
    assert rows_of(out / "objects.csv") == all_rows
    batch = report["objects"]["classes"]["disc"]
    assert batch["count"] == len(all_rows)
    mean = np.mean([float(r["equivalent_diameter_px"]) for r in all_rows])
    assert batch["mean_equivalent_diameter_px"] == pytest.approx(mean)
    assert report["objects"]["interval"] == "bootstrap over images"
    second_run = folder / "again"
    assert main(["apply", str(out / "model.vispe"), *images, *object_options[:-1], str(second_run)]) == 0
    assert (second_run / "objects.csv").read_bytes() == (out / "objects.csv").read_bytes()


def test_unknown_classes_and_options_without_objects_are_rejected(folder, capsys):
    options = [str(folder / "i0.png"), "--labels", str(folder / "i0_labels.png"), *FAST]
    assert main(["segment", *options, "--objects", "disk", "-o", str(folder / "a")]) == 2
    assert "Did you mean 'disc'" in capsys.readouterr().err
    assert not (folder / "a" / "model.vispe").exists()
    assert main(["segment", *options, "--fill-holes", "-o", str(folder / "b")]) == 2
    assert "--fill-holes has no effect without --objects" in capsys.readouterr().err


def test_a_z_stack_has_volumes_and_a_series_has_pages(folder):
    grey, _, _drawn = scene()
    tifffile.imwrite(
        folder / "z.tif", np.stack([grey] * 3), imagej=True, resolution=(2, 2),
        metadata={"axes": "ZYX", "unit": "um", "spacing": 1.5},
    )  # fmt: skip
    tifffile.imwrite(folder / "t.tif", np.stack([grey] * 3), imagej=True, metadata={"axes": "TYX"})
    object_options = ObjectOptions(["class 2"], "keep")
    first = segment(
        [folder / "i0.png"], folder / "one", labels=[folder / "i0_labels.png"], objects=object_options,
        features=FeatureConfig("filters"),
    )  # fmt: skip
    count = first.images[0]["objects"]["classes"]["class 2"]["count"]
    model = folder / "one" / "model.vispe"
    volumes = apply(model, [folder / "z.tif"], folder / "z", objects=object_options).images[0]
    pages = apply(model, [folder / "t.tif"], folder / "t", objects=object_options).images[0]
    assert pages["objects"]["classes"]["class 2"]["count"] == 3 * count
    assert volumes["objects"]["neighbours"] == 26
    rows = rows_of(folder / "z" / "z_objects.csv")
    assert len(rows) >= count
    assert np.isclose(float(rows[0]["volume_um3"]), int(rows[0]["volume_px"]) * 0.375)
    assert float(rows[0]["centroid_z_um"]) == pytest.approx(1.5)
    with tifffile.TiffFile(folder / "z" / "z_objects.tif") as file:
        assert file.imagej_metadata["spacing"] == 1.5
        assert file.series[0].axes == "ZYX"


def test_invalid_objects_raise_in_python(folder):
    with pytest.raises(OptionError, match="objects='x' is not a class"):
        segment(
            [folder / "i0.png"], folder / "o", labels=[folder / "i0_labels.png"],
            features=FeatureConfig("filters"), objects=ObjectOptions("x"),
        )  # fmt: skip

    with pytest.raises(OptionError, match="objects needs an instance of ObjectOptions, got objects='disc'"):
        segment([folder / "i0.png"], folder / "o", labels=[folder / "i0_labels.png"], objects="disc")


@pytest.mark.slow
def test_resumed_runs_write_identical_tables(folder):
    class StopAfterFirstImage(ProgressCallbacks):
        def done(self, record):
            raise KeyboardInterrupt

    images, labels = ([folder / f"i{n}{end}.png" for n in range(2)] for end in ("", "_labels"))
    object_options = {
        "labels": labels,
        "features": FeatureConfig("filters"),
        "objects": ObjectOptions(["class 2"]),
    }
    segment(images, folder / "whole", **object_options)
    with pytest.raises(KeyboardInterrupt):
        segment(images, folder / "out", watch=StopAfterFirstImage(), **object_options)
    with pytest.raises(InputError, match="unfinished run with other objects"):
        segment(images, folder / "out", **{**object_options, "objects": ObjectOptions(["class 2"], "keep")})
    segment(images, folder / "out", **object_options)
    for name in ("objects.csv", "i0_objects.csv", "i1_objects.tif"):
        assert (folder / "out" / name).read_bytes() == (folder / "whole" / name).read_bytes()
    with pytest.raises(InputError, match="exist"):
        segment(images, folder / "out", **object_options)


def test_images_without_objects_have_empty_tables(folder):
    model = folder / "m" / "model.vispe"
    segment(
        [folder / "i0.png"],
        folder / "m",
        labels=[folder / "i0_labels.png"],
        features=FeatureConfig("filters"),
    )
    options = ObjectOptions(["class 2"], min_area=100_000)
    report = apply(model, [folder / "i0.png"], folder / "o", objects=options)
    assert rows_of(folder / "o" / "i0_objects.csv") == [] == rows_of(folder / "o" / "objects.csv")
    actual = report.images[0]["objects"]
    assert actual["classes"]["class 2"]["equivalent_diameter_px"]["mean"] is None
    assert actual["left_out"]["smaller"] > 0
    assert "object_min_area=0" in " ".join(report.images[0]["notes"])
    assert tifffile.imread(folder / "o" / "i0_objects.tif").max() == 0


def test_more_than_65535_objects_are_stored_as_uint32(tmp_path):
    values = np.arange(1, 70_001, dtype=np.uint32).reshape(1, 200, 350)
    write_instances(tmp_path / "a.tif", values)
    assert np.array_equal(tifffile.imread(tmp_path / "a.tif"), values[0])
    with pytest.raises(InputError, match="uint16 or uint32"):
        write_instances(tmp_path / "b.tif", values.astype(float))


def test_objects_are_exported_as_geojson_rois_and_coco(tmp_path, capsys):
    from skimage import data

    coins = data.coins()
    Image.fromarray(coins).save(tmp_path / "coins.png")
    scribbles = np.zeros(coins.shape, np.uint8)
    scribbles[5:20, 100:300] = scribbles[150:156, :60] = scribbles[295:300] = 1
    for y, x in ((50, 50), (60, 110), (125, 40), (190, 130), (260, 280), (60, 340)):
        scribbles[y - 8 : y + 8, x - 8 : x + 8] = 2
    Image.fromarray(scribbles).save(tmp_path / "strokes.png")
    out = tmp_path / "out"
    argv = [
        "segment",
        tmp_path / "coins.png",
        "--labels",
        tmp_path / "strokes.png",
        "--classes",
        "ground,coin",
    ]
    argv += ["--objects", "coin", "--touching", "split", "--fill-holes", "--object-min-area", 200, "-o", out]
    assert main([*map(str, argv), "--objects-as", "geojson,rois,coco"]) == 0
    assert "objects: 24 coin" in capsys.readouterr().out  # the true number
    instances = tifffile.imread(out / "coins_objects.tif")
    features = json.loads((out / "coins_objects.geojson").read_text())["features"]
    assert len(features) == len(roifile.roiread(out / "coins_RoiSet.zip")) == instances.max() == 24
    coco = json.loads((out / "coins_coco.json").read_text())
    assert sorted(a["area"] for a in coco["annotations"]) == sorted(np.bincount(instances.ravel())[1:])
    assert coco["images"][0]["file_name"] == "coins.png"
    record = json.loads((out / "report.json").read_text())["images"][0]
    assert {"geojson", "rois", "coco"} <= set(record["files"])


AXES = {"Z": 3, "T": 2, "C": 2, "Y": 48, "X": 48}


@pytest.mark.parametrize(
    ("axes", "z", "plane", "position"),
    [
        ("ZYX", 2, (2, 0), {"position": 3}),
        ("TYX", 1, (0, 1), {"position": 2}),
        ("TZYX", 5, (2, 1), {"z_position": 3, "t_position": 2}),
        ("ZTYX", 4, (2, 0), {"z_position": 3, "t_position": 1}),
        ("ZCYX", 1, (1, 0), {"z_position": 2, "t_position": 1}),
        ("YX", None, None, {}),
    ],
)
def test_exported_objects_have_the_slice_and_time_of_their_page(tmp_path, axes, z, plane, position):
    stack = np.zeros([AXES[letter] for letter in axes], np.uint8)
    stack[..., 10:20, 8:30] = 200
    metadata = {"axes": axes}
    tifffile.imwrite(tmp_path / "a.tif", stack, ome=True, metadata=metadata, photometric="minisblack")
    path = tmp_path / "strokes.json"
    path.write_text(
        json.dumps(
            [
                {"class": 1, "width": 3, "points": [[3, 40], [40, 40]]},
                {"class": 2, "width": 3, "points": [[10, 15], [27, 15]]},
            ]
        )
    )
    argv = [
        "segment",
        tmp_path / "a.tif",
        "--labels",
        path,
        *FAST,
        "--objects",
        "disc",
        "-o",
        tmp_path / "o",
    ]
    argv += [] if z is None else ["--z", z]
    argv += ["--channel", 0] if "C" in axes else []
    assert main([*map(str, argv), "--objects-as", "geojson,rois", "--classifier", "logistic"]) == 0
    (geojson,) = json.loads((tmp_path / "o" / "a_objects.geojson").read_text())["features"]
    expected = None if plane is None else {"c": -1, "z": plane[0], "t": plane[1]}
    assert geojson["geometry"].get("plane") == expected
    (roi,) = roifile.ImagejRoi.fromfile(tmp_path / "o" / "a_RoiSet.zip")
    names = ("position", "z_position", "t_position", "c_position")
    assert {n: getattr(roi, n) for n in names if getattr(roi, n)} == position
    image = read_image(tmp_path / "a.tif", z=z)
    for name in ("a_objects.geojson", "a_RoiSet.zip"):
        (shape,) = read_shapes(tmp_path / "o" / name, image.shape)
        assert shape.page_in(image.frame) == (None if z is None else 0)


def test_export_of_objects_needs_objects(tmp_path, capsys):
    Image.fromarray(np.zeros((9, 9), np.uint8)).save(tmp_path / "a.png")
    code = main(
        [
            "segment",
            str(tmp_path / "a.png"),
            "--cluster",
            "2",
            "--objects-as",
            "rois",
            "-o",
            str(tmp_path / "o"),
        ]
    )
    assert code == 2
    assert "--objects-as has no effect without --objects" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("name", ["=cmd|'/c calc'!A0", "+1+1", "-phase", "@SUM(A1)"])
def test_tables_contain_no_spreadsheet_formulas(folder, name):
    out = folder / "out"
    argv = [
        "segment",
        str(folder / "i0.png"),
        "--labels",
        str(folder / "i0_labels.png"),
        "--features",
        "filters",
    ]
    argv += ["--classes", f'["ground", "{name}"]', "--objects", f'["{name}"]', "--object-min-area", "5"]
    assert main([*argv, "--materials", "-o", str(out)]) == 0
    tables = sorted(out.glob("*.csv"))
    assert {"report.csv", "objects.csv", "i0_objects.csv", "i0_materials.csv"} <= {t.name for t in tables}
    cells = [cell for t in tables for row in csv.reader(t.read_text("utf-8").splitlines()) for cell in row]
    assert any(name in cell for cell in cells)
    formulas = [c for c in cells if c.startswith(("=", "+", "-", "@")) and not _is_number(c)]
    assert formulas == []


def _is_number(text):
    try:
        float(text)
    except ValueError:
        return False
    return True


def test_figure_outlines_every_object_in_its_class_colour(folder):
    images, labels = [str(folder / "i0.png")], ["--labels", str(folder / "i0_labels.png")]
    assert main(["segment", *images, *labels, *FAST, "--objects", "disc", "-o", str(folder / "out")]) == 0
    figure = np.asarray(Image.open(folder / "out" / "i0_objects.png"))
    actual = tifffile.imread(folder / "out" / "i0_objects.tif")
    factor = figure.shape[0] // actual.shape[0]
    assert figure.shape == (factor * actual.shape[0], factor * actual.shape[1], 3)
    outlines = (figure == PALETTE[1]).all(-1)
    upsampled = actual.repeat(factor, 0).repeat(factor, 1)
    assert set(np.unique(upsampled[outlines])) == set(range(1, actual.max() + 1))
    inside = (grey_dilation(upsampled, 3) == upsampled) & (grey_erosion(upsampled, 3) == upsampled)
    assert not outlines[inside].any()
    page = (folder / "out" / "report.html").read_text()
    assert ">objects</text>" in page
