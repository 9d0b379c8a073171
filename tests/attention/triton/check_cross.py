"""Fused attention of queries and keys at different positions, against float64. `test_interpreter` runs this file."""

import pytest
import torch

from tests.attention.triton.check_coords import BACKWARD, FORWARD, HEADS, relative, small_tiles, table  # noqa: F401
from vispe import Grid, attention, explain
from vispe.attention import CrossAttentionBias, DistanceBias, ProfileBias, SumBias, TableBias
from vispe.errors import BackendUnavailable

pytestmark = pytest.mark.usefixtures("poisoned", "small_tiles")


def inputs(queries, keys, batch=2, dtype=torch.float32, width=16, value=24, key_heads=HEADS):
    sizes = ((HEADS, queries, width), (key_heads, keys, width), (key_heads, keys, value))
    return [torch.randn(batch, n, h, d).to(dtype).transpose(1, 2).requires_grad_() for h, n, d in sizes]


def compare(make, params, pos_q, pos_k, batch=2, dtype=torch.float32, key_heads=HEADS, **options):
    """Compare output and gradients with those of the reference backend in float64; `make(*params)` is the bias."""
    leaves = [*inputs(pos_q.tokens, pos_k.tokens, batch, dtype, key_heads=key_heads), *params]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    results = []
    for backend, values in (("triton", leaves), ("reference", exact)):
        bias = CrossAttentionBias(make(*values[3:]), pos_q, pos_k)
        results.append(attention(*values[:3], bias=bias, backend=backend, **options))
    if options.get("return_lse"):
        assert relative(results[0][1], results[1][1]) <= FORWARD[dtype]
    else:
        results = [(out,) for out in results]
    cotangents = [torch.randn_like(t) for t in results[0]]
    assert relative(results[0][0], results[1][0]) <= FORWARD[dtype]
    ours = torch.autograd.grad(results[0], leaves, cotangents)
    theirs = torch.autograd.grad(results[1], exact, [c.double() for c in cotangents])
    for mine, other, leaf in zip(ours, theirs, leaves, strict=True):
        assert mine.shape == leaf.shape
        assert mine.dtype == leaf.dtype
        assert relative(mine, other) <= BACKWARD[dtype] * (5 if leaf.shape == (HEADS, 3) else 1)


GRID = Grid((6, 7), 3)
QUERIES = {"one": [[20]], "repeated": [[40, 0, 5, 5, 17]], "per sample": [[3, 1, 9], [0, 8, 44]]}


@pytest.mark.parametrize("rows", QUERIES)
def test_some_queries_of_a_table(rows):
    pos = GRID.positions()
    compare(
        lambda t, e: TableBias(t, pos, e), [table(GRID), torch.randn(HEADS, 3).requires_grad_()],
        pos.gather(torch.tensor(QUERIES[rows])), pos,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("options", [{}, {"deterministic": True}, {"return_lse": True}, {"padded": True},
                                     {"enable_gqa": True}], ids=str)  # fmt: skip
def test_fewer_queries_than_keys(options, dtype):
    pos, options = GRID.positions(), dict(options)
    if options.pop("padded", False):
        options["key_padding_mask"] = torch.rand(2, GRID.tokens) < 0.7
    queries = torch.randperm(GRID.tokens)[None, :37]
    compare(
        lambda t: TableBias(t, pos), [table(GRID)], pos.gather(queries), pos, dtype=dtype,
        key_heads=1 if "enable_gqa" in options else HEADS, **options,
    )  # fmt: skip


def test_more_queries_than_keys():
    pos, keys = GRID.positions(), torch.randperm(GRID.tokens)[None, :9]
    compare(lambda t: TableBias(t, pos), [table(GRID)], pos, pos.gather(keys))


RULES = (
    {}, {"metric": "manhattan"}, {"normalize": "max"}, {"wrap": True}, {"spacing": (1.0, 2.0)},
    {"metric": "squared", "normalize": "max"},
)  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_two_grids(rule):
    """A decoder with fewer queries: distances are between physical coordinates."""
    coarse, fine = Grid((3, 4), 1, spacing=(2.0, 2.0)).positions(), Grid((6, 8), 2).positions()
    slopes = torch.tensor([0.04, 0.9], requires_grad=True)
    compare(lambda s: DistanceBias(s, fine, **rule), [slopes], coarse, fine)


def test_sums_and_profiles():
    pos, queries = GRID.positions(), torch.randperm(GRID.tokens)[None, :20]
    slopes = [torch.tensor([0.04, 0.9], requires_grad=True) for _ in range(2)]

    def make(s, t, factors, profile):
        return SumBias([DistanceBias(s, pos), TableBias(t, pos), ProfileBias(factors, profile, pos)])

    compare(make, [slopes[0], table(GRID), slopes[1], table(GRID, heads=1)], pos.gather(queries), pos)


def test_refusals():
    pos, other = GRID.positions(), Grid((7, 6), 3).positions()
    q, k, v = inputs(pos.tokens, pos.tokens)
    for bias, why in (
        (CrossAttentionBias(TableBias(table(GRID), pos), other, pos), "not on the grid of the TableBias"),
        (
            CrossAttentionBias(DistanceBias((1.0, 0.5), pos), pos.gather(torch.tensor([[1]])), pos),
            "other numbers",
        ),
        (
            CrossAttentionBias(SumBias([DistanceBias((1.0, 0.5), pos)] * 2), pos, pos),
            "a sum of several distances",
        ),
    ):
        with pytest.raises(BackendUnavailable, match=why):
            attention(q, k, v, bias=bias, backend="triton")
    fused = CrossAttentionBias(DistanceBias((1.0, 0.5), pos), pos, pos)
    assert "triton" not in explain(q, k, v, bias=fused, backend="triton").unsupported
