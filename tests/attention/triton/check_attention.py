"""The fused kernels against attention in float64, all gradients included. `test_interpreter` runs this file."""

import os

import pytest
import torch

from tests.attention import oracle
from vispe import Grid, attention
from vispe.attention import DistanceBias, ProfileBias, SumBias, TableBias
from vispe.attention.backends.triton import tiles as sizes
from vispe.attention.backends.triton.grid import operands
from vispe.attention.backends.triton.grid.launch import product_of
from vispe.attention.bias.strip.float16_runs import fits_float16
from vispe.attention.bias.strip.layout import Layout

pytestmark = pytest.mark.usefixtures("poisoned")

# bfloat16 is cut, not rounded, here
FORWARD = {
    torch.float32: 2e-6,
    torch.float16: 6e-4,
    torch.bfloat16: 8e-3,
}
BACKWARD = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2.4e-2}
HEADS = 2


@pytest.fixture(autouse=True)
def _large_tiles(monkeypatch):
    """The interpreter needs as long for a small tile as for a large one."""
    if "VISPE_TEST_DEVICE" not in os.environ:
        monkeypatch.setitem(sizes.TABLES, (90, "float32"), sizes.TABLES[90, "half"])


@pytest.fixture
def strips(monkeypatch):
    """Small grids, which would take rows, take strips."""
    monkeypatch.setattr(operands, "layout_of", lambda shape, prefix: Layout(shape, prefix, False))


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of 32, so that small grids have many of them."""
    half = {
        name: {64: sizes.Tiles(32, 16, 4, 1), 128: sizes.Tiles(32, 16, 4, 1)}
        for name in sizes.TABLES[90, "half"]
    }
    monkeypatch.setitem(sizes.TABLES, (90, "half"), half)
    monkeypatch.setitem(sizes.TABLES, (90, "float32"), half)


def inputs(grid, dtype=torch.float32, width=16, value=None, batch=2, heads=HEADS):
    """Return q, k and v as a model has them: slices of one projection, so no two have the same strides."""
    n, value = grid.tokens, value or width
    qk = torch.randn(batch, n, 2, heads, width).to(dtype).permute(2, 0, 3, 1, 4)
    v = torch.randn(batch, heads, n, value).to(dtype)
    return [t.detach().requires_grad_() for t in (qk[0], qk[1], v)]


def table(grid, scale=2.0, heads=HEADS):
    return (torch.randn(heads, *(2 * n - 1 for n in grid.shape)) * scale).requires_grad_()


def relative(ours, theirs):
    return ((ours.double() - theirs).norm() / theirs.norm().clamp(min=1e-12)).item()


def compare(tensors, params, make, dense, dtype, keep=None, edge_slack=1.0, **options):
    """Compare output and gradients of the fused backend with the oracle, which gets the same rounded numbers."""
    out = attention(*tensors, bias=make(*params), key_padding_mask=keep, backend="triton", **options)
    exact = [t.detach().double().requires_grad_() for t in (*tensors, *params)]
    allowed = None if keep is None else keep[:, None, None]
    expected = oracle.attend(*exact[:3], bias=dense(*exact[3:]), keep=allowed, scale=options.get("scale"))
    assert out.dtype == dtype
    assert relative(out, expected) <= FORWARD[dtype]
    cotangent = torch.randn_like(out)
    ours = torch.autograd.grad(out, (*tensors, *params), cotangent)
    theirs = torch.autograd.grad(expected, exact, cotangent.double())
    for mine, other, leaf in zip(ours, theirs, (*tensors, *params), strict=True):
        assert mine.dtype == leaf.dtype
        assert mine.shape == leaf.shape
        if other.norm() < 1e-9:  # one token, or only one weight: nothing to change
            assert mine.abs().max() < 1e-2 if dtype != torch.float32 else mine.abs().max() < 1e-5
        else:
            slack = edge_slack if mine.shape[-1] == 3 and mine.ndim == 2 else 1.0
            rounding = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / 2 * mine.numel() ** 0.5
            error = (mine.double() - other).norm()
            # gradients may be below what dtype holds
            assert error <= BACKWARD[dtype] * slack * other.norm() + rounding
    return out


def compare_table(grid, dtype, keep=None, width=16, value=None, spread=2.0, heads=HEADS, batch=2, **options):
    pos = grid.positions()
    params = [table(grid, spread, heads), torch.randn(heads, 3).requires_grad_()][: 2 if grid.prefix else 1]
    return compare(
        inputs(grid, dtype, width, value, batch), params, lambda values, edge=None: TableBias(values, pos, edge),
        lambda values, edge=None: oracle.table_matrix(values, grid, edge)[None], dtype, keep, 5.0, **options,
    )  # fmt: skip


GRIDS = [
    Grid((1, 1)), Grid((1, 6), 1), Grid((5, 7)), Grid((5, 7), 1), Grid((5, 7), 5), Grid((14, 14), 1), Grid((37, 3), 5),
    Grid((4, 8), 1), Grid((9,), 1), Grid((2, 3, 5), 1), Grid((1, 6), 3), Grid((1, 3, 4), 2),
]  # fmt: skip


@pytest.mark.parametrize("grid", GRIDS, ids=lambda g: f"{'x'.join(map(str, g.shape))}+{g.prefix}")
def test_strips(strips, grid):
    compare_table(grid, torch.float32, batch=1 if grid.tokens > 64 else 2)


@pytest.fixture
def rounded():
    """Torch may round float32 to TF32 in products of its own."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    yield
    torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.parametrize("width", [16, 72])
