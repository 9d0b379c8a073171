import numpy as np
import pytest
from skimage.measure import perimeter_crofton

from tests.cases import cases
from tests.segment.materials.test_correlation import boolean
from vispe.errors import InputError, OptionError
from vispe.segment.materials.crossings import grain_size_number
from vispe.segment.materials.directions import ANGLES
from vispe.segment.materials.statistics import measure


def stripes(shape, width, angle):
    """Make stripes of two classes along an angle, in degrees counter-clockwise from the horizontal."""
    y, x = np.mgrid[: shape[0], : shape[1]] + 0.31
    distance = x * np.sin(np.radians(angle)) + y * np.cos(np.radians(angle))
    return (distance // width % 2).astype(np.uint8) + 1


@cases(
    ("millimetres", "number"),
    # mean intercepts of ASTM E112, table 4
    [(0.3200, 0), (0.2263, 1), (0.1600, 2), (0.1131, 3), (0.0800, 4), (0.0566, 5), (0.0400, 6), (0.0283, 7),
     (0.0200, 8), (0.0141, 9), (0.0100, 10), (0.0071, 11), (0.0050, 12), (0.4525, -1)],
)  # fmt: skip
def test_grain_size_numbers_equal_astm_e112(millimetres, number):
    assert grain_size_number(millimetres) == pytest.approx(number, abs=0.03)


def test_invalid_lengths_raise():
    for value in (0, -1, float("nan"), float("inf")):
        with pytest.raises(OptionError, match="mean_intercept_mm needs a number above 0"):
            grain_size_number(value)


@cases("angle", [0, 10, 45, 63.434949, 90, 120, 161.565051])
def test_stripes_have_the_expected_statistics_at_any_angle(angle):
    width = 9
    actual, _ = measure(stripes((241, 260), width, angle), ["a", "b"])
    for numbers in (actual["patches"], *actual["classes"].values()):
        # lines at an angle d to the stripes: width / sin d
        sine = np.abs(np.sin(np.radians(np.array(ANGLES) - angle)))
        steep = sine > 0.25
        rose = np.array([np.inf if v is None else v for v in numbers["rose"]["mean_intercept"]])
        np.testing.assert_allclose(rose[steep], width / sine[steep], rtol=0.07)
        assert numbers["boundary_per_area"] == pytest.approx(1 / width, rel=0.04)
        deviation = (numbers["elongation"]["degrees"] - angle + 90) % 180 - 90
        assert abs(deviation) < 2
        ratio = numbers["elongation"]["ratio"]
        assert ratio is None or ratio > 4


def test_chessboard_has_the_expected_intercepts():
    side = 20
    y, x = (np.mgrid[:240, :320] + side // 2) // side  # the page ends in the middle of squares
    actual, _ = measure(((y + x) % 2 + 1).astype(np.uint8), ["a", "b"])
    radians = np.radians(ANGLES)
    for numbers in (actual["patches"], *actual["classes"].values()):
        expected = side / (np.abs(np.cos(radians)) + np.abs(np.sin(radians)))
        # corners, where two boundaries are crossed at once, count less
        np.testing.assert_allclose(numbers["rose"]["mean_intercept"], expected, rtol=0.13)
        assert numbers["rose"]["mean_intercept"][0] == pytest.approx(side, rel=0.06)
        assert numbers["elongation"]["ratio"] == pytest.approx(1, abs=0.02)


def test_disc_perimeter_equals_scikit_image():
    y, x = np.mgrid[:201, :180]
    labels = ((y - 99.3) ** 2 + (x - 88.8) ** 2 < 60**2) + 1
    actual, _ = measure(labels, ["matrix", "disc"])
    disc = actual["classes"]["disc"]
    length = disc["boundary_per_area"] * labels.size
    assert length == pytest.approx(2 * np.pi * 60, rel=0.02)
    assert length == pytest.approx(perimeter_crofton(labels == 2, 4), rel=0.025)
    assert disc["mean_intercept"] == pytest.approx(np.pi * 60 / 2, rel=0.02)
    assert disc["surface_per_volume"] == pytest.approx(4 / np.pi * disc["boundary_per_area"])
    assert actual["patches"]["boundary_per_area"] == disc["boundary_per_area"]


@pytest.mark.slow
def test_intercepts_of_the_boolean_model_match_theory():
    radius, density = 10, 0.0015
    empty = np.exp(-density * np.pi * radius**2)
    class_statistics = [
        measure(boolean(240, radius, density, s) + 1, ["matrix", "discs"])[0]["classes"] for s in range(6)
    ]
    mean = {n: np.mean([c[n]["mean_intercept"] for c in class_statistics]) for n in ("matrix", "discs")}
    assert mean["matrix"] == pytest.approx(1 / (2 * radius * density), rel=0.09)
    assert mean["discs"] == pytest.approx((1 - empty) / (empty * 2 * radius * density), rel=0.09)
    surface = np.mean([c["discs"]["surface_per_volume"] for c in class_statistics])
    assert surface == pytest.approx(4 / np.pi * 2 * np.pi * radius * density * empty, rel=0.08)


def voronoi(side, area, seed):
    """Make Voronoi cells of random seeds in 12 classes; one in 12 neighbours has the same class -> (side, side)."""
    from scipy.spatial import cKDTree

    rng = np.random.default_rng(seed)
    wide = side + 120
    seeds = rng.random((rng.poisson(wide**2 / area), 2)) * wide - 60
    cells = cKDTree(seeds).query(np.stack(np.mgrid[:side, :side], -1).reshape(-1, 2))[1]
    return (cells % 12 + 1).reshape(side, side)


@pytest.mark.slow
def test_poisson_voronoi_tessellation_matches_theory():
    area, names = 900, [str(k) for k in range(12)]
    actual = [measure(voronoi(200, area, s), names, (0.5, 0.5))[0]["patches"] for s in range(3)]
    # intercept pi/4 sqrt(A), boundary 2 / sqrt(A); 1 in 12 neighbours is of the same class
    mean = np.mean([f["mean_intercept"] for f in actual])
    assert mean == pytest.approx(0.5 * np.pi / 4 * np.sqrt(area) * 12 / 11, rel=0.06)
    density = np.mean([f["boundary_per_area"] for f in actual])
    assert density == pytest.approx(2 * 2 / np.sqrt(area) * 11 / 12, rel=0.06)
    for f in actual:
        low, high = f["mean_intercept_ci95"]
        assert low < f["mean_intercept"] < high
        assert f["relative_accuracy_percent"] == pytest.approx(50 * (high - low) / f["mean_intercept"])
        assert f["grain_size_number"] == pytest.approx(grain_size_number(f["mean_intercept"] / 1000))
        assert f["grain_size_number_ci95"] == [grain_size_number(v / 1000) for v in (high, low)]
        assert f["elongation"]["ratio_ci95"][0] < 1.1


def test_statistics_are_rotation_equivariant():
    labels = stripes((96, 130), 7, 25)
    labels[20:50, 30:60] = 2
    (unrotated, _), (rotated, _) = (measure(a, ["a", "b"]) for a in (labels, np.rot90(labels).copy()))
    for name in ("a", "b"):
        expected, actual = unrotated["classes"][name], rotated["classes"][name]
        rose = np.roll(expected["rose"]["mean_intercept"], 18)
        np.testing.assert_allclose(actual["rose"]["mean_intercept"], rose, rtol=1e-9)
        for key in ("mean_intercept", "boundary_per_area", "specific_surface_from_correlation"):
            assert actual[key] == pytest.approx(expected[key], rel=1e-9)
        assert actual["elongation"]["degrees"] == pytest.approx(
            (expected["elongation"]["degrees"] + 90) % 180
        )


def test_anisotropic_pixels_are_supported():
    tall = stripes((128, 128), 8, 0)  # boundaries every 8 rows of 2 um
    actual, curves = measure(tall, ["a", "b"], (2.0, 0.5))
    rose = actual["patches"]["rose"]["mean_intercept"]
    assert rose[ANGLES.index(90)] == pytest.approx(16, rel=0.06)
    assert rose[0] is None
    assert actual["patches"]["elongation"]["ratio"] is None
    assert abs((actual["patches"]["elongation"]["degrees"] + 90) % 180 - 90) < 1
    assert {row["at_unit"] for row in curves} == {"um", "degrees"}


def test_invalid_pixels_are_ignored():
    labels = stripes((100, 120), 6, 40)
    masked = labels.copy()
    masked[:, 60:] = 0
    (masked_statistics, _), (cropped_statistics, _) = (
        measure(masked, ["a", "b"]),
        measure(labels[:, :60], ["a", "b"]),
    )
    for name in ("a", "b"):
        a, b = masked_statistics["classes"][name], cropped_statistics["classes"][name]
        assert a["mean_intercept"] == pytest.approx(b["mean_intercept"], rel=1e-12)
        assert a["rose"] == b["rose"]
    assert masked_statistics["blocks"] == 8


def test_absent_classes_and_classes_without_boundary_have_no_intercepts():
    actual, curves = measure(np.ones((40, 40), np.uint8), ["all", "none"])
    for numbers in (actual["patches"], *actual["classes"].values()):
        assert numbers["mean_intercept"] is None
        assert numbers["mean_intercept_ci95"] is None
        assert numbers["boundary_per_area"] == 0
        assert numbers["elongation"] == {"degrees": None, "ratio": None, "ratio_ci95": None}
        assert set(numbers["rose"]["mean_intercept"]) == {None}
        assert numbers.get("specific_surface_from_correlation") is None
    assert {r["value"] for r in curves if r["curve"] == "two_point_correlation" and r["class"] == "all"} == {
        1.0
    }
    with pytest.raises(InputError, match="no pixel of the page has data"):
        measure(np.zeros((40, 40), np.uint8), ["a"])


def test_small_pages_have_statistics_without_intervals():
    actual, _ = measure(stripes((20, 40), 4, 90), ["a", "b"])
    assert actual["blocks"] == 2
    assert actual["patches"]["mean_intercept"] > 0
    assert actual["patches"]["mean_intercept_ci95"] is None
    assert actual["patches"]["relative_accuracy_percent"] is None
