import json

import numpy as np
import pytest
import torch

from tests.evaluate.rotation.cases import noise, vit
from vispe.errors import OptionError, ShapeError, UnknownName
from vispe.evaluate.rotation import (
    Measurement,
    RotationResult,
    VisionModel,
    equivariance,
    merge,
    paired_difference,
    position_equivariance,
    relabelled,
    summarise,
)
from vispe.evaluate.rotation.evaluation import measure
from vispe.evaluate.rotation.feature_similarity import error
from vispe.evaluate.rotation.record_key import EVERY_POSE, Key
from vispe.evaluate.rotation.verdict import remedy, scale_notes, verdict
from vispe.utils.report.statistics import bootstrap_interval


def test_summary_of_known_values():
    values = [0.1, 0.5, 0.2, np.nan, 0.4, 0.3]
    low, high, zero = (summarise(values, b) for b in ("low", "high", "zero"))
    assert (low.n, low.missing) == (5, 1)
    assert low.mean == pytest.approx(0.3)
    assert low.median == pytest.approx(0.3)
    assert low.std == pytest.approx(np.std([0.1, 0.5, 0.2, 0.4, 0.3], ddof=1))
    assert (low.worst, high.worst, zero.worst) == (0.5, 0.1, 0.5)
    assert low.interval[0] < 0.3 < low.interval[1]
    assert low == summarise(values, "low")
    many = np.random.default_rng(0).random(30)
    assert summarise(many).interval == summarise(many).interval != summarise(many, seed=1).interval
    assert summarise([-0.9, 0.5], "zero").worst == -0.9


def test_few_images_have_no_interval_and_none_have_no_numbers():
    assert summarise([1, 2, 3, 4]).interval is None
    assert summarise([1, 2, 3, 4, 5]).interval is not None
    nothing = summarise([np.nan, np.nan])
    assert (nothing.n, nothing.missing) == (0, 2)
    assert nothing.to_dict()["mean"] is None
    assert summarise([2.0]).std == 0
    with pytest.raises(ShapeError, match=r"one value per image, \(n,\)"):
        summarise(np.zeros((2, 2)))
    with pytest.raises(OptionError, match="better='big'"):
        summarise([1.0], "big")


def test_the_bootstrap_covers_as_it_says():
    rng = np.random.default_rng(0)
    hits = sum(
        low <= 0 <= high
        for low, high in (bootstrap_interval(rng.standard_normal(40), draws=400, seed=k) for k in range(300))
    )
    assert 0.88 < hits / 300 < 0.98
    values = rng.standard_normal(50)
    low, high = bootstrap_interval(values, draws=20000)
    assert high - low == pytest.approx(2 * 1.96 * values.std() / np.sqrt(50), rel=0.05)


def test_a_paired_difference_sees_what_two_intervals_do_not():
    rng = np.random.default_rng(1)
    hard = 10 * rng.standard_normal(20)
    a, b = hard + 0.1 + 0.02 * rng.standard_normal(20), hard
    actual = paired_difference(a, b)
    assert actual.interval[0] > 0.05
    assert actual.mean == pytest.approx(float(np.mean(a - b)))
    assert summarise(a).interval[0] < summarise(b).interval[1]
    with pytest.raises(ShapeError, match=r"the same images, got shapes \(20,\) and \(19,\)"):
        paired_difference(a, b[1:])


def test_rows_with_floors_give_effect_and_ratio():
    row = Measurement(
        "15°", "error", np.array([0.4, 0.6]), floors={"a": np.array([0.1, 0.3]), "b": np.array([0.2, 0.1])}
    )
    assert row.floor.tolist() == [0.2, 0.3]
    assert row.effect().mean == pytest.approx(0.25)
    assert row.ratio() == pytest.approx(2)
    high = Measurement("15°", "miou", np.array([0.4]), floors={"a": np.array([0.9]), "b": np.array([0.8])})
    assert high.floor.tolist() == [0.8]
    zero = Measurement("90°", "error", np.zeros(1), floors={"a": np.zeros(1)})
    assert zero.ratio() is None
    assert Measurement("D4", "error", np.zeros(1)).effect() is None
    with pytest.raises(UnknownName, match="unknown metric, got 'l2'"):
        Measurement("D4", "l2", np.zeros(1))
    with pytest.raises(ShapeError, match="need one value per image"):
        Measurement("D4", "error", np.zeros(2), floors={"a": np.zeros(1)})


