"""countdown and ranked: closed forms, lengths per sample, dropped tokens, errors."""

import math

import numpy as np
import pytest
import torch

from tests.cases import cases
from vispe import Grid, Positions, create_encoding
from vispe.errors import OptionError, ShapeError
from vispe.grid import PerToken


def waves(value, base, half, last):
    angle = [value * base ** (-i / (half - last)) for i in range(half)]
    return [math.sin(a) for a in angle] + [math.cos(a) for a in angle]


@cases("mode", ["difference", "ratio"])
@cases(("dim", "offset"), [(8, 3), (9, 0), (4, -2)])
def test_closed_form(mode, dim, offset):
    encoding = create_encoding("countdown", dim=dim, mode=mode, offset=offset)
    length = torch.tensor([7, 5000])
    actual = encoding.table(Grid((6,), prefix=2).positions().replace(attrs={"length": length}))
    assert actual.shape == (2, 8, dim)
    assert not actual[:, :2].any()
    for i, n in enumerate(length.tolist()):
        for t in range(1, 7):
            expected = (
                waves(n + offset - t, 1e4, dim // 2, 1) if mode == "difference" else waves(t, n, dim // 2, 1)
            )
            np.testing.assert_allclose(actual[i, t + 1, : dim // 2 * 2], expected, atol=1e-6)
    assert not actual[..., dim // 2 * 2 :].any()


def test_grid_length_is_the_number_of_cells_in_raster_order():
    encoding = create_encoding("countdown", dim=8)
    line = encoding.table(Grid((6,)).positions())
    torch.testing.assert_close(encoding.table(Grid((2, 3), prefix=1).positions())[:, 1:], line)
    arguments = Grid((6,)).positions().replace(attrs={"length": torch.tensor([6])})
    assert torch.equal(encoding.table(arguments), line)
    # the last token of every length is the same
    other = encoding.table(Grid((9,)).positions())
    torch.testing.assert_close(other[0, -6:], line[0])


def test_dropped_tokens_do_not_change_numbers():
    encoding = create_encoding("countdown", dim=8)
    pos = Grid((2, 4), prefix=1).positions().replace(attrs={"length": torch.tensor([9, 20])})
    keep = torch.tensor([[0, 3, 8], [0, 1, 5]])
    torch.testing.assert_close(
        encoding.table(pos.gather(keep)), encoding.table(pos).gather(1, keep[..., None].expand(-1, -1, 8))
    )


def test_free_coordinates_are_numbers_from_zero():
    encoding = create_encoding("countdown", dim=8)
    attrs = {"length": torch.tensor([9.0])}
    free = Positions(torch.arange(6.0)[:, None], attrs=attrs)
    torch.testing.assert_close(
        encoding.table(free), encoding.table(Grid((6,)).positions().replace(attrs=attrs))
    )
    with pytest.raises(ShapeError, match=r"needs the length of every sample, got .*attrs\['length'\]"):
        encoding.table(Positions(torch.arange(6.0)[:, None]))
    with pytest.raises(ShapeError, match="or free coordinates of one axis"):
        encoding.table(Positions(torch.rand(6, 2), attrs=attrs))


@cases(
    ("length", "message"),
    [
        (9, r"one length for each of b samples in Positions.attrs\['length'\], got int"),
        (torch.tensor(9), r"got \(\) torch.int64"),
        (torch.tensor([[9]]), r"got \(1, 1\) torch.int64"),
        (torch.tensor([True]), "torch.bool"),
        (torch.tensor([9, 0]), r"lengths above 0 in Positions.attrs\['length'\], got 0"),
    ],
)
def test_bad_lengths(length, message):
    pos = Grid((6,)).positions().replace(attrs={"length": length})
    with pytest.raises(ShapeError, match=message):
        create_encoding("countdown", dim=8).table(pos)


def test_one_length_per_sample():
    pos = Positions(torch.rand(3, 4, 1), attrs={"length": torch.tensor([4, 5])})
    with pytest.raises(ShapeError, match=r"each of 3 samples .* got \(2,\) torch.int64"):
        create_encoding("countdown", dim=8).table(pos)
    with pytest.raises(OptionError, match="dim needs an integer of 4 or more, got dim=2"):
        create_encoding("countdown", dim=2)


@cases("shape", [(5,), (3, 4), (1, 1), (2, 3, 2)])
def test_border(shape):
    encoding = create_encoding("border", dim=26, temperature=50)
    axes = len(shape)
    k = 26 // (4 * axes)
    actual = encoding.table(Grid(shape, prefix=1, spacing=(0.5,) * axes).positions())[0]
    assert not actual[0].any()
    assert not actual[:, 4 * axes * k :].any()
    for row, cell in zip(actual[1:], np.ndindex(*shape), strict=True):
        border_distances = [d for c, n in zip(cell, shape, strict=True) for d in (c, n - 1 - c)]
        expected = [w for d in border_distances for w in waves(d / 2, 50, k, 0)]
        np.testing.assert_allclose(row[: len(expected)], expected, atol=1e-6)


def test_mirrored_fields_exchange_opposite_borders():
    encoding = create_encoding("border", dim=16)
    table = encoding.table(Grid((4, 5)).positions())[0].unflatten(0, (4, 5)).unflatten(-1, (4, 4))
    torch.testing.assert_close(table.flip(0), table[:, :, [1, 0, 2, 3]])
    torch.testing.assert_close(table.flip(1), table[:, :, [0, 1, 3, 2]])
    with pytest.raises(ShapeError, match="4 channels for each of 2 axes, got dim=6"):
        create_encoding("border", dim=6).table(Grid((2, 2)).positions())


def test_ranks():
    encoding = create_encoding("ranked", dim=8, temperature=100)
    pos = Grid((2, 2), prefix=1).positions()
    ranks = torch.tensor([[9, 0, 3, 1, 2], [9, 2, 3, 0, 1]])
    for arguments in (ranks, PerToken(ranks, (1,))):
        prepared = encoding.prepare(pos.replace(attrs={"rank": arguments, "other": 1}))
        assert prepared.attrs["other"] == 1
        table = encoding.table(prepared)
        assert table.shape == (2, 5, 8)
        assert not table[:, 0].any()
        for i in range(2):
            for t in range(1, 5):
                np.testing.assert_allclose(table[i, t], waves(ranks[i, t].item(), 100, 4, 0), atol=1e-6)
        keep = torch.tensor([[0, 4, 2], [0, 1, 3]])
        torch.testing.assert_close(
            encoding.table(prepared.gather(keep)), table.gather(1, keep[..., None].expand(-1, -1, 8))
        )
    # without ranks the cells of a grid are read row by row
    without_ranks = encoding.table(pos)
    torch.testing.assert_close(without_ranks[0, 1:], encoding.table(Grid((4,)).positions())[0])


@cases(
    ("rank", "message"),
    [
        (
            torch.zeros(1, 3, dtype=torch.long),
            r"an integer per token \(4 tokens.* got \(1, 3\) torch.int64",
        ),
        (torch.zeros(1, 4), "torch.float32"),
        (torch.zeros(4, dtype=torch.long), r"got \(4,\)"),
        ([0, 1, 2, 3], "got list"),
        (torch.zeros(1, 4, dtype=torch.bool), "torch.bool"),
    ],
)
def test_bad_ranks(rank, message):
    encoding = create_encoding("ranked", dim=8)
    pos = Grid((2, 2)).positions().replace(attrs={"rank": rank})
    with pytest.raises(ShapeError, match=message):
        encoding.table(encoding.prepare(pos))
    with pytest.raises(ShapeError, match="needs the rank of every token"):
        encoding.table(Positions(torch.rand(4, 2)))
    # a plain tensor does not follow dropped tokens
    plain = Grid((2, 2)).positions().replace(attrs={"rank": torch.arange(4)[None]})
    with pytest.raises(ShapeError, match="before tokens are dropped"):
        encoding.table(plain.gather(torch.tensor([[0, 2]])))
