"""`Positions.joined` and `Grid.offset`: coordinates, attributes, subsets, and support by each encoding."""

from dataclasses import replace

import pytest
import torch

import vispe
from tests.cases import cases
from tests.encodings.test_conformance import DIM, NAMES, build, forward
from vispe.encodings.parts.positions.sampler import Sampler
from vispe.encodings.registry import encoding_class
from vispe.errors import OptionError, ShapeError, VispeError
from vispe.grid import Grid, Positions

# scans along the sequence, or a token given by its number: the order of the grids is an input
ORDERED = {"path", "grape_path", "carope.scan", "selective_rope.scan", "target"}


def grids(axes):
    fine = Grid((3, 2, 2)[:axes], spacing=(1.0, 1.5, 2.0)[:axes], offset=(0.0, 1.0, 2.0)[:axes])
    coarse = Grid((2, 4, 3)[:axes], spacing=(4.0, 3.0, 5.0)[:axes], offset=(-2.0, 1.5, 3.0)[:axes])
    return fine, coarse


def test_fields():
    fine, coarse = (
        Grid((2, 1), prefix=1, spacing=(1, 2)).positions(),
        Grid((1, 2), spacing=(4, 8), offset=(10, 20)),
    )
    pos = Positions.joined([fine, coarse])
    assert pos.coords[0].tolist() == [[0, 0], [0, 0], [1, 0], [10, 20], [10, 28]]
    assert pos.spatial[0].tolist() == [False, True, True, True, True]
    assert pos.attrs["level"].values.tolist() == [[0, 0, 0, 1, 1]]
    assert pos.attrs["spacing"].values[0].tolist() == [[1, 2]] * 3 + [[4, 8]] * 2
    assert pos.cell.tolist() == [[1, 2]]
    assert pos.extent.tolist() == [[12.5, 33]]  # -0.5 to 12 and -1 to 32
    assert pos.attrs["corner"].tolist() == [[-0.5, -1]]
    assert "joined from several grids" in repr(pos)
    subset = pos.gather(torch.tensor([[4, 1], [2, 3]]))
    assert subset.attrs["level"].values.tolist() == [[1, 0], [0, 1]]
    assert subset.extent.tolist() == [[12.5, 33]]


def test_grids_without_offset_are_concentric():
    pos = Positions.joined(
        [Grid((2, 2)), Grid((2, 2), spacing=(4, 4)), Grid((1, 1), spacing=(9, 9), offset=(5, 6))]
    )
    assert pos.coords[0].tolist() == [
        *([y, x] for y in (-0.5, 0.5) for x in (-0.5, 0.5)),
        *([y, x] for y in (-2, 2) for x in (-2, 2)),
        [5, 6],
    ]


def test_samples_with_separate_coordinates():
    many = Positions(torch.rand(3, 4, 2), cell=torch.full((1, 2), 2.0))
    pos = Positions.joined([Grid((2, 2)), many])
    assert pos.coords.shape == (3, 8, 2)
    assert torch.equal(pos.coords[:, 4:], many.coords)
    assert pos.extent.shape == (3, 2)


def test_offset_of_a_grid():
    grid = Grid((2, 3), prefix=1, spacing=(2, 0.5), offset=(10, -1), origin="centre")
    assert grid.positions().coords[0].tolist() == [
        [0, 0],
        *([y, x] for y in (9, 11) for x in (-1.5, -1, -0.5)),
    ]
    assert grid.positions().extent.tolist() == [[4, 1.5]]
    with pytest.raises(
        OptionError, match=r"offset must be one finite number for each of 2 axes, got offset=\(1,\)"
    ):
        Grid((2, 3), offset=(1,))
    with pytest.raises(OptionError, match="got offset=\\(1, nan\\)"):
        Grid((2, 3), offset=(1, float("nan")))


