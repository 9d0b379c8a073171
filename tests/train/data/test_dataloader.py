"""Batches: a step does not depend on the process, the worker and the time of loading."""

import itertools
import json
import pickle
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.products import slow_except
from tests.train.random_images import PLAIN, Numbers, RandomImages, take
from vispe.errors import InputError, OptionError
from vispe.train.data import Augment, Batches, ConcatSource, FolderSource, Mixture, TarSource
from vispe.train.data.sampler import Order

POOL = (Path(__file__).resolve().parents[3] / "../shared/data/pretrain").resolve()
EVERYTHING = Augment(pose=True, roll=4, brightness=0.2, contrast=0.3, noise=0.1)


# of 10 images and seed 0, for ever
FIRST_EPOCHS = [8, 2, 4, 6, 7, 0, 3, 1, 9, 5, 4, 3, 1, 5, 9, 2, 8, 6, 7, 0]
SHAPES = [(17, 23), (16, 12), (40, 16), (12, 12), (13, 31), (24, 19), (16, 16)]


def _batches(source=None, img_size=(12, 8), batch_size=6, **options):
    return Batches(
        source or RandomImages(SHAPES),
        img_size,
        batch_size,
        seed=options.pop("seed", 3),
        augment=EVERYTHING,
        **options,
    )


@pytest.mark.parametrize("mixed", [False, True])
def test_a_step_does_not_depend_on_the_start(mixed):
    source = (
        Mixture([RandomImages(SHAPES), RandomImages(SHAPES[:3], seed=9)], [2, 1])
        if mixed
        else RandomImages(SHAPES)
    )
    full = take(_batches(source).from_step(), 9)
    for step in range(9):
        resumed = take(_batches(source).from_step(step), 9 - step)
        assert all(torch.equal(a, b) for a, b in zip(resumed, full[step:], strict=True)), step
    shared = _batches(source)
    # one object, any order
    assert all(torch.equal(shared.load(step), full[step]) for step in (8, 0, 5, 5, 2))
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(full, 2))
    assert not torch.equal(_batches(source, seed=4).load(0), full[0])
    assert torch.equal(pickle.loads(pickle.dumps(shared)).load(7), full[7])


@pytest.mark.parametrize("world", [2, 3, 6])
def test_ranks_share_the_rows_of_one_process(world):
    full = take(_batches().from_step(), 5)
    ranks = [_batches(rank=rank, world_size=world) for rank in range(world)]
    for step, batch in enumerate(full):
        for rank, batches in enumerate(ranks):
            local = batches.load(step)
            assert torch.equal(local, batch[rank::world])
            assert np.array_equal(batches.indices(step), _batches().indices(step))
    assert len({b.fingerprint() for b in (_batches(), *ranks)}) == 1


@pytest.mark.parametrize("world", slow_except([1, 2], [2]))
def test_workers_give_equal_batches_and_do_not_change_random_numbers(world):
    single_process = take(_batches(rank=world - 1, world_size=world).from_step(2), 7)
    before = torch.get_rng_state()
    working = _batches(rank=world - 1, world_size=world, num_workers=2)
    first = working.from_step(2)
    second = working.from_step(4)  # two at once do not disturb each other
    for step, batch in enumerate(single_process):
        assert torch.equal(next(first), batch)
        if step >= 2:
            assert torch.equal(next(second), batch)
    assert torch.equal(torch.get_rng_state(), before)


def test_rows_do_not_depend_on_the_number_of_threads():
    source = RandomImages([(301, 417)] * 2)
    batches = Batches(source, (224, 210), 2, augment=Augment(pose=True, roll=14, contrast=0.3, noise=0.1))
    one = batches.load(0)
    torch.set_num_threads(2)
    try:
        assert torch.equal(batches.load(0), one)
    finally:
        torch.set_num_threads(1)


def test_an_error_in_a_worker_is_one_sentence():
    batches = _batches(RandomImages(SHAPES, damaged=range(7)), num_workers=1)
    with pytest.raises(InputError) as error:
        next(batches.from_step(0))
    number = batches.indices(0)[0]
    assert str(error.value) == f"image {number} is truncated; copy it again."
    with pytest.raises(InputError, match="is truncated"):
        next(_batches(RandomImages(SHAPES, damaged=range(7))).from_step(0))


