"""Objects of stores on the command line: map and table equal those of the page in memory."""

import csv
import json

import numpy as np
import pytest
import tifffile

from tests.segment.out_of_core.conftest import small_blocks  # noqa: F401
from tests.segment.out_of_core.stores import scene, scribbled, write_store, zarr
from vispe.cli.main import main
from vispe.errors import OptionError
from vispe.segment.objects.labelling import find
from vispe.segment.objects.options import ObjectOptions
from vispe.segment.out_of_core.store_inputs import check_request
from vispe.segment.run.request import Request


@pytest.mark.parametrize(
    ("touching", "axes"), [("split", "yx"), pytest.param("keep", "zyx", marks=pytest.mark.slow)]
)
def test_objects_of_a_store_equal_those_in_memory(tmp_path, small_blocks, touching, axes):  # noqa: F811
    values, phase = scene()
    values = np.stack([values, values[::-1], values]) if axes == "zyx" else values
    path = write_store(tmp_path / "a.zarr", values.astype(np.float32), axes)
    labels = scribbled(tmp_path / "a_labels.png", phase)
    out = tmp_path / "out"
    object_options = ["--objects", "bright", "--touching", touching, "--object-min-area", "5", "--fill-holes"]
    arguments = ["--features", "filters", "--classes", "bright,dark", "-o", str(out)]
    arguments += ["--label-page", "0"] if axes == "zyx" else []
    assert main(["segment", str(path), "--labels", str(labels), *arguments, *object_options]) == 0
    root = zarr.open_group(str(out / "a_seg.ome.zarr"), mode="r")
    shape = (-1, *phase.shape)
    classes, prob = root["labels/classes/0"][:].reshape(shape), root["0"][:]
    prob = np.moveaxis(prob, 0, 1) if axes == "zyx" else prob[None]
    grey = values.reshape(*classes.shape, 1).astype(np.float32)
    options = ObjectOptions("bright", touching, 5, True)
    volumes, spacing = (3, (1.0, 0.5, 0.5)) if axes == "zyx" else (None, (0.5, 0.5))
    record = json.loads((out / "report.json").read_text())["images"][0]
    spacing = None if axes == "zyx" and record["z_step_um"] is None else spacing
    expected, expected_objects = find(
        classes, prob, grey, ["bright", "dark"], options, volumes=volumes, spacing=spacing
    )
    actual = root["labels/objects/0"][:]
    assert actual.dtype == np.uint32
    assert np.array_equal(actual.reshape(shape), expected)
    with (out / "a_objects.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == len(expected_objects.rows) > 3
    for row, expected_row in zip(rows, expected_objects.rows, strict=True):
        assert {k: row[k] for k in expected_row} == {
            k: "" if v is None else str(v) for k, v in expected_row.items()
        }
    assert (out / "objects.csv").read_bytes() == (out / "a_objects.csv").read_bytes()
    assert record["objects"]["classes"]["bright"]["count"] == len(rows)
    attributes = dict(root["labels"].attrs)
    assert set(attributes["ome"]["labels"]) == {"classes", "objects"}


def rows_of(path):
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def test_volumes_are_independent_of_the_order_of_time_and_z(tmp_path):
    values, phase = scene(60, 70)
    grey = values.astype(np.uint8)
    scribbles = np.where(phase, 2, 1) * (np.random.default_rng(0).random(phase.shape) < 0.03)
    series = np.stack([np.stack([np.roll(grey, t + z, 0) for z in range(3)]) for t in range(2)])
    labels = np.zeros(series.shape, np.uint8)
    labels[0, 0] = scribbles
    orders = {"TZYX": (series, labels), "ZTYX": (series.swapaxes(0, 1), labels.swapaxes(0, 1))}
    tables, maps, stored = {}, {}, {}
    options = ["--features", "filters", "--classifier", "logistic", "--classes", "dark,disc"]
    for axes, (pages, page_labels) in orders.items():
        image, labels_path = tmp_path / f"{axes}.ome.tif", tmp_path / f"{axes}_labels.tif"
        metadata = {"axes": axes, "PhysicalSizeX": 0.5, "PhysicalSizeY": 0.5, "PhysicalSizeZ": 1.0}
        tifffile.imwrite(image, pages, ome=True, photometric="minisblack", metadata=metadata)
        tifffile.imwrite(labels_path, page_labels.reshape(6, *grey.shape), photometric="minisblack")
        out = tmp_path / axes
        object_options = ["--objects", "disc", "-o", str(out)]
        assert main(["segment", str(image), "--labels", str(labels_path), *options, *object_options]) == 0
        tables[axes] = [{**row, "image": "", "page": ""} for row in rows_of(out / "objects.csv")]
        maps[axes] = tifffile.imread(out / f"{axes}.ome_objects.tif")
        blocks = ["--memory", "800MiB", "-o", str(tmp_path / f"{axes}_blocks")]
        assert main(["apply", str(out / "model.vispe"), str(image), *object_options[:2], *blocks]) == 0
        stored[axes] = rows_of(tmp_path / f"{axes}_blocks" / "objects.csv")
        assert stored[axes] == rows_of(out / "objects.csv")
    assert tables["TZYX"] == tables["ZTYX"]
    assert {row["page"] for row in stored["TZYX"]} == {"0", "3"}
    assert {row["page"] for row in stored["ZTYX"]} == {"0", "1"}
    np.testing.assert_array_equal(maps["TZYX"], maps["ZTYX"].swapaxes(0, 1))


def test_unknown_classes_are_rejected_with_a_suggestion(tmp_path, capsys):
    values, phase = scene(60, 70)
    path = write_store(tmp_path / "a.zarr", values.astype(np.float32))
    labels = scribbled(tmp_path / "a_labels.png", phase, 0.05)
    options = ["--features", "filters", "--classes", "bright,dark", "-o", str(tmp_path / "out")]
    assert main(["segment", str(path), "--labels", str(labels), *options, "--objects", "brigth"]) == 2
    assert "Did you mean 'bright'" in capsys.readouterr().err


def test_export_formats_raise_for_stores(tmp_path):
    request = Request("apply", [], tmp_path, objects=ObjectOptions(["a"], kinds=("rois",)))
    with pytest.raises(OptionError, match="objects_as is not supported for images processed in blocks"):
        check_request(request)
    check_request(Request("apply", [], tmp_path, objects=ObjectOptions(["a"])))
