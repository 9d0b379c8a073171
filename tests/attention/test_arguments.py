"""Grouped heads, unequal lengths, scale, dropout, dtypes, autocast, transforms, value terms."""

import pytest
import torch
from torch.nn import functional as F

from tests.attention import oracle
from tests.attention.cases import (
    BACKENDS,
    CASES,
    HEADS,
    WIDTH,
    Case,
    close,
    compare,
    doubles,
    is_supported,
    leaf,
    masked,
    tensors,
)
from tests.cases import cases
from vispe import Grid, attention
from vispe.attention import (
    Affine,
    BlockTransform,
    ContextBias,
    DenseBias,
    DistanceBias,
    Expand,
    LowRankBias,
    PairRotation,
    SumBias,
    TableBias,
    ValueTerm,
)
from vispe.errors import BackendUnavailable, ShapeError

pytestmark = pytest.mark.usefixtures("poisoned")


@cases("backend", BACKENDS)
@cases("name", ["none", "squared fixed", "table", "context of key", "context of query"])
def test_grouped_queries(name, backend):
    pos = Grid((2, 4), prefix=1).positions()
    case = CASES[name](pos, 2)
    if not is_supported(case, backend):
        return
    q, k, v = tensors(2, 9, heads=HEADS, kv_heads=1, d_v=5)
    compare(case, backend, q, k, v, enable_gqa=True)
    with pytest.raises(ShapeError, match=r"3 query heads and 1 key head\. Pass enable_gqa=True"):
        attention(q, k, v, bias=case.bias, backend=backend)


def test_grouped_queries_with_a_rotation_per_key_head():
    angle = torch.randn(1, 2, 5, 3)
    q, k, v = tensors(2, 5, heads=4, kv_heads=2)
    rotation = PairRotation(angle.cos(), angle.sin(), "half")
    wide = angle.repeat_interleave(2, 1)
    each = PairRotation(wide.cos(), wide.sin(), "half")
    a = attention(q, k, v, transform=rotation, enable_gqa=True)
    b = attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), transform=each)
    torch.testing.assert_close(a, b)


@cases("backend", ["reference", "sdpa"])
@cases(("n", "m"), [(3, 7), (7, 3)])
@cases("kind", ["none", "dense", "columns", "lowrank", "causal", "bool"])
def test_unequal_numbers_of_queries_and_keys(n, m, kind, backend):
    q, k, v = tensors(2, n, m, d_v=5)
    keep = torch.rand(n, m) > 0.5
    keep[:, 0] = True
    values, row, col = leaf(1, HEADS, n, m), leaf(2, 1, n, 4), leaf(1, HEADS, m, 4)
    case, arguments, args = {
        "none": (Case(None, [], lambda p, q, k, s: None), {}, {}),
        "dense": (Case(DenseBias(values), [values], lambda p, q, k, s: p[0]), {}, {}),
        "columns": (Case(DenseBias(values[:, :, :1]), [values], lambda p, q, k, s: p[0][:, :, :1]), {}, {}),
        "lowrank": (
            Case(LowRankBias(row, col), [row, col], lambda p, q, k, s: torch.einsum("bgir,ahjr->bhij", *p)),
            {},
            {},
        ),
        "causal": (Case(None, [], lambda p, q, k, s: None), *masked("causal", 2, n, m)),
        "bool": (Case(None, [], lambda p, q, k, s: None), {"attn_mask": keep}, {"keep": keep[None, None]}),
    }[kind]
    compare(case, backend, q, k, v, oracle_args=args, **arguments)


@cases("backend", BACKENDS)
@cases("name", ["none", "squared fixed", "context of query"])
def test_scale(name, backend):
    pos = Grid((2, 3)).positions()
    case = CASES[name](pos, 1)
    if is_supported(case, backend):
        compare(case, backend, *tensors(1, 6), scale=0.7)


@cases("dtype", [torch.float32, torch.float64, torch.bfloat16])
@cases("scale", [-0.7, 0.0])
def test_causal_attention_with_a_scale_that_is_not_positive(scale, dtype):
    q, k, v = (t.detach().to(dtype).requires_grad_() for t in tensors(2, 3, 7))
    wide = doubles([q, k, v])
    rows = torch.ones(3, 7, dtype=torch.bool).tril()[None, None]
    expected = oracle.attend(*wide, keep=rows.expand(2, HEADS, -1, -1), scale=scale)
    actual = attention(q, k, v, is_causal=True, scale=scale)
    limit = 3e-2 if dtype == torch.bfloat16 else 1e-5
    close(actual, expected, limit)
    grads = torch.autograd.grad(actual.sum(), [q, k, v]), torch.autograd.grad(expected.sum(), wide)
    for ours, exact in zip(*grads, strict=True):
        close(ours, exact, limit)


