"""Windows of images of any size, and random augmentations against their definitions."""

import itertools
import warnings
from collections import Counter

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.train.random_images import PLAIN, Numbers, RandomImages, take
from vispe.errors import InputError
from vispe.train.data import Augment, Batches, Mixture
from vispe.train.data.augmentation import apply_pose, perturb, window


def _resized(image, large):
    return F.interpolate(image[None], large, mode="bilinear", antialias=True, align_corners=False)[0]


def test_centre_windows_cover_resize_or_keep():
    source = RandomImages([(40, 27)])
    image = source[0]

    def only(size, **options):
        return Batches(source, size, 1, crop="centre", **PLAIN, **options).load(0)[0]

    torch.testing.assert_close(only((12, 8)), _resized(image, (12, 8)))
    torch.testing.assert_close(only((9, 9)), _resized(image, (13, 9))[:, 2:11])
    torch.testing.assert_close(only((9, 14), resize=18), _resized(image, (27, 18))[:, 9:18, 2:16])
    torch.testing.assert_close(only((9, 14), resize="none"), image[:, 16:25, 7:21])
    assert torch.equal(only((40, 27)), image)
    normal = Batches(source, (40, 27), 1, mean=(0.1, 0.2, 0.3), std=(0.5, 1, 2)).load(0)[0]
    for c, (mean, std) in enumerate(((0.1, 0.5), (0.2, 1), (0.3, 2))):
        torch.testing.assert_close(normal[c], (image[c] - mean) / std)


def test_random_windows_cover_the_image():
    rows, columns = torch.meshgrid(torch.arange(5.0), torch.arange(7.0), indexing="ij")

    class Ramp(Numbers):
        def __getitem__(self, i):
            return torch.stack([rows / 10, columns / 10, rows / 10])

    batches = Batches(Ramp([(5, 7)]), (4, 4), 100, resize="none", **PLAIN)
    corners = Counter(tuple((10 * row[:2, 0, 0]).round().int().tolist()) for row in batches.load(1))
    assert set(corners) == set(itertools.product(range(2), range(4)))
    assert min(corners.values()) >= 4
    for row in batches.load(2):
        torch.testing.assert_close(row[0] - row[0, 0, 0], rows[:4, :4] / 10)
        torch.testing.assert_close(row[1] - row[1, 0, 0], columns[:4, :4] / 10)


def test_grey_is_resized_like_colour():
    grey = torch.rand(1, 33, 29, generator=torch.Generator().manual_seed(1))
    thin = window(grey.expand(3, -1, -1), (11, 7), "cover", (0.3, 0.6))
    full = window(grey.repeat(3, 1, 1), (11, 7), "cover", (0.3, 0.6))
    assert torch.equal(thin, full)


def test_tiny_images_are_enlarged_skipped_or_raise():
    source = RandomImages([(30, 30), (1, 1), (5, 40), (12, 12), (2, 3)])
    batches = Batches(source, 12, 5, **PLAIN)
    with pytest.warns(
        UserWarning, match=r"too small for img_size=\(12, 12\) with resize=cover are enlarged, such as: "
    ) as warning:
        actual = take(batches.from_step(0), 3)
    assert len(warning) == 1
    position = batches.indices(0).tolist().index(1)
    assert torch.allclose(actual[0][position], source[1].expand(-1, 12, 12))
    stored = Batches(source, 12, 4, small="skip", **PLAIN)
    assert len(stored) == 2
    assert stored.describe()["pictures"] == 2
    rows = np.concatenate([stored.indices(step) for step in range(6)])
    assert all(sorted(rows[e * 2 : e * 2 + 2]) == [0, 3] for e in range(12))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stored.load(3)
    with pytest.raises(
        InputError, match=r"image [124] has \d+ x \d+ pixels, too few for img_size=\(12, 12\) .* Set `small`"
    ):
        Batches(source, 12, 5, small="error").load(0)
    with pytest.raises(InputError, match=r"no image is large enough for img_size=\(64, 64\)"):
        Batches(source, 64, 5, small="skip")
    mixture = Mixture([source, RandomImages([(3, 3)])], [1, 1])
    with pytest.raises(InputError, match="no image of source 1 of the mixture is large enough"):
        Batches(mixture, 12, 5, small="skip")
    both = Batches(Mixture([source, RandomImages([(3, 3), (20, 20)])], [1, 1]), 12, 256, small="skip")
    assert {int(k): int(n) for k, n in zip(*np.unique(both.indices(1), return_counts=True), strict=True)} == {
        0: 64, 3: 64, 6: 128,
    }  # fmt: skip


