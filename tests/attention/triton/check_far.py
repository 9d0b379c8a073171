"""Queries all of whose keys have a hugely negative bias, and tensors at distant addresses."""

import pytest
import torch

from tests.attention.cases import HEADS, close, leaf, tensors
from vispe import Grid, attention
from vispe.attention import DistanceBias, GatedBias, SumBias, TableBias
from vispe.attention.backends.triton.grid import operands
from vispe.attention.bias.decomposed import DecomposedBias
from vispe.attention.bias.strip.layout import Layout

GRID = Grid((5, 4), 2)


def low_table(pos, low):
    """Patches see rows of the grid above their own, those of the first row hardly any; prefix tokens hardly patches.

    If prefix tokens saw each other as little, the kernels would be exact and the float32 reference would not.
    """
    values = torch.randn(HEADS, 9, 7)
    values[:, :5] = low
    edge = torch.tensor([[low, low, 0.0]]).expand(HEADS, -1)
    return [values.requires_grad_(), edge.clone().requires_grad_()]


def tables(pos, low):
    params = low_table(pos, low)
    return TableBias(params[0], pos, params[1]), params


def gates(pos, low):
    values, _ = low_table(pos, low)
    params = [values, torch.ones(2, HEADS, pos.tokens, requires_grad=True)]
    return GatedBias(params[1], None, TableBias(values, pos)), params


def distances(pos, low):
    slopes = leaf(HEADS)
    params = low_table(pos, low)
    pos = pos.gather(torch.randperm(pos.tokens).expand(2, -1))
    return SumBias([DistanceBias(slopes, pos), TableBias(params[0], pos, params[1])]), [slopes, *params]


def lookups(dot):
    def make(pos, low):
        rows = torch.randn(2, HEADS, pos.tokens, 6)
        rows[:, :, 3:7] = low
        if dot == "key":  # some query finds as little in all keys
            rows[..., 2] = low
        cols = leaf(2, HEADS, pos.tokens, 5)
        rows.requires_grad_()
        return DecomposedBias(rows, cols, dot, pos), [rows, cols]

    return make


KINDS = {
    "tables": tables,
    "gates": gates,
    "distances": distances,
    "queries": lookups("query"),
    "keys": lookups("key"),
}


@pytest.mark.parametrize("low", [-3e3, -1e5, -1e9, -1e30])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_low_numbers(kind, padded, low):
    bias, params = KINDS[kind](GRID.positions(), low)
    q, k, v = tensors(2, GRID.tokens)
    keep = torch.rand(2, GRID.tokens) > 0.3 if padded else None
    cotangent, result = torch.randn_like(q), []
    for backend in ("triton", "reference"):
        out = attention(q, k, v, bias=bias, key_padding_mask=keep, backend=backend)
        result.append([out, *torch.autograd.grad(out, [q, k, v, *params], cotangent)])
    # float32 logits of this size have steps of 2^-24 of it, in which they are rounded by both
    slack = 1 + min(-low, 1e5) * 2e-3
    for i, (mine, other) in enumerate(zip(*result, strict=True)):
        ends = 5 if mine.shape[-1] == 3 and mine.ndim == 2 else 1  # sums of what nearly cancels
        close(mine, other, 2e-5 * slack * ends, f"result {i}")


@pytest.mark.parametrize("name", ["q", "k", "v", "cotangent"])
def test_tokens_at_distant_addresses(name):
    """The last token is 2^31 elements after the first, in memory of which only the used pages are allocated."""
    n, width, step = 3, 16, 1 << 30
    pos = Grid((n,)).positions()
    arguments = {
        key: torch.randn(1, 1, n, width, dtype=torch.float16) for key in ("q", "k", "v", "cotangent")
    }
    wide = torch.empty(2 * step + width, dtype=torch.float16).as_strided((1, 1, n, width), (1, 1, step, 1))
    result = []
    for tensor in (arguments[name], wide.copy_(arguments[name])):
        q, k, v, cotangent = {**arguments, name: tensor}.values()
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        out = attention(*leaves, bias=DistanceBias((1.0,), pos), backend="triton")
        result.append([out, *torch.autograd.grad(out, leaves, cotangent)])
    for mine, other in zip(*result, strict=True):
        assert torch.equal(mine, other)


def _far(name):
    pos = Grid((5, 6), 1).positions()
    table = torch.randn(1, 9, 11)
    subset = pos.gather(torch.randperm(pos.tokens)[None])
    if name in ("large", "large, subset"):
        table[:, 4, 5] = 1e4  # each patch for itself; the class token has a bias of 0
        return TableBias(table, pos if name == "large" else subset)
    if name == "large between prefix tokens":
        return TableBias(table, pos, torch.tensor([[0.0, 0.0, 1e4]]))
    if name == "large for prefix tokens":
        return TableBias(table, pos, torch.tensor([[3e3, 1.0, 2990.0]]))
    if name == "all large":
        return TableBias(table + 1e4, pos, torch.full((1, 3), -1e4))
    if name == "all low":
        return TableBias(table - 1e4, Grid((5, 6)).positions())
    if name == "all low, subset":
        return TableBias(table - 1e4, subset, torch.full((1, 3), -1e3))
    return SumBias([TableBias(table + 1e4, pos), DistanceBias(torch.tensor([-0.1]), pos)])


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize(
    "name",
    ["large", "large, subset", "large between prefix tokens", "large for prefix tokens", "all large", "all low",
     "all low, subset", "sum"],
)  # fmt: skip
def test_precision_of_rows_far_from_the_largest_bias(name, rows, monkeypatch):
    """Errors relative to the limit of float32 per row: no product of queries and keys is added to a large number."""
    monkeypatch.setattr(operands, "layout_of", lambda shape, prefix: Layout(shape, prefix, rows))
    bias = _far(name)
    q, k, v = (torch.randn(1, 1, bias.pos.tokens, 64) for _ in range(3))
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    out = attention(q, k, v, bias=bias, backend="triton")
    # in float64 the biases are exact
    expected = attention(*exact, bias=bias, backend="reference")
    error = (out.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.max() <= 2e-6
    cotangent = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), cotangent)
    others = torch.autograd.grad(expected, exact, cotangent.double())
    for mine, other in zip(grads, others, strict=True):
        assert (mine.double() - other).norm() <= 5e-6 * other.norm()


@pytest.mark.parametrize("entry", [(4, 6), (7, 8)])
@pytest.mark.parametrize("gap", [0.0, 50.0, 1e3, 1e4])
def test_error_of_rows_far_below_the_largest_bias_of_the_head(gap, entry):
    """The documented limit: one number per head is subtracted from a strip, so float32 loses digits in other rows."""
    pos = Grid((5, 6), 1).positions()
    q, k, v = torch.randn(3, 1, 1, pos.tokens, 64)
    table = torch.randn(1, 9, 11)
    table[(0, *entry)] = gap
    bias = TableBias(table, pos)
    actual = attention(q, k, v, bias=bias, backend="triton")
    exact = attention(q.double(), k.double(), v.double(), bias=bias, backend="reference")
    error = ((actual - exact).norm(dim=-1) / exact.norm(dim=-1)).amax()
    assert error < 1e-6 + 1.2e-7 * gap
