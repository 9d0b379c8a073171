"""Caches of masks: after autocast, in checkpointed blocks, and with parameters that are new in each call."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.cases import cases
from vispe import Grid, attention
from vispe.attention import DenseBias, OffsetBias, RadialBias, TableBias
from vispe.attention.bias.cache import entries

GRID = Grid((5, 6))


@pytest.fixture
def qkv():
    torch.manual_seed(0)
    return torch.randn(3, 2, 3, 30, 8)


@cases("masked", [False, True])
@cases("cls", [OffsetBias, RadialBias])
def test_masks_computed_under_autocast_are_exact(cls, masked, qkv):
    """A product in the function of a fixed bias would be rounded to bfloat16, and cached for later calls."""
    weights = torch.randn(3, 2) * 3

    def function(x):
        return (x.reshape(len(x), -1) @ weights[:, : x.ndim].mT).mT

    def out(key, **arguments):
        return attention(*qkv, bias=cls(function, pos, key=key), **arguments)

    pos = GRID.positions()
    arguments = {"key_padding_mask": torch.rand(2, 30) > 0.2} if masked else {}
    with torch.autocast("cpu", torch.bfloat16):
        out("fixed", **arguments)
    torch.testing.assert_close(out("fixed", **arguments), out(None, backend="reference", **arguments))


@cases("arguments", [{}, {"key_padding_mask": torch.ones(2, 30, dtype=torch.bool)}], ids=["alone", "padding"])
def test_new_parameters_in_each_call_do_not_fill_the_cache(arguments, qkv):
    pos = GRID.positions()
    with torch.no_grad():
        for _ in range(3 * entries.MAX_ENTRIES):
            attention(*qkv, bias=TableBias(torch.randn(3, 9, 11), pos), **arguments)
    (cache,) = (m for key, m in pos.memo.items() if key[0] == "learned masks")
    assert len(cache.entries) <= entries.MAX_ENTRIES
    # parameters that are requested again are still cached
    bias = TableBias(torch.randn(3, 9, 11), pos)
    with torch.no_grad():
        expected = [attention(*qkv, bias=bias, **arguments) for _ in range(3)][-1]
    assert max(cache.entries, key=lambda e: e.used).mask is not None
    torch.testing.assert_close(expected, attention(*qkv, bias=bias, backend="reference"))


@cases("arguments", [{}, {"key_padding_mask": torch.ones(2, 30, dtype=torch.bool)}], ids=["alone", "padding"])
def test_checkpointed_blocks_with_a_frozen_table(arguments, qkv):
    """The recomputation reads a mask that the forward pass did not find in the cache."""
    table = torch.randn(3, 9, 11)
    table[:, 0] = -torch.inf
    bias, q = TableBias(table, GRID.positions()), qkv[0].clone().requires_grad_()

    def block(q):
        return attention(q, qkv[1], qkv[2], bias=bias, **arguments)

    for _ in range(3):
        out = checkpoint(block, q, use_reentrant=False)
        (grad,) = torch.autograd.grad(out.square().sum(), q)
    exact = attention(q, qkv[1], qkv[2], bias=bias, backend="reference", **arguments)
    torch.testing.assert_close(grad, torch.autograd.grad(exact.square().sum(), q)[0], rtol=1e-4, atol=1e-5)


@cases("queries", [0, 4])
def test_no_keys(queries):
    q, k = torch.randn(2, 3, queries, 8), torch.randn(2, 3, 0, 8)
    for _ in range(2):
        assert not attention(q, k, k, bias=DenseBias(torch.zeros(1, 3, queries, 0))).any()
