"""Every encoding whose bias is computed in blocks: output and all gradients against dense float64 attention."""

import pytest
import torch

from tests.attention.cases import close
from tests.cases import cases, pairwise
from vispe import Grid, attention, create_encoding
from vispe.attention import ContextBias, DistanceBias, RadialBias, SumBias, TableBias, explain
from vispe.attention.backends import blocked, blocks, content_cpu, sdpa
from vispe.attention.backends.blocks.attention import BlockAttention
from vispe.attention.bias.cache import masks

HEADS, WIDTH = 3, 8
GRIDS = [((5, 7), 0), ((7, 5), 1), ((4, 9), 3)]
FIXED = [
    "alibi2d",
    "alibi2d(metric=manhattan)",
    "alibi_graph",
    "sandwich",
    "lookhere",
    "lookhere(directions=halves)",
]
LEARNED = [
    "alibi2d(slopes=learned)",
    "rpb",
    "rpb.beit",
    "rpb_cpb",
    "kerple",
    "fire",
    "t5",
    "bam",
    "irpe(mode=bias)",
]
CONTENT = [
    "irpe",
    "irpe(on=q,shared=false)",
    "irpe.ctx_product_50_shared_qk",
    "irpe(method=euclidean)",
    "irpe(method=quantization,prefix_buckets=3,on=qk)",
    "irpe(prefix_buckets=0)",
    "shaw",
    "shaw(shared=false,index=key_query)",
    "shaw.method4",
    "shaw(clip=[2,1])",
    "distance_bank",
]


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """All sizes are computed in blocks, of several heads or few rows; dense masks are errors."""
    calls = []
    original = BlockAttention.apply
    monkeypatch.setattr(BlockAttention, "apply", lambda *a: calls.append(a[0].shape) or original(*a))
    for name in ("MIN_QUERIES", "MIN_CONTENT_BYTES", "MIN_CONTENT_TOKENS"):
        monkeypatch.setattr(blocked, name, 0)
    monkeypatch.setattr(blocks.attention, "FORWARD_BLOCK", 2800)
    monkeypatch.setattr(blocks.attention, "BACKWARD_BLOCK", 1500)
    monkeypatch.setattr(masks, "MAX_MASK_BYTES", 0)
    monkeypatch.setattr(sdpa, "_masked", None)
    torch.manual_seed(0)
    return calls


def random_encoding(spec, shape):
    encoding = create_encoding(spec, dim=HEADS * WIDTH, num_heads=HEADS, grid=shape)
    for p in encoding.parameters():
        torch.nn.init.normal_(p, 0.3, 0.3)
    return encoding.double()


def inputs(pos, b=2, dtype=torch.float64):
    q, k, v, cotangent = torch.randn(4, b, pos.tokens, HEADS, WIDTH, dtype=dtype).transpose(2, 3)
    return [t.clone().requires_grad_() for t in (q, k, v)], cotangent


def compare(run, leaves, cotangent, tol=1e-9):
    """Compare output and gradients of both backends; the reference is dense."""
    results = []
    for backend in ("auto", "reference"):
        out = run(backend)
        grads = torch.autograd.grad(out, leaves, cotangent, allow_unused=True)
        results.append(
            [
                out.detach(),
                *(torch.zeros_like(t) if g is None else g for t, g in zip(leaves, grads, strict=True)),
            ]
        )
    for i, (actual, expected) in enumerate(zip(*results, strict=True)):
        close(actual, expected, tol, f"result {i}")


def padding(pos, b=2):
    keep = torch.rand(b, pos.tokens) > 0.4
    keep[0, 0] = True
    keep[-1] = False  # a sample without keys
    return keep


@pairwise
@cases("padded", [False, True], ids=["all keys", "padded"])
@cases(("shape", "prefix"), GRIDS, ids=str)
@cases("spec", FIXED + LEARNED + CONTENT)
def test_encodings(spec, shape, prefix, padded, calls, monkeypatch):
    calls.clear()
    if spec.startswith("shaw"):
        monkeypatch.setattr(blocks.content, "MAX_PRODUCTS", 0)
    encoding = random_encoding(spec, (5, 7))  # the other grids are new resolutions
    pos, (b, layer) = Grid(shape, prefix).positions(), (2, 0)
    leaves, cotangent = inputs(pos)
    x = torch.randn(b, pos.tokens, HEADS * WIDTH, dtype=torch.float64)
    keep = padding(pos) if padded else None
    parameters = list(encoding.parameters())

    def run(backend):
        bias = encoding.bias(pos, layer, x)
        return attention(*leaves, bias=bias, key_padding_mask=keep, backend=backend)

    compare(run, leaves + parameters, cotangent)
    assert len(calls) == 1