@cases("name", NAMES)
def test_every_encoding_follows_the_offset_or_raises(name):
    """Equal coordinates with and without a grid give equal results, as for other origins."""
    encoding = build(name).eval()
    axes = 2 if 2 in encoding.ndim else max(encoding.ndim)
    grid = Grid((3, 4, 2)[:axes], reference=(3, 4, 2)[:axes], offset=(0.5, -2.0, 3.0)[:axes])
    plain = replace(grid, offset=None).positions()
    x = torch.randn(1, grid.tokens, DIM, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        try:
            result = forward(encoding, encoding.prepare(grid.positions()), x)
        except ShapeError as error:
            assert "which offset=(" in str(error)  # noqa: PT017
            return
        shifted = plain.replace(coords=grid.positions().coords)
        torch.testing.assert_close(
            result, forward(encoding, encoding.prepare(shifted), x), rtol=1e-4, atol=1e-5
        )


@cases("name", NAMES)
def test_every_encoding_reads_joined_grids_or_raises(name):
    encoding = build(name).eval().double()
    axes = 2 if 2 in encoding.ndim else max(encoding.ndim)
    fine, coarse = grids(axes)
    n, m = fine.tokens, coarse.tokens
    x = torch.randn(1, n + m, DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.no_grad():
        try:
            result = forward(encoding, encoding.prepare(Positions.joined([fine, coarse])), x)
        except VispeError as error:
            known = "joined from several grids" in str(error) or "needs the training grid" in str(error)
            assert known, str(error)  # noqa: PT017
            return
        assert not issubclass(encoding_class(name.partition(".")[0]), Sampler)
        if name not in ORDERED:
            swapped = forward(encoding, encoding.prepare(Positions.joined([coarse, fine])), x.roll(m, 1))
            torch.testing.assert_close(result, swapped.roll(-m, 1), rtol=1e-6, atol=1e-6)
        if "translation" in vispe.encoding_info(name).invariant:
            shift = torch.tensor((7.0, -3.0, 2.0)[:axes])
            shifted = [
                replace(g, offset=tuple((torch.tensor(g.offset) + shift).tolist())) for g in (fine, coarse)
            ]
            same = forward(encoding, encoding.prepare(Positions.joined(shifted)), x)
            torch.testing.assert_close(result, same, rtol=1e-4, atol=1e-4)


def test_coordinates_relative_to_the_field():
    """Encodings of fractions of the field read cells of both grids from the common corner."""
    encoding = vispe.create_encoding("fourier_learned", dim=24, axes=2)
    a, b = Grid((2, 2), spacing=(2, 2), offset=(101, 51)), Grid((1, 1), spacing=(4, 4), offset=(102, 52))
    pos = Positions.joined([a, b])
    centres = torch.tensor([[[0.25, 0.25], [0.25, 0.75], [0.75, 0.25], [0.75, 0.75], [0.5, 0.5]]])
    torch.testing.assert_close(encoding.place(pos), centres)


def test_errors():
    with pytest.raises(ShapeError, match="needs at least one grid, got none"):
        Positions.joined([])
    with pytest.raises(ShapeError, match="needs parts of equal axes"):
        Positions.joined([Grid((2,)), Grid((2, 2))])
    with pytest.raises(ShapeError, match=r"needs parts of equal axes, of batch size 1 or 3"):
        Positions.joined([Positions(torch.zeros(2, 4, 1)), Positions(torch.zeros(3, 4, 1))])
    jittered = vispe.create_encoding("jitter").train().prepare(Grid((2, 2)).positions())
    with pytest.raises(ShapeError, match=r"with attributes .*Join grids before `prepare`"):
        Positions.joined([jittered])
    pos = Positions.joined([Grid((2, 2)), Grid((1, 1))])
    with pytest.raises(ShapeError, match=r"have several spacings, got spacing=\(2.0, 2.0\)"):
        pos.with_spacing((2, 2))
    with pytest.raises(ShapeError, match="got positions of several grids"):
        pos.cells()
    with pytest.raises(ShapeError, match="jitter draws positions for the cells of one grid"):
        vispe.create_encoding("jitter").train().prepare(pos)


def test_alibi2d_on_slide_coordinates_equals_a_grid_with_gaps():
    """Tiles of tissue at pixel coordinates far from the corner of the slide, in any order."""
    spec = "alibi2d(slopes=alibi,normalize=none,wrap=false)"
    torch.manual_seed(0)
    attention = vispe.Attention(64, 4, spec).eval()
    cells = torch.randperm(900, generator=torch.Generator().manual_seed(1))[:420]
    rows_columns = torch.stack([cells // 30, cells % 30], -1)
    x = torch.randn(1, 420, 64)
    expected = attention(x, Grid((30, 30)).positions().gather(cells[None]))
    for offset in (0, 1_000_000):
        pixels = rows_columns * 512 + offset
        free = Positions(((pixels - pixels.amin(0)) / 512).float()[None])
        torch.testing.assert_close(attention(x, free), expected, rtol=1e-5, atol=1e-5)
    tissue = Positions((rows_columns.float() + 2000)[None])
    torch.testing.assert_close(attention(x, tissue), expected, rtol=1e-5, atol=1e-5)
