"""Cached masks of learned biases, which are not used after a change of the values."""

import copy
import gc
import pickle
import threading

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from vispe import Grid, attention, create_encoding
from vispe.attention import DistanceBias, SumBias, TableBias
from vispe.attention.backends import blocks, content_cpu, sdpa
from vispe.attention.bias.cache import entries, masks
from vispe.attention.bias.content import ContextBias
from vispe.attention.precision import rounded

LEARNED = [
    "rpb.swin",
    "rpb.beit",
    "irpe(mode=bias)",
    "rpb_cpb",
    "kerple",
    "fire",
    "t5",
    "bam",
    "alibi2d(slopes=learned)",
]
GRID = (5, 7)


@pytest.fixture(autouse=True)
def fresh_caches(monkeypatch):
    monkeypatch.setattr(entries, "ALL_CACHES", type(entries.ALL_CACHES)())


def random_encoding(spec):
    torch.manual_seed(3)
    encoding = create_encoding(spec, dim=24, num_heads=3, grid=GRID).eval()
    for p in encoding.parameters():
        torch.nn.init.normal_(p, 0.5, 0.3)
    return encoding


def inputs(pos, b=2, dtype=torch.float32):
    return torch.randn(3, b, 3, pos.tokens, 8, dtype=dtype)


def entries_at(pos):
    return [e for key, m in pos.memo.items() if key[0] == "learned masks" for e in m.entries]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("spec", LEARNED)
def test_every_call_has_the_same_bits(spec, dtype):
    encoding, pos = random_encoding(spec).to(dtype), Grid(GRID, 1).positions()
    q, k, v = inputs(pos, dtype=dtype)
    with torch.no_grad():
        outs = [attention(q, k, v, bias=encoding.bias(pos, 0)) for _ in range(4)]
        mask = rounded(encoding.bias(pos, 0).dense(), dtype)
        expected = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert [e.mask is not None for e in entries_at(pos)] == [True]
    assert entries_at(pos)[0].checked, "the shortest way was not taken"
    for out in outs:
        assert torch.equal(out, expected)


@pytest.mark.parametrize("how", ["data", "in place", "load", "inference", "optimizer"])
@pytest.mark.parametrize("spec", LEARNED)
def test_changed_values_are_detected(spec, how):
    encoding, pos = random_encoding(spec), Grid(GRID, 2).positions()
    q, k, v = inputs(pos)

    def out(backend="auto"):
        with torch.no_grad():
            return attention(q, k, v, bias=encoding.bias(pos, 0), backend=backend)

    for _ in range(3):
        out()
    parameter = next(encoding.parameters())
    if how == "data":  # which leaves the version as it is
        version = parameter._version
        parameter.data.view(-1)[-1] += 0.5
        assert parameter._version == version
    elif how == "in place":
        with torch.no_grad():
            parameter.mul_(1.5)
    elif how == "load":
        other = {n: p + 0.25 for n, p in encoding.state_dict().items()}
        encoding.load_state_dict(other)
    elif how == "inference":
        with torch.inference_mode():
            parameter.mul_(1.5)
    else:
        parameter.grad = torch.ones_like(parameter)
        torch.optim.SGD(encoding.parameters(), lr=0.3).step()
    for _ in range(3):
        actual, expected = out(), out("reference")
        torch.testing.assert_close(actual, expected, rtol=0, atol=3e-6)


def test_alternating_layers_have_separate_masks():
    pos, layers = Grid(GRID).positions(), [random_encoding("rpb.swin") for _ in range(4)]
    for i, layer in enumerate(layers):
        torch.nn.init.normal_(layer.relative_position_bias_table, i)
    q, k, v = inputs(pos)
    with torch.inference_mode():
        for _ in range(3):
            for layer in layers:
                bias = layer.bias(pos, 0)
                actual, expected = (
                    attention(q, k, v, bias=bias),
                    attention(q, k, v, bias=bias, backend="reference"),
                )
                torch.testing.assert_close(actual, expected, rtol=0, atol=3e-6)
    assert len(entries_at(pos)) == 4
    assert all(e.mask is not None and not e.mask.is_inference() for e in entries_at(pos))


def test_masks_of_old_tables_are_freed():
    encoding, pos = random_encoding("rpb.swin"), Grid(GRID).positions()
    q, k, v = inputs(pos)
    for _ in range(60):
        with torch.no_grad():
            encoding.relative_position_bias_table.add_(0.01)
            for _ in range(3):
                attention(q, k, v, bias=encoding.bias(pos, 0))
    assert len(entries_at(pos)) < 30


