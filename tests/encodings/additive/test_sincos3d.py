"""sincos3d against its formula, cell by cell."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import cases
from vispe import Grid, Positions, create_encoding
from vispe.errors import OptionError, ShapeError

sides = st.integers(1, 4)
spacings = st.floats(0.25, 8, width=32)


def slow(shape, counts, temperature, spacing):
    rows = []
    for cell in itertools.product(*(range(n) for n in shape)):
        row = []
        for c, count, step in zip(cell, counts, spacing, strict=True):
            angles = [c * step * temperature ** (-k / count) for k in range(count)]
            row += [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float64)


@cases(
    ("dim", "split", "counts"),
    [
        (24, (1, 1, 1), (4, 4, 4)),
        (1024, (1, 1, 1), (171, 171, 170)),
        (10, (1, 1, 1), (2, 2, 1)),
        (32, (2, 1, 1), (8, 4, 4)),
        (22, (2, 1, 1), (5, 3, 3)),
        (8, (0.5, 0.25, 0.25), (2, 1, 1)),
    ],
)
def test_values(dim, split, counts):
    encoding = create_encoding("sincos3d", dim=dim, split=split, temperature=50.0)
    assert encoding.counts() == counts
    assert sum(counts) * 2 == dim
    for shape, spacing in (((2, 3, 5), (4.0, 0.5, 1.0)), ((3, 1, 2), (1.0, 1.0, 1.0))):
        table = encoding.table(Grid(shape, prefix=2, spacing=spacing).positions())
        assert (table[:, :2] == 0).all()
        torch.testing.assert_close(
            table[0, 2:].double(), slow(shape, counts, 50.0, spacing), rtol=0, atol=2e-6
        )


@given(shape=st.tuples(sides, sides, sides), more=st.tuples(sides, sides, sides), step=spacings)
def test_the_value_at_a_coordinate_does_not_depend_on_the_grid(shape, more, step):
    encoding = create_encoding("sincos3d", dim=16)
    large = tuple(a + b for a, b in zip(shape, more, strict=True))
    grid = [Grid(s, 1, (step, 1.0, 2.0)) for s in (shape, large)]
    small, big = (encoding.table(g.positions())[0, 1:].reshape(*g.shape, 16) for g in grid)
    corner = big[: shape[0], : shape[1], : shape[2]]
    torch.testing.assert_close(corner, small, rtol=0, atol=1e-6)


def test_spacing_std_and_free_coordinates():
    grid = Grid((2, 3, 4), prefix=1)
    wide = create_encoding("sincos3d(spacing=[5,1,0.5])", dim=12).table(grid.positions())
    torch.testing.assert_close(
        wide,
        create_encoding("sincos3d", dim=12).table(Grid((2, 3, 4), 1, (5, 1, 0.5)).positions()),
    )
    scaled = create_encoding("sincos3d(std=0.02)", dim=12)
    table = scaled.table(grid.positions())
    assert table[:, 1:].std().item() == pytest.approx(0.02, rel=1e-5)
    keep = torch.tensor([[0, 3, 7], [0, 24, 1]])
    subset = scaled.table(grid.positions().gather(keep))
    torch.testing.assert_close(subset, table[0][keep])
    coords = torch.rand(2, 5, 3, requires_grad=True)
    free = create_encoding("sincos3d", dim=12).table(Positions(coords))
    cotangent = torch.randn_like(free)
    free.backward(cotangent)
    assert coords.grad.abs().sum() > 0
    assert torch.autograd.gradcheck(
        lambda c: create_encoding("sincos3d", dim=6).table(Positions(c)),
        torch.rand(1, 3, 3, dtype=torch.float64, requires_grad=True),
    )


@cases(
    ("options", "message"),
    [
        ({"dim": 7}, "dim needs an integer of 6 or more and divisible by 2, got dim=7"),
        ({"dim": 4}, "dim needs an integer of 6 or more and divisible by 2, got dim=4"),
        ({"dim": 12, "temperature": 0}, "temperature needs a number above 0, got temperature=0"),
        ({"dim": 12, "std": -1}, "std needs a number above 0, got std=-1"),
        ({"dim": 12, "split": (1, 1)}, r"split needs a list of 3 numbers above 0, got split=\(1, 1\)"),
        ({"dim": 12, "split": 2}, "split needs a list of 3 numbers above 0, got split=2"),
        ({"dim": 12, "split": (1, 0, 1)}, "split needs a list of 3 numbers above 0, got split="),
        ({"dim": 12, "split": (1, True, 1)}, "split needs a list of 3 numbers above 0, got split="),
        (
            {"dim": 12, "spacing": (1, 2)},
            r"spacing needs one number for each of 3 axes, got spacing=\[1, 2\]",
        ),
    ],
)
def test_option_errors(options, message):
    with pytest.raises(OptionError, match=message):
        create_encoding("sincos3d", **options)


def test_other_axes_are_refused():
    with pytest.raises(ShapeError, match="sincos3d needs 3-axis positions, got 2 axes"):
        create_encoding("sincos3d", dim=12).table(Grid((2, 3)).positions())
