import numpy as np
import pytest
import torch
from sklearn.metrics import adjusted_rand_score, jaccard_score

from tests.evaluate.rotation.cases import F64, field, noise, vit
from vispe.errors import InputError, OptionError, ShapeError
from vispe.evaluate.rotation import (
    D4,
    SavedSegmenter,
    VisionModel,
    across_poses,
    angle_consistency,
    cluster_consistency,
    consistency,
    element,
    phase_consistency,
    quadrant_gap,
    raw_intensity,
    scribble_classifier,
)
from vispe.evaluate.rotation.helpers import scribbles
from vispe.evaluate.rotation.metrics.quadrant_gap import QUADRANTS, quadrants
from vispe.segment.metrics import adjusted_rand_index, class_percentages, mean_iou, without_borders


def bright(image):
    """Class 2 where the field is positive."""
    return (image[0] > 0).numpy().astype(np.int64) + 1


def leaning(image):
    """The same, but less and less of it towards the right."""
    ramp = torch.linspace(-1, 1, image.shape[-1], dtype=image.dtype)
    return (image[0] > ramp).numpy().astype(np.int64) + 1


def row(rows, transform, metric, part="full", control=False):
    (actual,) = [
        r for r in rows if (r.transform, r.metric, r.part, r.control) == (transform, metric, part, control)
    ]
    return actual


def test_label_numbers_are_those_of_scikit_learn():
    generator = np.random.default_rng(0)
    a, b = generator.integers(0, 4, (2, 13, 17))
    both = (a > 0) & (b > 0)
    assert mean_iou(a, b, 3) == pytest.approx(jaccard_score(a[both], b[both], average="macro"))
    assert adjusted_rand_index(a, b) == pytest.approx(adjusted_rand_score(a[both], b[both]))
    assert mean_iou(a, b, 5) == mean_iou(a, b, 3)  # classes in neither map do not count
    assert np.isnan(mean_iou(a, b * 0, 3))
    np.testing.assert_allclose(class_percentages(np.array([[0, 1, 1, 3]]), 3), [200 / 3, 0, 100 / 3])


def test_borders_of_classes_are_left_out_but_not_those_of_the_image():
    labels = np.ones((5, 7), int)
    labels[:, 4:] = 2
    labels[0, 0] = 0
    expected = labels.copy()
    expected[:, 3:5] = 0
    np.testing.assert_array_equal(without_borders(labels), expected)
    np.testing.assert_array_equal(without_borders(labels, 0), labels)


def test_consistency_is_one_for_intensity_and_known_for_a_leaning_threshold():
    images = [field((20, 26)), field((15, 15), 1)]
    for actual in consistency(bright, images, 2):
        assert actual.values.tolist() == [1, 1]
    rows = consistency(leaning, images, 2)
    for g in D4[1:]:
        for k, image in enumerate(images):
            restored = g.undo(leaning(g.apply(image)))
            assert row(rows, g.name, "miou").values[k] == mean_iou(leaning(image), restored, 2)
    assert row(rows, "vflip", "miou").values.tolist() == [1, 1]  # which the lean does not see
    assert row(rows, "hflip", "miou").values.max() < 0.8
    mean = np.mean([row(rows, g.name, "ari").values for g in D4[1:]], axis=0)
    np.testing.assert_allclose(row(rows, "D4", "ari").values, mean)
    assert row(rows, "identity", "miou", control=True).values.tolist() == [1, 1]


def test_consistency_at_any_angle_is_near_its_floor_for_intensity():
    images = [field((64, 64), finest=0.05)]
    rows = angle_consistency(bright, images, 2, angles=(0, 30, 90), margin=4)
    assert row(rows, "0°", "miou").values == 1
    assert row(rows, "90°", "ari").values == row(rows, "90°", "ari").floor == 1
    tilted = row(rows, "30°", "miou")
    assert 0.9 < tilted.floor[0] < 1
    assert tilted.values[0] > tilted.floor[0] - 0.05
    bad = row(angle_consistency(leaning, images, 2, angles=(180,), margin=4), "180°", "miou")
    assert bad.effect().mean < -0.1


def test_accuracy_across_poses_with_truth_that_is_exact_at_every_angle():
    images = [field((72, 72), k, finest=0.05) for k in range(2)]
    truths = [bright(x) for x in images]
    rows = across_poses(bright, images, 2, truths, margin=4, names=["dark", "bright"])
    for angle in range(0, 360, 15):
        actual = row(rows, f"{angle}°", "accuracy")
        assert (actual.values > 0.97).all()
        assert angle % 90 or actual.values.tolist() == [1, 1]
    assert row(rows, "all poses", "accuracy_worst").values.min() > 0.97
    assert row(rows, "all poses", "accuracy_spread").values.max() < 0.03
    for name in ("dark", "bright"):
        assert row(rows, "all poses", "phase_spread", name).values.max() < 1
        assert abs(row(rows, "all poses", "phase_error", name).values).max() < 1


