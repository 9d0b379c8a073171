"""The fused kernels for coordinates, compared with attention in float64. `test_interpreter` runs this file."""

import os

import pytest
import torch

from tests.attention import oracle
from vispe import Grid, Positions, attention
from vispe.attention import DistanceBias, ProfileBias, SumBias, TableBias
from vispe.attention.backends.triton import tiles as sizes
from vispe.attention.backends.triton.coords.op import coords_attention
from vispe.attention.backends.triton.coords.operands import segments
from vispe.attention.score_terms import cell_numbers, extended

pytestmark = pytest.mark.usefixtures("poisoned")

FORWARD = {torch.float32: 2e-6, torch.float16: 6e-4}
BACKWARD = {torch.float32: 1e-5, torch.float16: 2e-3}
HEADS = 2


@pytest.fixture(autouse=True)
def _large_tiles(monkeypatch):
    """The interpreter needs as long for a small tile as for a large one."""
    if "VISPE_TEST_DEVICE" not in os.environ:
        monkeypatch.setitem(sizes.TABLES, (90, "float32"), sizes.TABLES[90, "half"])


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of 32, so that few tokens have many of them."""
    small = {
        name: {64: sizes.Tiles(32, 32, 4, 1), 128: sizes.Tiles(32, 32, 4, 1)}
        for name in sizes.TABLES[90, "half"]
    }
    monkeypatch.setitem(sizes.TABLES, (90, "half"), small)
    monkeypatch.setitem(sizes.TABLES, (90, "float32"), small)


def inputs(tokens, dtype=torch.float32, batch=2, width=16, value=24):
    """Return q, k and v of which no two have the same strides."""
    qk = torch.randn(batch, tokens, 2, HEADS, width).to(dtype).permute(2, 0, 3, 1, 4)
    v = torch.randn(batch, HEADS, tokens, value).to(dtype)
    return [t.detach().requires_grad_() for t in (qk[0], qk[1], v)]


def table(grid, scale=2.0, heads=HEADS):
    return (torch.randn(heads, *(2 * n - 1 for n in grid.shape)) * scale).requires_grad_()


def slopes():
    return torch.tensor([0.04, 0.9], requires_grad=True)


def relative(ours, theirs):
    return ((ours.double() - theirs).norm() / theirs.norm().clamp(min=1e-12)).item()


def exact(pos):
    """Return positions with coordinates in float64."""
    return pos.replace(coords=pos.coords.double(), extent=pos.extent.double(), cell=pos.cell.double())


def random_subset(grid, patches, batch):
    """Return which tokens remain, (b, tokens): all of the prefix, and other patches for each sample, in any order."""
    prefix = torch.arange(grid.prefix)
    rows = [torch.cat([prefix, grid.prefix + torch.randperm(grid.patches)[:patches]]) for _ in range(batch)]
    return torch.stack(rows)


def compare(tensors, params, make, expected=None, **options):
    """Compare output and all gradients with those in float64, by the reference backend or by `expected(q, k, v, ...)`.

    `make(exact, ...)` returns the bias.
    """
    leaves = [*tensors, *params]
    dtype = tensors[0].dtype
    out = attention(*tensors, bias=make(False, *params), backend="triton", **options)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    if expected is None:
        reference = attention(*wide[:3], bias=make(True, *wide[3:]), backend="reference", **options)
    else:
        reference = expected(*wide)
    assert out.dtype == dtype
    assert relative(out, reference) <= FORWARD[dtype]
    cotangent = torch.randn_like(out)
    ours = torch.autograd.grad(out, leaves, cotangent)
    theirs = torch.autograd.grad(reference, wide, cotangent.double())
    for mine, other, leaf in zip(ours, theirs, leaves, strict=True):
        assert mine.dtype == leaf.dtype
        assert mine.shape == leaf.shape
        edge = dtype != torch.float32 and mine.shape == (HEADS, 3)  # few numbers, of few pairs
        assert relative(mine, other) <= BACKWARD[dtype] * (5 if edge else 1)
    return out, ours


def compare_subset(grid, dtype=torch.float32, patches=None, batch=3, scale=2.0, widths=(16, 24), **options):
    """Compare a table on other tokens of a grid in each sample with the oracle."""
    which = random_subset(grid, patches or grid.patches * 2 // 3, batch)
    pos = grid.positions().gather(which)
    params = [table(grid, scale), torch.randn(HEADS, 3).requires_grad_()][: 2 if grid.prefix else 1]

    def expected(q, k, v, values, edge=None):
        matrix = oracle.table_matrix(values, grid, edge)
        return oracle.attend(q, k, v, bias=torch.stack([matrix[:, w][..., w] for w in which]))

    return compare(
        inputs(which.shape[1], dtype, batch, *widths),
        params,
        lambda _, t, e=None: TableBias(t, pos, e),
        expected,
        **options,
    )


@pytest.mark.parametrize("learned", ["table", "slopes"])
def test_a_shuffled_grid_is_the_grid(learned):
    grid = Grid((6, 7), 3)
    order = torch.randperm(grid.tokens)
    pos = grid.positions()
    tensors = inputs(grid.tokens)
    mixed = [t.detach()[:, :, order].requires_grad_() for t in tensors]
    leaf = table(grid) if learned == "table" else slopes()

    def make(where):
        if learned == "table":
            return TableBias(leaf, where, torch.tensor([[0.5, -1.0, 2.0]]))
        return DistanceBias(leaf, where, wrap=True, normalize="max")

    grid_out = attention(*tensors, bias=make(pos), backend="triton")
    parts = attention(*mixed, bias=make(pos.gather(order[None])), backend="triton")
    cotangent = torch.randn_like(grid_out)
    torch.testing.assert_close(parts, grid_out[:, :, order], rtol=1e-5, atol=1e-6)
    expected = torch.autograd.grad(grid_out, [*tensors, leaf], cotangent)
    actual = torch.autograd.grad(parts, [*mixed, leaf], cotangent[:, :, order])
    for mine, other in zip(actual[:3], expected[:3], strict=True):
        torch.testing.assert_close(mine, other[:, :, order], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(actual[3], expected[3], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(("shape", "prefix"), [((17,), 5), ((5, 7), 0), ((5, 7), 1), ((2, 3, 5), 1)], ids=str)
def test_dropped_tokens(shape, prefix):
    compare_subset(Grid(shape, prefix))


def test_more_samples_than_one_group():
    compare_subset(Grid((3, 5), 1), batch=18)


@pytest.mark.parametrize("widths", [(72, 96), (88, 16), (16, 80)], ids=str)
def test_widths(widths):
    compare_subset(Grid((5, 7), 1), widths=widths)


def test_dropped_tokens_in_half_precision():
    compare_subset(Grid((6, 7), 1), torch.float16, batch=1, scale=17.0)


def test_samples_that_share_their_tokens_and_many_tiles(small_tiles):
    grid = Grid((7, 9), 2)
    which = random_subset(grid, 38, 1)
    pos = grid.positions().gather(which)
    compare(
        inputs(40), [table(grid, heads=1)], lambda _, t: TableBias(t, pos),
        lambda q, k, v, t: oracle.attend(
            q, k, v, bias=oracle.table_matrix(t, grid)[None][:, :, which[0]][..., which[0]].expand(2, HEADS, -1, -1)
        ), deterministic=True,
    )  # fmt: skip


def test_fixed_point_sums_of_tokens_in_any_order(small_tiles):
    grid = Grid((5, 7), 1)
    pos, values, tensors = (
        grid.positions().gather(random_subset(grid, 33, 1)),
        table(grid),
        inputs(34, batch=1),
    )
    cotangent = torch.randn(1, HEADS, 34, 24)
    result = []
    for one in (torch.arange(34), torch.randperm(34)):
        own_positions = pos.gather(one[None])
        out = attention(
            *[t[:, :, one] for t in tensors],
            bias=TableBias(values, own_positions),
            backend="triton",
            deterministic=True,
        )
        result.append(torch.autograd.grad(out, values, cotangent[:, :, one])[0])
    assert relative(result[0], result[1].double()) < 1e-6


@pytest.mark.parametrize(
    ("metric", "axes", "wrap"),
    [("euclidean", 1, False), ("euclidean", 3, True), ("manhattan", 2, True), ("chebyshev", 3, False),
     ("squared", 2, True)],
)  # fmt: skip
def test_free_coordinates(metric, axes, wrap):
    coords = torch.rand(1, 33, axes) * 9 + 1000
    spatial = torch.rand(1, 33) < 0.8
    extent = torch.rand(1, axes) * 5 + 6
    pos = Positions(coords.masked_fill(~spatial[..., None], float("nan")), spatial, extent)
    wide = exact(pos.replace(coords=coords))
    compare(
        inputs(33, batch=1), [slopes()],
        lambda exact, s: DistanceBias(s, wide if exact else pos, metric=metric, wrap=wrap),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("metric", "wrap", "normalize", "dtype"),
    [("euclidean", True, "max", torch.float32), ("squared", False, "max", torch.float32),
     ("chebyshev", True, "reference", torch.float32), ("euclidean", False, "reference", torch.float16)],
)  # fmt: skip
def test_separate_fields_of_samples(metric, wrap, normalize, dtype):
    sizes_ = [(3, 5), (5, 4), (2, 2)]
    grid = Grid((5, 5), 2, reference=(7, 6))
    cells = [torch.cartesian_prod(torch.arange(h), torch.arange(w)) for h, w in sizes_]
    coords, spatial = torch.zeros(3, 24, 2), torch.zeros(3, 24, dtype=torch.bool)
    for sample, cell in enumerate(cells):
        coords[sample, 2 : 2 + len(cell)], spatial[sample, 2 : 2 + len(cell)] = cell.float(), True
    index = (coords[..., 0] * 5 + coords[..., 1]).long()
    pos = Positions(coords, spatial, torch.tensor(sizes_).float(), index=index, grid=grid)
    keep = spatial.clone()
    keep[:, :2] = True
    compare(
        inputs(24, dtype, 3), [slopes()],
        lambda double, s: DistanceBias(
            s, exact(pos) if double else pos, metric=metric, wrap=wrap, normalize=normalize, spacing=(0.5, 2.0)
        ), key_padding_mask=keep,
    )  # fmt: skip


GRIDS = [Grid((4, 5), 1), Grid((3, 3), 5), Grid((2, 7))]
ENDS = torch.tensor([0, 0, 21, 35, 35, 49, 49])


def packed():
    """Return the positions of three grids in one sequence, as cells of one grid that contains them."""
    field = Grid((4, 7))
    cells = [torch.cartesian_prod(*map(torch.arange, g.shape)) for g in GRIDS]
    coords = torch.cat([torch.cat([c.new_zeros(g.prefix, 2), c]) for c, g in zip(cells, GRIDS, strict=True)])
    spatial = torch.cat([torch.arange(g.tokens) >= g.prefix for g in GRIDS])
    index = coords[:, 0] * 7 + coords[:, 1]
    extent = torch.tensor([[4.0, 7.0]])
    return Positions(coords[None].float(), spatial[None], extent, index=index[None], grid=field)


def test_packed_grids_equal_separate_ones(small_tiles):
    pos, s, values = packed(), slopes(), table(Grid((4, 7)))
    tensors = inputs(49, batch=1)
    tabled = TableBias(values, pos, torch.tensor([[0.5, -1.0, 2.0]]), one_grid=False)
    for bias in (None, tabled, DistanceBias(s, pos)):
        together = attention(*tensors, bias=bias, cu_seqlens=ENDS, backend="triton")
        for grid, start in zip(GRIDS, (0, 21, 35), strict=True):
            sample = [t[:, :, start : start + grid.tokens].detach().double() for t in tensors]
            matrix = None
            if isinstance(bias, DistanceBias):
                matrix = -s[:, None, None] * oracle.distance_matrix(grid, "euclidean", False, "none")
            elif bias is not None:
                y, x = grid.shape
                matrix = oracle.table_matrix(
                    values[:, 4 - y : 3 + y, 7 - x : 6 + x].double(), grid, bias.prefix
                )
            expected = oracle.attend(*sample, bias=None if matrix is None else matrix[None])
            assert relative(together[:, :, start : start + grid.tokens], expected) < FORWARD[torch.float32]


@pytest.mark.parametrize(
    ("kind", "masked"), [("none", False), ("table", True), ("distance", True), ("both", False)]
)
def test_gradients_of_packed_grids(small_tiles, kind, masked):
    pos, field = packed(), Grid((4, 7))
    params = {
        "none": [], "table": [table(field)], "distance": [slopes()],
        "both": [table(field, heads=1), slopes(), slopes()],
    }[kind]  # fmt: skip

    def make(double, *params):
        where = exact(pos) if double else pos
        if kind == "both":
            values, steep, near = params
            return SumBias([ProfileBias(near, values, where), DistanceBias(steep, where, metric="manhattan")])
        return {"none": lambda: None, "table": TableBias, "distance": DistanceBias}[kind](
            *params, *[where] * (kind != "none")
        )

    keep = torch.rand(1, 49) < 0.7 if masked else None
    if keep is not None:
        keep[:, 21:35] = False
    out, (_, dk, dv, *_) = compare(
        inputs(49, batch=1), params, make, cu_seqlens=ENDS, key_padding_mask=keep, deterministic=masked
    )
    if keep is not None:
        assert (out[:, :, 21:35] == 0).all()
        assert (dk[:, :, ~keep[0]] == 0).all()
        assert (dv[:, :, ~keep[0]] == 0).all()


@pytest.mark.parametrize("ends", [[0, 32, 64, 100], [0, 100], [0, 1, 2, 70, 100]], ids=str)
def test_tiles_that_begin_and_end_with_a_sequence(small_tiles, ends):
    tensors = inputs(100, batch=1)
    wide = [t.detach().double() for t in tensors]
    out = attention(*tensors, cu_seqlens=torch.tensor(ends), backend="triton")
    assert relative(out, attention(*wide, cu_seqlens=torch.tensor(ends), backend="reference")) < 2e-6


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # opcheck reads it of its own copies
def test_opcheck():
    grid = Grid((4, 5), 1)
    pos = grid.positions().gather(random_subset(grid, 12, 1))
    values = extended(torch.randn(HEADS, 7, 9), torch.randn(HEADS, 3)).requires_grad_()
    positions, period = DistanceBias((0.1, 0.2), pos, wrap=True).coords(pos)
    more = (
        values,
        cell_numbers(pos),
        slopes(),
        positions,
        period,
        segments(torch.tensor([0, 5, 13]), 13),
        None,
    )
    torch.library.opcheck(
        coords_attention, (*inputs(13, batch=1), *more, 1, 0.25, True), rtol=1e-4, atol=1e-5
    )
    more = None, None, slopes(), positions, None, None, torch.rand(2, 13) < 0.9
    checks = "test_schema", "test_autograd_registration", "test_faketensor"
    torch.library.opcheck(coords_attention, (*inputs(13), *more, 1, 0.25, False), test_utils=checks)


def test_compiled_in_one_graph_for_two_sizes():
    torch._dynamo.reset()

    def attend(q, k, v, steep, values, pos, ends):
        bias = SumBias([TableBias(values, pos), DistanceBias(steep, pos)])
        return attention(q, k, v, bias=bias, cu_seqlens=ends, backend="triton")

    fast = torch.compile(attend, fullgraph=True, backend="aot_eager")
    grid = Grid((5, 6), 1)
    for patches in (12, 20):
        leaves = [*inputs(patches + 1, batch=1), slopes(), table(grid)]
        pos, ends = (
            grid.positions().gather(random_subset(grid, patches, 1)),
            torch.tensor([0, 5, patches + 1]),
        )
        cotangent = torch.randn(1, HEADS, patches + 1, 24)
        result = [
            (out := f(*leaves, pos, ends), *torch.autograd.grad(out, leaves, cotangent))
            for f in (fast, attend)
        ]
        for ours, theirs in zip(*result, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_refusals():
    grid = Grid((4, 5), 1)
    pos = grid.positions().gather(random_subset(grid, 12, 3))
    tensors = inputs(13, batch=2)
    with pytest.raises(ValueError, match="must have 1 or 2 samples, got 3"):
        attention(*tensors, bias=TableBias(table(grid), pos), backend="triton")
    with pytest.raises(ValueError, match="must have 1 or 2 heads, got 3"):
        attention(
            *tensors, bias=DistanceBias((0.1, 0.2, 0.3), Positions(torch.rand(13, 2))), backend="triton"
        )
