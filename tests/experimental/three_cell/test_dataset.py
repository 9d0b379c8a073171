"""The three-cell benchmark: properties of the sampler, labels against formulas, worked examples of scores."""

import pytest
import torch

from vispe.errors import OptionError, ShapeError
from vispe.experimental.three_cell import dataset


def slow(cells, grid):
    (xr, yr), (xg, yg), (xb, yb) = cells
    g, b = ((xr - xg) ** 2 + (yr - yg) ** 2) ** 0.5, ((xr - xb) ** 2 + (yr - yb) ** 2) ** 0.5
    ag, ab = abs((yr + yg) * (xg - xr)) / 2, abs((yr + yb) * (xb - xr)) / 2
    cross_product = (xg - xr) * (yb - yr) - (yg - yr) * (xb - xr)
    out = xr + xg + xb > grid - 1 and yr + yg + yb > grid - 1
    return [int(v) for v in (g > b, b > g, cross_product > 0, ag > ab, ab > ag, out)]


@pytest.mark.parametrize("grid", [14, 5])
def test_labels(grid):
    cells = torch.randint(grid, (300, 3, 2), generator=torch.Generator().manual_seed(0))
    actual = dataset.labels(cells, grid)
    assert actual.dtype == torch.int64
    assert actual.tolist() == [slow(c, grid) for c in cells.tolist()]


@pytest.mark.parametrize("grid", [14, 3, 7])
def test_sampler(grid):
    cells = dataset.sample_cells(2000, grid, torch.Generator().manual_seed(0))
    assert cells.shape == (2000, 3, 2)
    assert ((cells >= 0) & (cells < grid)).all()
    side = cells[:, 1:] - cells[:, :1]
    assert (side[:, 0, 0] * side[:, 1, 1] != side[:, 0, 1] * side[:, 1, 0]).all()
    nearer = dataset.labels(cells, grid)[:, :2]
    shares = [
        nearer[:, 0].double().mean(),
        nearer[:, 1].double().mean(),
        (nearer.sum(1) == 0).double().mean(),
    ]
    assert all(0.29 < s < 0.38 for s in shares)
    second = dataset.sample_cells(2000, grid, torch.Generator().manual_seed(0))
    assert torch.equal(cells, second)
    state = torch.get_rng_state()
    dataset.sample_cells(3, grid, torch.Generator().manual_seed(1))
    assert torch.equal(torch.get_rng_state(), state)
    assert dataset.sample_cells(0, grid).shape == (0, 3, 2)


def test_majority_equals_a_simulation_of_the_published_sampler():
    cells = dataset.sample_cells(6000, generator=torch.Generator().manual_seed(0))
    actual = dataset.majority(dataset.labels(cells))
    assert actual.distance == pytest.approx(66.9, abs=1.5)
    assert actual.orientation == pytest.approx(51.0, abs=1.5)
    assert actual.area == pytest.approx(54.2, abs=1.5)
    assert actual.vector_sum == pytest.approx(60.0, abs=2.5)
    assert actual.balanced == pytest.approx(50.0)


def test_images():
    cells = torch.tensor([[[0, 1], [2, 0], [2, 2]]])
    image = dataset.images(cells, grid=3, patch_size=2)
    assert image.shape == (1, 3, 6, 6)
    for colour, (x, y) in enumerate(cells[0].tolist()):
        expected = torch.zeros(6, 6)
        expected[2 * y : 2 * y + 2, 2 * x : 2 * x + 2] = 1
        assert torch.equal(image[0, colour], expected)
    assert dataset.images(dataset.sample_cells(2)).shape == (2, 3, 224, 224)


def test_worked_examples_of_scores():
    target = torch.tensor([[1, 0, 1, 0, 1, 1], [0, 1, 0, 0, 0, 1], [0, 0, 1, 1, 0, 0], [1, 0, 1, 0, 1, 1]])
    logits = torch.tensor(
        [
            [2.0, -1.0, 1.0, -1.0, 1.0, 1.0],  # all right
            [1.0, 1.0, -1.0, -1.0, -1.0, -1.0],  # bits 0 and 5 wrong
            [-1.0, -1.0, -1.0, 1.0, 1.0, 1.0],  # bits 2, 4 and 5 wrong
            [-0.1, -1.0, 1.0, -1.0, 1.0, 0.0],  # bits 0 and 5 wrong (0 is not above the threshold)
        ]
    )
    actual = dataset.score(logits, target)
    assert (actual.distance, actual.orientation, actual.area, actual.vector_sum) == (75, 75, 87.5, 25)
    assert actual.average == 65.625
    assert (actual.distance_exact, actual.area_exact) == (50, 75)
    ones_zeros = [(50, 50), (100, 100), (200 / 3, 100), (100, 100), (100, 50), (100 / 3, 0)]
    assert actual.balanced == pytest.approx(sum(a + b for a, b in ones_zeros) / 12)
    assert actual.to_dict()["average"] == actual.average
    strict = dataset.score(logits, target, threshold=0.8)
    assert strict.orientation == 25
    train = torch.tensor([[1, 1, 0, 0, 0, 0]] * 3)
    constant = dataset.majority(target, train)
    assert (constant.orientation, constant.vector_sum, constant.distance) == (25, 25, 37.5)


def test_errors():
    with pytest.raises(ShapeError, match=r"integers \(n, 3, 2\), got \(4, 3\)"):
        dataset.labels(torch.ones(4, 3).long())
    with pytest.raises(ShapeError, match="cells must be integers"):
        dataset.labels(torch.ones(4, 3, 2))
    with pytest.raises(ShapeError, match="grid of 14 x 14, got coordinates from 0 to 14"):
        dataset.labels(torch.tensor([[[0, 14], [1, 2], [2, 2]]]))
    with pytest.raises(ShapeError, match=r"got \(4, 6\) and \(4, 5\)"):
        dataset.score(torch.ones(4, 6), torch.ones(4, 5))
    with pytest.raises(OptionError, match="threshold needs a number above 0 and below 1, got threshold=1"):
        dataset.score(torch.ones(4, 6), torch.ones(4, 6), threshold=1)
    for options in ({"count": -1}, {"count": 1, "grid": 2}):
        with pytest.raises(OptionError, match="sample_cells needs count of 0 or more"):
            dataset.sample_cells(**options)
