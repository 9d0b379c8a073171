import itertools
import math

import numpy as np
import pytest

from tests.cases import cases
from vispe.errors import InputError, ShapeError
from vispe.segment.materials.crossings import count_crossings
from vispe.segment.materials.directions import STEPS


def adjacent_pixels(step):
    """Return the pixels adjacent to a line along a step, at each position of the longer axis."""
    dy, dx = step
    long = max(abs(dy), abs(dx))
    positions = []
    for t in range(long + 1):
        y, x = t * dy / long, t * dx / long
        ys, xs = {math.floor(y + 1e-9), math.ceil(y - 1e-9)}, {math.floor(x + 1e-9), math.ceil(x - 1e-9)}
        positions.append([(a, b) for a in ys for b in xs])
    return positions


def naive(labels, step, k):
    """Count steps and crossings with plain loops."""
    h, w = labels.shape
    steps = crossings = 0
    for y, x in itertools.product(range(h), range(w)):
        if not (0 <= y + step[0] < h and 0 <= x + step[1] < w):
            continue
        values = [[labels[y + a, x + b] for a, b in position] for position in adjacent_pixels(step)]
        if 0 in itertools.chain(*values):
            continue
        steps += 1
        crossings += min(
            sum((a != b) if k == 0 else ((a == k) != (b == k)) for a, b in itertools.pairwise(path))
            for path in itertools.product(*values)
        )
    return steps, crossings


@cases("shape", [(9, 14), (17, 8), (33, 20)])
def test_counts_equal_a_naive_loop(shape):
    labels = np.random.default_rng(shape[0]).choice(4, shape, p=(0.02, 0.5, 0.3, 0.18)).astype(np.uint8)
    actual = count_crossings(labels, 3)
    assert actual.pixels.sum(0).tolist() == [(labels == k).sum() for k in (1, 2, 3)]
    for d, step in enumerate(STEPS):
        for k in range(4):
            expected = naive(labels, step, k)
            assert (actual.steps[:, d].sum(), actual.changes[:, d, k].sum()) == expected, (step, k)


@cases("angle", [0, 3, 11, 20, 30, 45, 62, 77, 90, 100, 119, 150, 171])
def test_lines_cross_a_straight_boundary_at_most_once(angle):
    y, x = np.mgrid[:61, :74] - np.array([30.2, 36.7])[:, None, None]
    labels = (x * np.cos(np.radians(angle)) - y * np.sin(np.radians(angle)) > 0) + 1
    actual = count_crossings(labels, 2)
    for d, (dy, dx) in enumerate(STEPS):
        lines = 0
        for top, left in itertools.product(range(61), range(74)):
            inside = 0 <= top - dy < 61 and 0 <= left - dx < 74
            if not inside:  # a line starts here; number of steps to its end
                ends = [(60 - top if dy > 0 else top) // abs(dy) if dy else 99]
                ends.append((73 - left if dx > 0 else left) // abs(dx) if dx else 99)
                last = min(ends)
                lines += labels[top, left] != labels[top + last * dy, left + last * dx]
        assert actual.changes[:, d, 0].sum() == lines
        assert (actual.changes[:, d] == actual.changes[:, d, :1]).all()


def test_blocks_partition_steps_and_pixels():
    labels = np.ones((70, 53), np.uint8)
    actual = count_crossings(labels, 1)
    assert actual.pixels.shape == (4 * 3, 1)
    assert actual.pixels.sum() == labels.size
    for d, (dy, dx) in enumerate(STEPS):
        assert actual.steps[:, d].sum() == (70 - abs(dy)) * (53 - abs(dx))
    assert not actual.changes.any()
    assert actual.pixels.min() > 0.8 * actual.pixels.max()


def test_invalid_labels_raise():
    with pytest.raises(ShapeError, match=r"one page \(h, w\), got labels.shape=\(2, 9, 9\)"):
        count_crossings(np.ones((2, 9, 9), int), 1)
    with pytest.raises(InputError, match="at least 8 px along each side, got 7 x 9"):
        count_crossings(np.ones((7, 9), int), 1)
    with pytest.raises(InputError, match="labels must be in 0 to n_classes=2, got 1 to 3"):
        count_crossings(np.repeat([[1, 3]], 9, 0).repeat(5, 1), 2)