def test_words_follow_the_limits():
    assert verdict("f", 0.049, "E") == "f: invariant (E = 0.049)"
    assert verdict("f", 0.05, "E") == "f: mild dependence (E = 0.05)"
    assert verdict("f", 0.3, "E") == "f: strong dependence (E = 0.3)"
    assert "cannot be judged" in verdict("f", float("nan"), "E")
    assert remedy(0.04, 1.0) == ""
    assert remedy(0.5, 0.2).startswith("The position code breaks")
    assert "patch kernel contributes" in remedy(0.5, 0.2)
    assert "patch kernel" not in remedy(0.5, 0.4)
    assert remedy(0.5, 1e-6).startswith("The patch kernel breaks")
    assert "not measured" in remedy(0.5)


@pytest.mark.parametrize(
    ("pos", "symmetric", "word", "cure"),
    [
        ("learn", True, "strong", "position code"),
        ("alibi2d", False, "strong", "patch kernel"),
        ("alibi2d", True, "invariant", ""),
    ],
)
def test_verdict_and_remedy_of_models(pos, symmetric, word, cure):
    f = VisionModel(vit(pos, symmetric, depth=2))
    images = [noise((42, 42), k) for k in range(2)]
    rows = equivariance(f, images, measures=["error"]) + position_equivariance(f, images)
    rows += (Measurement("none", "r2", np.array([0.1, np.nan])),)
    result = RotationResult(rows, ("a", "b"), {"seed": 0}, ("small",))
    assert result.verdict.startswith(f"features under rotation and reflection: {word}")
    assert result.verdict.endswith("features against position: mild dependence (held-out R² = 0.1)")
    assert (f"The {cure} breaks" in result.remedy) if cure else result.remedy == ""
    actual = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert actual["rows"][-1]["values"] == [0.1, None]
    assert actual["rows"][0]["summary"]["interval"] is None
    assert actual["images"] == ["a", "b"]
    table = result.to_markdown().splitlines()
    assert len(table) == 2 + len(rows)
    assert len({len(line) for line in table}) == 1
    assert result.find("rot90", "error", "position code").part == "position code"
    assert result.find("rot45", "error") is None
    with pytest.raises(ShapeError, match="must have 1 value, one per image, got 2"):
        RotationResult(rows, ("a",))


def test_shares_of_the_images_are_joined():
    images = [noise((6, 6), k) for k in range(5)]
    f = lambda x: x + x.roll(1, -1)  # noqa: E731
    options = {"controls": False, "measures": ["error", "rank", "invariant_share"]}
    full = equivariance(f, images, **options)
    joined = merge([equivariance(f, part, **options) for part in (images[:2], images[2:])])
    for a, b in zip(full, joined, strict=True):
        np.testing.assert_array_equal(a.values, b.values)
    with pytest.raises(ShapeError, match="parts must have the same records"):
        merge([full, full[1:]])
    named = relabelled(full, "raw intensity", control=True)
    assert all(r.control and r.part == "raw intensity" for r in named)
    assert not any(r.control for r in relabelled(full, "other"))


# what the centred error ranges over


