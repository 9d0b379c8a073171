"""Shifted windows of tables with a vector per offset: supported tables, and attention compared with the reference."""

import pytest
import torch

from tests.cases import cases, pairwise
from vispe import Grid, attention, create_encoding
from vispe.attention.backends import content_cpu, sdpa
from vispe.attention.backends.content_cpu import windows
from vispe.attention.backends.content_cpu.windows import windows_of
from vispe.attention.bias.content import ContextBias
from vispe.attention.bias.dense import SumBias


@pytest.fixture(autouse=True, params=[True, False], ids=["by hand", "SDPA"])
def _small(request, monkeypatch):
    monkeypatch.setattr(content_cpu, "prefers_explicit", lambda dtype: request.param)
    monkeypatch.setattr(content_cpu, "MIN_BIAS_BYTES", 300)
    monkeypatch.setattr(content_cpu, "ROWS", 20)  # several blocks of several rows of the grid
    monkeypatch.setattr(content_cpu, "SDPA_ROWS", 20)
    monkeypatch.setattr(windows, "QUERIES_PER_LINE", 4)  # several pieces of a row, of two lengths
    monkeypatch.setattr(windows, "QUERIES_PER_PRODUCT", 8)
    monkeypatch.setattr(sdpa, "_masked", None)


def random_encoding(spec, grid, dim=24, heads=3):
    encoding = create_encoding(spec, dim=dim, num_heads=heads, grid=grid)
    for p in encoding.parameters():
        torch.nn.init.normal_(p)
    return encoding


@pairwise
@cases("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@cases("threads", [1, 7])
@cases("spec", ["shaw", "shaw(shared=false)", "shaw(index=key_query)"])
@cases("prefix", [0, 1, 5])
@cases("shapes", [[(7, 9), (9, 7)], [(23,), (17,)], [(1, 6), (6, 1)]], ids=str)
def test_attention_on_two_grids(shapes, prefix, spec, threads, dtype, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    encoding = random_encoding(spec, shapes[0])
    for shape in shapes:
        pos = Grid(shape, prefix).positions()
        q, k, v = torch.randn(3, 4, 3, pos.tokens, 8, dtype=dtype)
        with torch.no_grad():
            bias = encoding.bias(pos, 0)
            assert windows_of(bias) is not None
            actual = [attention(q, k, v, bias=bias) for _ in range(2)]
            expected = attention(*(t.double() for t in (q, k, v)), bias=bias, backend="reference")
        assert torch.equal(*actual)
        assert (actual[0] - expected).abs().max() < {torch.bfloat16: 6e-2}.get(dtype, 5e-6)


@cases("prefix", [0, 1, 5])
def test_windows_equal_the_buckets(prefix):
    """With one nonzero vector, the bias is nonzero where its bucket is read."""
    pos = Grid((3, 4), prefix).positions()
    encoding = create_encoding("shaw", dim=8, num_heads=1, grid=(3, 4))
    bias = encoding.bias(pos, 0)
    buckets = bias.buckets.view(pos.tokens, pos.tokens)
    assert windows_of(bias) is not None
    for bucket in range(bias.weights.shape[1]):
        weights = torch.zeros(1, bias.weights.shape[1], 8)
        weights[0, bucket] = 1
        one = ContextBias(weights, bias.buckets, "query", False, pos, cache_key=bias.cache_key)
        request = content_cpu.DenseRequest(
            None, None, torch.ones(1, 1, pos.tokens, 8), None, 1.0, slice(None)
        )
        rows = windows.WindowTable(one, request, torch.float32, windows_of(one))
        block = content_cpu.BiasBlock(slice(0, 1), 0, 3, slice(0, pos.tokens))
        assert torch.equal(rows.mask(block, 0)[0], 8.0 * (buckets == bucket))


def test_heads_that_share_keys():
    encoding, pos = random_encoding("shaw", (7, 9), 32, 4), Grid((7, 9), 1).positions()
    q, k, v = torch.randn(3, 2, 4, pos.tokens, 8)
    k, v = k[:, :2], v[:, :2]
    with torch.no_grad():
        bias = encoding.bias(pos, 0)
        actual = attention(q, k, v, bias=bias, enable_gqa=True)
        expected = attention(q, k, v, bias=bias, enable_gqa=True, backend="reference")
    torch.testing.assert_close(actual, expected, rtol=0, atol=5e-6)


@cases("spec", ["shaw(method=key_query)", "shaw(clip=[2,2])", "shaw(clip=[9,3])"])
def test_windows_with_other_lookups(spec):
    """Terms of keys in addition to windows; clipped tables are small or have repeated offsets."""
    encoding, pos = random_encoding(spec, (7, 9)), Grid((7, 9), 2).positions()
    q, k, v = torch.randn(3, 2, 3, pos.tokens, 8)
    with torch.no_grad():
        bias = encoding.bias(pos, 0)
        actual, expected = (attention(q, k, v, bias=bias, backend=b) for b in ("auto", "reference"))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def test_biases_without_windows(monkeypatch):
    """Three axes, small tables, tables without offsets, unnamed buckets, other tokens, many kinds of prefix pairs."""
    pos = Grid((7, 9), 1).positions()
    bias = random_encoding("shaw", (7, 9)).bias(pos, 0)
    assert windows_of(random_encoding("shaw", (3, 4, 5)).bias(Grid((3, 4, 5)).positions(), 0)) is None
    assert windows_of(random_encoding("shaw(clip=[2,2])", (7, 9)).bias(pos, 0)) is None
    assert windows_of(ContextBias(bias.weights, bias.buckets, "query", True, pos)) is None
    assert windows_of(random_encoding("shaw(method=key_query)", (7, 9)).bias(pos, 0).terms[1]) is None
    mixed = bias.buckets.clone()
    mixed[..., 5, 7] = mixed[..., 7, 5]
    assert windows_of(ContextBias(bias.weights, mixed, "query", True, pos, cache_key="mixed")) is None
    many = bias.buckets.clone()
    many[..., 0] = torch.arange(pos.tokens)
    monkeypatch.setattr(windows, "MAX_PREFIX_BUCKETS", pos.tokens - 1)
    assert windows_of(ContextBias(bias.weights, many, "query", True, pos, cache_key="many")) is None
    subset = pos.gather(torch.arange(40)[None])
    assert windows_of(random_encoding("shaw", (7, 9)).bias(subset, 0)) is None


def test_tables_of_two_grids():
    """As many tokens in other rows: the windows of one grid end where those of the other do not."""
    biases = [
        random_encoding("shaw", shape).bias(Grid(shape, 1).positions(), 0) for shape in ((6, 10), (10, 6))
    ]
    q, k, v = torch.randn(3, 2, 3, 61, 8)
    with torch.no_grad():
        for bias in (SumBias(biases), SumBias([biases[0], biases[0]])):
            actual, expected = (attention(q, k, v, bias=bias, backend=b) for b in ("auto", "reference"))
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
