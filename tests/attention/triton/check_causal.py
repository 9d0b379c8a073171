"""Causal masks in the fused kernels: learned tables, gradients, all orders of tiles (`test_interpreter`)."""

import pytest
import torch

from tests.attention.triton.check_attention import BACKWARD, FORWARD, inputs, relative, table
from vispe import Grid, attention, explain
from vispe.attention import DistanceBias, SumBias, TableBias
from vispe.attention.backends.triton.grid import operands
from vispe.attention.bias.strip.layout import Layout
from vispe.errors import BackendUnavailable

pytestmark = pytest.mark.usefixtures("poisoned")


def agrees(leaves, make, **options):
    """Compare output and gradients with the reference in float64, which masks scores one by one."""
    exact = [t.detach().double().requires_grad_() for t in leaves]
    out = attention(*leaves[:3], bias=make(*leaves[3:]), is_causal=True, backend="triton", **options)
    expected = attention(*exact[:3], bias=make(*exact[3:]), is_causal=True, backend="reference", **options)
    torch.testing.assert_close(out.double(), expected, rtol=2e-6, atol=2e-6)
    cotangent = torch.randn_like(out)
    actual = torch.autograd.grad(out, leaves, cotangent)
    right = torch.autograd.grad(expected, exact, cotangent.double())
    for mine, other in zip(actual, right, strict=True):
        assert (mine - other).norm() <= 1e-5 * other.norm() + 1e-9
    return out


GRIDS = [Grid((5, 7)), Grid((5, 7), 1), Grid((13, 16), 1), Grid((40,), 1), Grid((2, 3, 5)), Grid((1, 1), 1)]


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_learned_tables(monkeypatch, grid, rows):
    monkeypatch.setattr(operands, "layout_of", lambda shape, prefix: Layout(shape, prefix, rows))
    pos = grid.positions()
    leaves = [*inputs(grid), table(grid), *([torch.randn(2, 3).requires_grad_()] if grid.prefix else [])]
    agrees(leaves, lambda values, edge=None: TableBias(values, pos, edge))


@pytest.mark.parametrize("once", [None, False])
def test_padded_keys_and_one_pass(once):
    grid = Grid((13, 16), 1)
    pos = grid.positions()
    keep = torch.rand(2, grid.tokens) < 0.7
    agrees(
        [*inputs(grid), table(grid)], lambda t: TableBias(t, pos), key_padding_mask=keep, deterministic=once
    )


def test_distances_alongside_a_table():
    grid = Grid((9, 11), 1)
    pos = grid.positions()
    slopes = torch.tensor([0.2, 1.0]).requires_grad_()
    agrees(
        [*inputs(grid), table(grid), slopes], lambda t, s: SumBias([TableBias(t, pos), DistanceBias(s, pos)])
    )


def test_cached_strips_depend_on_the_mask():
    """A fixed bias is packed once with the mask and once without."""
    grid = Grid((9, 11), 1)
    pos = grid.positions()
    q, k, v = inputs(grid)
    bias = DistanceBias((0.5, 0.1), pos)
    for causal in (True, False, True):
        out = attention(q, k, v, bias=bias, is_causal=causal, backend="triton")
        expected = attention(q, k, v, bias=bias, is_causal=causal, backend="reference")
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy of infinite values
def test_values_after_a_tile_are_not_read(monkeypatch):
    """Tiles of keys after all queries of a tile are skipped: infinite values there have no effect."""
    monkeypatch.setattr(operands, "layout_of", lambda shape, prefix: Layout(shape, prefix, False))
    grid = Grid((16, 16))
    pos = grid.positions()
    q, k, v = inputs(grid, batch=1)
    bias, result = TableBias(table(grid).detach(), pos), []
    for spoiled in (False, True):
        values = v.detach().clone()
        if spoiled:
            values[:, :, 192:] = torch.inf
        result.append(attention(q, k, values, bias=bias, is_causal=True, backend="triton")[:, :, :64])
    assert torch.equal(*result)
    assert result[0].isfinite().all()


def test_refusals():
    grid = Grid((5, 7), 3)
    q, k, v = inputs(grid)
    pos = grid.positions()
    bias = TableBias(table(grid), pos)
    unsupported = explain(q, k, v, bias=bias, is_causal=True).unsupported["triton"]
    assert "at most one prefix token, got 3" in unsupported
    with pytest.raises(BackendUnavailable, match="only together with a bias"):
        attention(q, k, v, is_causal=True, backend="triton")
    patches = Grid((5, 7))
    one = [t[:1, :, 3:] for t in (q, k, v)]
    packed = {"is_causal": True, "cu_seqlens": torch.tensor([0, 8, patches.tokens])}
    for fixed in (
        TableBias(table(patches), patches.positions()),
        DistanceBias((0.5, 0.1), patches.positions()),
    ):
        assert "packed" in explain(*one, bias=fixed, **packed).unsupported["triton"]
        actual, expected = (attention(*one, bias=fixed, backend=b, **packed) for b in ("auto", "reference"))
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-6)
    subset = TableBias(table(grid), pos.gather(torch.arange(30)[None]))
    q, k, v = (t[:, :, :30] for t in (q, k, v))
    with pytest.raises(BackendUnavailable, match="one full grid"):
        attention(q, k, v, bias=subset, is_causal=True, backend="triton")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype):
    grid = Grid((9, 11), 1)
    pos = grid.positions()
    leaves = [*inputs(grid, dtype), table(grid, 0.3)]
    out = attention(*leaves[:3], bias=TableBias(leaves[3], pos), is_causal=True, backend="triton")
    exact = [t.detach().double().requires_grad_() for t in leaves]
    expected = attention(*exact[:3], bias=TableBias(exact[3], pos), is_causal=True, backend="reference")
    assert relative(out, expected.detach()) <= FORWARD[dtype]
    cotangent = torch.randn_like(out)
    actual = torch.autograd.grad(out, leaves, cotangent)
    right = torch.autograd.grad(expected, exact, cotangent.double())
    for mine, other in zip(actual, right, strict=True):
        assert relative(mine, other) <= BACKWARD[dtype]