def test_gradients_are_unchanged():
    encoding, pos = random_encoding("rpb.swin"), Grid(GRID, 1).positions()
    q, k, v = inputs(pos)
    with torch.no_grad():
        for _ in range(3):
            attention(q, k, v, bias=encoding.bias(pos, 0))
    q = q.clone().requires_grad_()
    table = encoding.relative_position_bias_table
    actual = torch.autograd.grad(attention(q, k, v, bias=encoding.bias(pos, 0)).square().sum(), (q, table))
    bias = encoding.bias(pos, 0)
    expected = torch.autograd.grad(
        attention(q, k, v, bias=bias, backend="reference").square().sum(), (q, table)
    )
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_masks_of_frozen_tables_with_gradients_of_queries():
    encoding, pos = random_encoding("rpb.swin").requires_grad_(False), Grid(GRID, 1).positions()
    q, k, v = inputs(pos)
    q = q.clone().requires_grad_()
    for _ in range(3):
        actual = torch.autograd.grad(attention(q, k, v, bias=encoding.bias(pos, 0)).square().sum(), q)[0]
    bias = encoding.bias(pos, 0)
    expected = torch.autograd.grad(attention(q, k, v, bias=bias, backend="reference").square().sum(), q)[0]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert [e.mask is not None for e in entries_at(pos)] == [True]


def test_sums_and_shapes_of_calls():
    pos = Grid(GRID, 1).positions()
    table, slopes = torch.randn(3, 9, 13), torch.rand(3)
    bias = SumBias([TableBias(table, pos), DistanceBias(slopes, pos), DistanceBias((0.5, 0.25, 0.125), pos)])
    for b in (1, 2, 1, 3, 2):
        q, k, v = inputs(pos, b)
        keep = torch.rand(b, pos.tokens) > 0.3
        for more in ({}, {"key_padding_mask": keep}, {"is_causal": True}, {"scale": 0.3}):
            actual = attention(q, k, v, bias=bias, **more)
            torch.testing.assert_close(
                actual, attention(q, k, v, bias=bias, backend="reference", **more), rtol=0, atol=3e-6
            )
    table[0, 2, 3] += 4
    actual, expected = attention(q, k, v, bias=bias), attention(q, k, v, bias=bias, backend="reference")
    torch.testing.assert_close(actual, expected, rtol=0, atol=3e-6)


def test_hidden_keys_and_nan():
    pos = Grid(GRID).positions()
    q, k, v = inputs(pos)
    table = torch.randn(3, 9, 13)
    table[1] = -torch.inf  # a head without any key
    for _ in range(3):
        out = attention(q, k, v, bias=TableBias(table, pos))
        assert not out[:, 1].any()
        assert out.isfinite().all()
    table[0, 0, 0] = torch.nan
    assert all(attention(q, k, v, bias=TableBias(table, pos))[:, 0].isnan().any() for _ in range(3))


def test_memory_is_bounded_and_freed(monkeypatch):
    pos, other = Grid(GRID).positions(), Grid((6, 6)).positions()
    one = 3 * pos.tokens**2 * 4
    monkeypatch.setattr(entries, "MAX_TOTAL_BYTES", int(2.5 * one))
    tables = [torch.randn(3, 9, 13) for _ in range(4)]
    q, k, v = inputs(pos)
    for _ in range(3):
        for table in tables:
            attention(q, k, v, bias=TableBias(table, pos))
    assert sum(e.mask is not None for e in entries_at(pos)) == 2
    # another grid takes the room of the first
    q, k, v = inputs(other)
    for _ in range(3):
        attention(q, k, v, bias=TableBias(torch.ones(3, 11, 11), other))
    assert sum(e.mask is not None for e in entries_at(other)) == 1
    assert not entries_at(pos) or sum(e.mask is not None for e in entries_at(pos)) + 1 <= 2
    total = sum(m.bytes for m in entries.ALL_CACHES)
    assert 0 < total <= entries.MAX_TOTAL_BYTES
    del pos, other, q, k, v
    gc.collect()
    assert not list(entries.ALL_CACHES)


