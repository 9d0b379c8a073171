"""Dense masks in half precision: as exact as attention without a bias, however far from 0 the biases are."""

import torch
from torch.nn import functional as F

from tests.cases import cases, pairwise
from vispe import Grid, attention
from vispe.attention import ContextBias, DenseBias, DistanceBias, OffsetBias, SumBias, TableBias
from vispe.attention.backends import blocked, content_cpu
from vispe.attention.bias.cache import masks
from vispe.attention.precision import rounded

GRID = Grid((12, 13), prefix=1)
POS = GRID.positions()
N = GRID.tokens
HALVES = [torch.float16, torch.bfloat16]


def _table(scale=1.0, offset=0.0, hidden=0.0):
    values = torch.randn(2, 23, 25) * scale + offset
    return values.masked_fill(torch.rand(2, 23, 25) < hidden, -torch.inf).index_fill(
        1, torch.tensor(11), offset
    )


BIASES = {
    "table": lambda: TableBias(_table(), POS),
    "offset 50": lambda: TableBias(_table(1, 50), POS),
    "offset -1000": lambda: TableBias(_table(1, -1000), POS, torch.full((2, 3), -1000.0)),
    "wide": lambda: TableBias(_table(50), POS),
    "very wide": lambda: TableBias(_table(1000), POS),
    "one large entry": lambda: TableBias(_table().index_fill(2, torch.tensor(3), 300.0), POS),
    "hides": lambda: TableBias(_table(1, 20, hidden=0.5), POS),
    "slopes": lambda: DistanceBias((0.5, 0.1), POS),
    "negative slopes": lambda: DistanceBias(torch.tensor([-0.5, -0.1]), POS),
    "fixed negative slopes": lambda: DistanceBias((-0.5, -40.0), POS),
    "offsets": lambda: OffsetBias(lambda step: (step @ torch.ones(2, 2)).T * 3, POS, key="steep"),
    "dense per sample": lambda: DenseBias(
        torch.randn(2, 1, N, N) + 100 * torch.arange(2.0)[:, None, None, None]
    ),
    "per query": lambda: DenseBias(torch.randn(1, 2, N, N) + 100 * torch.randn(1, 1, N, 1)),
    "content": lambda: ContextBias(
        torch.randn(2, 9, 16) * 5, torch.arange(N * N).reshape(N, N) % 9, "key", False, POS, cache_key="nine"
    ),
    "sum": lambda: SumBias([TableBias(_table(1, 20), POS), DistanceBias((-0.5, -0.1), POS)]),
}


def _keys(*real):
    keep = torch.zeros(2, N, dtype=torch.bool)
    for sample, key in zip(keep, real, strict=True):
        sample[key] = True
    return keep


MASKS = {
    "all": {},
    "causal": {"is_causal": True},
    "few keys": {"key_padding_mask": _keys(slice(140, 157), slice(None))},
    "no keys": {"key_padding_mask": _keys(slice(0), slice(100, 150))},
    "bool": {"attn_mask": torch.rand(N, N, generator=torch.Generator().manual_seed(0)) < 0.2},
    "added": {"attn_mask": torch.full((1, 1, 1, N), 200.0).index_fill(3, torch.arange(90), -300.0)},
}


def _error(out, exact):
    assert out.isfinite().all()
    return ((out.double() - exact).norm() / exact.norm()).item()


def _check(bias, dtype, **arguments):
    q, k, v = (torch.randn(2, 2, N, 16).to(dtype) for _ in range(3))
    wide = [t.double() for t in (q, k, v)]
    exact = attention(*wide, bias=bias, backend="reference", **arguments)
    # torch's kernel without a bias, and the rounding of the output
    limit = 1.5 * _error(F.scaled_dot_product_attention(q, k, v), F.scaled_dot_product_attention(*wide))
    with torch.no_grad():
        outs = [attention(q, k, v, bias=bias, **arguments) for _ in range(3)]
    for out in outs:  # validated, cached, and cached without validation
        assert _error(out, exact) <= limit
    if arguments.get("key_padding_mask") is not None:
        dead = ~arguments["key_padding_mask"].any(1)
        assert not outs[0][dead].any()


