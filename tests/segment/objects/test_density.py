"""Number density is unbiased by the border; measurements with anisotropic pixels."""

import itertools
import json

import numpy as np
import pytest
import tifffile
from PIL import Image
from scipy.ndimage import binary_erosion

from tests.cases import cases
from vispe.segment.features.feature_config import FeatureConfig
from vispe.segment.objects.labelling import find
from vispe.segment.objects.options import ObjectOptions
from vispe.segment.objects.sizes import summarize_batch, summarize_image
from vispe.segment.objects.table import measure
from vispe.segment.pipeline import segment

NAMES = ["ground", "disc"]
SIDE, COUNT = 200, 30


def discs(seed, side=SIDE, count=COUNT, radius=(3.0, 12.0)):
    """Make discs on a torus: the field of view cuts objects, and the true number per area is known."""
    rng, actual = np.random.default_rng(seed), []
    while len(actual) < count:
        center, disc_radius = rng.random(2) * side, rng.uniform(*radius)
        gaps = (np.abs(center - c) for c, _ in actual)
        distances = [np.hypot(*np.minimum(g, side - g)) - r for g, (_, r) in zip(gaps, actual, strict=True)]
        if all(f > disc_radius + 2 for f in distances):
            actual.append((center, disc_radius))
    mask = np.zeros((side, side), bool)
    y, x = np.mgrid[:side, :side]
    for (cy, cx), disc_radius in actual:
        dy, dx = np.abs(y - cy), np.abs(x - cx)
        mask |= np.minimum(dy, side - dy) ** 2 + np.minimum(dx, side - dx) ** 2 <= disc_radius**2
    return mask


def density(mask, *, valid=None, min_area=0, exclude=False, volumes=None):
    """Return objects per pixel of one field or stack, and the count of the table."""
    labels = np.where(np.ones(mask.shape, bool) if valid is None else valid, mask + 1, 0).astype(np.uint8)
    labels = labels.reshape(-1, *labels.shape[-2:])
    prob = np.ones((len(labels), 2, *labels.shape[1:]), np.float32)
    options = ObjectOptions("disc", "keep", min_area, exclude_border=exclude)
    _, actual = find(labels, prob, labels[..., None], NAMES, options, volumes=volumes)
    record = summarize_image(actual, options, NAMES, float((labels > 0).sum()), volumes is not None)
    disc_radius = record["classes"]["disc"]
    return disc_radius["per_um3" if volumes else "per_um2"], disc_radius["count"]


@pytest.mark.slow
@cases("exclude", [False, True])
@cases("min_area", [0, 10, 25])
def test_density_has_no_bias_from_the_border(exclude, min_area):
    fields = [discs(seed) for seed in range(6)]
    actual = [density(mask, min_area=min_area, exclude=exclude) for mask in fields]
    true = COUNT / SIDE**2
    assert np.mean([per for per, _ in actual]) == pytest.approx(true, rel=0.02)
    # the plain count has a larger bias
    assert abs(np.mean([count for _, count in actual]) / COUNT - 1) > 0.05


@cases("min_area", [0, 100])
def test_density_in_a_crop_equals_the_cropped_image(min_area):
    mask, valid = discs(3), np.zeros((SIDE, SIDE), bool)
    valid[50:110, 70:150] = True
    expected = density(mask[50:110, 70:150], min_area=min_area)
    assert density(mask, valid=valid, min_area=min_area) == expected
    stack, valid = np.stack([mask] * 5), np.stack([np.zeros_like(valid), *[valid] * 3, np.zeros_like(valid)])
    expected = density(stack[1:4, 50:110, 70:150], min_area=min_area, volumes=3)
    assert density(stack, valid=valid, min_area=min_area, volumes=5) == expected


@pytest.mark.slow
def test_slanted_fibres_are_counted_once():
    """A fibre that passes a corner lies in two fields that count it; all fields of a torus with one fibre."""
    side, field = 110, 70
    y, x = np.mgrid[:side, :side]
    fibre = (np.abs(y + x - 60) <= 2) & (np.abs(y - x) <= 25)
    tiled = np.tile(fibre, (2, 2))
    offsets = itertools.product(range(0, side, 5), repeat=2)
    actual = [density(tiled[a : a + field, b : b + field])[0] for a, b in offsets]
    assert np.mean(actual) == pytest.approx(1 / side**2, rel=0.02)


@pytest.mark.slow
def test_small_specks_are_excluded_from_the_density():
    mask = discs(1)
    ground = np.argwhere(~mask)
    specks = np.zeros_like(mask)
    y, x = ground[np.random.default_rng(0).choice(len(ground), 300, replace=False)].T
    specks[y, x] = True
    assert density(mask | specks)[0] > 3 * density(mask)[0]
    assert density(mask | specks, min_area=20)[0] == pytest.approx(density(mask)[0], rel=0.15)


