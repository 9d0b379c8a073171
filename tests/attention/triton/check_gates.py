"""Gated biases, fused, against attention in float64. `test_interpreter` runs this file."""

import os

import pytest
import torch

from tests.attention import oracle
from tests.attention.triton.check_context import (
    BACKWARD,
    FORWARD,
    HEADS,
    compare_layers,
    inputs,
    layers,
    relative,
    small,
)
from vispe import Grid, attention
from vispe.attention import DistanceBias, GatedBias, TableBias
from vispe.attention.backends.triton import tiles as sizes
from vispe.attention.backends.triton.grid import operands
from vispe.attention.backends.triton.grid.op import table_attention
from vispe.attention.bias.strip.layout import Layout, layout_of
from vispe.attention.bias.strip.packed import pack
from vispe.attention.bias.strip.runs import build

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture(autouse=True)
def _large_tiles(monkeypatch):
    """The interpreter needs as long for a small tile as for a large one."""
    if "VISPE_TEST_DEVICE" not in os.environ:
        monkeypatch.setitem(sizes.TABLES, (90, "float32"), sizes.TABLES[90, "half"])


def compare_gates(
    grid, profile, matrix, params, gates=(True, True), dtype=torch.float32, keep=None, width=16, **options
):
    """Compare gated attention with the oracle; `profile` makes the bias, `matrix` its meaning, of `params`."""
    tensors = inputs(grid, dtype, width, batch=1 if keep is None else 2)
    gate = [torch.randn(tensors[0].shape[:3], requires_grad=True) for present in gates if present]

    def both(read):
        read = iter(read)
        return [next(read) if present else None for present in gates]

    bias = GatedBias(*both(gate), profile(*params))
    out = attention(*tensors, bias=bias, key_padding_mask=keep, backend="triton", **options)
    exact = [t.detach().double().requires_grad_() for t in (*tensors, *gate, *params)]
    row, col = both(exact[3 : 3 + len(gate)])
    total = (0.0 if row is None else row[..., None]) + (0.0 if col is None else col[..., None, :])
    dense = total * matrix(*exact[3 + len(gate) :])
    expected = oracle.attend(*exact[:3], bias=dense, keep=None if keep is None else keep[:, None, None])
    assert relative(out, expected.detach()) <= FORWARD[dtype]
    cotangent = torch.randn_like(out)
    ours = torch.autograd.grad(out, (*tensors, *gate, *params), cotangent)
    theirs = torch.autograd.grad(expected, exact, cotangent.double())
    for mine, other, leaf in zip(ours, theirs, (*tensors, *gate, *params), strict=True):
        assert mine.shape == leaf.shape
        assert relative(mine, other) <= BACKWARD[dtype] * (5 if leaf.shape[-1] == 3 else 1)


def gated_table(grid, heads=HEADS):
    return (torch.randn(heads, *(2 * n - 1 for n in grid.shape)) + 1.0).requires_grad_()


def compare_table(grid, gates=(True, True), **options):
    """Compare gates on a table with numbers for prefix tokens."""
    pos = grid.positions()
    params = [gated_table(grid), torch.randn(HEADS, 3, requires_grad=True)]
    compare_gates(
        grid,
        lambda t, e: TableBias(t, pos, e),
        lambda t, e: oracle.table_matrix(t, grid, e)[None],
        params,
        gates,
        **options,
    )


@pytest.mark.parametrize("width", [64, 72])
def test_widths(width):
    compare_table(Grid((5, 7), 2), width=width)


@pytest.mark.parametrize("strips", [True, False])
@pytest.mark.parametrize("gates", [(True, True), (True, False), (False, True)], ids=str)
def test_gates(monkeypatch, strips, gates):
    monkeypatch.setattr(operands, "layout_of", lambda shape, prefix: Layout(shape, prefix, not strips))
    compare_table(Grid((5, 7), 2), gates)


@pytest.mark.parametrize("steady", [False, True])
def test_gates_with_many_tiles_padding_and_one_table(monkeypatch, steady):
    monkeypatch.setitem(sizes.TABLES, (90, "float32"), small())
    monkeypatch.setattr(operands, "layout_of", lambda shape, prefix: Layout(shape, prefix, False))
    grid = Grid((6, 7), 1)
    pos = grid.positions()
    keep = torch.rand(2, grid.tokens) < 0.7
    compare_gates(
        grid, lambda t: TableBias(t, pos), lambda t: oracle.table_matrix(t, grid)[None], [gated_table(grid, 1)],
        keep=keep, deterministic=steady,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_gated_distances(dtype):
    grid = Grid((8, 7), 1)
    pos = grid.positions()
    matrix = oracle.distance_matrix(grid, "euclidean", False, "max")
    slopes = torch.tensor([0.1, 2.0], requires_grad=True)
    compare_gates(
        grid, lambda s: DistanceBias(s, pos, normalize="max"), lambda s: -s[:, None, None] * matrix, [slopes],
        dtype=dtype,
    )  # fmt: skip


@pytest.mark.parametrize("gates", ["key", "query", "query_key"])
def test_grape_alibi(gates):
    fused, exact = layers({"name": "grape_alibi", "gates": gates})
    grid = Grid((4, 5), 1)
    compare_layers(fused, exact, grid)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_opcheck_of_gates():
    grid = Grid((1, 3), 1)
    layout = layout_of(grid.shape, grid.prefix)
    table = torch.randn(HEADS, 1, 5), torch.randn(HEADS, 3)
    runs, ends = build(*table, layout)
    packed, edge = pack(*table, layout, 0.25, torch.float32, shift=False)
    address, base = layout.patches_first()
    gates = [torch.randn(1, HEADS, grid.tokens, requires_grad=True) for _ in range(2)]
    runs.requires_grad_(), ends.requires_grad_()
    bias = packed, address, edge, base, None, runs, ends
    options = layout.selected, 0.25, 4, False, None, None, False, None, 0.0
    torch.library.opcheck(table_attention, (*inputs(grid), *bias, *options, *gates), rtol=1e-4, atol=1e-5)
