"""Content-dependent biases, fused, compared with attention in float64. `test_interpreter` runs this file."""

import os

import pytest
import torch

import vispe
from tests.attention import oracle
from vispe import Grid, attention
from vispe.attention import SumBias
from vispe.attention.backends.triton import tiles as sizes
from vispe.attention.backends.triton.content.axis_tables import lay_out, slots_of
from vispe.attention.backends.triton.content.decomposed_op import decomposed_attention, slots_for
from vispe.attention.bias.decomposed import DecomposedBias
from vispe.errors import BackendUnavailable

pytestmark = pytest.mark.usefixtures("poisoned")

FORWARD = {torch.float32: 2e-6, torch.float16: 6e-4}
BACKWARD = {torch.float32: 1e-5, torch.float16: 2e-3}
BATCH, HEADS = 1, 2
QUERY, KEY, BOTH = ("query",), ("key",), ("query", "key")


@pytest.fixture(autouse=True)
def _large_tiles(monkeypatch):
    """The interpreter needs as long for a small tile as for a large one."""
    if "VISPE_TEST_DEVICE" not in os.environ:
        monkeypatch.setitem(sizes.TABLES, (90, "float32"), sizes.TABLES[90, "half"])


def small():
    """Return tiles of 32 own tokens and 16 others, so that small grids have many of them."""
    rotated = {"forward": (32, 16), "grad_q": (32, 16), "grad_kv": (16, 32), "grad_bias": (32, 16)}
    return {
        (name, "short", strip): dict.fromkeys((64, 128), sizes.Tiles(*size, 4, 1))
        for name, size in rotated.items()
        for strip in ("float16", "float32")
    }


def inputs(grid, dtype=torch.float32, width=16, value=None, batch=BATCH):
    """Return q, k and v as a model has them: slices of one projection, so no two have the same strides."""
    n, value = grid.tokens, value or width
    qk = torch.randn(batch, n, 2, HEADS, width).to(dtype).permute(2, 0, 3, 1, 4)
    v = torch.randn(batch, HEADS, n, value).to(dtype)
    return [t.detach().requires_grad_() for t in (qk[0], qk[1], v)]


def lookups(grid, dots, scale=2.0, batch=BATCH, heads=HEADS):
    """Return rows and columns for each of `dots`."""
    logits = [torch.randn(batch, heads, grid.tokens, n + 1) * scale for _ in dots for n in grid.shape]
    return [t.requires_grad_() for t in logits]


def dense_bias(grid, dots, reads):
    """Return the dense bias, pair by pair."""
    cells = oracle.cells_of(grid.shape, grid.prefix)
    total = 0.0
    for dot, rows, cols in zip(dots, reads[::2], reads[1::2], strict=True):
        pairs = [grid.shape if cell is None else cell for cell in cells]
        dense = torch.stack([rows[..., y] + cols[..., x] for y, x in pairs], -1)
        total = total + (dense if dot == "query" else dense.transpose(-1, -2))
    return total


def bias_of(grid, dots, reads):
    pos = grid.positions()
    return SumBias([DecomposedBias(reads[2 * i], reads[2 * i + 1], dot, pos) for i, dot in enumerate(dots)])


def relative(ours, theirs):
    return ((ours.double() - theirs).norm() / theirs.norm().clamp(min=1e-12)).item()


