"""Objects of a published volume of touching nuclei with instance masks (StarDist, BSD-3)."""

import csv
from pathlib import Path

import numpy as np
import pytest
import tifffile
from scipy.ndimage import binary_erosion
from skimage.measure import regionprops

from vispe.segment.features.feature_config import FeatureConfig
from vispe.segment.objects.labelling import find
from vispe.segment.pipeline import LabelOptions, ObjectOptions, ReadOptions, apply, segment

DATA = Path(__file__).parents[2] / "data" / "nuclei_volume"
NUCLEI = ObjectOptions(["nucleus"], min_area=30)


def count_matches(instances, truth):
    """Return the number of true instances that an object matches with an intersection over union above 0.5."""
    pairs, counts = np.unique(np.stack([truth, instances])[:, truth > 0], axis=1, return_counts=True)
    unions = np.bincount(truth.ravel())[pairs[0]] + np.bincount(instances.ravel())[pairs[1]] - counts
    return int(((pairs[1] > 0) & (counts / unions > 0.5)).sum())


@pytest.fixture(scope="module")
def nuclei(tmp_path_factory):
    folder, mask = tmp_path_factory.mktemp("nuclei"), tifffile.imread(DATA / "mask.tif")
    rng, labels = np.random.default_rng(0), np.zeros(mask.shape, np.uint8)
    for value in (1, 2):
        inside = np.stack([binary_erosion((page > 0) == (value == 2)) for page in mask])
        labels.flat[rng.choice(np.flatnonzero(inside), 400, replace=False)] = value
    tifffile.imwrite(folder / "labels.tif", labels)
    report = segment(
        DATA / "image.tif", folder / "out", labels=folder / "labels.tif", objects=NUCLEI,
        features=FeatureConfig("filters"), labelling=LabelOptions(classes=["ground", "nucleus"]),
    )  # fmt: skip
    return folder, mask, report


def test_table_equals_regionprops_of_the_map(nuclei):
    folder, mask, report = nuclei
    instances = tifffile.imread(folder / "out" / "image_objects.tif")
    with (folder / "out" / "image_objects.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    properties = regionprops(instances, tifffile.imread(DATA / "image.tif"))
    assert len(rows) == len(properties) == report.images[0]["objects"]["classes"]["nucleus"]["count"]
    for row, expected in zip(rows, properties, strict=True):
        assert int(row["volume_px"]) == expected.area
        assert float(row["mean_grey"]) == pytest.approx(expected.intensity_mean)
        centroid = [float(row[f"centroid_{axis}_px"]) for axis in "zyx"]
        assert centroid == pytest.approx(expected.centroid)
        assert not row["area_px"]
    # fewer than the 27 true nuclei, since neighbours touch; merged nuclei would be far fewer
    assert 12 <= len(rows) <= 40
    assert count_matches(instances, mask) >= 8


@pytest.mark.slow
def test_pages_without_axes_are_slices_unless_axes_are_given(nuclei):
    folder, _, report = nuclei
    assert report.images[0]["objects"]["neighbours"] == 26
    assert sum("interpreted as slices along Z" in note for note in report.images[0]["notes"]) == 1
    results = {
        axes: apply(
            folder / "out" / "model.vispe", DATA / "image.tif", folder / axes, objects=NUCLEI,
            reading=ReadOptions(axes=axes),
        ).images[0]
        for axes in ("ZYX", "TYX")
    }  # fmt: skip
    assert results["ZYX"]["objects"] == report.images[0]["objects"]
    assert not any("interpreted" in note for result in results.values() for note in result["notes"])
    assert results["TYX"]["objects"]["neighbours"] == 8


def test_true_foreground_is_split_into_most_nuclei(nuclei):
    mask = nuclei[1]
    labels, grey = np.where(mask > 0, 2, 1), tifffile.imread(DATA / "image.tif")[..., None]
    prob = np.ones((len(mask), 2, *mask.shape[1:]), np.float32)
    instances, _ = find(labels, prob, grey, ["ground", "nucleus"], NUCLEI, volumes=len(mask))
    assert count_matches(instances, mask) >= 15