@pytest.mark.parametrize("prefix", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_masks_are_computed_in_blocks(dtype, prefix, monkeypatch):
    pos = Grid((9, 5), prefix).positions()
    monkeypatch.setattr(masks, "MAX_MASK_BYTES", 100)
    monkeypatch.setattr(sdpa.blocked, "MIN_QUERIES", 0)
    monkeypatch.setattr(blocks.attention, "FORWARD_BLOCK", 900)
    monkeypatch.setattr(sdpa, "_masked", None)
    table, edge = torch.randn(3, 17, 9, requires_grad=True), torch.randn(3, 3)
    q, k, v = inputs(pos, dtype=dtype)
    keep = torch.rand(2, pos.tokens) > 0.2
    bias = TableBias(table, pos, edge if prefix else None)
    for more in ({}, {"key_padding_mask": keep}):
        with torch.no_grad():
            actual = attention(q, k, v, bias=bias, **more)
            expected = attention(*(t.double() for t in (q, k, v)), bias=bias, backend="reference", **more)
        assert actual.dtype == dtype
        assert (actual - expected).abs().max() < {torch.float32: 3e-6, torch.bfloat16: 4e-2}[dtype]
    assert not entries_at(pos)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "spec", ["irpe.ctx_product_50_shared_qk", "irpe(on=k,shared=false)", "irpe(on=q)", "shaw"]
)
def test_content_tables(spec, dtype, monkeypatch):
    monkeypatch.setattr(content_cpu, "MIN_BIAS_BYTES", 300)
    monkeypatch.setattr(content_cpu, "ROWS", 8)
    monkeypatch.setattr(sdpa, "_masked", None)
    torch.manual_seed(0)
    encoding, pos = create_encoding(spec, dim=24, num_heads=3, grid=GRID), Grid(GRID, 1).positions()
    for p in encoding.parameters():
        torch.nn.init.normal_(p)
    q, k, v = inputs(pos, dtype=dtype)
    with torch.no_grad():
        bias = encoding.bias(pos, 0)
        actual = attention(q, k, v, bias=bias)
        expected = attention(*(t.double() for t in (q, k, v)), bias=bias, backend="reference")
    assert (actual - expected).abs().max() < {torch.float32: 5e-6, torch.bfloat16: 6e-2}[dtype]


@pytest.mark.parametrize("content", [None, torch.randn(2, 3, 36, 8)], ids=["queries, keys", "content"])
def test_rows_of_positions_that_differ_between_samples(content, monkeypatch):
    monkeypatch.setattr(content_cpu, "MIN_BIAS_BYTES", 300)
    monkeypatch.setattr(content_cpu, "ROWS", 8)
    weights, buckets = torch.randn(3, 6, 8), torch.randint(6, (2, 36, 36))
    bias = SumBias([ContextBias(weights, buckets, dot, True, content=content) for dot in ("query", "key")])
    q, k, v = torch.randn(3, 2, 3, 36, 8)
    k, v = k[:, :1], v[:, :1]
    actual = attention(q, k, v, bias=bias, enable_gqa=True)
    expected = attention(q, k, v, bias=bias, enable_gqa=True, backend="reference")
    torch.testing.assert_close(actual, expected, rtol=0, atol=5e-6)


def test_threads_and_copies():
    encoding, pos = random_encoding("rpb.swin"), Grid(GRID).positions()
    q, k, v = inputs(pos)
    expected = attention(q, k, v, bias=encoding.bias(pos, 0), backend="reference").detach()
    wrong = []

    def work():
        encoding_copy = copy.deepcopy(encoding)
        with torch.no_grad():
            for _ in range(50):
                if (attention(q, k, v, bias=encoding_copy.bias(pos, 0)) - expected).abs().max() > 3e-6:
                    wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not wrong


def test_copies_of_positions_have_no_masks():
    pos, table = Grid(GRID).positions(), torch.randn(3, 9, 13)
    q, k, v = inputs(pos)
    for _ in range(3):
        attention(q, k, v, bias=TableBias(table, pos))
    before = sum(m.bytes for m in entries.ALL_CACHES)
    positions_copy = copy.deepcopy(pos)
    assert not entries_at(positions_copy)
    assert sum(m.bytes for m in entries.ALL_CACHES) == before > 0
    assert len(pickle.dumps(pos)) < before + 60_000


def test_terms_on_other_positions_are_not_stored():
    """Distances of two spacings have equal numbers, and other masks."""
    near, far, slopes = Grid(GRID).positions(), Grid(GRID, spacing=(2.0, 2.0)).positions(), torch.rand(3)
    table = TableBias(torch.randn(3, 9, 13), near)
    q, k, v = inputs(near)
    for pos in (near, far, near, far, near, far):
        bias = SumBias([table, DistanceBias(slopes, pos)])
        actual, expected = (attention(q, k, v, bias=bias, backend=b) for b in ("auto", "reference"))
        torch.testing.assert_close(actual, expected, rtol=0, atol=3e-6)
