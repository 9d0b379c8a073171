"""Strips packed in float32 and float16: rounding errors do not exceed those of a mask."""

import pytest
import torch

from tests.attention import oracle
from tests.cases import cases
from vispe import Grid
from vispe.attention.bias.strip.float16_runs import pack_with_copy, widest_range
from vispe.attention.bias.strip.layout import Layout
from vispe.attention.bias.strip.packed import pack

HALVES = [torch.float16, torch.bfloat16]
HEADS, WIDTH = 4, 64


def packed(values, edge, grid, dtype, scale, rows=False):
    """Return what `pack_both` makes of a table, and its layout."""
    layout = Layout(grid.shape, grid.prefix, rows)
    return *pack_with_copy(values, edge, layout, scale, dtype), layout


def matrix(runs, edge, layout, scale):
    """Return the biases (h, n, n) that kernels read, patches first, in float64."""
    n, m = layout.tokens, layout.tokens - layout.selected
    at = layout.patches_first()[0].long()[:, None] + torch.arange(n)
    read = runs[:, at.clamp(max=runs.shape[1] - 1)].double()
    ends = torch.where(torch.arange(n)[None] >= m, edge[:, 1:2], edge[:, :1]).double()
    read[:, :, m:] = ends[:, :, None]
    return read * scale


def exact(values, edge, grid):
    """Return the biases (h, n, n) in the same order, in float64."""
    order = torch.roll(torch.arange(grid.tokens), -grid.prefix)
    dense = oracle.table_matrix(values.double(), grid, *([] if edge is None else [edge.double()]))
    return dense[:, order][:, :, order]


def attend(x, bias, v):
    return (x + bias).softmax(-1) @ v


@cases("dtype", HALVES, ids=str)
@cases(("grid", "rows"), [(Grid((5, 7), 2), False), (Grid((4, 9)), False), (Grid((3, 4), 1), True)])
@cases("scale", [0.125, 1.0, 0.004])
def test_rounding_errors_are_within_the_documented_bound(dtype, grid, rows, scale):
    widest = widest_range(dtype, scale)
    values = torch.rand(HEADS, *(2 * n - 1 for n in grid.shape))
    # heads of a quarter of the range, nearly all of it, more, and much more
    values = values * torch.tensor([0.25, 0.98, 1.3, 40.0])[:, None, None] * widest
    edge = torch.rand(HEADS, 3) * widest / 4 if grid.prefix else None
    runs, ends, copy, layout = packed(values, edge, grid, dtype, scale, rows)
    assert ends[:, 2].tolist() == [1, 1, 0, 0]
    assert (runs.dtype, copy.dtype, runs.shape) == (torch.float32, torch.float16, copy.shape)
    assert torch.equal(copy[:2].float(), runs[:2])
    order = exact(values, edge, grid)
    error = matrix(runs, ends, layout, scale) - order
    if rows:
        error = matrix(runs, ends, layout, scale) - oracle.table_matrix(values.double(), grid, edge.double())
    error = error - error.mean(2, keepdim=True)  # softmax does not see it
    value_range = values.flatten(1).amax(1) - values.flatten(1).amin(1)
    assert (error.abs().amax((1, 2))[:2] <= 2 * 2.0**-12 * value_range[:2] + 2.0**-24 * scale).all()
    assert (error.abs().amax((1, 2))[:2] <= 2 * torch.finfo(dtype).eps / 2).all()
    assert (error.abs().amax((1, 2))[2:] <= 2.0**-22 * value_range[2:]).all()


@pytest.mark.slow
@pytest.mark.parametrize("grid", [Grid((8, 8), 1), Grid((9, 13))], ids=str)
@pytest.mark.parametrize(
    ("dtype", "spread", "part"), [(torch.float16, 0.2, 1.1), (torch.bfloat16, 1.5, 0.25)]
)
def test_attention_is_no_worse_than_with_a_mask_in_the_dtype_of_queries(dtype, spread, part, grid):
    ours = masks = 0.0
    for _ in range(8):
        values = torch.randn(HEADS, *(2 * n - 1 for n in grid.shape)) * spread
        edge = torch.randn(HEADS, 3) * spread if grid.prefix else None
        runs, ends, _, layout = packed(values, edge, grid, dtype, WIDTH**-0.5)
        assert ends[:, 2].all()
        q, k, v = (torch.randn(HEADS, grid.tokens, WIDTH, dtype=torch.float64) for _ in range(3))
        x, dense = q @ k.mT * WIDTH**-0.5, exact(values, edge, grid)
        expected = attend(x, dense, v)
        mine = (attend(x, matrix(runs, ends, layout, WIDTH**-0.5), v) - expected).norm() / expected.norm()
        ours += mine**2
        masks += ((attend(x, dense.float().to(dtype).double(), v) - expected).norm() / expected.norm()) ** 2
        # below what rounding the output alone costs
        rounding = (expected.to(dtype).double() - expected).norm() / expected.norm()
        assert mine <= 0.7 * rounding
    assert ours <= part**2 * masks


@cases("dtype", HALVES, ids=str)
def test_hidden_entries_and_heads_without_finite_entries(dtype):
    grid = Grid((3, 4), 1)
    values = torch.rand(HEADS, 5, 7)
    values[0] = float("-inf")
    values[1, :2] = float("-inf")
    values[2] = 0.75
    values[3, 0, 0] = 1e9
    edge = torch.rand(HEADS, 3)
    runs, ends, copy, layout = packed(values, edge, grid, dtype, 0.25)
    assert ends[1:, 2].tolist() == [1, 1, 0]
    read, order = matrix(runs, ends, layout, 0.25), exact(values, edge, grid)
    assert torch.equal(read == float("-inf"), order == float("-inf"))
    assert torch.equal(copy[:3].float(), runs[:3])
    assert (read.softmax(-1) - order.softmax(-1))[1:3].abs().max() < 2 * torch.finfo(dtype).eps


@cases("scale", [0.0, -1.0, 4096.0, 1e-9])
def test_extreme_scales(scale):
    assert widest_range(torch.float32, 0.125) == 0.0
    assert widest_range(torch.bfloat16, scale) < 2e-4
    assert widest_range(torch.bfloat16, 0.125) == 16
    assert widest_range(torch.float16, 0.125) == 2
    if 0 < scale <= 1:
        grid = Grid((3, 4))
        layout = Layout(grid.shape, 0, False)
        table = torch.rand(2, 5, 7)
        both = pack_with_copy(table, None, layout, scale, torch.bfloat16)
        plain = pack(table, None, layout, scale, torch.float32)
        assert not both[1][:, 2].any()
        assert torch.equal(both[0], plain[0])
        assert torch.equal(both[1][:, :2], plain[1])
