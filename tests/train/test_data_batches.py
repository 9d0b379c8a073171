"""Batches: every step is the same wherever and whenever it is made, and each random change is what it says."""

import itertools
import json
import pickle
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from vispe.errors import InputError, OptionError
from vispe.train.data import Augment, Batches, Concat, FolderSource, Mixture, Source, TarSource
from vispe.train.data.augment import changed, posed, window
from vispe.train.data.order import Order

POOL = (Path(__file__).resolve().parents[2] / "../shared/data/pretrain").resolve()
PLAIN = {"mean": (0, 0, 0), "std": (1, 1, 1)}
EVERYTHING = Augment(pose=True, roll=4, brightness=0.2, contrast=0.3, noise=0.1)


class Pictures(Source):
    """Random pictures of given shapes; `damaged` ones raise."""

    def __init__(self, shapes, seed=0, damaged=()):
        self.shapes, self.seed, self.damaged = list(shapes), seed, damaged

    def __len__(self):
        return len(self.shapes)

    def __getitem__(self, i):
        if i in self.damaged:
            raise InputError(f"{self.name(i)} is truncated; copy it again.")
        h, w = self.shapes[i]
        rng = np.random.default_rng([self.seed, i])
        grey = torch.from_numpy(rng.random((1, h, w), np.float32)).expand(3, -1, -1)
        return grey if i % 2 else torch.from_numpy(rng.random((3, h, w), np.float32))

    def describe(self):
        return {"kind": "pictures", "count": len(self), "where": "here", "licence": ""}

    def fingerprint(self):
        return f"{self.seed}{self.shapes}"


class Numbers(Pictures):
    """Picture i is i / 1000 everywhere."""

    def __getitem__(self, i):
        return torch.full((3, *self.shapes[i]), i / 1000)


FIRST_EPOCHS = [
    8,
    2,
    4,
    6,
    7,
    0,
    3,
    1,
    9,
    5,
    4,
    3,
    1,
    5,
    9,
    2,
    8,
    6,
    7,
    0,
]  # of 10 pictures and seed 0, for ever
SHAPES = [(17, 23), (16, 12), (40, 16), (12, 12), (13, 31), (24, 19), (16, 16)]


def _batches(source=None, size=(12, 8), batch=6, **options):
    return Batches(
        source or Pictures(SHAPES), size, batch, seed=options.pop("seed", 3), augment=EVERYTHING, **options
    )


def _take(iterator, count):
    return list(itertools.islice(iterator, count))


@pytest.mark.parametrize("mixed", [False, True])
def test_a_step_is_the_same_from_wherever_one_starts(mixed):
    source = Mixture([Pictures(SHAPES), Pictures(SHAPES[:3], seed=9)], [2, 1]) if mixed else Pictures(SHAPES)
    whole = _take(_batches(source).from_step(), 9)
    for step in range(9):
        again = _take(_batches(source).from_step(step), 9 - step)
        assert all(torch.equal(a, b) for a, b in zip(again, whole[step:], strict=True)), step
    shared = _batches(source)
    assert all(
        torch.equal(shared.load(step), whole[step]) for step in (8, 0, 5, 5, 2)
    )  # one object, any order
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(whole, 2))
    assert not torch.equal(_batches(source, seed=4).load(0), whole[0])
    assert torch.equal(pickle.loads(pickle.dumps(shared)).load(7), whole[7])


@pytest.mark.parametrize("world", [2, 3, 6])
def test_ranks_share_the_rows_of_one_process(world):
    whole = _take(_batches().from_step(), 5)
    ranks = [_batches(rank=rank, world=world) for rank in range(world)]
    for step, batch in enumerate(whole):
        for rank, batches in enumerate(ranks):
            own = batches.load(step)
            assert torch.equal(own, batch[rank::world])
            assert np.array_equal(batches.indices(step), _batches().indices(step))
    assert len({b.fingerprint() for b in (_batches(), *ranks)}) == 1


@pytest.mark.parametrize("world", [1, 2])
def test_workers_give_the_same_and_leave_random_numbers_alone(world):
    alone = _take(_batches(rank=world - 1, world=world).from_step(2), 7)
    before = torch.get_rng_state()
    working = _batches(rank=world - 1, world=world, workers=2)
    first = working.from_step(2)
    second = working.from_step(4)  # two at once do not disturb each other
    for step, batch in enumerate(alone):
        assert torch.equal(next(first), batch)
        if step >= 2:
            assert torch.equal(next(second), batch)
    assert torch.equal(torch.get_rng_state(), before)