@pairwise
@cases("dtype", HALVES, ids=str)
@cases("mask", MASKS)
@cases("name", BIASES)
def test_error_equals_that_without_a_bias(name, mask, dtype):
    _check(BIASES[name](), dtype, **MASKS[mask])


@pairwise
@cases("dtype", HALVES, ids=str)
@cases("mask", ["all", "few keys", "no keys"])
@cases("name", ["offset 50", "offset -1000", "wide", "negative slopes"])
def test_masks_in_blocks(name, mask, dtype, monkeypatch):
    monkeypatch.setattr(blocked, "MIN_QUERIES", 0)
    monkeypatch.setattr(masks, "MAX_MASK_BYTES", 0)
    _check(BIASES[name](), dtype, **MASKS[mask])


@cases("dtype", HALVES, ids=str)
@cases("explicit", [False, True])
@cases("dot", ["query", "key"])
def test_content_in_blocks(dot, explicit, dtype, monkeypatch):
    monkeypatch.setattr(content_cpu, "MIN_BIAS_BYTES", 0)
    monkeypatch.setattr(content_cpu, "prefers_explicit", lambda dtype: explicit)
    weights = torch.randn(2, 9, 16)
    weights[:, 4] += 3 * torch.ones(16)  # a bucket with large products of either sign
    buckets = torch.arange(N * N).reshape(N, N) % 9
    for terms in (1, 2):
        bias = [ContextBias(5 * weights, buckets, dot, False, POS, cache_key="nine")] * terms
        _check(bias[0] if terms == 1 else SumBias(bias), dtype)


@cases("dtype", HALVES, ids=str)
def test_gradients(dtype):
    """The constant of a row has no gradient, and changes none."""
    q, k, v = (torch.randn(2, 2, N, 16).to(dtype) for _ in range(3))
    table = (_table() + 50).requires_grad_()
    exact = table.detach().double().requires_grad_()
    bias, wide = (DenseBias(TableBias(t, POS).dense()) for t in (table, exact))
    out = attention(q, k, v, bias=bias, backend="sdpa")
    expected = attention(*(t.double() for t in (q, k, v)), bias=wide, backend="reference")
    cotangent = torch.randn_like(expected)
    (grad,) = torch.autograd.grad(out, table, cotangent.to(dtype))
    (expected,) = torch.autograd.grad(expected, exact, cotangent)
    assert _error(grad, expected) < (2e-2 if dtype == torch.bfloat16 else 3e-3)


@cases("dtype", HALVES, ids=str)
def test_rounded(dtype):
    inf, nan, huge = float("inf"), float("nan"), torch.finfo(torch.float32).max
    mask = torch.tensor([
        [-inf, -inf, -inf], [-inf, 1000.0, 999.0], [-huge, -huge, -huge], [huge, -huge, 0.0], [inf, 0.0, -inf],
        [nan, 0.0, 0.0],
    ])  # fmt: skip
    weights = rounded(mask, dtype).float().softmax(-1)
    torch.testing.assert_close(weights[1:4], mask[1:4].double().softmax(-1).float(), rtol=2e-3, atol=2e-3)
    assert (rounded(mask, dtype)[0] == -inf).all()
    assert rounded(mask, dtype)[5].isnan().any()
    for shape in ((2, 0, 5), (2, 3, 0), (1, 3, 1)):
        assert rounded(torch.ones(shape), dtype).shape == shape
    expanded = torch.randn(1, 1, 1, 300).expand(2, 1, 4, 300)
    torch.testing.assert_close(
        rounded(expanded, dtype)[1, 0, 3], rounded(expanded[:1, :, :1], dtype)[0, 0, 0]
    )
    already = torch.full((2, 3), 7.0, dtype=dtype)
    assert rounded(already, dtype) is already
    assert torch.equal(rounded(mask[:4], torch.float32), mask[:4])
