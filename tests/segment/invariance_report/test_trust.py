import numpy as np
import pytest

from tests.cases import cases
from vispe.errors import InputError, OptionError, ShapeError
from vispe.images.symmetry.d4 import D4
from vispe.segment.invariance_report import FAMILIES, RUNS, SHIFTS, measure_invariance
from vispe.segment.invariance_report.poses import (
    REPEAT,
    ShiftedFrame,
    ShiftMargin,
    SquareSymmetry,
    valid_shifts,
)
from vispe.segment.types import Prediction

SIZES = [(64, 64), (67, 91), (90, 65)]


def page(h, w, channels=1, seed=0):
    return np.random.default_rng(seed).random((h, w, channels), np.float32)


def everywhere(p):
    return np.ones(p.shape[:2], bool)


def by_level(p, valid):
    """Return three classes by grey level only, which is invariant to every pose."""
    return np.where(valid, 1 + np.digitize(p[..., 0], [0.3, 0.6]), 0)


def by_row(p, valid):
    """Return class 2 for bright pixels in the upper half of the frame."""
    rows = np.arange(len(p))[:, None] < len(p) / 2
    return 1 + ((p[..., 0] > 0.5) & rows)


def by_patch(p, valid, side=8):
    """Return the class of the mean of each patch, on a grid that starts at the top left corner."""
    h, w = valid.shape
    rows, columns = np.arange(0, h, side), np.arange(0, w, side)
    sums = np.add.reduceat(np.add.reduceat(p[..., 0].astype(np.float64), rows, 0), columns, 1)
    counts = np.add.reduceat(np.add.reduceat(np.ones((h, w)), rows, 0), columns, 1)
    return 1 + (sums / counts > 0.5).repeat(side, 0)[:h].repeat(side, 1)[:, :w]


def oracle(p, valid, predict, count, shifts):
    """Compute all numbers of a report with plain loops over pixels."""
    h, w = valid.shape
    reference = predict(p, valid)
    poses = []
    for g in D4[1:]:
        indices = g.apply(np.arange(h * w).reshape(h, w))
        actual = predict(p.reshape(h * w, -1)[indices], valid.ravel()[indices])
        restored = np.zeros(h * w, int)
        for target, index in np.ndenumerate(indices):
            restored[index] = actual[target]
        poses.append((g.name, "mirrored" if g.flip else "turned", restored.reshape(h, w)))
    mirror = lambda i, n: -i - 1 if i < 0 else 2 * n - 1 - i if i >= n else i  # noqa: E731
    for dy, dx in shifts:
        shifted, shifted_valid = np.empty_like(p), np.empty_like(valid)
        for y in range(h):
            for x in range(w):
                source = mirror(y - dy, h), mirror(x - dx, w)
                shifted[y, x], shifted_valid[y, x] = p[source], valid[source]
        actual, restored = predict(shifted, shifted_valid), np.zeros((h, w), int)
        for y in range(h):
            for x in range(w):
                if 0 <= y + dy < h and 0 <= x + dx < w:
                    restored[y, x] = actual[y + dy, x + dx]
        poses.append((f"shift ({dy}, {dx}) px", "shifted", restored))
    common = np.zeros((h, w), bool)
    for y in range(h):
        for x in range(w):
            common[y, x] = all(0 <= y + dy < h and 0 <= x + dx < w for dy, dx in shifts)
    rows, disagreement = {}, np.full((h, w), np.nan)
    for name, family, restored in poses:
        region = valid & common if family == "shifted" else valid
        change = [
            100 * (np.mean(restored[region] == k) - np.mean(reference[region] == k))
            for k in range(1, count + 1)
        ]
        rows[name] = family, change, np.mean(restored[region] == reference[region]), region.sum()
    for y, x in np.argwhere(valid):
        votes = [reference[y, x], *(b[y, x] for *_, b in poses if b[y, x])]
        disagreement[y, x] = 1 - max(votes.count(k) for k in votes) / len(votes)
    return rows, disagreement