@pytest.mark.parametrize("sm", [90, 80])
def test_products_are_split_where_torch_may_round(strips, rounded, monkeypatch, sm, width):
    """With separate tiles; the interpreter itself multiplies exactly."""
    monkeypatch.setitem(sizes.TABLES, (90, "tf32x3"), sizes.TABLES[sm, "tf32x3"])
    assert product_of(torch.zeros(1)) == "tf32x3"
    assert product_of(torch.zeros(1).half()) == "ieee"
    compare_table(Grid((5, 7), 1), torch.float32, width=width)


@pytest.mark.parametrize("grid", [GRIDS[1], GRIDS[4], GRIDS[9]], ids=str)
def test_rows(grid):
    assert product_of(torch.zeros(1)) == "ieee"
    compare_table(grid, torch.float32)


@pytest.mark.parametrize(
    ("prefix", "dtype"),
    [(20, torch.float32), (20, torch.float16), (0, torch.bfloat16), (1, torch.float16)],
    ids=str,
)
def test_many_tiles(strips, small_tiles, prefix, dtype):
    compare_table(Grid((7, 6), prefix), dtype, batch=1)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    "grid",
    [Grid((8, 16), 1), Grid((9, 15), 5), Grid((11, 13)), Grid((6, 9), 40), Grid((5, 5, 6), 1)],
    ids=str,
)
def test_whole_and_narrow_tiles(monkeypatch, strips, grid, padded):
    """Whole tiles of patches, and narrow tiles of the remaining patches and the prefix, in queries and in keys."""
    size = {
        name: {64: sizes.Tiles(64, 64, 4, 1), 128: sizes.Tiles(64, 64, 4, 1)}
        for name in sizes.TABLES[90, "half"]
    }
    monkeypatch.setitem(sizes.TABLES, (90, "half"), size)
    monkeypatch.setitem(sizes.TABLES, (90, "float32"), size)
    keep = torch.rand(1, grid.tokens) < 0.7 if padded else None
    compare_table(grid, torch.float32, keep, batch=1)
    # heads of 64 + 32 columns have narrower tiles of keys
    compare_table(grid, torch.float32, keep, batch=1, width=72, value=16)
    compare_table(grid, torch.float32, keep, batch=1, width=16, value=72)


@pytest.mark.parametrize(
    ("width", "value"),
    [(16, 64), (24, 40), (64, 64), (128, 16), (80, 128), (8, 8), (72, 72), (96, 88), (88, 40)],
)
def test_widths(strips, width, value):
    dtype = torch.float16 if width in (24, 64, 88, 128) else torch.float32
    compare_table(Grid((5, 6), 1), dtype, width=width, value=value, batch=1)


@pytest.mark.parametrize("batch", [16, 35])
def test_more_samples_than_one_group(strips, small_tiles, batch):
    compare_table(Grid((6, 7), 1), torch.float32, width=8, batch=batch)