def compare(
    grid, dots, dtype=torch.float32, keep=None, width=16, value=None, reads=None, batch=BATCH, **options
):
    tensors, reads = inputs(grid, dtype, width, value, batch), reads or lookups(grid, dots, batch=batch)
    out = attention(
        *tensors, bias=bias_of(grid, dots, reads), key_padding_mask=keep, backend="triton", **options
    )
    exact = [t.detach().double().requires_grad_() for t in (*tensors, *reads)]
    allowed = None if keep is None else keep[:, None, None]
    expected = oracle.attend(
        *exact[:3], bias=dense_bias(grid, dots, exact[3:]), keep=allowed, scale=options.get("scale")
    )
    assert out.dtype == dtype
    assert relative(out, expected) <= FORWARD[dtype]
    cotangent = torch.randn_like(out)
    ours = torch.autograd.grad(out, (*tensors, *reads), cotangent)
    theirs = torch.autograd.grad(expected, exact, cotangent.double())
    for mine, other, leaf in zip(ours, theirs, (*tensors, *reads), strict=True):
        assert mine.dtype == leaf.dtype
        assert mine.shape == leaf.shape
        if other.norm() < 1e-9:  # one row only: what is read for it does not matter
            assert mine.abs().max() < 1e-5
        else:
            assert relative(mine, other) <= BACKWARD[dtype]


CASES = [
    (Grid((1, 1)), BOTH), (Grid((1, 6)), QUERY), (Grid((1, 6)), KEY), (Grid((5, 7), 1), QUERY), (Grid((5, 7), 1), KEY),
    (Grid((5, 7), 5), BOTH), (Grid((37, 3), 5), BOTH),
]  # fmt: skip


@pytest.mark.parametrize(
    ("grid", "dots"), CASES, ids=lambda v: "+".join(v) if isinstance(v, tuple) else f"{v.shape}+{v.prefix}"
)
def test_grids(grid, dots):
    compare(grid, dots)


@pytest.mark.parametrize("dots", [QUERY, KEY], ids="+".join)
def test_half_precision(dots):
    compare(Grid((8, 7), 1), dots, torch.float16)


@pytest.mark.parametrize(("grid", "dots"), [(Grid((3, 10), 17), QUERY), (Grid((3, 10), 1), KEY)], ids=str)
def test_many_tiles_and_panels(monkeypatch, grid, dots):
    monkeypatch.setitem(sizes.TABLES, (90, "float32"), small())
    compare(grid, dots)


@pytest.mark.parametrize(("width", "value"), [(24, 40), (16, 128), (72, 96)])
def test_widths(width, value):
    compare(Grid((3, 5), 1), BOTH, width=width, value=value)


@pytest.mark.parametrize("dots", [QUERY, KEY], ids="+".join)
def test_padding_and_rows_without_any_key(dots):
    grid = Grid((4, 5), 2)
    keep = torch.rand(2, grid.tokens) < 0.5
    keep[1] = False
    compare(grid, dots, keep=keep, batch=2)


def test_large_numbers_and_another_scale():
    grid = Grid((4, 5), 1)
    compare(grid, BOTH, reads=lookups(grid, BOTH, 20.0), scale=1.0)


def test_one_of_all_heads_or_samples():
    grid = Grid((4, 5), 1)
    reads = [*lookups(grid, QUERY, heads=1, batch=2), *lookups(grid, QUERY, batch=1)]
    compare(grid, ("query", "query"), reads=reads, batch=2)


def test_gradients_do_not_change_from_run_to_run():
    grid = Grid((4, 9), 1)
    tensors, reads = inputs(grid), lookups(grid, BOTH)
    cotangent = torch.randn(BATCH, HEADS, grid.tokens, 16)
    first, second = (
        torch.autograd.grad(
            attention(*tensors, bias=bias_of(grid, BOTH, reads), backend="triton"), reads, cotangent
        )
        for _ in range(2)
    )
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


def layers(spec, dim=32, heads=2, std=1.0):
    """Return a layer for kernels and the same in float64, with tables that are not zero."""
    fused = vispe.Attention(dim, heads, spec, backend="triton")
    exact = vispe.Attention(dim, heads, spec, backend="reference").double()
    for name, parameter in fused.named_parameters():
        if "pos_enc" in name:
            torch.nn.init.normal_(parameter, std=std)
    exact.load_state_dict(fused.state_dict())
    return fused, exact