@cases("size", [(5, 8), (7, 6)])
@cases(
    "move",
    [
        *map(SquareSymmetry, D4),
        ShiftedFrame(2, -3),
        ShiftedFrame(-1, 0),
        ShiftedFrame(0, 0),
        ShiftMargin(1, 2, 0, 3),
    ],
)
def test_undo_inverts_apply_inside_the_image(move, size):
    labels = np.arange(1, 1 + size[0] * size[1]).reshape(size)
    planes = np.stack([labels, -labels])
    transformed = move.apply(planes)
    np.testing.assert_array_equal(transformed[0], move.apply(labels))
    np.testing.assert_array_equal(transformed[1], -transformed[0])
    assert set(np.unique(transformed[0])) <= set(labels.ravel())
    restored = move.undo(transformed[0])
    np.testing.assert_array_equal(restored[restored > 0], labels[restored > 0])
    lost_size = {ShiftedFrame: lambda m: (abs(m.dy), abs(m.dx)), ShiftMargin: lambda m: (3, 3)}.get(
        type(move), lambda m: (0, 0)
    )(move)
    assert (restored > 0).sum() == (size[0] - lost_size[0]) * (size[1] - lost_size[1])


def test_shifts_move_down_and_right_with_mirrored_borders():
    np.testing.assert_array_equal(ShiftedFrame(0, 2).apply(np.array([[1, 2, 3, 4]])), [[2, 1, 1, 2]])
    np.testing.assert_array_equal(ShiftedFrame(-1, 0).apply(np.array([[1], [2], [3]])), [[2], [3], [3]])
    np.testing.assert_array_equal(ShiftedFrame(0, 2).undo(np.array([[1, 2, 3, 4]])), [[3, 4, 0, 0]])
    assert ShiftMargin.of([(-3, 5), (8, -7), (16, 16)]) == ShiftMargin(3, 16, 7, 16)
    np.testing.assert_array_equal(
        ShiftMargin(0, 0, 1, 2).apply(np.array([[1, 2, 3, 4, 5]])), [[2, 2, 3, 3, 2]]
    )


@cases("holes", [False, True])
@cases("size", [(33, 26), (24, 24)])
@cases("kind", ["row and column", "patch"])
def test_report_equals_plain_loops(kind, size, holes):
    def predict(p, valid):
        if kind == "patch":
            return np.where(valid, by_patch(p, valid, 5) + (p[..., 1] > 0.8), 0)
        y, x = np.mgrid[: valid.shape[0], : valid.shape[1]]
        return np.where(valid, 1 + np.digitize(p.mean(-1) + 0.01 * y - 0.02 * x, [0.3, 0.5]), 0)

    p, shifts = page(*size, channels=2), ((-3, 5), (4, -2), (6, 6))
    valid = everywhere(p)
    if holes:
        valid[3:9, 10:15] = valid[20, 1] = valid[0, 0] = False
    actual = measure_invariance(p, valid, predict, "abc", shifts=shifts)
    rows, disagreement = oracle(p, valid, predict, 3, shifts)
    assert [q.name for q in actual.poses] == list(rows)
    for q in actual.poses:
        family, change, agreement, pixels = rows[q.name]
        assert (q.family, q.pixels) == (family, pixels)
        np.testing.assert_allclose(q.change, change, atol=1e-10)
        assert q.agreement == pytest.approx(agreement, abs=1e-12)
    np.testing.assert_allclose(actual.disagreement, disagreement, atol=1e-6)
    for family in FAMILIES:
        changes = np.array([[0] * 3, *(r[1] for r in rows.values() if r[0] == family)])
        np.testing.assert_allclose(actual.phase_spread(family), changes.max(0) - changes.min(0), atol=1e-10)
    assert actual.agreement == pytest.approx(np.mean(disagreement[valid] == 0))
    np.testing.assert_array_equal(actual.labels, predict(p, valid))
    assert sum(c.any() for c in actual.changed.values()) == 3
    np.testing.assert_array_equal(np.any(list(actual.changed.values()), 0), np.nan_to_num(disagreement) > 0)


@cases("size", SIZES)
def test_position_independent_rules_are_steady(size):
    p = page(*size)
    valid = everywhere(p)
    valid[5:20, 7:30] = False
    actual = measure_invariance(p, valid, by_level, ["matrix", "carbide", "pore"])
    assert not np.nan_to_num(actual.disagreement).any()
    np.testing.assert_array_equal(np.isnan(actual.disagreement), ~valid)
    for family in FAMILIES:
        np.testing.assert_array_equal(actual.phase_spread(family), 0)
        np.testing.assert_allclose(
            actual.floor(family), 100 / min(q.pixels for q in actual.poses if q.family == family)
        )
        assert not actual.changed[family].any()
    assert actual.level == "steady"
    assert actual.agreement == 1
    assert np.isnan(actual.at_borders)
    assert (
        actual.verdict == "Steady: no pixel changes its class when the image is rotated, mirrored or shifted."
    )
    assert actual.brief == "steady, 100 % of pixels agree"
    assert actual.to_dict()["changes_at_borders"] is None