@pytest.mark.parametrize("mean", [0.0, 3.0])
@pytest.mark.parametrize("spread", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("correlation", [-1.0, 0.0, 0.6, 1.0])
def test_the_error_is_made_of_correlation_spread_and_mean(correlation, spread, mean):
    d, h, w = 3, 5, 7
    basis = torch.randn(h * w, 2, dtype=torch.float64)
    constant = torch.ones(h * w, 1, dtype=torch.float64)
    basis = torch.linalg.qr(torch.cat([constant, basis], 1))[0][:, 1:]  # without a mean, orthonormal
    z, other = (torch.zeros(d, h * w, dtype=torch.float64) for _ in range(2))
    z[0], other[0] = basis[:, 0], basis[:, 1]
    y = spread * (correlation * z + (1 - correlation**2) ** 0.5 * other)
    step = torch.zeros(d, 1, dtype=torch.float64)
    step[2] = mean / (h * w) ** 0.5  # m, for maps whose squares sum to 1
    first, second = (t.reshape(d, h, w) for t in (z + 2.0, y + 2.0 + step))
    expected = (1 + spread**2 - 2 * spread * correlation + mean**2) ** 0.5
    assert error(first, second) == pytest.approx(expected, abs=1e-9)


def test_parts_that_cancel_leave_less_than_one_of_them():
    rotated, kernel = torch.randn(2, 4, 6, 6, dtype=torch.float64)
    base = torch.randn(4, 6, 6, dtype=torch.float64)
    # what the kernel changes undoes what the code changed
    total = base + rotated - 0.8 * rotated + 0.1 * kernel
    assert error(base, total) < error(base, base + rotated)


def test_notes_say_what_exceeds_the_scale():
    assert scale_notes([0.2, 1.42, np.nan], 0.8, 0.3) == ()
    (note,) = scale_notes([0.2, 2.1], 1.27)
    assert note.startswith("The largest error is 2.1, above 1.41")
    (note,) = scale_notes([1.3], 1.27, 1.43)
    assert note.startswith("The error due to the position code alone (1.43) is above the total (1.27)")


def test_a_measurement_notes_what_exceeds_the_scale():
    def louder(images):
        """Features that grow with the brightness of the upper half: their mean and spread turn with the image."""
        top = images[..., : images.shape[-2] // 2, :].mean((-3, -2, -1), keepdim=True)
        return images * (1 + 100 * top)

    image = torch.rand(3, 8, 8) * 0.1
    image[:, 4:] += 0.9
    report = measure(louder, [image], metrics=["d4"], patch_size=1)
    assert report.result.find("D4 worst", "error").values[0] > 2
    (note,) = [n for n in report.result.notes if "above 1.41" in n]
    assert note in report.to_dict()["notes"]
    calm = measure(lambda images: images, [image], metrics=["d4"], patch_size=1)
    assert not any("1.41" in n for n in calm.result.notes)


@pytest.mark.parametrize(
    ("key", "transform", "part"),
    [
        (Key("D4", "error"), "D4", "full"),
        (Key("angle", "error", amount=(15.0,)), "15°", "full"),
        (Key("angle", "accuracy", amount=(-7.5,), training=EVERY_POSE), "-7.5°", "trained on all poses"),
        (Key("roll", "error", amount=(0, -8)), "roll (0, -8) px", "full"),
        (Key("crop shift", "error", "position code", (4, 2)), "crop shift (4, 2) px", "position code"),
        (Key("D4", "error", layer=3), "D4", "layer 3"),
        (Key("D4", "error", "position code", layer=0), "D4", "layer 0, position code"),
        (
            Key("all poses", "phase_spread", "pores", training=EVERY_POSE),
            "all poses",
            "pores, trained on all poses",
        ),
    ],
)
def test_keys_are_printed_as_transform_and_part(key, transform, part):
    row = Measurement.of(key, [0.5])
    assert (row.transform, row.part, row.metric, row.key) == (transform, part, key.quantity, key)
    printed = row.to_dict()
    assert (printed["transform"], printed["part"]) == (transform, part)


def test_rows_by_printed_names_and_new_names():
    by_name = Measurement("D4", "error", np.array([0.5]), "position code")
    assert by_name.key == Key("D4", "error", "position code")
    (renamed,) = relabelled(
        [Measurement.of(Key("D4", "error", layer=3), [0.5])], "random weights", control=True
    )
    assert (renamed.part, renamed.control, renamed.key.layer) == ("random weights", True, None)
    trained = Measurement.of(Key("angle", "accuracy", amount=(15,)), [0.5]).about(training=EVERY_POSE)
    assert (trained.transform, trained.part) == ("15°", EVERY_POSE)