@pytest.mark.parametrize(("count", "batch"), [(7, 1), (7, 3), (7, 7), (5, 12), (1, 4)])
def test_every_image_occurs_once_in_an_epoch(count, batch):
    batches = Batches(Numbers([(4, 4)] * count), 4, batch, seed=8, **PLAIN)
    steps = -(-6 * count // batch)
    rows = np.concatenate([batches.indices(step) for step in range(steps)])
    epochs = [rows[e * count : (e + 1) * count].tolist() for e in range(6)]
    assert all(sorted(epoch) == list(range(count)) for epoch in epochs)
    assert count < 5 or len(set(map(tuple, epochs))) == 6
    loaded = torch.cat([batches.load(step)[:, 0, 0, 0] for step in range(steps)])
    assert (1000 * loaded).round().long().tolist() == rows.tolist()
    other = Batches(Numbers([(4, 4)] * count), 4, batch, seed=9, **PLAIN)
    assert count < 5 or not np.array_equal(other.indices(0), batches.indices(0)) or batch == 1


def test_permutations_are_even_and_stable():
    actual = Counter(tuple(Order([(0, 3, 1)], seed)(np.arange(3)).tolist()) for seed in range(1200))
    assert len(actual) == 6
    assert max(abs(n - 200) for n in actual.values()) < 60  # 4.6 standard deviations
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
        indices = numbers[parts == part] - first
        for e in range(len(indices) // size):
            assert sorted(indices[e * size : (e + 1) * size]) == list(range(size))
    assert len(batches) == 48


def test_a_concat_is_sampled_like_one_source():
    source = ConcatSource([Numbers([(4, 4)] * 5), Numbers([(4, 4)] * 2)])
    order = np.concatenate([Batches(source, 4, 7).indices(step) for step in range(3)])
    assert all(sorted(order[e * 7 : e * 7 + 7]) == list(range(7)) for e in range(3))


def test_descriptions_and_fingerprints():
    description = json.loads(json.dumps(_batches().describe()))
    assert description["augment"] == {
        "pose": True,
        "roll": 4,
        "brightness": 0.2,
        "contrast": 0.3,
        "noise": 0.1,
    }
    assert description["source"]["kind"] == "pictures"
    assert (description["img_size"], description["batch_size"], description["pictures"]) == ([12, 8], 6, 7)
    base = {"img_size": 12, "batch_size": 6}
    changes = ({}, {"img_size": (12, 16)}, {"batch_size": 4}, {"seed": 1}, {"resize": 30}, {"crop": "centre"},
               {"small": "error"}, {"augment": Augment(pose=True)}, {"mean": (0, 0, 0)},
               {"std": (1, 1, 1)})  # fmt: skip
    prints = [Batches(RandomImages(SHAPES), **{**base, **change}).fingerprint() for change in changes]
    assert len(set(prints)) == len(changes)
    assert Batches(RandomImages(SHAPES), [12, 12], 6, num_workers=2).fingerprint() == prints[0]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"batch_size": 0}, "batch_size needs an integer of 1 or more, got batch_size=0"),
        ({"batch_size": 5, "world_size": 2}, "batch_size must be a multiple of world_size=2, got 5"),
        ({"rank": 2, "world_size": 2}, "rank must be below world_size=2, got 2"),
        ({"seed": -1}, "seed needs an integer of 0 or more, got seed=-1"),
        ({"num_workers": -1}, "num_workers needs an integer of 0 or more, got num_workers=-1"),
        ({"img_size": (12, 0)}, "img_size needs an integer of 1 or more, got img_size=0"),
        ({"img_size": 12.5}, "img_size needs an integer of 1 or more, got img_size=12.5"),
        ({"img_size": (12, 12, 3)}, "must be a height and a width"),
        ({"crop": "middle"}, "crop must be one of random, centre, got 'middle'"),
        ({"small": "drop"}, "small must be one of enlarge, skip, error, got 'drop'"),
        ({"resize": "fit"}, "resize must be 'cover', 'none' or a number of pixels, got 'fit'"),
        ({"resize": 11}, "resize needs an integer of 12 or more, got resize=11"),
        ({"mean": (0, 0)}, "must have 3 values each"),
        ({"std": (1, 0, 1)}, "must have 3 values each, std positive"),
        ({"augment": Augment(roll=5)}, r"img_size must be a multiple of roll=5, got \(12, 12\)"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit(options, text):
    with pytest.raises(OptionError, match=text):
        Batches(RandomImages(SHAPES), **{"img_size": 12, "batch_size": 6, **options})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"roll": -1}, "got roll=-1"),
        ({"roll": 1.5}, "got roll=1.5"),
        ({"noise": -0.1}, "got noise=-0.1"),
        ({"contrast": 2}, "got contrast=2"),
    ],
)  # fmt: skip
def test_invalid_augmentations(options, text):
    with pytest.raises(OptionError, match=text):
        Augment(**options)


def test_invalid_steps():
    for call in (_batches().load, _batches().from_step, _batches().indices):
        for step in (-1, 1.5, True):
            with pytest.raises(OptionError, match=r"step needs an integer of 0 or more, got"):
                call(step)


@pytest.mark.skipif(not POOL.exists(), reason="the shared images are not on this machine")
def test_real_images_from_folder_and_tar_are_the_same(tmp_path):
    import tarfile

    folder = FolderSource(POOL / "dsb2018_nuclei")
    with tarfile.open(tmp_path / "nuclei.tar", "w") as tar:
        for file in folder.files[:40]:
            tar.add(file, arcname=f"x/{file.name}")
    subset = FolderSource(folder.files[:40])
    packed = TarSource(tmp_path / "nuclei.tar")
    one = Batches(subset, 96, 8, resize="none", small="skip").load(2)
    two = next(Batches(packed, 96, 8, resize="none", small="skip", num_workers=1).from_step(2))
    assert torch.equal(one, two)
