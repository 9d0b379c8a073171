"""Round trip of object files (GeoJSON, ImageJ ROI, COCO): the same instance map, with holes, corners and borders."""

import json
import zipfile

import numpy as np
import pytest

from tests.cases import cases
from vispe.errors import InputError, OptionError, ShapeError
from vispe.images.annotations.annotation_files import read_shapes
from vispe.images.annotations.object_files import write_objects
from vispe.images.labels.label_files import read_labels

roifile = pytest.importorskip("roifile", reason="roifile writes regions of ImageJ: pip install 'vispe[cli]'")
NAMES, COLORS = ("matrix", "pore-2", "grün"), np.array([(1, 2, 3), (230, 159, 0), (0, 0, 0)], np.uint8)


def random_map(seed):
    rng = np.random.default_rng(seed)
    h, w = rng.integers(1, 25, 2)
    return rng.choice([0, 1, 2, 9, 300][: rng.integers(2, 6)], (h, w)), {1: 2, 2: 1, 9: 2, 300: 3}


@cases("seed", range(25))
def test_round_trip_of_instance_maps_is_exact(tmp_path, seed):
    instances, classes = random_map(seed)
    h, w = instances.shape
    files = write_objects(tmp_path, "a", instances, classes, NAMES, COLORS)
    present = [n for n in np.unique(instances).tolist() if n]
    for kind, path in files.items():
        if not present and kind == "rois":
            continue  # a file without regions is refused
        shapes = read_shapes(path, (h, w))
        assert [s.name for s in shapes] == [NAMES[classes[n] - 1] for n in present]
        restored = np.zeros(h * w, int)
        for number, shape in zip(present, shapes, strict=True):
            indices = shape.pixel_indices(h, w)
            assert not restored[indices].any()
            restored[indices] = number
            left, top, right, bottom = shape.box()
            assert min(left, top) >= 0
            assert right <= w
            assert bottom <= h
        np.testing.assert_array_equal(restored.reshape(h, w), instances)


@cases("kind", ["geojson", "rois", "coco"])
def test_object_files_are_valid_label_files(tmp_path, kind):
    instances = np.array([[1, 1, 0, 2], [1, 0, 0, 2], [1, 1, 1, 0]])
    path = write_objects(tmp_path, "a", instances, [1, 2], NAMES, COLORS, [kind])[kind]
    actual = read_labels(path, (1, 3, 4), classes=NAMES)
    np.testing.assert_array_equal(actual.values[0], instances)


def test_geojson_output_has_the_qupath_format(tmp_path):
    instances = np.zeros((6, 7), np.uint16)
    instances[1:5, 1:6], instances[2:4, 2:4], instances[5, 0] = 3, 0, 3
    path = write_objects(tmp_path, "a", instances, [1, 1, 2], NAMES, COLORS, ["geojson"])["geojson"]
    (feature,) = json.loads(path.read_text())["features"]
    assert feature["geometry"]["type"] == "MultiPolygon"
    single, with_hole = sorted(feature["geometry"]["coordinates"], key=len)
    assert single == [[[0, 5], [1, 5], [1, 6], [0, 6], [0, 5]]]
    assert [ring[0] == ring[-1] for ring in with_hole] == [True, True]
    assert feature["properties"] == {
        "objectType": "detection",
        "name": "3",
        "classification": {"name": "pore-2", "color": [230, 159, 0]},
    }
    paths = write_objects(tmp_path, "a", instances, [1, 1, 2], NAMES, COLORS, ["geojson"], force=True)
    assert json.loads(paths["geojson"].read_text())["features"][0]["id"] == feature["id"]