def test_phase_error_compares_the_labelled_pixels_only():
    images = [field((72, 72), k) for k in range(2)]
    truths = [bright(x) for x in images]
    for truth in truths:
        truth[:, :44] = 0
    rows = across_poses(bright, images, 2, truths, angles=(0, 90, 180), margin=4)
    for name in ("class 1", "class 2"):
        assert row(rows, "all poses", "phase_error", name).values.tolist() == [0, 0]
        result = row(
            across_poses(bright, images, 2, angles=(0, 90), margin=4), "all poses", "phase_spread", name
        )
        assert row(rows, "all poses", "phase_spread", name).values.tolist() == result.values.tolist()


def test_classes_beyond_the_number_of_classes_are_refused_without_a_truth():
    with pytest.raises(InputError, match="class 2, but n_classes=1"):
        across_poses(bright, [field((40, 40))], 1, angles=(0,), margin=4)


def test_a_leaning_threshold_is_caught_by_accuracy_and_phase_fractions():
    side = 40
    stripes = (torch.arange(side) >= side // 2).to(F64) * 4 - 2  # right half bright, by a wide margin
    image = stripes.expand(1, side, side).clone()

    def half(x):  # sees class 2 in the right half whatever is there
        return np.tile(1 + (np.arange(x.shape[-1]) >= x.shape[-1] // 2), (x.shape[-2], 1))

    truth = half(image)
    rows = across_poses(half, [image], 2, [truth], angles=(0, 90, 180), margin=4, how="disc", border=0)
    assert row(rows, "0°", "accuracy").values == 1
    assert row(rows, "180°", "accuracy").values == 0
    assert row(rows, "90°", "accuracy").values == pytest.approx(1 / 3)
    over = [row(rows, "all poses", f"accuracy_{k}").values[0] for k in ("mean", "worst", "spread", "std")]
    np.testing.assert_allclose(over, [4 / 9, 0, 1, np.std([1, 1 / 3, 0])])
    assert row(rows, "all poses", "phase_spread", "class 1").values == 0

    def growing(x):  # a share of class 2 that depends on the pose: 3/4 when the bright half is at the top
        level = 1.0 if float(x[0, 0].mean()) > 1 else -3.0
        return (x[0] > level).numpy().astype(np.int64) + 1

    rows = across_poses(growing, [image], 2, angles=(0, 90, 180), margin=4, how="disc")
    assert row(rows, "all poses", "phase_spread", "class 2").values == pytest.approx(50)
    rows = across_poses(growing, [image], 2, [truth], angles=(0, 90, 180), margin=4, how="disc")
    assert row(rows, "all poses", "phase_error", "class 2").values == pytest.approx(50)
    assert row(rows, "all poses", "phase_error", "class 1").values == pytest.approx(-50)


def test_phases_of_the_patch_grid():
    images = [field((24, 32))]
    for actual in phase_consistency(bright, images, 2, 4):
        assert actual.transform == "roll, random phases"
        assert actual.values == 1

    def blocks(image):  # one label for each patch
        means = torch.nn.functional.avg_pool2d(image[None], 4)[0, :1]
        return bright(means.repeat_interleave(4, 1).repeat_interleave(4, 2))

    every = phase_consistency(blocks, images, 2, 4, phases=None)
    expected = []
    for dy in range(4):
        for dx in range(4):
            if (dy, dx) != (0, 0):
                restored = np.roll(blocks(torch.roll(images[0], (dy, dx), (1, 2))), (-dy, -dx), (0, 1))
                expected.append(mean_iou(blocks(images[0]), restored, 2))
    assert row(every, "roll, all phases", "miou").values[0] == pytest.approx(np.mean(expected))
    values = [phase_consistency(blocks, images, 2, 4, phases=3, seed=k)[0].values[0] for k in (0, 0, 1)]
    assert values[0] == values[1] != values[2]


def test_clusters_of_an_equivariant_map_stay_and_of_a_biased_one_move():
    images = [field((12, 12)), field((12, 12), 1), field((10, 14), 2)]
    rows = cluster_consistency(raw_intensity, images, 3, batch_size=2, elements=[element("rot90"), D4[4]])
    for actual in rows:
        if actual.part == "clusters fitted once":
            assert actual.values.tolist() == [1, 1, 1]
        else:
            assert (actual.values > 0.5).all()
    biased = cluster_consistency(
        lambda x: x + 3 * torch.linspace(-1, 1, x.shape[-1], dtype=F64), images, 3, refit=False
    )
    assert {r.part for r in biased} == {"clusters fitted once"}
    assert row(biased, "D4", "miou", "clusters fitted once").values.max() < 0.8
    assert row(biased, "vflip", "ari", "clusters fitted once").values.tolist() == [1, 1, 1]
    with pytest.raises(OptionError, match="clusters=5 is more than the 2 different tokens"):
        cluster_consistency(lambda x: (x[:, :1] > 0).double(), images, 5)


def test_quadrants_and_scribbles():
    areas = quadrants((5, 6))
    assert [int(a.sum()) for a in areas] == [6, 6, 6, 6]
    assert sum(a.astype(int) for a in areas)[2].sum() == 0  # the middle row is in none
    truth = np.ones((5, 6), int)
    truth[:, :2] = 2
    marks = scribbles(truth, areas[0], 3, np.random.default_rng(0))
    assert ((marks == 0) | areas[0]).all()
    assert [(marks == k).sum() for k in (1, 2)] == [2, 3]
    assert (marks[marks > 0] == truth[marks > 0]).all()


def test_the_quadrant_gap_is_zero_for_intensity_and_negative_for_features_that_know_their_position():
    images = [field((40, 40), k, finest=0.08) for k in range(2)]
    truths = [bright(x) for x in images]
    fair = quadrant_gap(scribble_classifier(lambda x: x[:, :1]), images, truths, 2, budget=20)
    assert abs(row(fair, "four corners", "quadrant_gap").values).max() < 0.05

    def positional(x):  # content fades, position is loud
        rows, cols = (torch.linspace(-1, 1, n, dtype=F64) for n in x.shape[-2:])
        position = torch.stack(torch.meshgrid(rows, cols, indexing="ij"))
        waves = torch.cat(
            [(k * position).sin() for k in (2, 5, 9)] + [(k * position).cos() for k in (2, 5, 9)]
        )
        return torch.cat([x[:, :1] + 2 * noise(x.shape[-2:], 9, 1), waves.expand(len(x), -1, -1, -1)], 1)

    leaky = quadrant_gap(scribble_classifier(positional), images, truths, 2, budget=20)
    assert row(leaky, "four corners", "quadrant_gap").values.max() < -0.05
    gaps = np.mean([row(leaky, name, "quadrant_gap").values for name in QUADRANTS], axis=0)
    np.testing.assert_allclose(row(leaky, "four corners", "quadrant_gap").values, gaps)
    even = [row(leaky, n, "quadrant_gap", "spread everywhere", True).values for n in QUADRANTS]
    np.testing.assert_allclose(np.sum(even, axis=0), 0, atol=1e-12)
    one = np.ones((40, 40), int)
    assert np.isnan(quadrant_gap(bright, images[:1], [one], 2)[0].values).all()


def test_a_transformer_with_scribbles():
    f = VisionModel(vit("alibi2d", depth=1))
    image = field((42, 42), finest=0.02)
    rows = quadrant_gap(scribble_classifier(f), [image], [bright(image)], 2, budget=10)
    assert len(rows) == 12
    assert np.isfinite(rows[0].values).all()


def test_a_saved_model_is_a_segmenter(tmp_path):
    from PIL import Image

    from vispe.segment.pipeline import segment

    image = (np.asarray(field((32, 40), finest=0.05)[0]) > 0) * 200 + 20
    Image.fromarray(image.astype(np.uint8)).save(tmp_path / "a.png")
    segment([tmp_path / "a.png"], tmp_path / "out", cluster=2)
    s = SavedSegmenter(tmp_path / "out" / "model.vispe", device="cpu")
    assert s.n_classes == 2
    x = torch.from_numpy((image - 20) / 200)[None].float()
    labels = np.asarray(Image.open(tmp_path / "out" / "a_seg.png"))
    assert mean_iou(s(x).astype(int), labels.astype(int), 2) == 1
    rows = consistency(s, [x], 2, elements=D4[:2])
    assert row(rows, "identity", "miou", control=True).values == 1
    assert row(rows, "mean of 1 pose", "miou").values > 0.98  # filters have no direction
    with pytest.raises(ShapeError, match=r"must have 1 channel, as in training, got \(3, 32, 40\)"):
        s(x.expand(3, -1, -1))


def test_segmentations_that_cannot_be_used_are_refused():
    x = noise((16, 16))
    with pytest.raises(
        ShapeError, match=r"returned labels of shape \(8, 8\), but the image has \(16, 16\) px"
    ):
        consistency(lambda image: np.ones((8, 8), int), [x], 2)
    with pytest.raises(InputError, match="returned float64 values"):
        consistency(lambda image: np.ones((16, 16)), [x], 2)
    with pytest.raises(InputError, match="contains class 3, but n_classes=2"):
        consistency(lambda image: np.full((16, 16), 3), [x], 2)
    with pytest.raises(InputError, match="one entry per image, got 1 and image 1"):
        across_poses(bright, [x, x], 2, [bright(x)], angles=(0,), margin=2, how="disc")
    with pytest.raises(ShapeError, match=r"The truth of image 0 has labels of shape \(4, 4\)"):
        across_poses(bright, [x], 2, [np.ones((4, 4), int)], angles=(0,), margin=2, how="disc")
    with pytest.raises(OptionError, match="expected 2 names and at least one angle, got 1 names and 1 angle"):
        across_poses(bright, [x], 2, angles=(0,), names=["a"])
    with pytest.raises(OptionError, match="patch_size needs an integer of 2 or more, got patch_size=1"):
        phase_consistency(bright, [x], 2, 1)
