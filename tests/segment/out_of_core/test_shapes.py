"""Annotations of other programs on images larger than memory: labels equal those of images in memory."""

import json

import numpy as np

from tests.segment.out_of_core.stores import scene, write_store
from vispe.images.labels.label_files import read_labels
from vispe.segment.out_of_core.scribbles import read_scribbles
from vispe.segment.out_of_core.source.open_image import open_image
from vispe.segment.types import LabelOptions


def test_shapes_give_equal_labels_for_stores_and_images(tmp_path):
    grey, _ = scene(70, 90)
    image = open_image(write_store(tmp_path / "a.zarr", grey))
    rings = {
        "a": [[-4, -4], [60, 3], [50, 66]],
        "b": [[10, 10], [80, 12], [70, 30.5]],
        "c": [[20, 5], [30, 5], [25, 20]],
    }
    features = [
        {
            "type": "Feature",
            "geometry": {"type": "Polygon", "coordinates": [ring]},
            "properties": {"classification": {"name": name, "color": [k, 0, 0]}},
        }
        for k, (name, ring) in enumerate(rings.items())
    ]
    path = tmp_path / "a.geojson"
    path.write_text(json.dumps({"type": "FeatureCollection", "features": features}))
    (actual,), names, colors, notes = read_scribbles([path], [image], LabelOptions())
    expected = read_labels(path, (1, 70, 90))
    values = np.zeros(70 * 90, np.int32)
    values[actual.indices] = actual.classes
    np.testing.assert_array_equal(values.reshape(1, 70, 90), expected.values)
    assert (names, colors, tuple(notes)) == (expected.names, expected.colors, expected.notes)
    assert np.array_equal(actual.indices, np.unique(actual.indices))