def test_workers_warn_about_enlarged_images_once():
    batches = Batches(RandomImages([(3, 3)] * 3), 6, 2, num_workers=1)
    with pytest.warns(UserWarning, match="are enlarged") as warning:
        take(batches.from_step(0), 4)
    assert len(warning) == 1


def test_what_small_means_for_rotated_images():
    source = RandomImages([(12, 30), (30, 30)])
    assert len(Batches(source, (12, 20), 1, small="skip")) == 2
    assert len(Batches(source, (12, 20), 1, small="skip", augment=Augment(pose=True))) == 1
    assert len(Batches(source, (12, 20), 1, small="skip", resize=25)) == 1
    assert len(Batches(source, (12, 20), 1, small="skip", resize="none")) == 2


def test_all_eight_poses_occur_equally_often():
    source = RandomImages([(9, 9)])
    batches = Batches(source, 9, 800, augment=Augment(pose=True), **PLAIN)
    poses = [apply_pose(source[0], k) for k in range(8)]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(poses, 2))
    rows = batches.load(0)
    hits = [int((rows == pose).all(3).all(2).all(1).sum()) for pose in poses]
    assert sum(hits) == 800
    assert min(hits) > 60
    wide = Batches(RandomImages([(20, 31)]), (8, 14), 40, augment=Augment(pose=True), **PLAIN)
    assert wide.load(0).shape == (40, 3, 8, 14)


def test_rolls_are_by_whole_patches():
    source = RandomImages([(8, 12)])
    batches = Batches(source, (8, 12), 200, augment=Augment(roll=4), **PLAIN)
    shifts = [source[0].roll((4 * a, 4 * b), (1, 2)) for a in range(2) for b in range(3)]
    hits = [sum(torch.equal(row, shift) for row in batches.load(0)) for shift in shifts]
    assert sum(hits) == 200
    assert min(hits) > 12


def test_brightness_contrast_and_noise():
    source = RandomImages([(30, 40)])
    image = source[0] * 0.2 + 0.4

    def values(augment, draws, seed=0):
        return perturb(image, augment, np.array(draws), np.random.default_rng(seed))

    mean = image.mean()
    torch.testing.assert_close(values(Augment(brightness=0.2), [0, 0, 0.75, 0, 0]), image + 0.1)
    torch.testing.assert_close(values(Augment(contrast=0.4), [0, 0, 0, 0.25, 0]), mean + 0.8 * (image - mean))
    noisy = values(Augment(noise=0.1), [0, 0, 0, 0, 0.5]) - image
    torch.testing.assert_close(noisy[0], noisy[2], rtol=0, atol=1e-6)
    assert abs(noisy[0].std() - 0.05) < 0.005
    assert abs(noisy[0].mean()) < 0.005
    assert values(Augment(brightness=1.0), [0, 0, 1, 0, 0]).max() <= 1
    assert torch.equal(values(Augment(), [0.5] * 5), image)
    bright = Batches(source, (30, 40), 60, augment=Augment(brightness=0.1), **PLAIN).load(0).mean((1, 2, 3))
    assert bright.max() - bright.min() > 0.15


def test_one_option_does_not_change_what_others_draw():
    source = RandomImages([(30, 40)] * 4)
    plain = Batches(source, 12, 8, seed=1, resize="none", **PLAIN).load(3)
    brighter = Batches(source, 12, 8, seed=1, resize="none", augment=Augment(brightness=1e-6), **PLAIN).load(
        3
    )
    torch.testing.assert_close(brighter, plain, rtol=0, atol=2e-6)
