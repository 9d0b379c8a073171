"""Tables in half precision: heads that float16 represents exactly are read from a copy. `test_interpreter` runs this.

Results do not depend on which of the two is read, so NaN in the other one shows which it is.
"""

import pytest
import torch

from tests.attention import oracle
from tests.attention.triton.check_attention import compare_table, inputs
from vispe import Grid, attention
from vispe.attention import DistanceBias, ProfileBias, SumBias, TableBias
from vispe.attention.backends.triton import tiles as sizes
from vispe.attention.backends.triton.grid import operands
from vispe.attention.backends.triton.grid.launch import run_forward
from vispe.attention.backends.triton.grid.launch_backward import run_backward
from vispe.attention.bias.strip.float16_runs import pack_with_copy
from vispe.attention.bias.strip.layout import Layout

HEADS = 4
FITS = torch.tensor([True, False, True, True])
NAN = float("nan")


@pytest.fixture(autouse=True)
def _whole_tiles(monkeypatch):
    size = {
        name: {64: sizes.Tiles(16, 16, 4, 1), 128: sizes.Tiles(16, 16, 4, 1)}
        for name in sizes.TABLES[90, "half"]
    }
    monkeypatch.setitem(sizes.TABLES, (90, "half"), size)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("rows", [False, True])
def test_heads_that_fit_read_the_copy_and_others_do_not(rows, groups):
    grid, scale = Grid((4, 8)), 0.25
    values = torch.rand(HEADS, 7, 15) * torch.where(FITS, 1.5, 40.0)[:, None, None]
    layout = Layout(grid.shape, 0, rows)
    packed, edge, copy = pack_with_copy(values, None, layout, scale, torch.float16)
    address = layout.patches_first()[0]
    shared = [torch.randn(2, HEADS // groups, 32, 16).half() for _ in range(2)]
    q, grad = (torch.randn(2, HEADS, 32, 16).half() for _ in range(2))

    def actual(packed, copy):
        end = None, layout.selected, scale, None, copy
        out, lse = run_forward(q, *shared, packed, address, edge, *end)
        return [out, *run_backward(grad, q, *shared, out, lse[0], packed, address, edge, *end)[:3]]

    expected = actual(packed, None)
    with_nan = packed.masked_fill(FITS[:, None], NAN), copy.masked_fill(~FITS[:, None], NAN)
    mine = actual(*with_nan)
    for name, a, b in zip(("out", "dq", "dk", "dv"), mine, expected, strict=True):
        # a head of keys that serves one that does not fit reads float32 for both
        intact = slice(None) if groups == 1 or name in ("out", "dq") else slice(1, None)
        assert torch.equal(a[:, intact], b[:, intact]), name
    if groups > 1:
        assert mine[2][:, 0].isnan().any()
    assert all(torch.equal(a, b) for a, b in zip(actual(packed, copy), expected, strict=True))


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("prefix", [0, 3])
@pytest.mark.parametrize(
    ("dtype", "spread"), [(torch.float16, 0.25), (torch.float16, 3.0), (torch.bfloat16, 1.5)]
)
def test_output_and_gradients(monkeypatch, dtype, spread, prefix, rows):
    monkeypatch.setattr(operands, "layout_of", lambda shape, prefix: Layout(shape, prefix, rows))
    grid = Grid((7, 6), prefix)
    keep = torch.rand(2, grid.tokens) < 0.7
    keep[:, 0] = True
    compare_table(grid, dtype, keep, spread=spread)


@pytest.mark.parametrize(
    "make",
    [lambda pos: DistanceBias(torch.tensor([0.01, 0.02]), pos),
     lambda pos: ProfileBias(torch.tensor([0.2, -0.1]), torch.rand(1, 9, 11), pos),
     lambda pos: SumBias([DistanceBias((0.01, 0.02), pos), TableBias(torch.rand(2, 9, 11), pos)])],
    ids=["slopes", "profile", "sum"],
)  # fmt: skip
def test_every_kind_of_table_is_packed_in_both(monkeypatch, make):
    recorded = []
    monkeypatch.setattr(
        operands, "pack_with_copy", lambda *a, **k: recorded.append(pack_with_copy(*a, **k)) or recorded[-1]
    )
    grid = Grid((5, 6))
    bias = make(grid.positions())
    q, k, v = inputs(grid, torch.float16)
    out = attention(q, k, v, bias=bias, backend="triton")
    expected = attention(q.double(), k.double(), v.double(), bias=bias, backend="reference")
    assert (out.double() - expected).norm() <= 6e-4 * expected.norm()
    (both,) = recorded
    assert both[1][:, 2].all()


def test_fixed_tables_are_packed_once_for_each_dtype():
    grid = Grid((5, 6))
    pos = grid.positions()
    bias = DistanceBias((-0.01, -0.02), pos)  # repelling: no tokens are nearest
    matrix = oracle.distance_matrix(grid, "euclidean", False, "none")
    q, k, v = inputs(grid, torch.float32)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float16):
        arguments = [t.to(dtype) for t in (q, k, v)]
        out = attention(*arguments, bias=bias, backend="triton")
        slopes = torch.tensor([0.01, 0.02], dtype=torch.float64)
        expected = oracle.attend(*(t.double() for t in arguments), bias=slopes[:, None, None] * matrix)
        assert (out.double() - expected).norm() <= (
            8e-3 if dtype == torch.bfloat16 else 6e-4
        ) * expected.norm()
    packed_biases = {key[3]: made for key, made in pos.memo.items() if key[0] == "packed bias"}
    assert set(packed_biases) == {torch.float16, torch.bfloat16, torch.float32}
    assert [packed_biases[dtype][2] is None for dtype in (torch.float16, torch.bfloat16, torch.float32)] == [
        False,
        False,
        True,
    ]