def test_orientation_dependent_rules_have_the_expected_spread():
    p = np.zeros((120, 160, 1), np.float32)
    p[:60] = 1  # bright upper half: class 2 has 50 %, 0 % after a rotation by 180 degrees, 25 % by 90 degrees
    actual = measure_invariance(p, everywhere(p), by_row, ["matrix", "band"])
    fraction = {q.name: q.fractions[1] for q in actual.poses}
    assert actual.fractions[1] == fraction["hflip"] == 50
    assert fraction["rot180"] == fraction["vflip"] == 0
    assert {fraction[name] for name in ("rot90", "rot270", "transpose", "antitranspose")} == {25}
    change = {q.name: q.change[1] for q in actual.poses}
    assert change["shift (-3, 5) px"] == pytest.approx(0)
    # rows of the band below the middle, relative to the rows of the common frame
    assert change["shift (8, -7) px"] == pytest.approx(-800 / 101)
    assert change["shift (16, 16) px"] == pytest.approx(-1600 / 101)
    for family, expected, pixels in (
        ("turned", 50, 19200),
        ("mirrored", 50, 19200),
        ("shifted", 1600 / 101, 101 * 137),
    ):
        np.testing.assert_allclose(actual.phase_spread(family), expected)
        np.testing.assert_allclose(actual.floor(family), 100 / pixels)
    assert actual.levels == ("strong", "strong")
    assert actual.verdict == (
        "Strong dependence: the fraction of matrix (50 %) changes by 50 percentage points when the image is rotated "
        "(floor <0.01), 50 when mirrored (floor <0.01) and 16 when shifted (floor <0.01). 50.0 % of the pixels have "
        "the same class in every pose; 3.3 % of the others are within 2 px of a class border, and away from "
        "borders 50.0 % change."
    )
    assert actual.brief == "strong, matrix by 50 pp (floor <0.01)"
    assert actual.agreement == 0.5  # only pixels of the band change
    np.testing.assert_array_equal(actual.disagreement[60:], 0)
    # both poses by 180 degrees and two of four by 90 degrees
    assert actual.disagreement[5, 10] == pytest.approx(4 / 11)
    assert actual.at_borders == pytest.approx(2 / 60)
    assert actual.inside == 0.5


def test_verdict_names_the_rarest_of_equally_dependent_classes():
    p = np.zeros((120, 160, 1), np.float32)
    p[:40] = 1
    for names in (["ground", "band"], ["matrix", "carbide"]):
        assert (
            f"the fraction of {names[1]} (33 %)"
            in measure_invariance(p, everywhere(p), by_row, names).verdict
        )


def test_patch_grids_are_detected_only_by_shifts():
    p = page(64, 96)
    actual = measure_invariance(p, everywhere(p), by_patch, "ab")
    assert not actual.phase_spread("turned").any()
    assert not actual.phase_spread("mirrored").any()
    assert not actual.changed["turned"].any()
    assert actual.phase_spread("shifted")[0] > 1
    change = {q.name: np.abs(q.change).max() for q in actual.poses}
    assert change["shift (16, 16) px"] == 0  # whole patches
    assert change["shift (-3, 5) px"] > 0


def test_floor_is_the_change_of_a_repeated_prediction():
    rng = np.random.default_rng(0)

    def noisy_rule(p, valid):
        return 1 + (p[..., 0] + rng.normal(0, 0.1, valid.shape) > 0.5)

    p = page(64, 48)
    actual = measure_invariance(p, everywhere(p), noisy_rule, "ab")
    control = actual.controls[0]
    assert control.name == "identity"
    assert control.agreement < 0.95
    floor = max(abs(control.change[0]), 100 / p.size)
    assert actual.floor("turned")[0] == actual.floor("mirrored")[0] == pytest.approx(floor)


