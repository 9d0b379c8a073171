"""The evaluator against synthetic samples that are rendered exactly at every angle, without interpolation."""

import numpy as np
import pytest
import torch

from vispe.evaluate.rotation import (
    Canvas,
    across_poses,
    angle_consistency,
    angle_equivariance,
    consistency,
    equivariance,
    raw_intensity,
)
from vispe.images.symmetry.label_maps import rotated_window_labels
from vispe.images.textures import disc_packing, random_field, voronoi
from vispe.segment.metrics import mean_iou

SIZE, ANGLES = (72, 72), (20, 45, 90, 130)
SAMPLES = {
    "field": random_field(0, wavelength=16),
    "discs": disc_packing(0),
    "grains": voronoi(0),
}


def rendered(name, degrees=0.0):
    image, classes = SAMPLES[name].render(SIZE, angle=degrees)
    return image.double(), classes.numpy() + 1


def by_grey(name):
    """The class whose grey level is nearest: a segmenter that knows no direction."""
    image, classes = rendered(name)
    levels = torch.tensor([float(image[0][torch.from_numpy(classes == k)].mean()) for k in (1, 2)]).double()

    def segment(x):
        return ((x[:1] - levels[:, None, None]).abs().argmin(0) + 1).numpy()

    return segment


@pytest.mark.parametrize("name", SAMPLES)
def test_rotated_images_and_truths_are_the_rendered_ones(name):
    image, classes = rendered(name)
    canvas = Canvas.fit(SIZE, 1, how="disc")
    disc = canvas.pixels()
    for degrees in ANGLES:
        expected, labels = rendered(name, degrees)
        error = (
            (canvas.pose(image[None], degrees)[0] - expected)[:, disc].norm()
            / expected[:, disc].std()
            / disc.sum() ** 0.5
        )
        assert error < (0.06 * 3**0.5 if degrees % 90 else 1e-6)
        rotated = rotated_window_labels(canvas, classes, degrees)
        actual = mean_iou(np.where(disc, rotated, 0), labels, 2)
        assert actual > 0.9 if degrees % 90 else actual == 1


@pytest.mark.parametrize("name", SAMPLES)
def test_intensity_shows_nothing_above_sampling(name):
    image, _ = rendered(name)
    assert all(
        r.values == 0 for r in equivariance(raw_intensity, [image], measures=["error"], controls=False)
    )
    for actual in angle_equivariance(raw_intensity, [image], angles=ANGLES, patch_size=1):
        assert actual.values[0] <= actual.floor[0] < 0.2


@pytest.mark.parametrize("name", SAMPLES)
def test_a_segmenter_without_direction_is_as_good_at_every_angle(name):
    image, classes = rendered(name)
    s = by_grey(name)
    assert all(r.values == 1 for r in consistency(s, [image], 2))
    rows = {
        (r.transform, r.metric): r
        for r in across_poses(s, [image], 2, [classes], angles=(0, *ANGLES), margin=4)
    }
    assert rows["all poses", "accuracy_spread"].values < 0.05
    assert rows["all poses", "phase_spread"].values < 2.5
    for actual in angle_consistency(s, [image], 2, angles=ANGLES, margin=4):
        assert actual.values > actual.floor - 0.05


def test_a_planted_lean_is_measured_with_its_size_on_a_sample():
    image, classes = rendered("discs")
    s = by_grey("discs")

    def leaning(x):  # blind in the left half: class 1 whatever is there
        out = s(x)
        out[:, : x.shape[-1] // 2] = 1
        return out

    rows = {
        (r.transform, r.metric, r.part): r
        for r in across_poses(leaning, [image], 2, [classes], angles=(0, 90, 180, 270), margin=4)
    }
    canvas = Canvas.fit(SIZE, 4)
    disc = canvas.pixels().numpy()
    right = np.arange(canvas.side) >= canvas.side // 2
    spreads = [
        100 * ((np.rot90(s(canvas.pose(image[None], 0)[0]), k) == 2) & right)[disc].mean() for k in range(4)
    ]
    assert rows["all poses", "phase_spread", "class 2"].values[0] == pytest.approx(np.ptp(spreads), abs=1e-9)
    true = 100 * (rotated_window_labels(canvas, classes, 0) == 2)[disc].mean()
    worst = max((v - true for v in spreads), key=abs)
    assert rows["all poses", "phase_error", "class 2"].values[0] == pytest.approx(worst, abs=1e-9)
    assert rows["all poses", "accuracy_worst", "full"].values[0] < 0.75