def test_rows_do_not_depend_on_the_number_of_threads():
    source = Pictures([(301, 417)] * 2)
    batches = Batches(source, (224, 210), 2, augment=Augment(pose=True, roll=14, contrast=0.3, noise=0.1))
    one = batches.load(0)
    torch.set_num_threads(2)
    try:
        assert torch.equal(batches.load(0), one)
    finally:
        torch.set_num_threads(1)


def test_an_error_in_a_worker_is_one_sentence():
    batches = _batches(Pictures(SHAPES, damaged=range(7)), workers=1)
    with pytest.raises(InputError) as caught:
        next(batches.from_step(0))
    number = batches.indices(0)[0]
    assert str(caught.value) == f"picture {number} is truncated; copy it again."
    with pytest.raises(InputError, match="is truncated"):
        next(_batches(Pictures(SHAPES, damaged=range(7))).from_step(0))


@pytest.mark.parametrize(("count", "batch"), [(7, 1), (7, 3), (7, 7), (5, 12), (1, 4)])
def test_every_picture_comes_once_in_an_epoch(count, batch):
    batches = Batches(Numbers([(4, 4)] * count), 4, batch, seed=8, **PLAIN)
    steps = -(-6 * count // batch)
    rows = np.concatenate([batches.indices(step) for step in range(steps)])
    epochs = [rows[e * count : (e + 1) * count].tolist() for e in range(6)]
    assert all(sorted(epoch) == list(range(count)) for epoch in epochs)
    assert count < 5 or len(set(map(tuple, epochs))) == 6
    seen = torch.cat([batches.load(step)[:, 0, 0, 0] for step in range(steps)])
    assert (1000 * seen).round().long().tolist() == rows.tolist()
    other = Batches(Numbers([(4, 4)] * count), 4, batch, seed=9, **PLAIN)
    assert count < 5 or not np.array_equal(other.indices(0), batches.indices(0)) or batch == 1


def test_permutations_are_even_and_stable():
    found = Counter(tuple(Order([(0, 3, 1)], seed)(np.arange(3)).tolist()) for seed in range(1200))
    assert len(found) == 6
    assert max(abs(n - 200) for n in found.values()) < 60  # 4.6 standard deviations
    assert Order([(0, 10, 1)], 0)(np.arange(20)).tolist() == FIRST_EPOCHS


def test_mixtures_are_exact_in_every_period_and_through_each_source():
    sizes, weights = (5, 40, 3), (3, 2, 0.5)
    source = Mixture([Numbers([(4, 4)] * n) for n in sizes], weights)
    firsts, rows, period = np.cumsum((0, *sizes))[:-1], source.rows, source.period
    assert (sum(rows), rows[0] * 2, rows[1]) == (period, rows[1] * 3, rows[2] * 4)
    batches = Batches(source, 4, 24, seed=2)
    numbers = np.concatenate([batches.indices(step) for step in range(-(-3 * period // 24))])[: 3 * period]
    parts = np.searchsorted(firsts, numbers, side="right") - 1
    for p in range(3):
        assert np.bincount(parts[p * period : (p + 1) * period]).tolist() == list(rows)
    assert not np.array_equal(parts[:period], parts[period : 2 * period])
    for part, (first, size) in enumerate(zip(firsts, sizes, strict=True)):
        own = numbers[parts == part] - first
        for e in range(len(own) // size):
            assert sorted(own[e * size : (e + 1) * size]) == list(range(size))
    assert len(batches) == 48


def test_a_concat_is_gone_through_like_one_source():
    source = Concat([Numbers([(4, 4)] * 5), Numbers([(4, 4)] * 2)])
    order = np.concatenate([Batches(source, 4, 7).indices(step) for step in range(3)])
    assert all(sorted(order[e * 7 : e * 7 + 7]) == list(range(7)) for e in range(3))


def _resized(picture, large):
    return F.interpolate(picture[None], large, mode="bilinear", antialias=True, align_corners=False)[0]


def test_centre_windows_cover_resize_or_keep():
    source = Pictures([(40, 27)])
    picture = source[0]

    def only(size, **options):
        return Batches(source, size, 1, crop="centre", **PLAIN, **options).load(0)[0]

    torch.testing.assert_close(only((12, 8)), _resized(picture, (12, 8)))
    torch.testing.assert_close(only((9, 9)), _resized(picture, (13, 9))[:, 2:11])
    torch.testing.assert_close(only((9, 14), resize=18), _resized(picture, (27, 18))[:, 9:18, 2:16])
    torch.testing.assert_close(only((9, 14), resize="none"), picture[:, 16:25, 7:21])
    assert torch.equal(only((40, 27)), picture)
    normal = Batches(source, (40, 27), 1, mean=(0.1, 0.2, 0.3), std=(0.5, 1, 2)).load(0)[0]
    for c, (mean, std) in enumerate(((0.1, 0.5), (0.2, 1), (0.3, 2))):
        torch.testing.assert_close(normal[c], (picture[c] - mean) / std)


def test_random_windows_lie_everywhere():
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


def test_tiny_pictures_are_enlarged_left_out_or_refused():
    source = Pictures([(30, 30), (1, 1), (5, 40), (12, 12), (2, 3)])
    batches = Batches(source, 12, 5, **PLAIN)
    with pytest.warns(
        UserWarning, match=r"too small for size=\(12, 12\) with resize=cover are enlarged, such as: "
    ) as caught:
        found = _take(batches.from_step(0), 3)
    assert len(caught) == 1
    place = batches.indices(0).tolist().index(1)
    assert torch.allclose(found[0][place], source[1].expand(-1, 12, 12))
    kept = Batches(source, 12, 4, small="skip", **PLAIN)
    assert len(kept) == 2
    assert kept.describe()["pictures"] == 2
    rows = np.concatenate([kept.indices(step) for step in range(6)])
    assert all(sorted(rows[e * 2 : e * 2 + 2]) == [0, 3] for e in range(12))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept.load(3)
    with pytest.raises(
        InputError, match=r"picture [124] has \d+ x \d+ pixels, too few for size=\(12, 12\) .* set small="
    ):
        Batches(source, 12, 5, small="error").load(0)
    with pytest.raises(InputError, match=r"no picture is large enough for size=\(64, 64\)"):
        Batches(source, 64, 5, small="skip")
    mixture = Mixture([source, Pictures([(3, 3)])], [1, 1])
    with pytest.raises(InputError, match="no picture of source 1 of the mixture is large enough"):
        Batches(mixture, 12, 5, small="skip")
    both = Batches(Mixture([source, Pictures([(3, 3), (20, 20)])], [1, 1]), 12, 256, small="skip")
    assert {int(k): int(n) for k, n in zip(*np.unique(both.indices(1), return_counts=True), strict=True)} == {
        0: 64, 3: 64, 6: 128,
    }  # fmt: skip


def test_workers_tell_of_enlarged_pictures_once():
    batches = Batches(Pictures([(3, 3)] * 3), 6, 2, workers=1)
    with pytest.warns(UserWarning, match="are enlarged") as caught:
        _take(batches.from_step(0), 4)
    assert len(caught) == 1


def test_what_small_means_for_turned_pictures():
    source = Pictures([(12, 30), (30, 30)])
    assert len(Batches(source, (12, 20), 1, small="skip")) == 2
    assert len(Batches(source, (12, 20), 1, small="skip", augment=Augment(pose=True))) == 1
    assert len(Batches(source, (12, 20), 1, small="skip", resize=25)) == 1
    assert len(Batches(source, (12, 20), 1, small="skip", resize="none")) == 2


def test_all_eight_poses_come_alike_often():
    source = Pictures([(9, 9)])
    batches = Batches(source, 9, 800, augment=Augment(pose=True), **PLAIN)
    poses = [posed(source[0], k) for k in range(8)]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(poses, 2))
    rows = batches.load(0)
    hits = [int((rows == pose).all(3).all(2).all(1).sum()) for pose in poses]
    assert sum(hits) == 800
    assert min(hits) > 60
    wide = Batches(Pictures([(20, 31)]), (8, 14), 40, augment=Augment(pose=True), **PLAIN)
    assert wide.load(0).shape == (40, 3, 8, 14)


def test_rolls_are_by_whole_patches():
    source = Pictures([(8, 12)])
    batches = Batches(source, (8, 12), 200, augment=Augment(roll=4), **PLAIN)
    shifts = [source[0].roll((4 * a, 4 * b), (1, 2)) for a in range(2) for b in range(3)]
    hits = [sum(torch.equal(row, shift) for row in batches.load(0)) for shift in shifts]
    assert sum(hits) == 200
    assert min(hits) > 12


def test_brightness_contrast_and_noise():
    source = Pictures([(30, 40)])
    picture = source[0] * 0.2 + 0.4

    def values(augment, draws, seed=0):
        return changed(picture, augment, np.array(draws), np.random.default_rng(seed))

    mean = picture.mean()
    torch.testing.assert_close(values(Augment(brightness=0.2), [0, 0, 0.75, 0, 0]), picture + 0.1)
    torch.testing.assert_close(
        values(Augment(contrast=0.4), [0, 0, 0, 0.25, 0]), mean + 0.8 * (picture - mean)
    )
    noisy = values(Augment(noise=0.1), [0, 0, 0, 0, 0.5]) - picture
    torch.testing.assert_close(noisy[0], noisy[2], rtol=0, atol=1e-6)
    assert abs(noisy[0].std() - 0.05) < 0.005
    assert abs(noisy[0].mean()) < 0.005
    assert values(Augment(brightness=1.0), [0, 0, 1, 0, 0]).max() <= 1
    assert torch.equal(values(Augment(), [0.5] * 5), picture)
    bright = Batches(source, (30, 40), 60, augment=Augment(brightness=0.1), **PLAIN).load(0).mean((1, 2, 3))
    assert bright.max() - bright.min() > 0.15


def test_one_option_does_not_change_what_others_draw():
    source = Pictures([(30, 40)] * 4)
    plain = Batches(source, 12, 8, seed=1, resize="none", **PLAIN).load(3)
    brighter = Batches(source, 12, 8, seed=1, resize="none", augment=Augment(brightness=1e-6), **PLAIN).load(
        3
    )
    torch.testing.assert_close(brighter, plain, rtol=0, atol=2e-6)


def test_descriptions_and_fingerprints():
    described = json.loads(json.dumps(_batches().describe()))
    assert described["augment"] == {"pose": True, "roll": 4, "brightness": 0.2, "contrast": 0.3, "noise": 0.1}
    assert described["source"]["kind"] == "pictures"
    assert (described["size"], described["batch"], described["pictures"]) == ([12, 8], 6, 7)
    base = {"size": 12, "batch": 6}
    changes = ({}, {"size": (12, 16)}, {"batch": 4}, {"seed": 1}, {"resize": 30}, {"crop": "centre"},
               {"small": "error"}, {"augment": Augment(pose=True)}, {"mean": (0, 0, 0)},
               {"std": (1, 1, 1)})  # fmt: skip
    prints = [Batches(Pictures(SHAPES), **{**base, **change}).fingerprint() for change in changes]
    assert len(set(prints)) == len(changes)
    assert Batches(Pictures(SHAPES), [12, 12], 6, workers=2).fingerprint() == prints[0]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"batch": 0}, "batch=0 is not a whole number of at least 1"),
        ({"batch": 5, "world": 2}, "batch=5 cannot be shared by world=2 processes"),
        ({"rank": 2, "world": 2}, "rank=2 is not below world=2"),
        ({"seed": -1}, "seed=-1 is not a whole number of at least 0"),
        ({"workers": -1}, "workers=-1"),
        ({"size": (12, 0)}, "size=0"),
        ({"size": 12.5}, "size=12.5"),
        ({"size": (12, 12, 3)}, "is not a height and a width"),
        ({"crop": "middle"}, "crop='middle' is not one of random, centre"),
        ({"small": "drop"}, "small='drop' is not one of enlarge, skip, error"),
        ({"resize": "fit"}, "resize='fit' is not 'cover', 'none' or a number"),
        ({"resize": 11}, "resize=11 is not a whole number of at least 12"),
        ({"mean": (0, 0)}, "need 3 values each"),
        ({"std": (1, 0, 1)}, "need 3 values each, std positive"),
        ({"augment": Augment(roll=5)}, r"roll=5 does not divide size=\(12, 12\)"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit(options, text):
    with pytest.raises(OptionError, match=text):
        Batches(Pictures(SHAPES), **{"size": 12, "batch": 6, **options})


@pytest.mark.parametrize(
    ("options", "text"),
    [({"roll": -1}, "=-1 is"), ({"roll": 1.5}, "=1.5 is"), ({"noise": -0.1}, "=-0.1 is"), ({"contrast": 2}, "=2 is")],
)  # fmt: skip
def test_changes_that_cannot_be(options, text):
    with pytest.raises(OptionError, match=text):
        Augment(**options)


def test_steps_that_cannot_be():
    for call in (_batches().load, _batches().from_step, _batches().indices):
        for step in (-1, 1.5, True):
            with pytest.raises(OptionError, match=r"step=.* is not a whole number"):
                call(step)


@pytest.mark.skipif(not POOL.exists(), reason="the shared pictures are not on this machine")
def test_real_pictures_from_folder_and_tar_are_the_same(tmp_path):
    import tarfile

    folder = FolderSource(POOL / "dsb2018_nuclei")
    with tarfile.open(tmp_path / "nuclei.tar", "w") as tar:
        for file in folder.files[:40]:
            tar.add(file, arcname=f"x/{file.name}")
    few = FolderSource(folder.files[:40])
    packed = TarSource(tmp_path / "nuclei.tar")
    one = Batches(few, 96, 8, resize="none", small="skip").load(2)
    two = next(Batches(packed, 96, 8, resize="none", small="skip", workers=1).from_step(2))
    assert torch.equal(one, two)