@cases("prefix", [0, 2])
def test_sums_of_tables_and_content(prefix, calls):
    calls.clear()
    pos = Grid((6, 5), prefix).positions()
    leaves, cotangent = inputs(pos)
    slopes = torch.rand(HEADS, dtype=torch.float64, requires_grad=True)
    encodings = [
        random_encoding("irpe.ctx_product_50_shared_qk", (6, 5)),
        random_encoding("shaw", (6, 5)),
        random_encoding("alibi2d", (6, 5)),
    ]
    parameters = [p for e in encodings for p in e.parameters()]

    def run(backend):
        terms = [e.bias(pos, 0) for e in encodings]
        return attention(*leaves, bias=SumBias([*terms, DistanceBias(slopes, pos)]), backend=backend)

    compare(run, [*leaves, slopes, *parameters], cotangent)
    assert len(calls) == 1


@cases("dot", ["query", "key"])
def test_buckets_per_sample_and_content(dot, calls):
    calls.clear()
    pos = Grid((6, 5)).positions()
    leaves, cotangent = inputs(pos)
    weights = torch.randn(1, 6, 4, dtype=torch.float64, requires_grad=True)
    content = torch.randn(2, HEADS, 30, 4, dtype=torch.float64, requires_grad=True)
    buckets = torch.randint(6, (2, 30, 30))

    def run(backend):
        bias = ContextBias(weights, buckets, dot, False, content=content)
        return attention(*leaves, bias=bias, backend=backend)

    compare(run, [*leaves, weights, content], cotangent)
    assert len(calls) == 1


def test_shared_heads_of_keys(calls):
    pos = Grid((6, 5), 1).positions()
    (q, k, v), cotangent = inputs(pos)
    encoding = random_encoding("irpe.ctx_product_50_shared_qk", (6, 5))

    def run(backend):
        bias = encoding.bias(pos, 0)
        return attention(q, k[:, :1], v[:, :1], bias=bias, enable_gqa=True, backend=backend)

    compare(run, [q, k, v, *encoding.parameters()], cotangent)
    assert len(calls) == 1


def _hidden(pos, axis, index):
    values = torch.randn(HEADS, 9, 9, dtype=torch.float64)
    return TableBias(values.index_fill_(axis, torch.tensor(index), -torch.inf), pos)


CLOSED = {
    "table": lambda pos: _hidden(pos, 1, range(5)),
    "a head": lambda pos: _hidden(pos, 0, [1]),
    "fixed": lambda pos: RadialBias(lambda d: torch.where(d > 1, -torch.inf, -d)[None], pos, key="near"),
}


@cases("padded", [False, True], ids=["all keys", "padded"])
@cases("name", CLOSED)
def test_rows_without_keys_in_a_fixed_bias(name, padded, calls):
    calls.clear()
    pos = Grid((5, 5)).positions()
    leaves, cotangent = inputs(pos)
    bias, keep = CLOSED[name](pos), padding(pos) if padded else None

    def run(backend):
        return attention(*leaves, bias=bias, key_padding_mask=keep, backend=backend)

    compare(run, leaves, cotangent)
    assert len(calls) == 1


@cases("dtype", [torch.float16, torch.bfloat16], ids=str)
@cases("spec", ["alibi2d", "lookhere", "irpe", "shaw"])
@cases("prefix", [0, 1])
def test_half_precision(spec, prefix, dtype, calls):
    calls.clear()
    pos, encoding = Grid((6, 7), prefix).positions(), random_encoding(spec, (6, 7)).float()
    leaves, cotangent = inputs(pos, dtype=dtype)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    bias = encoding.bias(pos, 0)
    out, expected = attention(*leaves, bias=bias), attention(*exact, bias=bias, backend="reference")
    assert out.dtype == dtype
    assert len(calls) == 1
    tol = 5e-3 if dtype == torch.float16 else 2e-2
    close(out, expected, tol)
    grads = torch.autograd.grad(out, leaves, cotangent)
    for grad, other in zip(grads, torch.autograd.grad(expected, exact, cotangent.double()), strict=True):
        assert grad.dtype == dtype
        close(grad, other, 2 * tol)


