import numpy as np
import pytest
from scipy.ndimage import binary_fill_holes
from skimage.measure import label, regionprops

from tests.cases import cases
from vispe.errors import OptionError
from vispe.segment.objects.labelling import find
from vispe.segment.objects.options import ObjectOptions, options_or_none
from vispe.segment.objects.split import split

NAMES = ["matrix", "pore", "carbide"]


def scene(shape=(1, 61, 83), seed=0):
    rng = np.random.default_rng(seed)
    from scipy.ndimage import gaussian_filter

    noise = gaussian_filter(rng.normal(size=(3, *shape)), (0, 1 if shape[0] > 1 else 0, 2, 2))
    prob = np.exp(9 * noise)
    prob = np.moveaxis(prob / prob.sum(0), 0, 1).astype(np.float32)
    return (prob.argmax(1) + 1).astype(np.uint8), prob, rng.integers(0, 999, (*shape, 1)).astype(np.uint16)


def flood(mask, steps):
    """Label connected components with a flood fill."""
    instances, count = np.zeros(mask.shape, int), 0
    for start in zip(*np.nonzero(mask), strict=True):
        if instances[start]:
            continue
        count += 1
        instances[start], stack = count, [start]
        while stack:
            pixel = stack.pop()
            for step in steps:
                neighbour = tuple(int(a + b) for a, b in zip(pixel, step, strict=True))
                inside = all(0 <= a < n for a, n in zip(neighbour, mask.shape, strict=True))
                if inside and mask[neighbour] and not instances[neighbour]:
                    instances[neighbour] = count
                    stack.append(neighbour)
    return instances


def test_table_equals_regionprops():
    labels, prob, grey = scene()
    actual, objects = find(labels, prob, grey, NAMES, ObjectOptions(["pore"], "keep", 0), spacing=(0.5, 0.5))
    expected = label(labels[0] == 2, connectivity=2)
    assert np.array_equal(actual[0], expected)
    props = regionprops(expected, grey[0])
    assert len(props) == len(objects.rows) > 5
    for row, p in zip(objects.rows, props, strict=True):
        assert np.allclose([row["centroid_y_px"], row["centroid_x_px"]], p.centroid)
        assert (row["area_px"], row["class"], row["page"]) == (p.area, "pore", 0)
        assert np.isclose(row["equivalent_diameter_px"], p.equivalent_diameter_area)
        for name in ("perimeter", "eccentricity", "solidity"):
            assert np.isclose(row[name + "_px" if name == "perimeter" else name], getattr(p, name))
        assert np.isclose(row["orientation_deg"], (np.degrees(p.orientation) + 90) % 180)
        assert np.isclose(row["mean_grey"], np.mean(p.intensity_mean))
        assert np.isclose(row["area_um2"], p.area / 4)
        assert np.isclose(row["perimeter_um"], p.perimeter / 2)
        assert np.isclose(row["equivalent_diameter_um"], p.equivalent_diameter_area / 2)
        other_centroids = [q.centroid for q in props if q is not p]
        nearest = min(np.hypot(*np.subtract(p.centroid, q)) for q in other_centroids)
        assert np.isclose(row["nearest_px"], nearest)
        assert np.isclose(row["nearest_um"], nearest / 2)


def test_objects_equal_a_flood_fill_on_pages_and_in_volumes():
    labels, prob, grey = scene((5, 23, 31))
    options = ObjectOptions(["pore", "carbide"], "keep", 0)
    volume, objects = find(labels, prob, grey, NAMES, options, volumes=5)
    steps = [(a, b, c) for a in (-1, 0, 1) for b in (-1, 0, 1) for c in (-1, 0, 1)]
    for number in (2, 3):
        reference = flood(labels == number, steps)
        patch = np.where(labels == number, volume, 0)
        pairs = set(zip(reference[reference > 0].tolist(), patch[reference > 0].tolist(), strict=True))
        assert len(pairs) == reference.max() == len(np.unique(patch)) - 1
    assert [r["volume_px"] for r in objects.rows] == np.bincount(volume.ravel())[1:].tolist()
    assert all(r["area_px"] is None and r["perimeter_px"] is None for r in objects.rows)
    pages, _ = find(labels, prob, grey, NAMES, options)
    assert pages.max() > volume.max()
    expected = label(np.where(labels[0] > 1, labels[0], 0), connectivity=2)
    assert np.array_equal(pages[0], expected)


def test_holes_are_filled_except_for_other_objects():
    labels = np.ones((1, 11, 13), np.uint8)
    labels[0, 1:9, 1:9] = 2
    labels[0, 3:7, 3:7] = 1
    labels[0, 4, 4] = 3
    prob, grey = np.ones((1, 3, 11, 13)), np.ones((1, 11, 13, 1))
    actual, _ = find(labels, prob, grey, NAMES, ObjectOptions("pore", "keep", fill_holes=True))
    assert np.array_equal(actual[0] > 0, binary_fill_holes(labels[0] == 2))
    actual, _ = find(labels, prob, grey, NAMES, ObjectOptions(["pore", "carbide"], "keep", 0, True))
    assert actual[0, 4, 4] == 2
    assert (actual[0] == 1).sum() == 63