@pytest.mark.parametrize("rows", [False, True])
def test_padding_and_rows_without_any_key(monkeypatch, small_tiles, rows):
    monkeypatch.setattr(operands, "layout_of", lambda shape, prefix: Layout(shape, prefix, rows))
    grid = Grid((6, 7), 3)
    keep = torch.rand(2, grid.tokens) < 0.5
    keep[1] = False
    keep[0, :2] = True
    out = compare_table(grid, torch.float32, keep)
    assert (out[1] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_large_tables(strips, dtype):
    compare_table(Grid((6, 5), 1), dtype, spread=17.0, batch=1)


@pytest.mark.parametrize("slope", [0.004, 0.63, 8.0])
def test_distances_stored_in_half_precision(strips, slope):
    grid = Grid((8, 7), 1)
    pos = grid.positions()
    matrix = oracle.distance_matrix(grid, "euclidean", False, "none")
    slopes = torch.tensor([slope, slope / 2], dtype=torch.float64)
    compare(
        inputs(grid, torch.float16), [], lambda: DistanceBias(tuple(slopes.tolist()), pos),
        lambda: -slopes[:, None, None] * matrix, torch.float16,
    )  # fmt: skip
    assert {key[3] for key in pos.memo if key[0] == "packed bias"} == {torch.float16}


@pytest.mark.parametrize("scale", [1e-2, 1e-3, 1e-4, 1e-5, 1e-6])
@pytest.mark.parametrize(
    "kind", ["fixed", "learned", "repelling", "squared", "table", "profile", "sum", "anywhere"]
)
def test_half_precision_at_any_scale(strips, kind, scale):
    grid = Grid((6, 7), 1)
    pos = grid.positions()
    metric = "squared" if kind == "squared" else "euclidean"
    matrix = oracle.distance_matrix(grid, metric, False, "none")
    slopes = torch.tensor([1.0, 0.25], requires_grad=True)
    profile = table(grid, 1.0, heads=1)
    q, k, v = inputs(grid, torch.float16)
    q = (q.detach() * min(0.25 / scale, 16.0)).requires_grad_()  # products count alongside biases
    fixed = tuple(slopes.tolist())

    def far(s):
        return -s[:, None, None] * matrix

    def near(s, t):
        return s[:, None, None] * oracle.table_matrix(t, grid)

    params, make, dense = {
        "fixed": ([], lambda: DistanceBias(fixed, pos), lambda: far(slopes.detach().double())),
        "squared": ([], lambda: DistanceBias(fixed, pos, metric="squared"), lambda: far(slopes.detach().double())),
        "repelling": ([], lambda: DistanceBias((-1.0, -0.25), pos), lambda: far(-slopes.detach().double())),
        "learned": ([slopes], lambda s: DistanceBias(s, pos), far),
        "table": ([profile], lambda t: TableBias(t, pos), lambda t: oracle.table_matrix(t, grid)[None]),
        "profile": ([slopes, profile], lambda s, t: ProfileBias(s, t, pos), near),
        "sum": ([slopes, profile], lambda s, t: SumBias([DistanceBias(s, pos), TableBias(t, pos)]),
                lambda s, t: far(s) + oracle.table_matrix(t, grid)),
        "anywhere": ([slopes], lambda s: DistanceBias(s, pos.with_spacing((1.0, 1.0))), far),
    }[kind]  # fmt: skip
    compare([q, k, v], params, make, dense, torch.float16, scale=scale)


@pytest.mark.parametrize(
    ("options", "scale", "fits"),
    [({}, 0.125, True), ({}, 2e-4, True), ({}, 1e-4, False), ({}, 4096.0, False), ({"metric": "squared"}, 5e-4, False),
     ({"metric": "squared"}, 1e-3, True), ({"normalize": "max"}, 2e-5, True), ({"normalize": "max"}, 1e-5, False),
     ({"normalize": "reference", "reference": (3, 3)}, 1e-4, True), ({"spacing": (10.0, 1.0)}, 2e-4, False)],
    ids=str,
)  # fmt: skip
def test_values_beyond_half_precision(options, scale, fits):
    grid = Grid((6, 7), 1)
    bias = DistanceBias((1.0, 0.25), grid.positions(), **options)
    assert fits_float16(bias, grid, scale) == fits
    stored = -bias.table(grid) / scale
    assert not fits or (stored.half().isfinite().all() and scale <= 2048)


@pytest.mark.parametrize("scale", [0.05, 1.0])
def test_scales(strips, scale):
    compare_table(Grid((4, 5), 1), torch.float32, scale=scale)


def test_learned_slopes_of_wrapped_distances(strips):
    grid = Grid((7, 5), 1, spacing=(0.5, 2.0))
    pos = grid.positions()
    matrix = oracle.distance_matrix(grid, "manhattan", True, "max")
    slopes = torch.tensor([0.004, 1.0], requires_grad=True)
    compare(
        inputs(grid), [slopes], lambda s: DistanceBias(s, pos, metric="manhattan", wrap=True, normalize="max"),
        lambda s: -s[:, None, None] * matrix, torch.float32,
    )  # fmt: skip


def test_sums_of_tables_of_one_and_of_all_heads(strips):
    grid = Grid((4, 7), 1)
    pos = grid.positions()
    params = [
        table(grid, heads=1),
        torch.rand(HEADS).requires_grad_(),
        table(grid, heads=1),
        torch.randn(HEADS, 3).requires_grad_(),
    ]
    compare(
        inputs(grid), params, lambda t, s, u, e: SumBias([TableBias(t, pos, e), ProfileBias(s, u, pos)]),
        lambda t, s, u, e: oracle.table_matrix(t, grid, e) + s[:, None, None] * oracle.table_matrix(u, grid),
        torch.float32,
    )  # fmt: skip


def test_gradients_of_all_offsets_sum_to_zero(strips):
    grid = Grid((6, 7), 2)
    values, edge = table(grid), torch.zeros(HEADS, 3, requires_grad=True)
    out = attention(*inputs(grid), bias=TableBias(values, grid.positions(), edge), backend="triton")
    out.backward(torch.randn_like(out))
    sums = values.grad.flatten(1).sum(1) + edge.grad.sum(1)
    assert sums.abs().max() < 1e-5 * values.grad.abs().sum()


@pytest.mark.parametrize("grid", [Grid((6, 7), 1), Grid((1, 6), 3)], ids=str)
def test_fixed_point_sums_do_not_depend_on_order_and_are_as_exact(strips, small_tiles, grid):
    compare_table(grid, torch.float32, batch=1, deterministic=True)


def test_fixed_biases_are_packed_once_per_scale_and_dtype(strips):
    grid = Grid((5, 6), 1)
    pos = grid.positions()
    q, k, v = inputs(grid)
    bias = DistanceBias((0.3, 0.7), pos)
    for scale in (None, 0.5, None):
        for dtype in (torch.float32, torch.float16):
            ours = attention(q.to(dtype), k.to(dtype), v.to(dtype), bias=bias, scale=scale, backend="triton")
            expected = attention(
                q.double(), k.double(), v.double(), bias=bias, scale=scale, backend="reference"
            )
            assert relative(ours, expected.detach()) < (2e-6 if dtype == torch.float32 else 2e-3)
    packed_keys = [key for key in pos.memo if isinstance(key, tuple) and key[0] == "packed bias"]
    assert len(packed_keys) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_no_bias(dtype):
    grid = Grid((5, 7), 1)
    compare(inputs(grid, dtype), [], lambda: None, lambda: None, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("closed", ["head", "rows"])
def test_a_table_may_hide_all_keys_of_a_row(monkeypatch, strips, closed, padded, dtype):
    grid = Grid((5, 4))
    values = table(grid)
    with torch.no_grad():
        values[0 if closed == "head" else slice(None), : None if closed == "head" else 5] = float("-inf")
    keep = torch.rand(2, 20) > 0.4 if padded else None
    pos = grid.positions()
    out = compare(
        inputs(grid, dtype), [values], lambda t: TableBias(t, pos), lambda t: oracle.table_matrix(t, grid)[None], dtype,
        keep,
    )  # fmt: skip
    assert (out[:, 0, 0 if closed == "rows" else slice(None)] == 0).all()