@cases("dtype", [torch.float16, torch.bfloat16], ids=str)
@cases("spec", ["lookhere", "rpb", "irpe.ctx_product_50_shared_qk", "shaw"])
def test_half_precision_without_gradient(spec, dtype, calls):
    calls.clear()
    pos, encoding = Grid((6, 7), 1).positions(), random_encoding(spec, (6, 7)).float()
    leaves, _ = inputs(pos, dtype=dtype)
    keep = padding(pos)
    with torch.no_grad():
        bias = encoding.bias(pos, 0)
        out = attention(*leaves, bias=bias, key_padding_mask=keep)
        exact = (t.double() for t in leaves)
        expected = attention(*exact, bias=bias, key_padding_mask=keep, backend="reference")
    assert out.dtype == dtype
    assert len(calls) == 1
    close(out, expected, 5e-3 if dtype == torch.float16 else 2e-2)


@cases("offset", [0.0, 30.0, -200.0])
def test_half_precision_of_fixed_biases_far_from_zero(offset, calls):
    calls.clear()
    """Softmax ignores a constant, so a fixed bias is rounded after its maximum is subtracted."""
    pos = Grid((6, 7), 1).positions()
    leaves, _ = inputs(pos, dtype=torch.bfloat16)
    table, prefix = torch.randn(HEADS, 11, 13) + offset, torch.randn(HEADS, 3) + offset
    exact = [t.detach().double().requires_grad_() for t in leaves]
    out = attention(*leaves, bias=TableBias(table, pos, prefix))
    expected = attention(*exact, bias=TableBias(table, pos, prefix), backend="reference")
    close(out, expected, 1e-2)
    assert len(calls) == 1


@cases("spec", ["alibi2d", "irpe.ctx_product_50_shared_qk", "shaw"])
def test_gradients_of_gradients(spec, calls):
    calls.clear()
    pos, encoding = Grid((2, 4), 1).positions(), random_encoding(spec, (2, 4))
    leaves, _ = inputs(pos, b=1)

    def run(q, k, v):
        return attention(q, k, v, bias=encoding.bias(pos, 0))

    torch.autograd.gradcheck(run, leaves, fast_mode=True)
    torch.autograd.gradgradcheck(run, leaves, fast_mode=True)
    assert calls


@cases("spec", ["alibi2d", "lookhere", "rpb", "irpe", "irpe(on=q)", "shaw", "t5"])
def test_no_tensor_of_the_size_of_scores_is_saved_or_cached(spec, monkeypatch, calls):
    calls.clear()
    # in evaluation, irpe and shaw use buckets of all pairs up to this size
    monkeypatch.setattr(content_cpu, "MAX_TOTAL_BYTES", 0)
    monkeypatch.setattr(blocks.content, "MAX_PRODUCTS", 0)
    pos, encoding = Grid((12, 11)).positions(), random_encoding(spec, (12, 11))
    leaves, cotangent = inputs(pos, b=1)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        out = attention(*leaves, bias=encoding.bias(pos, 0))
    out.backward(cotangent)
    with torch.no_grad():
        attention(*leaves, bias=encoding.bias(pos, 0))
    limit = HEADS * pos.tokens**2 / 2
    assert sizes
    assert max(sizes) < limit
    for key, value in pos.memo.items():
        tensors = [
            t for t in (value if isinstance(value, tuple) else (value,)) if isinstance(t, torch.Tensor)
        ]
        assert all(t.numel() < pos.tokens**2 for t in tensors), key


def test_explain(monkeypatch):
    pos, q = Grid((8, 8)).positions(), torch.randn(1, HEADS, 64, 8, requires_grad=True)
    bias = DistanceBias((0.5, 0.25, 0.1), pos)
    assert explain(q, q, q, bias=bias).reason.startswith("the mask is computed in blocks")
    monkeypatch.setattr(masks, "MAX_MASK_BYTES", 1 << 26)
    assert explain(q, q, q, bias=bias).reason == "one dense mask, cached with its positions"