def test_filled_holes_are_not_necks():
    y, x = np.mgrid[:47, :53]
    distance = np.hypot(y - 23, x - 26)
    labels = np.where((distance < 20) & (distance > 9), 2, 1)[None].astype(np.uint8)
    prob = np.stack([labels == 1, labels == 2, labels == 3], 1) * 0.9 + 0.03
    grey = np.ones((*labels.shape, 1))
    filled, objects = find(labels, prob, grey, NAMES, ObjectOptions("pore", fill_holes=True))
    assert len(objects.rows) == 1
    assert np.array_equal(filled[0] > 0, distance < 20)


def test_small_and_border_objects_are_counted():
    labels = np.ones((1, 9, 30), np.uint8)
    labels[0, 0:4, 3:8] = labels[0, 3:6, 12:16] = labels[0, 2, 20] = 2
    prob, grey = np.ones((1, 3, 9, 30)), np.ones((1, 9, 30, 1))
    actual, objects = find(labels, prob, grey, NAMES, ObjectOptions("pore", "keep", 12, exclude_border=True))
    assert (objects.small, objects.border, len(objects.rows)) == (1, 1, 1)
    assert np.array_equal(actual[0] > 0, np.pad(np.ones((3, 4), bool), ((3, 3), (12, 14))))


@cases("axis", [0, 1, 2])
@cases("end", [False, True])
def test_objects_cut_by_invalid_regions_are_at_the_border(axis, end):
    """A crop, a mask or NaN bounds the sample as the image border does; an invalid pixel in an object does not."""
    labels = np.ones((11, 11, 11), np.uint8)
    labels[2:5, 2:5, 2:5] = labels[7:10, 7:10, 7:10] = 2
    labels[3, 3, 3] = 0
    cut = labels.swapaxes(0, axis)
    cut[9 if end else 2 :: 1 if end else -1] = 0
    prob, grey = np.ones((11, 3, 11, 11)), np.ones((*labels.shape, 1))
    for exclude in (False, True):
        options = ObjectOptions("pore", "keep", 0, exclude_border=exclude)
        actual, objects = find(labels, prob, grey, NAMES, options, volumes=11)
        assert (objects.border, len(objects.rows)) == ((1, 1) if exclude else (0, 2))
        assert actual.astype(bool)[8, 8, 8] == (not (exclude and end))


@cases("radius", [6, 10, 25])
def test_touching_discs_are_split_in_the_middle(radius):
    y, x = np.mgrid[: 2 * radius + 7, : 4 * radius + 7]
    first = np.hypot(y - radius - 3, x - radius - 3) <= radius
    second = np.hypot(y - radius - 3, x - 2.7 * radius - 3) <= radius
    union = first | second
    actual = split(union, np.ones(union.shape))
    assert actual.max() == 2
    assert np.array_equal(actual > 0, union)
    coverage = [(actual[first & ~second] == n).mean() for n in (1, 2)]
    assert max(coverage) > 0.97
    assert split(first, np.ones(first.shape)).max() == 1
    ball = np.stack([union] * 5)
    assert split(ball, np.ones(ball.shape)).max() >= 1


@cases(
    ("call", "words"),
    [
        (lambda: ObjectOptions([]), "names no class"),
        (lambda: ObjectOptions("pore", "cut"), "touching"),
        (
            lambda: ObjectOptions("pore", min_area=-1),
            "min_area needs an integer of 0 or more, got min_area=-1",
        ),
        (lambda: ObjectOptions("por").numbers(NAMES), "Did you mean 'pore'"),
        (lambda: options_or_none(None, touching="split"), "touching has no effect without objects"),
        (lambda: options_or_none(None, min_area=3), "object_min_area has no effect"),
    ],
)
def test_invalid_options_raise(call, words):
    with pytest.raises(OptionError, match=words):
        call()


@cases("pixel", [(0.5, 0.25), (0.25, 0.5), (1.0, 4.0)])
@cases("neck", [1, 3, 5])
def test_object_count_is_transposition_invariant_with_anisotropic_pixels(pixel, neck):
    mask = np.zeros((12, 25), bool)
    mask[1:11, 1:11] = mask[1:11, 13:23] = mask[5 - neck // 2 : 6 + neck // 2, 11:13] = True
    labels, options = np.where(mask, 2, 1), ObjectOptions("pore", min_area=0)
    counts = [
        find(
            page[None], np.ones((1, 2, *page.shape)), page[None, ..., None], NAMES[:2], options, spacing=size
        )[0].max()
        for page, size in ((labels, pixel), (labels.T, pixel[::-1]))
    ]
    assert counts[0] == counts[1]