def test_floor_of_shifts_is_the_change_by_the_lost_margin():
    def against_the_mean(p, valid):
        return 1 + (p[..., 0] > p.mean())

    p = page(64, 64)
    p[-16:] *= 0.2  # rows that the largest shift moves out of the frame
    actual = measure_invariance(p, everywhere(p), against_the_mean, "ab")
    assert not actual.phase_spread("turned").any()
    assert actual.floor("shifted")[0] > 5
    assert actual.floor("turned")[0] == pytest.approx(100 / 64**2)
    margin = ShiftMargin.of(SHIFTS)
    assert actual.controls[1].pixels == margin.frame(64, 64).sum() == 45 * 41
    assert actual.effect("shifted")[0] < actual.phase_spread("shifted")[0]
    assert actual.to_dict()["classes"]["a"]["floor_pp"]["shifted"] == pytest.approx(
        actual.floor("shifted")[0]
    )


def test_angles_have_a_separate_floor():
    y, x = np.mgrid[:97, :120]
    p = (0.5 + 0.5 * np.sin(x / 9) * np.cos(y / 7)).astype(np.float32)[..., None]
    steady = measure_invariance(
        p, everywhere(p), lambda q, v: 1 + (q[..., 0] > 0.6), "ab", angles=(90, 30), shifts=()
    )
    rotated_90, rotated_30 = (q for q in steady.poses if q.family == "angles")
    assert rotated_90.name == "90°"
    assert rotated_90.agreement == 1
    assert not rotated_90.change.any()
    assert rotated_30.agreement > 0.97
    assert np.abs(rotated_30.change).max() < 0.5
    assert [c.name for c in steady.controls[1:]] == [
        "90°, labels turned",
        "90°, round trip",
        "30°, labels turned",
        "30°, round trip",
    ]
    assert steady.level == "steady"
    assert steady.notes == ("angles are compared on a disc of 80 px in the centre of 97 x 120 px.",)
    dependent = measure_invariance(p, everywhere(p), by_row, "ab", angles=(30,), shifts=())
    assert dependent.phase_spread("angles")[0] > 3 * dependent.floor("angles")[0]
    assert "rotated by other angles (floor" in dependent.verdict
    holes = everywhere(p)
    holes[30:50, 40:60] = False
    actual = measure_invariance(
        p, holes, lambda q, v: np.where(v, 1 + (q[..., 0] > 0.6), 0), "ab", angles=(45,), shifts=()
    )
    assert actual.poses[-1].pixels < rotated_30.pixels
    assert np.abs(actual.poses[-1].change).max() < 1


def test_a_given_prediction_is_not_recomputed():
    p, calls, events = page(64, 64), [], []

    def predict(q, valid):
        calls.append(q.shape)
        labels = by_level(q, valid).astype(np.uint8)
        return Prediction(
            np.zeros((3, *valid.shape), np.float32), labels, np.zeros(valid.shape, np.float32), 0, 0, ()
        )

    first = predict(p, everywhere(p))
    report = measure_invariance(p, everywhere(p), predict, "abc", still=first, step=events.append)
    assert len(calls) - 1 == RUNS == len(events)
    assert sum(events) == pytest.approx(1)
    measure_invariance(p, everywhere(p), predict, "abc")
    assert len(calls) - 1 == 2 * RUNS + 1
    assert report.level == "steady"


def test_shifts_too_large_for_the_image_are_skipped_and_noted():
    assert valid_shifts([(1, 2), (0, 0), (1, 2), (9, 0)], (32, 32)) == [(1, 2)]
    p = page(20, 70)
    actual = measure_invariance(p, everywhere(p), by_level, "abc")
    assert [q.name for q in actual.poses if q.family == "shifted"] == ["shift (-3, 5) px"]
    assert actual.notes == ("2 of 3 shifts are too large for 20 x 70 px and were skipped.",)
    actual = measure_invariance(p, everywhere(p), by_level, "abc", shifts=((0, 0), (3, 5), (8, -7)))
    assert actual.notes == ("1 of 2 shifts are too large for 20 x 70 px and were skipped.",)
    tiny = page(3, 5)
    actual = measure_invariance(tiny, everywhere(tiny), by_level, "abc")
    assert actual.families == ("turned", "mirrored")
    assert actual.verdict == "Steady: no pixel changes its class when the image is rotated or mirrored."
    assert list(actual.to_dict()["agreement_by_family"]) == ["turned", "mirrored"]