@cases("backend", BACKENDS)
def test_dropout_keeps_the_mean_and_the_rate(backend):
    pos = Grid((4, 4)).positions()
    bias = DistanceBias((0.0,) * HEADS, pos, metric="squared")
    q = torch.zeros(64, HEADS, 16, WIDTH)
    v = torch.eye(16).expand(64, HEADS, 16, 16)  # the output is the attention matrix
    out = attention(q, q, v, bias=bias, dropout_p=0.3, backend=backend)
    dropped = (out == 0).float().mean()
    assert abs(dropped - 0.3) < 0.01
    torch.testing.assert_close(out[out > 0], torch.full_like(out[out > 0], 1 / 16 / 0.7))
    assert not torch.equal(out, attention(q, q, v, bias=bias, dropout_p=0.3, backend=backend))
    assert torch.equal(
        attention(q, q, v, bias=bias, backend=backend), attention(q, q, v, bias=bias, backend=backend)
    )


@cases(("dtype", "tol"), [(torch.float64, 1e-6), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
@cases("backend", BACKENDS)
@cases(
    "name",
    ["none", "distance constant", "squared fixed", "squared learned", "table", "context of query", "sum"],
)
def test_dtypes(name, backend, dtype, tol):
    pos = Grid((3, 4), prefix=1).positions()
    case = CASES[name](pos, 2)
    q, k, v = tensors(2, 13, dtype=dtype)
    if backend == "lowrank" and dtype == torch.float16 and is_supported(case, backend):
        with pytest.raises(BackendUnavailable, match="overflow float16"):
            attention(q, k, v, bias=case.bias, backend=backend)
    elif is_supported(case, backend):
        compare(case, backend, q, k, v, tol=tol)


@cases("backend", ["reference", "sdpa"])
def test_float64_parameters_are_not_rounded(backend):
    pos = Grid((3, 4)).positions()
    q, k, v = (t.detach() for t in tensors(1, 12, dtype=torch.float64))
    slopes = torch.rand(HEADS, dtype=torch.float64)
    distances = oracle.distance_matrix(pos.grid, "manhattan", False, "none")  # integers, exact in float32
    expected = oracle.attend(q, k, v, bias=-slopes[:, None, None] * distances)
    close(
        attention(q, k, v, bias=DistanceBias(slopes, pos, metric="manhattan"), backend=backend),
        expected,
        1e-14,
    )
    values = torch.randn(HEADS, 5, 7, dtype=torch.float64)
    expected = oracle.attend(q, k, v, bias=oracle.table_matrix(values, pos.grid))
    close(attention(q, k, v, bias=TableBias(values, pos), backend=backend), expected, 1e-14)
    angle = torch.randn(1, 1, 12, 4)
    rotated = PairRotation(angle.cos(), angle.sin(), "interleaved").query(q)
    a, b, c, s = q[..., 0::2], q[..., 1::2], angle.cos().double(), angle.sin().double()
    torch.testing.assert_close(
        rotated, torch.stack([a * c - b * s, b * c + a * s], -1).flatten(-2), rtol=0, atol=1e-15
    )


@cases("backend", BACKENDS)
@cases("name", ["none", "squared fixed", "squared learned", "context of query"])
def test_autocast(name, backend):
    pos = Grid((3, 3)).positions()
    case = CASES[name](pos, 2)
    if not is_supported(case, backend):
        return
    q, k, v = tensors(2, 9)
    expected = oracle.attend(
        *doubles((q, k, v)), bias=case.dense(doubles(case.params), q.double(), k.double(), WIDTH**-0.5)
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attention(q, k, v, bias=case.bias, backend=backend)
        # a norm under autocast gives wide q and k alongside a narrow v
        mixed = attention(q, k, v.to(torch.bfloat16), bias=case.bias, backend=backend)
    assert out.dtype == mixed.dtype == torch.bfloat16
    close(out, expected, 2e-2)
    close(mixed, expected, 2e-2)
    grads = torch.autograd.grad(out, [q, k, v, *case.params], torch.randn_like(out))
    assert all(g.dtype == torch.float32 and g.isfinite().all() for g in grads)


def test_autocast_does_not_round_what_biases_and_transforms_compute():
    n = 6
    row, col = torch.randn(1, 1, n, 4), torch.randn(1, 1, n, 4)
    weights, buckets = torch.randn(1, 5, WIDTH), torch.randint(0, 5, (n, n))
    blocks, q = torch.randn(1, 1, n, 2, 4, 4), torch.randn(1, HEADS, n, WIDTH)

    def results():
        return (
            LowRankBias(row, col).dense(),
            ContextBias(weights, buckets, "query", False).dense(q=q, k=q),
            BlockTransform(q=blocks).query(q),
            ValueTerm(weights, buckets).apply(torch.softmax(q[..., :n], -1)),
        )

    plain = results()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = results()
    for a, b in zip(plain, cast, strict=True):
        assert torch.equal(a, b)


def test_deterministic_equals_the_default():
    pos = Grid((3, 3)).positions()
    q, k, v = tensors(2, 9)
    bias = DistanceBias((0.5, 0.2, 0.1), pos)
    close(attention(q, k, v, bias=bias, deterministic=True), attention(q, k, v, bias=bias), 1e-6)


def test_reference_gradcheck():
    pos = Grid((2, 2), prefix=1).positions()
    q, k, v = (torch.randn(1, 2, 5, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    slopes = torch.rand(2, dtype=torch.float64, requires_grad=True)
    values = torch.randn(1, 3, 3, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    relative = torch.randn(1, 4, 3, dtype=torch.float64, requires_grad=True)
    buckets = torch.randint(0, 4, (5, 5))
    keep = torch.rand(5, 5) > 0.2
    keep[3] = False

    def run(q, k, v, slopes, values, weights, relative):
        bias = SumBias(
            [
                DistanceBias(slopes, pos),
                TableBias(values, pos),
                ContextBias(weights, buckets, "key", True, pos),
            ]
        )
        term = ValueTerm(relative, buckets)
        return attention(q, k, v, bias=bias, value_term=term, attn_mask=keep, backend="reference")

    assert torch.autograd.gradcheck(run, (q, k, v, slopes, values, weights, relative), fast_mode=True)


@cases("layout", [((2, 3), 0, 1), ((2, 2), 1, 3)], ids=str)
def test_value_term(layout):
    shape, prefix, b = layout
    pos = Grid(shape, prefix=prefix).positions()
    n = pos.tokens
    q, k, v = tensors(b, n, d_v=5)
    table, buckets = leaf(HEADS, 4, 5), torch.randint(0, 4, (n, n))
    keep = torch.rand(n, n) > 0.3
    keep[0] = False
    actual = attention(q, k, v, value_term=ValueTerm(table, buckets), attn_mask=keep)
    exact = doubles((q, k, v, table))
    expected = oracle.attend(*exact[:3], keep=keep[None, None], value_term=(exact[3], buckets))
    close(actual, expected, 1e-5)
    cotangent = torch.randn_like(expected)
    for a, w in zip(
        torch.autograd.grad(actual, (q, k, v, table), cotangent.float()),
        torch.autograd.grad(expected, exact, cotangent),
        strict=True,
    ):
        close(a, w, 1e-4)
    with pytest.raises(BackendUnavailable, match="a value term needs the attention weights"):
        attention(q, k, v, value_term=ValueTerm(table, buckets), backend="sdpa")


def test_value_terms_are_not_rotated_back():
    """With rotated values the result does not change if all tokens move by the same offset."""
    v, w, angle = torch.randn(1, 1, 4, 6), torch.randn(1, 7, 6), torch.rand(1, 1, 1, 3)
    q, buckets = torch.randn(1, 1, 4, 6), torch.arange(4)[:, None] - torch.arange(4) + 3

    def out(first):
        angles = (torch.arange(4)[:, None] + first) * angle
        rotation = PairRotation(angles.cos(), angles.sin(), "half", values=True)
        return attention(q, q, v, transform=rotation, value_term=ValueTerm(w, buckets))

    torch.testing.assert_close(out(0), out(5))


@cases("backend", BACKENDS)
def test_transforms_act_before_scores_and_after_values(backend):
    pos = Grid((2, 3)).positions()
    q, k, v = tensors(2, 6)
    blocks = [torch.randn(1, HEADS, 6, 2, 4, 4) for _ in range(4)]
    transform = BlockTransform(*blocks)
    bias = DistanceBias((0.5, 0.2, 0.1), pos, metric="squared")
    actual = attention(q, k, v, bias=bias, transform=transform, backend=backend)

    def full(m):
        return torch.stack(
            [torch.stack([torch.block_diag(*m[0, h, i]) for i in range(6)]) for h in range(HEADS)]
        ).double()

    rotated = [
        torch.einsum("hnij,bhnj->bhni", full(m), t.double()) for m, t in zip(blocks, (q, k, v), strict=False)
    ]
    expected = oracle.attend(*rotated, bias=bias.dense().double())
    expected = torch.einsum("hnij,bhnj->bhni", full(blocks[3]), expected)
    close(actual, expected, 1e-5)


@cases("backend", ["reference", "sdpa"])
def test_expand_keeps_the_scale_of_the_narrow_head(backend):
    q, k, v = tensors(1, 5)
    angle = torch.randn(1, 1, 5, WIDTH)
    result = attention(q, k, v, transform=Expand(angle.cos(), angle.sin()), backend=backend)
    weigh = (angle[0, 0, :, None] - angle[0, 0, None]).cos()
    logits = torch.einsum("bhid,bhjd,ijd->bhij", q, k, weigh) * WIDTH**-0.5
    close(result, logits.softmax(-1) @ v, 1e-5)


def test_affine():
    q, k, v = tensors(2, 5)
    a, b, c, d = (torch.randn(1, 1, 5, WIDTH) for _ in range(4))
    result = attention(q, k, v, transform=Affine(a, b, c, d))
    close(result, F.scaled_dot_product_attention(q * a + c, k * b + d, v), 1e-5)