@pytest.mark.slow
def test_invalid_regions_are_excluded_from_the_counting_frame():
    # four tiled fields of a torus: one quarter is invalid, and its borders are inside the page
    mask = np.tile(discs(2), (2, 2))
    valid = np.ones(mask.shape, bool)
    valid[SIDE // 3 : SIDE + SIDE // 3, SIDE // 2 : SIDE + SIDE // 2] = False
    assert density(mask, valid=valid)[0] == pytest.approx(COUNT / SIDE**2, rel=0.02)
    # single invalid pixels inside objects do not cut them
    dead = np.ones(mask.shape, bool)
    dead[tuple(np.argwhere(binary_erosion(mask))[::200].T)] = False
    assert density(mask, valid=dead)[0] == pytest.approx(density(mask)[0], rel=0.01)


def test_density_of_volumes_is_exact():
    side = 40
    z, y, x = np.mgrid[:side, :side, :side]
    mask = np.zeros((side, side, side), bool)
    for center in itertools.product((0, 20), repeat=3):
        distances = [
            np.minimum(np.abs(g - c), side - np.abs(g - c)) for g, c in zip((z, y, x), center, strict=True)
        ]
        mask |= distances[0] ** 2 + distances[1] ** 2 + distances[2] ** 2 <= 36
    for exclude in (False, True):
        per, count = density(mask, volumes=side, exclude=exclude)
        assert per == pytest.approx(8 / side**3)
        assert count == (1 if exclude else 27)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"exclude_border": True}])
def test_report_contains_the_density(tmp_path, options):
    count, mask = 15, discs(3, count=15, radius=(9.0, 12.0))
    scribbles = np.where(np.random.default_rng(0).random(mask.shape) < 0.02, mask + 1, 0).astype(np.uint8)
    Image.fromarray(scribbles).save(tmp_path / "a_labels.png")
    grey = np.where(mask, 200, 50).astype(np.uint8)
    tifffile.imwrite(tmp_path / "a.tif", grey, imagej=True, resolution=(2, 2), metadata={"unit": "um"})
    report = segment(
        [tmp_path / "a.tif"], tmp_path / "out", labels=[tmp_path / "a_labels.png"],
        features=FeatureConfig(sigmas=(1.0,)), objects=ObjectOptions("class 2", **options),
    )  # fmt: skip
    report_json = json.loads((tmp_path / "out" / "report.json").read_text())
    actual = report_json["images"][0]["objects"]
    assert actual["area_um2"] == SIDE**2 / 4
    assert actual["classes"]["class 2"]["per_um2"] == pytest.approx(4 * count / SIDE**2, rel=0.02)
    assert report_json["objects"]["classes"]["class 2"]["per_um2"] == actual["classes"]["class 2"]["per_um2"]
    assert "counting frame" in actual["density"]
    assert report.exit_code == 0


def test_density_of_a_batch_is_pooled():
    def record(count_in_frame, area):
        actual = {"count": 9, "counted_in_frame": count_in_frame, "per_um2": count_in_frame / area}
        actual["equivalent_diameter_um"] = {"mean": 1.0}
        return {"objects": {"area_um2": area, "neighbours": 8, "classes": {"disc": actual}}}

    batch = summarize_batch([record(4.0, 10.0), record(8.0, 30.0)])["classes"]["disc"]
    assert batch["per_um2"] == pytest.approx(12 / 40)
    low, high = batch["per_um2_ci95"]
    assert low <= batch["per_um2"] <= high
    unknown = record(4.0, 10.0)
    unknown["objects"]["area_um2"] = None
    assert "per_um2" not in summarize_batch([record(4.0, 10.0), unknown])["classes"]["disc"]
    assert batch["mean_equivalent_diameter_um"] == 1.0
    volumes = record(4.0, 10.0)
    volumes["objects"] |= {"neighbours": 26, "volume_um3": volumes["objects"].pop("area_um2")}
    mixed_batch = summarize_batch([record(4.0, 10.0), volumes])["classes"]["disc"]
    assert mixed_batch.keys() == {"count", "mean_per_image", "mean_per_image_ci95"}


@cases("pixel", [(0.5, 0.25), (1.0, 0.25), (0.25, 1.0), (0.5, 0.5)])
@cases("angle", [0, 30, 75, 120])
def test_measurements_are_independent_of_the_pixel_shape(pixel, angle):
    long, short, radians = 14.0, 7.0, np.radians(angle)
    rows, columns = int(2 * long / pixel[0]), int(2 * long / pixel[1])
    y, x = np.mgrid[-rows : rows + 1, -columns : columns + 1] * np.reshape(pixel, (2, 1, 1))
    along_axis, across_axis = (
        x * np.cos(radians) - y * np.sin(radians),
        x * np.sin(radians) + y * np.cos(radians),
    )
    mask = (along_axis / long) ** 2 + (across_axis / short) ** 2 <= 1
    actual = measure(mask, np.ones((*mask.shape, 1)), (0, 0), pixel)
    h = ((long - short) / (long + short)) ** 2
    perimeter = np.pi * (long + short) * (1 + 3 * h / (10 + np.sqrt(4 - 3 * h)))
    assert actual["perimeter_um"] == pytest.approx(perimeter, rel=0.05)
    assert actual["area_um2"] == pytest.approx(np.pi * long * short, rel=0.02)
    assert actual["equivalent_diameter_um"] == pytest.approx(2 * np.sqrt(long * short), rel=0.01)
    assert actual["eccentricity"] == pytest.approx(np.sqrt(1 - (short / long) ** 2), rel=0.02)
    assert abs((actual["orientation_deg"] - angle + 90) % 180 - 90) < 1.5
    assert 0 <= actual["orientation_deg"] < 180
