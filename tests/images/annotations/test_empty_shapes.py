"""Empty geometries in GeoJSON, COCO and ImageJ files: skipped with a note; a file with only empty ones raises."""

import json

import numpy as np
import pytest

from tests.cases import cases
from vispe.errors import InputError
from vispe.images.labels.label_files import read_labels
from vispe.images.labels.truth_files import read_truth

H, W = 20, 30
BOXES = {"bg": (0, 0, 8, 6), "ob": (10, 10, 28, 18)}
EXPECTED = np.zeros((1, H, W), np.int32)
EXPECTED[0, 0:6, 0:8], EXPECTED[0, 10:18, 10:28] = 1, 2


def ring(x0, y0, x1, y1):
    return [[x0, y0], [x1, y0], [x1, y1], [x0, y1], [x0, y0]]


def feature(geometry, name="ob"):
    return {"type": "Feature", "geometry": geometry, "properties": {"classification": {"name": name}}}


def geojson(tmp_path, features):
    path = tmp_path / "a.geojson"
    path.write_text(json.dumps({"type": "FeatureCollection", "features": features}))
    return path


FULL = [feature({"type": "Polygon", "coordinates": [ring(*BOXES[name])]}, name) for name in BOXES]
EMPTY = [
    None,
    {"type": "Polygon", "coordinates": []},
    {"type": "Polygon", "coordinates": [[]]},
    {"type": "Polygon", "coordinates": None},
    {"type": "MultiPolygon", "coordinates": []},
    {"type": "MultiPolygon", "coordinates": [[], [[]]]},
    {"type": "LineString", "coordinates": []},
    {"type": "MultiLineString", "coordinates": [[]]},
    {"type": "Point", "coordinates": []},
    {"type": "MultiPoint", "coordinates": []},
    {"type": "GeometryCollection", "geometries": []},
    {"type": "GeometryCollection", "geometries": [None, {"type": "Polygon", "coordinates": []}]},
]


@cases("geometry", EMPTY, ids=str)
def test_empty_geojson_geometries_are_skipped_with_a_note(tmp_path, geometry):
    path = geojson(tmp_path, [FULL[0], feature(geometry), FULL[1]])
    actual = read_labels(path, (1, H, W))
    np.testing.assert_array_equal(actual.values, EXPECTED)
    assert "a.geojson: skipped 1 shape with an empty geometry." in actual.notes
    notes = []
    np.testing.assert_array_equal(
        read_truth(path, (1, H, W), names=["bg", "ob"], note=notes.append), EXPECTED
    )
    assert any("empty geometry" in text for text in notes)
    with pytest.raises(InputError, match=r"has 1 shape, all of them empty"):
        read_labels(geojson(tmp_path, [feature(geometry)]), (1, H, W))


@cases(
    "geometry",
    [
        {"type": "MultiPolygon", "coordinates": [[], [ring(*BOXES["ob"]), []], [[]]]},
        {"type": "Polygon", "coordinates": [ring(*BOXES["ob"]), []]},
        {"type": "GeometryCollection", "geometries": [None, FULL[1]["geometry"], EMPTY[1]]},
    ],
    ids=lambda value: value["type"],
)
def test_empty_parts_of_a_geojson_geometry_are_skipped(tmp_path, geometry):
    actual = read_labels(geojson(tmp_path, [FULL[0], feature(geometry)]), (1, H, W))
    np.testing.assert_array_equal(actual.values, EXPECTED)


@cases("segmentation", [[], [[]], [[], []]], ids=str)
def test_empty_coco_segmentations_are_skipped_with_a_note(tmp_path, segmentation):
    segmentations = [[np.ravel(ring(*box)[:-1]).tolist()] for box in BOXES.values()]
    segmentations[1].append([])
    content = {
        "images": [{"id": 1, "file_name": "a.png", "height": H, "width": W}],
        "categories": [{"id": k, "name": name} for k, name in enumerate(BOXES)],
        "annotations": [
            {"id": n, "image_id": 1, "category_id": k, "segmentation": each}
            for n, (k, each) in enumerate([(0, segmentations[0]), (1, segmentation), (1, segmentations[1])])
        ],
    }
    (tmp_path / "a.json").write_text(json.dumps(content))
    actual = read_labels(tmp_path / "a.json", (1, H, W))
    np.testing.assert_array_equal(actual.values, EXPECTED)
    assert "a.json: skipped 1 shape with an empty geometry." in actual.notes


def test_empty_imagej_rois_are_skipped_with_a_note(tmp_path):
    roifile = pytest.importorskip("roifile")
    rois = []
    for name, box in (*BOXES.items(), ("ob-2", None)):
        roi = (
            roifile.ImagejRoi.frompoints(np.array(ring(*box)[:-1]), name=name) if box else roifile.ImagejRoi()
        )
        roi.roitype, roi.name = roifile.ROI_TYPE.POLYGON, name
        rois.append(roi)
    roifile.roiwrite(tmp_path / "a_RoiSet.zip", rois)
    actual = read_labels(tmp_path / "a_RoiSet.zip", (1, H, W))
    np.testing.assert_array_equal(actual.values, EXPECTED)
    assert "a_RoiSet.zip: skipped 1 shape with an empty geometry." in actual.notes