def compare_layers(fused, exact, grid):
    x = torch.randn(2, grid.tokens, 32, requires_grad=True)
    wide = x.detach().double().requires_grad_()
    out, expected = fused(x, grid), exact(wide, grid)
    assert relative(out, expected.detach()) <= 2e-6
    cotangent = torch.randn_like(out)
    names, leaves = zip(*fused.named_parameters(), strict=True)
    ours = torch.autograd.grad(out, (x, *leaves), cotangent)
    theirs = torch.autograd.grad(expected, (wide, *exact.parameters()), cotangent.double())
    for name, mine, other in zip(("x", *names), ours, theirs, strict=True):
        assert relative(mine, other) <= 1e-5 or other.norm() < 1e-9, name


@pytest.mark.parametrize(
    ("options", "grid"),
    [
        *(({"method": "cross", "on": on}, Grid((4, 6), 1)) for on in ("k", "q", "qk")),
        ({"method": "cross", "on": "qk", "shared": False, "prefix_buckets": 3}, Grid((3, 5), 2)),
        ({"method": "cross", "on": "qk", "prefix_buckets": 0, "ratio": 1.5}, Grid((7, 2), 1)),
        *(
            ({"method": method, "mode": "bias", "on": "qk"}, Grid((3, 4), 1))
            for method in ("cross", "product")
        ),
    ],
    ids=lambda value: ",".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_irpe(options, grid):
    fused, exact = layers({"name": "irpe", **options})
    compare_layers(fused, exact, grid)


@pytest.mark.parametrize(
    "spec",
    ["decomposed(grid=[3,5])", "transformer_xl(clamp_len=2)", "deberta(rescale=true,position_buckets=4)"],
)
def test_relative_positions_by_rows_and_columns(spec):
    fused, exact = layers(spec, std=0.3)
    compare_layers(fused, exact, Grid((4, 3), 1))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"method": "product"}, "fused only with separate terms for rows and columns"),
        ({"method": "euclidean", "on": "qk"}, "fused only with separate terms for rows and columns"),
        ({"method": "cross", "on": "kv"}, "not materialised"),
    ],
    ids=str,
)
def test_irpe_refused(options, reason):
    fused, _ = layers({"name": "irpe", **options})
    with pytest.raises(BackendUnavailable, match=reason):
        fused(torch.randn(1, 13, 32), Grid((3, 4), 1))


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # opcheck reads it of its own copies
def test_opcheck():
    grid = Grid((1, 3))
    slots = slots_of(grid.shape, grid.prefix, (64, 64, 64))
    by_query, by_key = (
        lay_out(*lookups(grid, QUERY), slots, 0.25).detach().requires_grad_() for _ in range(2)
    )
    keep = torch.ones(BATCH, grid.tokens, dtype=torch.bool)
    rest = (*grid.shape, grid.prefix, slots.width, slots.high, 0.25)
    arguments = (*inputs(grid), by_query, by_key, keep, *rest)
    torch.library.opcheck(decomposed_attention, arguments, rtol=1e-4, atol=1e-5)


def test_slots_are_laid_out_for_tiles_that_do_not_change():
    """Kernels may run later, in a compiled program, when torch may round float32."""
    q = torch.zeros(1, 2, 600, 64)
    before = torch.backends.cuda.matmul.fp32_precision
    exact = slots_for(q, q, (30, 20), 0)
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        assert slots_for(q, q, (30, 20), 0) == exact
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def test_compiled_in_one_graph_for_two_grids():
    torch._dynamo.reset()

    def attend(q, k, v, rows, cols, pos):
        return attention(q, k, v, bias=DecomposedBias(rows, cols, "query", pos), backend="triton")

    fast = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for grid in (Grid((1, 3), 1), Grid((1, 5), 2)):
        leaves = [*inputs(grid), *lookups(grid, QUERY)]
        cotangent = torch.randn(BATCH, HEADS, grid.tokens, 16)
        ours, theirs = (
            torch.autograd.grad(logits(*leaves, grid.positions()), leaves[2:], cotangent)
            for logits in (fast, attend)
        )
        torch.testing.assert_close(ours, theirs)
