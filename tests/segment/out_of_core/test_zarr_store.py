"""Result stores read by ome-zarr: metadata, pyramid levels, colours and names."""

import json

import numpy as np
import pytest

from tests.segment.out_of_core.stores import scene, scribbled, write_store, zarr
from vispe.segment import pipeline
from vispe.segment.features.feature_config import FeatureConfig
from vispe.segment.out_of_core.block_engine import _reduced
from vispe.segment.out_of_core.zarr_store import _mean
from vispe.segment.pipeline import LabelOptions

FILTERS = FeatureConfig(sigmas=(1.0,), tile=64)


@pytest.mark.parametrize("version", [pytest.param("0.4", marks=pytest.mark.slow), "0.5"])
def test_results_are_read_by_ome_zarr(tmp_path, small_blocks, version):
    from ome_zarr.io import parse_url
    from ome_zarr.reader import Reader

    values, phase = scene(130, 201)
    array = np.stack([values, values[::-1]]).astype(np.uint8)
    store = write_store(tmp_path / "a.ome.zarr", array, "zyx", version, scale=0.25)
    labelling = LabelOptions(classes=["matrix", "carbide"], label_page=0)
    labels = [scribbled(tmp_path / "a.png", phase)]
    pipeline.segment([store], tmp_path / "out", labels=labels, features=FILTERS, labelling=labelling)
    result = tmp_path / "out" / "a_seg.ome.zarr"
    nodes = {node.zarr.basename(): node for node in Reader(parse_url(result))()}
    image, classes = nodes["a_seg.ome.zarr"], nodes["classes"]
    assert [level.shape for level in image.data] == [(2, 2, 130, 201), (2, 2, 65, 101), (2, 2, 33, 51)]
    assert [level.shape for level in classes.data] == [(2, 130, 201), (2, 65, 101), (2, 33, 51)]
    assert image.metadata["channel_names"] == ["matrix", "carbide"]
    full, half = (np.asarray(level) for level in classes.data[:2])
    np.testing.assert_array_equal(half, full[:, ::2, ::2])

    root = zarr.open_group(str(result), mode="r")
    assert root.metadata.zarr_format == (3 if version == "0.5" else 2)
    facts = [
        dict(g.attrs).get("ome", dict(g.attrs)) for g in (root, root["labels/classes"], root["uncertainty"])
    ]
    axes = [[axis["name"] for axis in attributes["multiscales"][0]["axes"]] for attributes in facts]
    assert axes == [["c", "z", "y", "x"], ["z", "y", "x"], ["z", "y", "x"]]
    scales = [d["coordinateTransformations"][0]["scale"] for d in facts[1]["multiscales"][0]["datasets"]]
    assert scales == [[1.0, 0.25, 0.25], [1.0, 0.5, 0.5], [1.0, 1.0, 1.0]]
    assert facts[1]["multiscales"][0]["axes"][1] == {"name": "y", "type": "space", "unit": "micrometer"}
    class_names = {entry["label-value"]: entry["class"] for entry in facts[1]["image-label"]["properties"]}
    assert class_names == {1: "matrix", 2: "carbide"}
    assert facts[1]["image-label"]["colors"][0] == {"label-value": 1, "rgba": [0, 114, 178, 255]}
    assert facts[1]["image-label"]["source"] == {"image": "../../"}
    label_attributes = dict(root["labels"].attrs)
    assert label_attributes.get("ome", label_attributes)["labels"] == ["classes"]
    prob, lower = root["0"][:], root["1"][:]
    np.testing.assert_allclose(lower[:, :, :65, :100], _halved(prob[..., :200]), rtol=1e-6)
    np.testing.assert_allclose(lower[..., 100], prob[..., 200].reshape(2, 2, 65, 2).mean(-1), rtol=1e-6)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["images"][0]["pixel_size_um"] == [0.25, 0.25]
    assert report["images"][0]["notes"] == ["the overlay of a.ome.zarr shows page 1 of 2 (from 0)."]


def _halved(array):
    return array.reshape(*array.shape[:-2], array.shape[-2] // 2, 2, array.shape[-1] // 2, 2).mean((-1, -3))


def test_means_ignore_nan():
    values = np.array([[1, 3, np.nan], [np.nan, 5, np.nan], [2, 4, 8]], np.float32)
    np.testing.assert_array_equal(_mean(values), np.array([[3, np.nan], [3, 8]], np.float32))


def test_images_are_downsampled_by_means():
    grey = np.random.default_rng(0).random((7, 10, 2), np.float32)
    actual = _reduced(grey, 4)
    assert actual.shape == (2, 3, 2)
    np.testing.assert_allclose(actual[1, 2], grey[4:, 8:].mean((0, 1)), rtol=1e-6)
    np.testing.assert_array_equal(_reduced(grey, 1), grey)