def test_a_page_without_data_has_nothing_to_compare():
    p = page(40, 40)
    actual = measure_invariance(p, np.zeros((40, 40), bool), by_level, "abc")
    assert actual.verdict.startswith("Nothing could be compared")
    assert actual.brief == "nothing to compare"
    assert actual.to_dict()["classes"]["a"]["fraction"] is None
    assert actual.to_dict()["agreement"] is None


@cases(
    ("share", "lost", "level"),
    [(40, 0.5, "steady"), (40, 2, "mild"), (40, 6, "strong"), (2, 0.5, "mild"), (0.6, 0.4, "strong")],
)
def test_levels_depend_on_points_and_for_rare_classes_on_fractions(share, lost, level):
    p = np.zeros((100, 100, 1), np.float32)
    p.ravel()[: int(share * 100)] = 1

    def lose_pixels(q, valid):
        labels = 1 + (q[..., 0] > 0)
        if q[0, 0] == 0 or q[-1, 0] > 0:  # not the original pose
            bright = np.flatnonzero(labels == 2)
            labels.ravel()[bright[: int(lost * 100)]] = 1
        return labels

    actual = measure_invariance(p, everywhere(p), lose_pixels, ["rest", "phase"], shifts=())
    np.testing.assert_allclose(actual.phase_spread("turned")[1], lost)
    assert actual.levels[1] == level
    assert actual.to_dict()["spread_pp"]["phase"] == pytest.approx(lost)


@cases(("columns", "level"), [(1, "steady"), (8, "mild"), (40, "strong")])
def test_moved_classes_are_detected_at_constant_fractions(columns, level):
    p = page(80, 160)

    def left_and_right(q, valid):
        """Return class 2 for a strip at the start of the longer axis."""
        labels = np.ones(valid.shape, int)
        transposed = labels if labels.shape[1] >= labels.shape[0] else labels.T
        transposed[:, :columns] = 2
        return labels

    actual = measure_invariance(p, everywhere(p), left_and_right, "ab", shifts=())
    assert not actual.phase_spread("turned").any()
    assert actual.levels == ("steady", "steady")
    assert actual.pixel_level == actual.level == level
    inner = max(columns - 2, 0) + columns  # of the strip and of the mirrored strip
    assert actual.inside == pytest.approx(inner / (160 - min(columns, 2) - 2))
    if level == "strong":
        assert actual.brief == "strong, 50.0 % of pixels away from borders change"
        assert actual.verdict == (
            "Strong dependence: no fraction changes beyond the floor of the measurement when the image is rotated or "
            "mirrored. 50.0 % of the pixels have the same class in every pose; 2.5 % of the others are within 2 px of "
            "a class border, and away from borders 50.0 % change."
        )


def test_errors_contain_the_value():
    p = page(32, 40)
    with pytest.raises(
        ShapeError, match=r"needs a page \(h, w, c\) and valid \(h, w\), got \(32, 40\) and \(32, 40\)"
    ):
        measure_invariance(p[..., 0], everywhere(p), by_level, "abc")
    with pytest.raises(ShapeError, match=r"got \(32, 40, 1\) and \(40, 32\)"):
        measure_invariance(p, everywhere(p).T, by_level, "abc")
    with pytest.raises(
        OptionError, match=r"needs class names and a border of 0 or more pixels, got \[\], border=2"
    ):
        measure_invariance(p, everywhere(p), by_level, [])
    with pytest.raises(
        OptionError, match=r"A shift must be two integers, pixels \(down, right\), got \(1.5, 2\)"
    ):
        measure_invariance(p, everywhere(p), by_level, "abc", shifts=[(1.5, 2)])
    with pytest.raises(OptionError, match=r"supports up to 255 classes, got 256 names"):
        measure_invariance(p, everywhere(p), by_row, [f"class {k}" for k in range(256)])
    with pytest.raises(OptionError, match="returned class 3, but there are 2 class names"):
        measure_invariance(p, everywhere(p), by_level, "ab")
    with pytest.raises(
        ShapeError, match=r"returned labels of shape \(31, 40\), but the image has \(32, 40\) px"
    ):
        measure_invariance(p, everywhere(p), lambda q, v: by_level(q, v)[1:], "abc")
    with pytest.raises(InputError, match="Labels must be non-negative integers"):
        measure_invariance(p, everywhere(p), lambda q, v: by_level(q, v) + 0.5, "abc")
    assert REPEAT.name == "identity"
