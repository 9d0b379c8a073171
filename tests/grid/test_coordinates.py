"""Grids, positions, their cached values, and dropped tokens."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest
import torch

from tests.cases import cases
from vispe import Grid, Positions
from vispe.errors import OptionError, ShapeError
from vispe.grid import PerToken, as_positions
from vispe.hosts.common.position_cache import PositionCache


@cases(
    ("arguments", "error", "message"),
    [
        ({"shape": (0, 3)}, ShapeError, r"at least one token per axis, got shape=\(0, 3\)"),
        ({"shape": ()}, ShapeError, r"1 to 3 integers as shape, got shape=\(\)"),
        ({"shape": (1, 2, 3, 4)}, ShapeError, "1 to 3 integers"),
        ({"shape": (2.0, 3)}, ShapeError, "integers"),
        ({"shape": (True, 3)}, ShapeError, "integers"),
        ({"shape": (2, 3), "prefix": -1}, ShapeError, "prefix of 0 or more tokens, got prefix=-1"),
        ({"shape": (2, 3), "prefix": True}, ShapeError, "got prefix=True"),
        ({"shape": (2, 3), "prefix": 1.5}, ShapeError, r"got prefix=1\.5"),
        (
            {"shape": (2, 3), "spacing": (1.0,)},
            OptionError,
            r"for each of 2 axes, got spacing=\(1\.0,\)",
        ),
        ({"shape": (2, 3), "spacing": (1.0, 0.0)}, OptionError, "one positive number"),
        ({"shape": (2, 3), "spacing": (1.0, float("nan"))}, OptionError, "one positive number"),
        ({"shape": (2, 3), "spacing": (1.0, float("inf"))}, OptionError, "one positive number"),
        ({"shape": (2, 3), "spacing": 2.0}, OptionError, r"got spacing=2\.0"),
        ({"shape": (2, 3), "spacing": "21"}, OptionError, "got spacing='21'"),
        ({"shape": (2, 3), "reference": (4,)}, ShapeError, r"shape=\(2, 3\), got reference=\(4,\)"),
        ({"shape": (2, 3), "reference": (4, 0)}, ShapeError, r"got reference=\(4, 0\)"),
    ],
    ids=str,
)
def test_grid_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        Grid(**arguments)


def test_grid():
    grid = Grid([np.int64(3), 4], prefix=np.int32(2), spacing=[np.float32(2), 1], reference=[5, 5])
    assert grid == Grid((3, 4), 2, (2.0, 1.0), (5, 5))
    assert hash(grid) == hash(Grid((3, 4), 2, (2.0, 1.0), (5, 5)))
    assert type(grid.shape[0]) is int
    assert (grid.axes, grid.patches, grid.tokens) == (2, 12, 14)
    assert pickle.loads(pickle.dumps(grid)) == grid
    with pytest.raises(AttributeError):
        grid.prefix = 3


@cases("shape", [(5,), (2, 3), (1, 1), (2, 3, 4)])
@cases("prefix", [0, 3])
def test_positions_of_a_grid(shape, prefix):
    spacing = (0.5, 2.0, 3.0)[: len(shape)]
    pos = Grid(shape, prefix=prefix, spacing=spacing).positions()
    cells = torch.cartesian_prod(*(torch.arange(n) for n in shape)).reshape(-1, len(shape))
    assert torch.equal(pos.coords[0, prefix:], cells * torch.tensor(spacing))
    assert (pos.coords[0, :prefix] == 0).all()
    assert pos.coords.dtype == torch.float32
    assert pos.spatial[0].tolist() == [False] * prefix + [True] * len(cells)
    assert torch.equal(pos.cells()[0, prefix:], cells)
    assert (pos.cells()[0, :prefix] == 0).all()
    assert pos.extent[0].tolist() == pytest.approx([n * s for n, s in zip(shape, spacing, strict=True)])
    assert pos.regular
    assert pos.static
    assert (pos.tokens, pos.axes) == (prefix + len(cells), len(shape))
    assert Grid(shape, prefix=prefix).positions("meta").coords.is_meta


def test_cells_do_not_depend_on_shifted_coordinates():
    pos = Grid((3, 4), prefix=1).positions()
    shifted = pos.replace(coords=pos.coords + 0.7)
    assert torch.equal(shifted.cells(), pos.cells())
    assert torch.equal(pos.with_spacing((3.0, 0.1)).cells(), pos.cells())
    with pytest.raises(
        ShapeError, match=r"needs positions of a Grid, got free coordinates\. Use grid\.positions"
    ):
        Positions(pos.coords).cells()


def test_gather():
    pos = Grid((3, 4), prefix=2, spacing=(2.0, 1.0)).positions()
    noise = torch.randn(1, 2, 14, 14)
    pos = pos.replace(attrs={"noise": PerToken(noise, (2, 3)), "word": "unchanged"})
    keep = torch.tensor([[0, 1, 5, 13], [0, 1, 2, 7], [1, 0, 9, 3]])
    gathered = pos.gather(keep)
    for i in range(3):
        assert torch.equal(gathered.coords[i], pos.coords[0, keep[i]])
        assert torch.equal(gathered.spatial[i], pos.spatial[0, keep[i]])
        assert torch.equal(gathered.cells()[i], pos.cells()[0, keep[i]])
        assert torch.equal(gathered.attrs["noise"].values[i], noise[0][:, keep[i]][:, :, keep[i]])
    assert gathered.attrs["word"] == "unchanged"
    assert not gathered.regular
    assert torch.equal(gathered.extent, pos.extent)
    twice = gathered.gather(torch.tensor([[3, 0], [2, 2], [1, 3]]))
    assert torch.equal(twice.coords[2], pos.coords[0, [0, 3]])
    assert torch.equal(twice.cells()[1], pos.cells()[0, [2, 2]])
    assert torch.equal(twice.attrs["noise"].values[0], noise[0][:, [13, 0]][:, :, [13, 0]])
    with pytest.raises(ShapeError, match=r"gather needs token indices of shape \(b, tokens\), got \(4,\)"):
        pos.gather(keep[0])


def test_free_positions():
    coords = torch.tensor([[0.0, 0.0], [2.0, 5.0], [4.0, 9.0]])
    spatial = torch.tensor([[False, True, True]])
    pos = Positions(coords, spatial)
    assert pos.coords.shape == (1, 3, 2)
    assert pos.extent.tolist() == [[3.0, 5.0]]  # the prefix token at 0 has no position in the field
    assert not pos.regular
    assert Positions(coords, torch.zeros(1, 3, dtype=torch.bool)).extent.tolist() == [[1.0, 1.0]]
    assert Positions(coords.double()).extent.dtype == torch.float64
    assert "grid=None" in repr(pos)
    assert "tokens dropped" in repr(Grid((2, 2)).positions().gather(torch.tensor([[0]])))


@cases(
    ("make", "message"),
    [
        (lambda c: Positions(c.half()), "float32 or float64 coords"),
        (lambda c: Positions(c.long()), "float32 or float64 coords"),
        (lambda c: Positions(c[..., :0]), "with 1 to 3 axes"),
        (lambda c: Positions(c[0, 0]), "of shape"),
        (
            lambda c: Positions(c, torch.ones(1, 5, dtype=torch.bool)),
            r"spatial of shape \(2 or 1, 6\) .* got \(1, 5\)",
        ),
        (lambda c: Positions(c, torch.ones(3, 6, dtype=torch.bool)), r"spatial of shape"),
        (lambda c: Positions(c, torch.ones(1, 6)), "spatial of dtype bool, got torch.float32"),
        (lambda c: Positions(c, extent=torch.ones(2)), r"extent of shape \(2 or 1, 2\)"),
        (lambda c: Positions(c, cell=torch.ones(1, 3)), "cell of shape"),
        (lambda c: Positions(c, index=torch.zeros(6, dtype=torch.long)), "index of shape"),
        (
            lambda c: Positions(c, grid=Grid((2, 4))),
            r"coords of 8 tokens .* got \(2, 6, 2\)\. Pass `index`",
        ),
        (lambda c: Positions(c, grid=Grid((6,))), "on 1 axis"),
    ],
)
def test_positions_errors(make, message):
    with pytest.raises(ShapeError, match=message):
        make(torch.zeros(2, 6, 2))


def test_spaced_positions_are_cached():
    pos = Grid((2, 3), prefix=1, spacing=(1.0, 2.0)).positions()
    wide = pos.with_spacing((3.0, 1.0))
    assert wide is pos.with_spacing([3, 1])
    assert wide.coords[0, -1].tolist() == [3.0, 2.0]
    assert wide.extent[0].tolist() == [6.0, 3.0]
    with pytest.raises(OptionError, match="one positive number for each of 2 axes"):
        pos.with_spacing((1.0,))


def test_aligned_does_not_read_tensors():
    pos = Grid((3, 4), prefix=1).positions()
    meta = Grid((3, 4), prefix=1).positions("meta")
    for same in (pos, meta, pos.replace(attrs={"x": 1}), copy.deepcopy(pos), pickle.loads(pickle.dumps(pos))):
        assert same.on_grid
        assert same.regular
    dropped = pos.gather(torch.tensor([[0, 5, 3]]))
    assert dropped.on_grid
    assert not dropped.regular
    fields = ("coords", "spatial", "extent", "cell", "index", "grid")
    unaligned = [pos.replace(**{name: getattr(pos, name)}) for name in fields]
    unaligned += [
        pos.with_spacing((2.0, 1.0)),
        dropped.with_spacing((2.0, 1.0)),
        Positions(pos.coords, pos.spatial, grid=pos.grid),
    ]
    unaligned += [
        copy.deepcopy(unaligned[0]),
        unaligned[0].replace(attrs={}),
        unaligned[0].gather(torch.tensor([[0]])),
    ]
    for other in unaligned:
        assert not other.on_grid
        assert not other.regular
    assert pos.on_grid


def test_cached_values():
    pos = Grid((2, 3)).positions()
    calls = []

    def make():
        calls.append(1)
        return torch.ones(1)

    first = pos.remember("a", make)
    assert pos.remember("a", make) is first
    assert pos.replace(attrs={"draw": 1}).remember("a", make) is first  # attributes change nothing of it
    assert len(calls) == 1
    assert pos.replace(coords=pos.coords + 1).remember("a", make) is not first
    for field in ("coords", "extent", "cell"):
        learned = pos.replace(**{field: getattr(pos, field).clone().requires_grad_()})
        assert not learned.static
        assert learned.remember("a", make) is not learned.remember("a", make)
    with torch.inference_mode():
        assert not pos.remember("b", lambda: torch.ones(1)).is_inference()


def test_cache():
    cache, reference = PositionCache(size=2), torch.zeros(1)
    grids = [Grid((n, 2)) for n in (1, 2, 3)]
    first = cache(grids[0], reference)
    assert cache(grids[0], reference) is first
    cache(grids[1], reference)
    assert cache(Grid((1, 2)), reference) is first  # by value, and now the newest
    cache(grids[2], reference)
    assert cache(grids[0], reference) is first
    second = cache(grids[1], reference)
    assert cache(grids[1], reference) is second
    assert cache(Grid((2, 2), prefix=1), reference) is not second
    assert cache(grids[1], torch.zeros(1, device="meta")).coords.is_meta
    with torch.inference_mode():
        assert not PositionCache()(grids[0], reference).coords.is_inference()
    for other in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert other.size == 2
        assert other(grids[1], reference) is not second


def test_cache_is_not_used_in_compiled_graphs():
    cache = PositionCache()
    compiled = torch.compile(
        lambda x: x + cache(Grid((2, 3)), x).coords.sum(), fullgraph=True, backend="eager"
    )
    compiled(torch.zeros(1))
    assert not cache._cached


def test_as_positions():
    x = torch.zeros(2, 7, 4)
    assert as_positions(Grid((2, 3), prefix=1), x).tokens == 7
    assert as_positions((7,), x).axes == 1
    pos = Grid((7,)).positions()
    assert as_positions(pos, x) is pos
    with pytest.raises(
        ShapeError, match=r"The input has 7 tokens, but Grid\(shape=\(2, 3\), .* has 6\. Pass"
    ):
        as_positions((2, 3), x)
    with pytest.raises(ShapeError, match=r"must be tokens \(b, n, d\), got \(7, 4\)"):
        as_positions((7,), x[0])
    with pytest.raises(
        ShapeError, match=r"on cpu, but its positions are on meta\. Create them with grid\.positions"
    ):
        as_positions(Grid((7,)).positions("meta"), x)


@cases("shape", [(5,), (2, 3), (1, 1), (4, 3, 2)])
def test_origin(shape):
    spacing = (0.5, 2.0, 3.0)[: len(shape)]
    start = Grid(shape, prefix=2, spacing=spacing).positions()
    end = Grid(shape, prefix=2, spacing=spacing, origin="end").positions()
    centre = Grid(shape, prefix=2, spacing=spacing, origin="centre").positions()
    last = start.coords[:, -1:]
    assert torch.equal(end.coords[:, 2:], last - start.coords[:, 2:])
    assert torch.equal(centre.coords[:, 2:], start.coords[:, 2:] - last / 2)
    assert torch.equal(centre.coords[:, 2:].flip(1), -centre.coords[:, 2:])
    assert start.on_grid
    for pos in (end, centre):
        assert (pos.coords[:, :2] == 0).all()
        assert torch.equal(pos.extent, start.extent)
        assert torch.equal(pos.cell, start.cell)
        assert torch.equal(pos.cells(), start.cells())  # which cell a token is does not change
        assert not pos.on_grid
        assert not pos.gather(torch.tensor([[0, 2]])).on_grid
        wide = pos.with_spacing((3.0,) * len(shape))
        assert wide.grid.origin == pos.grid.origin
        torch.testing.assert_close(wide.coords, pos.coords / pos.cell * 3)


def test_origin_is_part_of_the_cache_key():
    grid = Grid((3, 4), origin="centre")
    assert grid != Grid((3, 4))
    assert Grid((3, 4)) == Grid((3, 4), origin="start")
    assert dataclasses.replace(grid, prefix=2).origin == "centre"
    assert pickle.loads(pickle.dumps(grid)) == grid
    assert copy.deepcopy(grid) == grid
    assert len({grid, Grid((3, 4)), Grid((3, 4), origin="end")}) == 3
    cache, reference = PositionCache(), torch.zeros(1)
    assert cache(grid, reference) is not cache(Grid((3, 4)), reference)
    assert cache(grid, reference) is cache(grid, reference)
    with pytest.raises(OptionError, match="origin must be one of start, end, centre, got 'middle'"):
        Grid((3, 4), origin="middle")


@pytest.mark.slow
def test_an_export_caches_no_fake_tensors():
    from vispe.attention import DistanceBias, RadialBias, TableBias, attention

    weight = torch.nn.Parameter(torch.ones(2, 1))
    table = torch.nn.Parameter(torch.randn(2, 3, 5))
    q = torch.randn(1, 2, 7, 8)
    for make in (
        lambda p: DistanceBias((1.0, 0.5), p),
        lambda p: RadialBias(lambda d: -weight * d, p),
        lambda p: TableBias(table, p),
    ):
        model = torch.nn.Module()
        model.positions = Grid((2, 3), prefix=1).positions()
        model.weight, model.table = weight, table
        model.forward = lambda q, make=make, model=model: attention(q, q, q, bias=make(model.positions))
        program = torch.export.export(model, (q,)).module()
        actual = model(q)  # positions of a module are shared by all calls
        assert type(actual) is torch.Tensor
        torch.testing.assert_close(program(q), actual)
