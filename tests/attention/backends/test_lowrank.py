"""Columns of low-rank biases: approximations of other biases, and the kernel that computes them on CPU."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.attention import oracle
from tests.cases import cases
from vispe import Grid, attention, explain
from vispe.attention import DistanceBias, LowRankBias, RadialBias, TableBias, low_rank_approximation
from vispe.errors import OptionError, UnsupportedCombination

FLASH = "aten._scaled_dot_product_flash_attention_for_cpu"


class Operators(TorchDispatchMode):
    """Record the names of all operators."""

    def __init__(self):
        super().__init__()
        self.called = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.called.append(str(func))
        return func(*args, **(kwargs or {}))


def of_table(pos, heads=3):
    rows = torch.arange(2 * pos.grid.shape[0] - 1)[:, None] / 5
    cols = torch.arange(2 * pos.grid.shape[1] - 1) / 7
    return TableBias(torch.stack([(rows + h).sin() * (cols * h).cos() + 50 for h in range(heads)]), pos)


@cases("tolerance", [1e-1, 1e-3, 1e-5])
@cases("kind", ["table", "radial", "squared"])
def test_the_error_is_below_the_tolerance(kind, tolerance):
    pos = Grid((5, 6), prefix=1).positions()
    bias = {
        "table": lambda: of_table(pos),
        "radial": lambda: RadialBias(lambda d: -torch.log1p(d)[None].expand(3, -1), pos),
        "squared": lambda: DistanceBias((0.1, 0.3, 0.0), pos, metric="squared"),
    }[kind]()
    columns = low_rank_approximation(bias, tolerance)
    exact, approximate = bias.dense().double(), columns.dense().double()
    exact = exact - exact.mean(-1, keepdim=True)  # softmax ignores a constant per row
    error = float((approximate - exact).abs().max())
    assert error <= 1.01 * tolerance + 1e-6
    rank = columns.row.shape[-1]
    assert rank < pos.tokens
    # one column less is not sufficient
    left, values, right = torch.linalg.svd(exact)
    fewer = (left[..., : rank - 1] * values[..., None, : rank - 1]) @ right[..., : rank - 1, :]
    assert float((fewer - exact).abs().max()) > tolerance
    q, k, v = (torch.randn(2, 3, pos.tokens, 16) for _ in range(3))
    out = attention(q, k, v, bias=columns, backend="lowrank")
    expected = attention(q, k, v, bias=bias, backend="reference")
    assert float((out - expected).abs().max()) < 6 * max(tolerance, 2e-6)


def test_refusals():
    pos = Grid((2, 3)).positions()
    with pytest.raises(OptionError, match="tolerance must be positive"):
        low_rank_approximation(DistanceBias((1.0,), pos), 0.0)
    hidden = TableBias(torch.full((1, 3, 5), -torch.inf), pos)
    with pytest.raises(UnsupportedCombination, match="infinities"):
        low_rank_approximation(hidden, 0.1)


def test_auto_does_not_approximate():
    pos = Grid((33, 33)).positions()
    q = torch.randn(1, 2, pos.tokens, 16)
    assert explain(q, q, q, bias=of_table(pos, 2)).backend == "sdpa"


@cases("mask", [False, True])
@cases("widths", [(16, 24), (24, 16), (16, 16)])
def test_values_of_another_width_use_the_fast_kernel(widths, mask):
    """Plain products would store the weights of all pairs."""
    width, value = widths
    tensors = [torch.randn(2, 3, 20, d, requires_grad=True) for d in (width, width, value)]
    added = torch.randn(20, 20) if mask else None
    with Operators() as operators:
        out = attention(*tensors, attn_mask=added)
        grads = torch.autograd.grad(out.square().sum(), tensors)
    assert any(name.startswith(f"{FLASH}.default") for name in operators.called), operators.called
    wide = [t.detach().double().requires_grad_() for t in tensors]
    expected = oracle.attend(*wide, added=None if added is None else added.double()[None, None])
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    theirs = torch.autograd.grad(expected.square().sum(), wide)
    for a, e in zip(grads, theirs, strict=True):
        torch.testing.assert_close(a.double(), e, rtol=1e-4, atol=1e-4)


def test_columns_use_the_fast_kernel():
    q, k, v = (torch.randn(1, 2, 30, 16) for _ in range(3))
    bias = LowRankBias(torch.randn(1, 2, 30, 3), torch.randn(1, 2, 30, 3))
    with torch.no_grad(), Operators() as operators:
        attention(q, k, v, bias=bias, backend="lowrank")
    assert any(name.startswith(f"{FLASH}.default") for name in operators.called)


def test_heads_of_a_shared_factor():
    # the factors of one side are shared by all heads
    for heads in ((1, 3), (3, 1)):
        row, col = (torch.randn(1, h, 5, 2) for h in heads)
        bias = LowRankBias(row, col)
        torch.testing.assert_close(bias.dense(), row @ col.mT)
        for chosen in (slice(1, 3), slice(2, 3)):
            torch.testing.assert_close(bias.dense(heads=chosen), (row @ col.mT)[:, chosen])
