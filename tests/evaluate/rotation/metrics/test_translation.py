import numpy as np
import pytest
import torch

from tests.evaluate.rotation.cases import field, noise, vit
from vispe.errors import OptionError, ShapeError
from vispe.evaluate.rotation import VisionModel, crop_shift, raw_intensity, roll_equivariance
from vispe.evaluate.rotation.metrics.translation import default_shifts, tokens_of

WHOLE = [(7, 0), (0, 14), (-7, 21), (35, -28)]


def values(rows, transform, metric="error"):
    (row,) = [r for r in rows if (r.transform, r.metric) == (transform, metric)]
    return row.values


def test_the_nearest_number_of_tokens():
    assert [tokens_of(d, 7) for d in (-7, -4, -3, 0, 3, 4, 7, 10, 11)] == [-1, -1, 0, 0, 0, 1, 1, 1, 2]
    assert [tokens_of(d, 4) for d in (-2, 2, 3, 6)] == [0, 0, 1, 1]
    assert default_shifts(3, (4, 1)) == ((3, 0), (0, 3), (3, 3), (6, 0), (1, 1), (2, 2))


def test_raw_intensity_moves_with_the_image():
    rows = roll_equivariance(raw_intensity, [noise((5, 8)), noise((5, 8), 1)], patch_size=1, batch_size=2)
    assert values(rows, "roll, whole patches").tolist() == [0, 0]
    rows = crop_shift(
        raw_intensity, [noise((9, 12))], (5, 8), shifts=[(1, 0), (-2, 3), (4, -4)], patch_size=1
    )
    assert [r.values[0] for r in rows] == [0] * 8


@pytest.mark.parametrize(
    ("pos", "low", "high"),
    [
        ("none", 0, 1e-13), ("alibi2d", 0, 1e-13), ("alibi2d(wrap=false)", 1e-7, 0.5),
        ("rope_axial", 1e-3, 1.5), ("learn", 0.3, 1.6),
    ],
)  # fmt: skip
def test_rolls_by_whole_patches_are_exact_without_position_and_for_wrapped_bias(pos, low, high):
    f = VisionModel(vit(pos, False))
    rows = roll_equivariance(f, [noise((42, 56))], shifts=[*WHOLE, (3, 3), (0, 6)])
    for dy, dx in WHOLE:
        assert low <= values(rows, f"roll ({dy}, {dx}) px")[0] <= high
    assert values(rows, "roll (3, 3) px")[0] > 0.3  # another phase of the patches, whatever the encoding
    mean = np.mean([values(rows, f"roll ({dy}, {dx}) px")[0] for dy, dx in WHOLE])
    assert values(rows, "roll, whole patches")[0] == pytest.approx(mean, rel=1e-12)


def test_a_planted_bias_is_measured_with_its_size():
    pattern = torch.tensor([1.0, -1.0, 0, 0]).double().expand(4, 4)
    x = noise((4, 4), channels=1) * 0 + torch.tensor([[1.0], [-1], [1], [-1]]).double()
    rows = roll_equivariance(lambda v: v + pattern / 2, [x], shifts=[(0, 1), (0, 2), (2, 0)], patch_size=1)
    signal = np.sqrt(16 + 8 / 4)
    for shift, moved_columns in {"(0, 1)": 6, "(0, 2)": 4, "(2, 0)": 0}.items():
        expected = 0.5 * np.sqrt(4 * moved_columns) / signal
        assert values(rows, f"roll {shift} px")[0] == pytest.approx(expected, abs=1e-14)


def test_crop_shift_compares_the_same_positions():
    calls = []

    def pooled(images):
        calls.append(images)
        return torch.nn.functional.avg_pool2d(images, 4)

    image = field((41, 46))
    rows = crop_shift(pooled, [image], (24, 32), shifts=[(8, -4), (-8, 4), (0, 4)], patch_size=4, margin=1)
    assert max(r.values[0] for r in rows) < 1e-14
    first, second = calls[:2]
    assert torch.equal(first[0, :, 8:, :28], second[0, :, :16, 4:])
    partly = crop_shift(pooled, [image], (24, 32), patch_size=4)
    assert [r.transform for r in partly if r.metric == "error"][:2] == [
        "crop shift, whole patches", "crop shift, parts of a patch",
    ]  # fmt: skip
    assert values(partly, "crop shift, parts of a patch")[0] > 0.05
    f = VisionModel(vit("none", False))
    assert values(crop_shift(f, [noise((56, 56))], (42, 42)), "crop shift, whole patches")[0] > 1e-3


def test_errors():
    x = noise((8, 8))
    with pytest.raises(OptionError, match="must be the number of pixels per token"):
        roll_equivariance(raw_intensity, [x])
    with pytest.raises(ShapeError, match=r"patch_size=2 does not match a map of \(8, 8\) tokens"):
        roll_equivariance(raw_intensity, [x], patch_size=2)
    with pytest.raises(
        ShapeError, match=r"size=\(8, 8\) with shift \(1, 0\) must fit into the image, got \(8, 8\) px"
    ):
        crop_shift(raw_intensity, [x], (8, 8), shifts=[(1, 0)], patch_size=1)
    with pytest.raises(ShapeError, match="must overlap, got margin=2"):
        crop_shift(raw_intensity, [x], (4, 4), shifts=[(1, 0)], patch_size=1, margin=2)
    with pytest.raises(OptionError, match="'invariant_share' is defined for groups of poses, got shifts"):
        roll_equivariance(raw_intensity, [x], patch_size=1, measures=["invariant_share"])