def test_roi_output_has_the_imagej_format(tmp_path):
    instances = np.zeros((6, 70_000), np.uint32)
    instances[1:3, 1:5], instances[3:5, 5:7], instances[0, 69_990:] = 1, 1, 2
    instances[5, :3] = 3
    path = write_objects(tmp_path, "a", instances, {1: 1, 2: 3, 3: 2}, NAMES, COLORS, ["rois"])["rois"]
    first, middle, last = roifile.roiread(path)
    assert [roi.name for roi in (first, middle, last)] == ["matrix-1", "grün-2", "pore-2-3"]
    assert first.composite
    assert (first.left, first.top, first.right, first.bottom) == (1, 1, 7, 5)
    assert middle.composite  # integers of ImageJ end at 65535
    assert last.roitype == roifile.ROI_TYPE.TRACED
    assert (last.left, last.top, last.right, last.bottom) == (0, 5, 3, 6)
    assert last.stroke_color == bytes([255, 230, 159, 0])
    shapes = read_shapes(path, instances.shape)
    for number, shape in enumerate(shapes, 1):
        np.testing.assert_array_equal(
            shape.pixel_indices(*instances.shape), np.flatnonzero(instances == number)
        )


def test_coco_output_has_rle_for_holes_and_polygons_otherwise(tmp_path):
    instances = np.array([[1, 1, 1, 2], [1, 0, 1, 0], [1, 1, 1, 2]])
    path = write_objects(tmp_path, "a", instances, [2, 1], NAMES, COLORS, ["coco"], image="a.tif")["coco"]
    actual = json.loads(path.read_text())
    assert actual["images"] == [{"id": 1, "file_name": "a.tif", "height": 3, "width": 4}]
    assert actual["categories"] == [{"id": k, "name": n} for k, n in enumerate(NAMES, 1)]
    with_hole, multipart = actual["annotations"]
    assert with_hole["segmentation"] == {"counts": [0, 4, 1, 4, 3], "size": [3, 4]}
    assert (with_hole["area"], with_hole["bbox"], with_hole["category_id"], with_hole["iscrowd"]) == (
        8,
        [0, 0, 3, 3],
        2,
        0,
    )
    assert multipart["segmentation"] == [[3, 0, 4, 0, 4, 1, 3, 1], [3, 2, 4, 2, 4, 3, 3, 3]]
    assert (multipart["area"], multipart["bbox"], multipart["id"]) == (2, [3, 0, 1, 3], 2)


def test_invalid_file_name_characters_of_classes_are_replaced(tmp_path):
    path = write_objects(tmp_path, "a", np.array([[1]]), [1], ["a/b:c 🔬"], [(0, 0, 0)], ["rois"])["rois"]
    assert zipfile.ZipFile(path).namelist() == ["a_b_c _-1.roi"]
    assert read_shapes(path, (1, 1))[0].name == "a/b:c _"


def test_nothing_is_written_if_one_of_the_files_exists(tmp_path):
    instances = np.array([[1]])
    (tmp_path / "a_coco.json").write_text("mine")
    with pytest.raises(InputError, match=r"a_coco\.json exists"):
        write_objects(tmp_path, "a", instances, [1], NAMES, COLORS)
    assert [p.name for p in tmp_path.iterdir()] == ["a_coco.json"]
    write_objects(tmp_path, "a", instances, [1], NAMES, COLORS, force=True)
    names = {p.name for p in tmp_path.iterdir()}
    assert names == {"a_coco.json", "a_objects.geojson", "a_RoiSet.zip"}


@cases(
    ("change", "error", "text"),
    [
        (
            {"kinds": ["geojsn"]},
            OptionError,
            "objects_as must be one of geojson, rois, coco, got 'geojsn'.*'geojson'",
        ),
        ({"kinds": ["coco", "coco"]}, OptionError, "has repeated kinds"),
        ({"names": ["a"]}, OptionError, "names and colors must have equal length, got 1 and 3"),
        ({"classes": [1]}, InputError, "object 2: the class must be 1 to 3, got no class"),
        ({"classes": [1, 4]}, InputError, "object 2: the class must be 1 to 3, got 4"),
        ({"instances": np.zeros((1, 2, 2), int)}, ShapeError, "instance maps have the shape"),
        ({"instances": np.array([[-1]])}, InputError, "must be integers from 0"),
    ],
)
def test_invalid_arguments_raise_and_write_nothing(tmp_path, change, error, text):
    arguments = {
        "instances": np.array([[1, 2]]),
        "classes": [1, 2],
        "names": NAMES,
        "colors": COLORS,
    } | change
    with pytest.raises(error, match=text):
        write_objects(tmp_path, "a", **arguments)
    assert not list(tmp_path.iterdir())
