"""Runs of keys with equal buckets: supported grids, and attention compared with the reference."""

import pytest
import torch

from tests.cases import cases
from tests.products import partly
from vispe import Grid, attention, create_encoding
from vispe.attention.backends import content_cpu, sdpa
from vispe.attention.backends.content_cpu.runs import _find, runs_of
from vispe.attention.bias.content import ContextBias
from vispe.encodings.parts.bias.irpe_tables import bucket_ids

BY_HAND = content_cpu.prefers_explicit


@pytest.fixture(autouse=True, params=[True, False], ids=["by hand", "SDPA"])
def _small(request, monkeypatch):
    monkeypatch.setattr(content_cpu, "prefers_explicit", lambda dtype: request.param)
    monkeypatch.setattr(content_cpu, "MIN_BIAS_BYTES", 300)
    monkeypatch.setattr(content_cpu, "ROWS", 100)  # several blocks
    monkeypatch.setattr(content_cpu, "SDPA_ROWS", 100)
    monkeypatch.setattr(sdpa, "_masked", None)


def random_encoding(spec, dim=24, heads=3):
    encoding = create_encoding(spec, dim=dim, num_heads=heads)
    for p in encoding.parameters():
        torch.nn.init.normal_(p)
    return encoding


@partly(2)
@cases("dtype", [torch.float32, torch.bfloat16], ids=str)
@cases("threads", [1, 7])
@cases("spec", ["irpe", "irpe(shared=false,prefix_buckets=3)", "irpe(prefix_buckets=0)"])
@cases("prefix", [0, 1, 5, 20])
def test_attention_on_two_grids(spec, prefix, dtype, threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    encoding = random_encoding(spec)
    for shape in ((31, 17), (29, 19)):
        pos = Grid(shape, prefix).positions()
        q, k, v = torch.randn(3, 2, 3, pos.tokens, 8, dtype=dtype)
        with torch.no_grad():
            bias = encoding.bias(pos, 0)
            assert runs_of(bias) is not None
            actual = [attention(q, k, v, bias=bias) for _ in range(2)]
            exact = (t.double() for t in (q, k, v))
            expected = attention(*exact, bias=bias, backend="reference")
        assert torch.equal(*actual)
        assert (actual[0] - expected).abs().max() < {torch.float32: 5e-6, torch.bfloat16: 6e-2}[dtype]


def test_shared_heads_of_keys():
    pos = Grid((23, 17), 1).positions()
    q, k, v = torch.randn(3, 2, 4, pos.tokens, 8)
    k, v = k[:, :2], v[:, :2]
    with torch.no_grad():
        bias = random_encoding("irpe", 32, 4).bias(pos, 0)
        actual = attention(q, k, v, bias=bias, enable_gqa=True)
        expected = attention(q, k, v, bias=bias, enable_gqa=True, backend="reference")
    torch.testing.assert_close(actual, expected, rtol=0, atol=5e-6)


@cases("prefix", [0, 1, 5])
def test_runs_equal_the_buckets(prefix):
    grid = Grid((23, 17), prefix)
    table = bucket_ids(grid, "product", 1.9)[0][0]
    pattern = _find(table, 50, grid)
    every = pattern.buckets.view(-1, 17).index_select(0, pattern.order.flatten()).view(len(table), -1)
    assert torch.equal(every[:, pattern.skip :], table)
    assert (every[:, : pattern.skip] == 50).all()
    assert pattern.buckets.shape[1] <= (7 + (prefix > 0)) * 17


def test_biases_without_runs():
    """Short rows; distances, whose rows differ; tables read by keys; unnamed buckets; other tokens."""
    pos = Grid((23, 17), 1).positions()
    bias = random_encoding("irpe").bias(pos, 0)
    assert runs_of(random_encoding("irpe").bias(Grid((23, 15)).positions(), 0)) is None
    assert runs_of(random_encoding("irpe(method=euclidean)").bias(pos, 0)) is None
    assert runs_of(random_encoding("irpe(on=q)").bias(pos, 0)) is None
    assert runs_of(ContextBias(bias.weights, bias.buckets, "query", True, pos)) is None
    assert runs_of(bias) is runs_of(random_encoding("irpe").bias(pos, 0)) is not None
    subset = pos.gather(torch.arange(300)[None])
    assert runs_of(random_encoding("irpe").bias(subset, 0)) is None
    subset.memo = None
    assert runs_of(random_encoding("irpe").bias(subset, 0)) is None


def test_other_options_on_the_same_positions():
    pos = Grid((23, 17), 1).positions()
    q, k, v = torch.randn(3, 1, 3, pos.tokens, 8)
    with torch.no_grad():
        for spec in ("irpe", "irpe(ratio=1.5)", "irpe(prefix_buckets=3)", "irpe(on=qk)", "irpe"):
            bias = random_encoding(spec).bias(pos, 0)
            actual, expected = (attention(q, k, v, bias=bias, backend=b) for b in ("auto", "reference"))
            torch.testing.assert_close(actual, expected, rtol=0, atol=5e-6)


def test_manual_products(monkeypatch):
    """With one thread, except for float32 with AVX2 and for half precision with units for it."""
    requested = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
    for threads, units, kind, expected in [
        (1, False, "AVX512", [True] * 4),
        (1, False, "AVX2", [False, False, True, True]),
        (1, True, "AVX512", [True, True, False, False]),
        (1, False, "DEFAULT", [True, True, False, False]),
        (2, False, "AVX512", [False] * 4),
    ]:
        monkeypatch.setattr(torch, "get_num_threads", lambda n=threads: n)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda of=units: of)
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda of=kind: of)
        assert [BY_HAND(dtype) for dtype in requested] == expected
