"""Gradients of queries, keys and values in one pass over the scores: `deterministic=False`."""

import pytest
import torch

from tests.attention.triton.check_attention import BACKWARD, compare, compare_table, inputs
from vispe import Grid, attention
from vispe.attention import TableBias
from vispe.attention.backends.triton.grid import launch_backward, operands
from vispe.attention.bias.strip.layout import Layout

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture(autouse=True)
def _strips(monkeypatch):
    monkeypatch.setattr(operands, "layout_of", lambda shape, prefix: Layout(shape, prefix, False))


@pytest.fixture(autouse=True)
def _no_second_pass(monkeypatch):
    class Launched:
        def __getitem__(self, grid):
            raise AssertionError("queries got a pass of their own")

    monkeypatch.setattr(launch_backward, "grad_q", Launched())


@pytest.mark.parametrize(
    ("grid", "width", "dtype"),
    [(Grid((5, 7), 1), 16, torch.float32), (Grid((9, 15), 5), 24, torch.float32), (Grid((9, 15)), 72, torch.float32),
     (Grid((11, 13), 1), 64, torch.float16), (Grid((1, 1)), 8, torch.float32)],
    ids=str,
)  # fmt: skip
def test_one_pass(grid, width, dtype):
    keep = torch.rand(2, grid.tokens) < 0.8
    keep[:, :1] = True
    compare_table(grid, dtype, keep, width=width, deterministic=False)


def test_without_a_bias():
    grid = Grid((6, 7), 1)
    zeros = torch.zeros(1, 1, grid.tokens, grid.tokens, dtype=torch.float64)
    compare(inputs(grid), [], lambda: None, lambda: zeros[0], torch.float32, deterministic=False)


def test_heads_that_share_keys():
    grid = Grid((6, 7), 1)
    q, _, _ = inputs(grid, heads=4)
    _, k, v = inputs(grid, heads=2)
    leaves = (q, k, v, torch.randn(4, 11, 13).requires_grad_())

    def gradients(backend, q, k, v, values, cotangent=None):
        bias = TableBias(values, grid.positions())
        out = attention(q, k, v, bias=bias, enable_gqa=True, deterministic=False, backend=backend)
        return torch.autograd.grad(out, (q, k, v, values), cotangent.to(out.dtype))

    cotangent = torch.randn(2, 4, grid.tokens, 16)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    actual = gradients("triton", *leaves, cotangent)
    expected = gradients("reference", *wide, cotangent)
    for mine, other in zip(actual, expected, strict=True):
        assert (mine - other).norm() <= BACKWARD[torch.float32] * other.norm()


def test_deterministic_algorithms_of_torch(monkeypatch):
    """`use_deterministic_algorithms` has precedence over the keyword of a call."""
    monkeypatch.undo()
    passes = []
    launch = launch_backward.grad_q

    class Counted:
        arg_names = launch.arg_names

        def __getitem__(self, grid):
            passes.append(grid)
            return launch[grid]

    monkeypatch.setattr(launch_backward, "grad_q", Counted())
    torch.use_deterministic_algorithms(True)
    try:
        compare_table(Grid((3, 5)), torch.float32, deterministic=False)
    finally:
        torch.use_deterministic_algorithms(False)
    assert passes
