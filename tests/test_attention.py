"""Every bias on every backend, against an oracle in float64 that is written from the definitions."""

from dataclasses import dataclass, field

import pytest
import torch
from torch.nn import functional as F

from tests import oracle
from vispe import Grid, Positions, attention, create_encoding, explain
from vispe.attention import (
    Affine,
    BlockTransform,
    ContextBias,
    DenseBias,
    DistanceBias,
    Expand,
    GatedBias,
    LowRankBias,
    PairRotation,
    ProfileBias,
    SumBias,
    TableBias,
    ValueTerm,
    sdpa,
)
from vispe.errors import BackendUnavailable, OptionError, ShapeError, UnknownName

pytestmark = pytest.mark.usefixtures("poisoned")

BACKENDS = ("reference", "sdpa", "lowrank")
HEADS, WIDTH = 3, 8


@dataclass
class Case:
    """A bias, its parameters, and its dense form made anew in float64 from parameters, q, k and scale."""

    bias: object
    params: list = field(default_factory=list)
    dense: object = None


def leaf(*shape, scale=1.0):
    return (torch.randn(*shape) * scale).requires_grad_()


def _distance(pos, slopes, metric="euclidean", wrap=False, normalize="none"):
    matrix = oracle.distance_matrix(pos.grid, metric, wrap, normalize)

    def dense(p, q, k, scale):
        m = p[0] if p else torch.tensor(slopes, dtype=torch.float64)
        return -m[:, None, None] * matrix

    bias = DistanceBias(slopes, pos, metric=metric, wrap=wrap, normalize=normalize)
    return Case(bias, [slopes] if isinstance(slopes, torch.Tensor) else [], dense)


def _table(pos, heads=HEADS, prefix=None):
    values = leaf(heads, *(2 * n - 1 for n in pos.grid.shape))
    params = [values] if prefix is None else [values, prefix]
    return Case(
        TableBias(values, pos, prefix), params, lambda p, q, k, s: oracle.table_matrix(p[0], pos.grid, *p[1:])
    )


def _profile(pos):
    slopes, values = leaf(HEADS), leaf(1, *(2 * n - 1 for n in pos.grid.shape))
    return Case(
        ProfileBias(slopes, values, pos),
        [slopes, values],
        lambda p, q, k, s: p[0][:, None, None] * oracle.table_matrix(p[1], pos.grid),
    )


def _lowrank(pos, heads=HEADS, b=1):
    row, col = leaf(b, heads, pos.tokens, 4), leaf(1, 1, pos.tokens, 4)
    return Case(
        LowRankBias(row, col, pos), [row, col], lambda p, q, k, s: torch.einsum("bhir,bgjr->bhij", *p)
    )


def _dense(pos, heads=HEADS, b=1):
    values = leaf(b, heads, pos.tokens, pos.tokens)
    return Case(DenseBias(values, pos), [values], lambda p, q, k, s: p[0])


def _gated(pos, row, col, b):
    gates = [leaf(b, HEADS, pos.tokens) for used in (row, col) if used]
    inner = _distance(pos, (0.5, 0.2, 0.1))

    def dense(p, q, k, s):
        total = torch.zeros((), dtype=torch.float64)
        if row:
            total = total + p[0][..., :, None]
        if col:
            total = total + p[-1][..., None, :]
        return total * inner.dense([], q, k, s)

    bias = GatedBias(gates[0] if row else None, gates[-1] if col else None, inner.bias)
    return Case(bias, gates, dense)


def _context(pos, dot, scaled, heads=HEADS):
    weights, n = leaf(heads, 5, WIDTH), pos.tokens
    buckets = torch.randint(0, 5, (n, n))

    def dense(p, q, k, scale):
        factor = scale if scaled else 1.0
        read = p[0][:, buckets]  # (h, n, n, d)
        content = q[:, :, :, None] if dot == "query" else k[:, :, None]
        return factor * (content * read).sum(-1)

    return Case(ContextBias(weights, buckets, dot, scaled, pos), [weights], dense)


def _sum(*cases):
    def dense(p, q, k, s):
        total, rest = 0, list(p)
        for case in cases:
            mine, rest = rest[: len(case.params)], rest[len(case.params) :]
            total = total + case.dense(mine, q, k, s)
        return total

    return Case(SumBias([c.bias for c in cases]), [p for c in cases for p in c.params], dense)


CASES = {
    "none": lambda pos, b: Case(None, [], lambda p, q, k, s: None),
    "distance constant": lambda pos, b: _distance(pos, (1.0,) * HEADS, wrap=True, normalize="max"),
    "distance fixed": lambda pos, b: _distance(pos, (0.5, 0.2, 0.0), "manhattan"),
    "distance learned": lambda pos, b: _distance(pos, leaf(HEADS), "chebyshev", wrap=True),
    "squared fixed": lambda pos, b: _distance(pos, (0.5, 0.2, 0.1), "squared"),
    "squared learned": lambda pos, b: _distance(pos, leaf(HEADS), "squared", normalize="max"),
    "table": lambda pos, b: _table(pos),
    "table shared": lambda pos, b: _table(pos, heads=1),
    "table with prefix": lambda pos, b: _table(pos, prefix=leaf(HEADS, 3)),
    "table shared, prefix per head": lambda pos, b: _table(pos, heads=1, prefix=leaf(HEADS, 3)),
    "profile": lambda pos, b: _profile(pos),
    "lowrank": lambda pos, b: _lowrank(pos),
    "lowrank per sample": lambda pos, b: _lowrank(pos, b=b),
    "dense": lambda pos, b: _dense(pos),
    "dense shared": lambda pos, b: _dense(pos, heads=1),
    "dense per sample": lambda pos, b: _dense(pos, b=b),
    "gated": lambda pos, b: _gated(pos, True, True, b),
    "gated rows": lambda pos, b: _gated(pos, True, False, b),
    "gated columns": lambda pos, b: _gated(pos, False, True, b),
    "context of query": lambda pos, b: _context(pos, "query", True),
    "context of key": lambda pos, b: _context(pos, "key", False, heads=1),
    "sum": lambda pos, b: _sum(_distance(pos, (0.5, 0.2, 0.0)), _table(pos), _context(pos, "key", True)),
}


def served(case, backend):
    if backend != "lowrank":
        return True
    squared = isinstance(case.bias, DistanceBias) and case.bias.metric == "squared"
    return squared or isinstance(case.bias, LowRankBias)


def tensors(b, n, m=None, heads=HEADS, kv_heads=None, d_v=WIDTH, dtype=torch.float32):
    m, kv_heads = m or n, kv_heads or heads
    q, k = torch.randn(b, heads, n, WIDTH), torch.randn(b, kv_heads, m, WIDTH)
    return [t.to(dtype).requires_grad_() for t in (q, k, torch.randn(b, kv_heads, m, d_v))]


def doubles(ts):
    return [t.detach().double().requires_grad_() for t in ts]


def close(found, wanted, tol, what=""):
    found, wanted = found.double(), wanted.double()
    assert found.shape == wanted.shape, what
    assert found.isfinite().all(), what
    error = (found - wanted).norm() / wanted.norm().clamp(min=0.1)
    assert error < tol, f"{what}: relative error {error:.2e}"


def compare(case, backend, q, k, v, tol=2e-5, oracle_args=None, **arguments):
    """Compare forward and every gradient with the oracle."""
    inputs = [q, k, v, *case.params]
    exact = doubles(inputs)
    groups = q.shape[1] // k.shape[1]
    scale = arguments.get("scale") or WIDTH**-0.5
    wide_k = exact[1].repeat_interleave(groups, 1)
    dense = case.dense(exact[3:], exact[0], wide_k, scale)
    wanted = oracle.attend(*exact[:3], bias=dense, scale=scale, groups=groups, **(oracle_args or {}))
    found = attention(q, k, v, bias=case.bias, backend=backend, **arguments)
    assert found.dtype == q.dtype
    close(found, wanted, tol, "forward")
    cotangent = torch.randn_like(wanted)
    wanted_grads = torch.autograd.grad(wanted, exact, cotangent, allow_unused=True)
    found_grads = torch.autograd.grad(found, inputs, cotangent.to(found.dtype), allow_unused=True)
    for i, (a, w) in enumerate(zip(found_grads, wanted_grads, strict=True)):
        close(a, torch.zeros_like(exact[i]) if w is None else w, 4 * tol, f"gradient of input {i}")


LAYOUTS = [((2, 3), 0, 1), ((3, 5), 1, 2), ((1, 4), 5, 3), ((4, 3), 1, 1), ((1, 1), 0, 2)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_every_bias_on_every_backend(name, backend, layout):
    shape, prefix, b = layout
    pos = Grid(shape, prefix=prefix).positions()
    case = CASES[name](pos, b)
    q, k, v = tensors(b, pos.tokens)
    if served(case, backend):
        compare(case, backend, q, k, v)
    else:
        with pytest.raises(
            BackendUnavailable, match=r"backend='lowrank' cannot serve this call: .*; use backend='auto'"
        ):
            attention(q, k, v, bias=case.bias, backend=backend)


@pytest.mark.parametrize("name", CASES)
def test_dense_is_the_meaning(name):
    pos = Grid((3, 4), prefix=2).positions()
    case = CASES[name](pos, 2)
    if case.bias is None:
        return
    q, k, _ = tensors(2, pos.tokens)
    wanted = case.dense(doubles(case.params), q.double(), k.double(), 0.5)
    found = case.bias.dense(q=q, k=k, scale=0.5)
    assert found.ndim == 4
    assert found.dtype == torch.float32
    torch.testing.assert_close(
        found.double().expand(2, HEADS, -1, -1), wanted.expand(2, HEADS, -1, -1), rtol=1e-5, atol=1e-5
    )
    assert (found.shape[1] > 1) == case.bias.per_head
    for i in range(HEADS):
        part = case.bias.dense(q=q, k=k, scale=0.5, heads=slice(i, i + 1))
        torch.testing.assert_close(part, found[:, i : i + 1] if found.shape[1] > 1 else found)


# masks


def _keep(kind, b, n, m):
    padding = torch.ones(b, m, dtype=torch.bool)
    padding[-1, m // 2 :] = False
    table = torch.rand(n, m) > 0.4
    table[:, 0] = True
    if kind == "padding":
        return {"key_padding_mask": padding}, {"keep": padding[:, None, None]}
    if kind == "bool":
        return {"attn_mask": table}, {"keep": table[None, None]}
    if kind == "bool per head":
        each = torch.rand(1, HEADS, n, m) > 0.4
        each[..., 0] = True
        return {"attn_mask": each}, {"keep": each}
    if kind == "float":
        added = torch.randn(b, 1, n, m)
        return {"attn_mask": added}, {"added": added.double()}
    if kind == "float with -inf":
        added = torch.randn(n, m).masked_fill(~table, float("-inf"))
        return {"attn_mask": added}, {"added": added.double()[None, None]}
    if kind == "closed rows":
        table = table.clone()
        table[1] = False
        added = torch.randn(b, HEADS, n, m)
        added[:, 1, 0] = float("-inf")
        return {"attn_mask": added, "key_padding_mask": padding}, {
            "added": added.double(), "keep": padding[:, None, None],
        }  # fmt: skip
    if kind == "closed sample":
        padding = padding.clone()
        padding[0] = False
        return {"key_padding_mask": padding, "attn_mask": table}, {"keep": padding[:, None, None] & table}
    if kind == "causal":
        return {"is_causal": True}, {"keep": torch.ones(n, m).tril().bool()[None, None]}
    causal = torch.ones(n, m).tril().bool()
    return {"is_causal": True, "key_padding_mask": padding}, {"keep": causal & padding[:, None, None]}


MASKS = [
    "padding",
    "bool",
    "bool per head",
    "float",
    "float with -inf",
    "closed rows",
    "closed sample",
    "causal",
    "both",
]


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["none", "squared learned", "table"])
def test_masks(name, backend, kind):
    pos = Grid((3, 3), prefix=1).positions()
    case = CASES[name](pos, 2)
    if served(case, backend):
        arguments, wanted = _keep(kind, 2, 10, 10)
        compare(case, backend, *tensors(2, 10), oracle_args=wanted, **arguments)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_without_a_key_give_zero_and_no_gradient(backend):
    pos = Grid((2, 3)).positions()
    q, k, v = tensors(2, 6)
    keep = torch.ones(2, 1, 6, 6, dtype=torch.bool)
    keep[0, :, 2] = False
    slopes = leaf(HEADS)
    bias = DistanceBias(slopes, pos, metric="squared")
    for mask in (keep, torch.zeros(2, 1, 6, 6).masked_fill(~keep, float("-inf"))):
        out = attention(q, k, v, bias=bias, attn_mask=mask, backend=backend)
        assert (out[0, :, 2] == 0).all()
        assert out[1, :, 2].abs().min() > 0
        grads = torch.autograd.grad(out, (q, k, v, slopes), torch.randn_like(out))
        assert all(g.isfinite().all() for g in grads)
        assert (grads[0][0, :, 2] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_a_bias_may_close_rows(backend, dtype):
    values = torch.zeros(1, HEADS, 4, 4)
    values[:, 1, 2] = float("-inf")
    values[:, :, 0, 3] = float("-inf")
    q, k, v = tensors(1, 4, dtype=dtype)
    out = attention(q, k, v, bias=DenseBias(values), backend=backend)
    assert (out[0, 1, 2] == 0).all()
    grads = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    assert all(g.isfinite().all() for g in grads)
    close(
        out,
        oracle.attend(*doubles((q, k, v)), bias=values.double()),
        1e-5 if dtype == torch.float32 else 2e-2,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("low", [-1e30, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_large_finite_masks_stay_finite(backend, low, dtype):
    # a whole row at the least float is a common way to say "padding query": it attends evenly, in every dtype
    mask = torch.zeros(1, 1, 4, 4)
    mask[..., 1, :] = low
    mask[..., 2, 0] = low
    q, k, v = (t.detach() for t in tensors(1, 4, dtype=dtype))
    out = attention(q, k, v, attn_mask=mask, backend=backend)
    assert out.isfinite().all()
    closed = oracle.attend(*(t.double() for t in (q, k, v)), added=mask.double())
    close(out[:, :, [0, 2, 3]], closed[:, :, [0, 2, 3]], 1e-5 if dtype == torch.float32 else 2e-2)
    assert (out[:, :, 1] != 0).any()


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_sequences_equal_separate_ones(backend, index):
    sizes = [(2, 3), (1, 4), (3, 3)]
    parts = [Grid(s, prefix=1).positions() for s in sizes]
    coords = torch.cat([p.coords for p in parts], 1)
    spatial = torch.cat([p.spatial for p in parts], 1)
    packed = Positions(coords, spatial, torch.tensor([[9.0, 9.0]]))
    q, k, v = tensors(1, packed.tokens)
    ends = torch.tensor([0, *(p.tokens for p in parts)]).cumsum(0)
    slopes = (0.5, 0.2, 0.1)
    if backend == "lowrank":
        with pytest.raises(BackendUnavailable, match="free coordinates"):
            attention(q, k, v, bias=DistanceBias(slopes, packed, metric="squared"), backend=backend)
        return
    bias = DistanceBias(slopes, packed, metric="squared")
    out = attention(q, k, v, bias=bias, cu_seqlens=ends.to(index), backend=backend)
    for pos, start, end in zip(parts, ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        own = (t[:, :, start:end] for t in (q, k, v))
        alone = attention(*own, bias=DistanceBias(slopes, pos, metric="squared"), backend="reference")
        close(out[:, :, start:end], alone, 1e-5)


# other arguments


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["none", "squared fixed", "table", "context of key", "context of query"])
def test_grouped_queries(name, backend):
    pos = Grid((2, 4), prefix=1).positions()
    case = CASES[name](pos, 2)
    if not served(case, backend):
        return
    q, k, v = tensors(2, 9, heads=HEADS, kv_heads=1, d_v=5)
    compare(case, backend, q, k, v, enable_gqa=True)
    with pytest.raises(ShapeError, match="3 query heads and 1 key heads; pass enable_gqa=True"):
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


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize(("n", "m"), [(3, 7), (7, 3)])
@pytest.mark.parametrize("kind", ["none", "dense", "columns", "lowrank", "causal", "bool"])
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
        "causal": (Case(None, [], lambda p, q, k, s: None), *_keep("causal", 2, n, m)),
        "bool": (Case(None, [], lambda p, q, k, s: None), {"attn_mask": keep}, {"keep": keep[None, None]}),
    }[kind]
    compare(case, backend, q, k, v, oracle_args=args, **arguments)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["none", "squared fixed", "context of query"])
def test_scale(name, backend):
    pos = Grid((2, 3)).positions()
    case = CASES[name](pos, 1)
    if served(case, backend):
        compare(case, backend, *tensors(1, 6), scale=0.7)


@pytest.mark.parametrize("backend", BACKENDS)
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


@pytest.mark.parametrize(
    ("dtype", "tol"), [(torch.float64, 1e-6), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)]
)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "name",
    ["none", "distance constant", "squared fixed", "squared learned", "table", "context of query", "sum"],
)
def test_dtypes(name, backend, dtype, tol):
    pos = Grid((3, 4), prefix=1).positions()
    case = CASES[name](pos, 2)
    q, k, v = tensors(2, 13, dtype=dtype)
    if backend == "lowrank" and dtype == torch.float16 and served(case, backend):
        with pytest.raises(BackendUnavailable, match="overflow float16"):
            attention(q, k, v, bias=case.bias, backend=backend)
    elif served(case, backend):
        compare(case, backend, q, k, v, tol=tol)


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_float64_parameters_keep_their_digits(backend):
    pos = Grid((3, 4)).positions()
    q, k, v = (t.detach() for t in tensors(1, 12, dtype=torch.float64))
    slopes = torch.rand(HEADS, dtype=torch.float64)
    whole = oracle.distance_matrix(pos.grid, "manhattan", False, "none")  # whole numbers, exact in float32
    wanted = oracle.attend(q, k, v, bias=-slopes[:, None, None] * whole)
    close(
        attention(q, k, v, bias=DistanceBias(slopes, pos, metric="manhattan"), backend=backend), wanted, 1e-14
    )
    values = torch.randn(HEADS, 5, 7, dtype=torch.float64)
    wanted = oracle.attend(q, k, v, bias=oracle.table_matrix(values, pos.grid))
    close(attention(q, k, v, bias=TableBias(values, pos), backend=backend), wanted, 1e-14)
    angle = torch.randn(1, 1, 12, 4)
    turned = PairRotation(angle.cos(), angle.sin(), "interleaved").query(q)
    a, b, c, s = q[..., 0::2], q[..., 1::2], angle.cos().double(), angle.sin().double()
    torch.testing.assert_close(
        turned, torch.stack([a * c - b * s, b * c + a * s], -1).flatten(-2), rtol=0, atol=1e-15
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["none", "squared fixed", "squared learned", "context of query"])
def test_autocast(name, backend):
    pos = Grid((3, 3)).positions()
    case = CASES[name](pos, 2)
    if not served(case, backend):
        return
    q, k, v = tensors(2, 9)
    wanted = oracle.attend(
        *doubles((q, k, v)), bias=case.dense(doubles(case.params), q.double(), k.double(), WIDTH**-0.5)
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attention(q, k, v, bias=case.bias, backend=backend)
        # a norm under autocast gives wide q and k beside a narrow v
        mixed = attention(q, k, v.to(torch.bfloat16), bias=case.bias, backend=backend)
    assert out.dtype == mixed.dtype == torch.bfloat16
    close(out, wanted, 2e-2)
    close(mixed, wanted, 2e-2)
    grads = torch.autograd.grad(out, [q, k, v, *case.params], torch.randn_like(out))
    assert all(g.dtype == torch.float32 and g.isfinite().all() for g in grads)


def test_autocast_does_not_round_what_biases_and_transforms_compute():
    n = 6
    row, col = torch.randn(1, 1, n, 4), torch.randn(1, 1, n, 4)
    weights, buckets = torch.randn(1, 5, WIDTH), torch.randint(0, 5, (n, n))
    blocks, q = torch.randn(1, 1, n, 2, 4, 4), torch.randn(1, HEADS, n, WIDTH)

    def made():
        return (
            LowRankBias(row, col).dense(),
            ContextBias(weights, buckets, "query", False).dense(q=q, k=q),
            BlockTransform(q=blocks).query(q),
            ValueTerm(weights, buckets).apply(torch.softmax(q[..., :n], -1)),
        )

    plain = made()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = made()
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

    assert torch.autograd.gradcheck(run, (q, k, v, slopes, values, weights, relative))


@pytest.mark.parametrize("layout", [((2, 3), 0, 1), ((2, 2), 1, 3)], ids=str)
def test_value_term(layout):
    shape, prefix, b = layout
    pos = Grid(shape, prefix=prefix).positions()
    n = pos.tokens
    q, k, v = tensors(b, n, d_v=5)
    table, buckets = leaf(HEADS, 4, 5), torch.randint(0, 4, (n, n))
    keep = torch.rand(n, n) > 0.3
    keep[0] = False
    found = attention(q, k, v, value_term=ValueTerm(table, buckets), attn_mask=keep)
    exact = doubles((q, k, v, table))
    wanted = oracle.attend(*exact[:3], keep=keep[None, None], value_term=(exact[3], buckets))
    close(found, wanted, 1e-5)
    cotangent = torch.randn_like(wanted)
    for a, w in zip(
        torch.autograd.grad(found, (q, k, v, table), cotangent.float()),
        torch.autograd.grad(wanted, exact, cotangent),
        strict=True,
    ):
        close(a, w, 1e-4)
    with pytest.raises(BackendUnavailable, match="a value term needs the attention weights"):
        attention(q, k, v, value_term=ValueTerm(table, buckets), backend="sdpa")


@pytest.mark.parametrize("backend", BACKENDS)
def test_transforms_act_before_scores_and_after_values(backend):
    pos = Grid((2, 3)).positions()
    q, k, v = tensors(2, 6)
    blocks = [torch.randn(1, HEADS, 6, 2, 4, 4) for _ in range(4)]
    transform = BlockTransform(*blocks)
    bias = DistanceBias((0.5, 0.2, 0.1), pos, metric="squared")
    found = attention(q, k, v, bias=bias, transform=transform, backend=backend)

    def full(m):
        return torch.stack(
            [torch.stack([torch.block_diag(*m[0, h, i]) for i in range(6)]) for h in range(HEADS)]
        ).double()

    turned = [
        torch.einsum("hnij,bhnj->bhni", full(m), t.double()) for m, t in zip(blocks, (q, k, v), strict=False)
    ]
    wanted = oracle.attend(*turned, bias=bias.dense().double())
    wanted = torch.einsum("hnij,bhnj->bhni", full(blocks[3]), wanted)
    close(found, wanted, 1e-5)


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_expand_keeps_the_scale_of_the_narrow_head(backend):
    q, k, v = tensors(1, 5)
    angle = torch.randn(1, 1, 5, WIDTH)
    found = attention(q, k, v, transform=Expand(angle.cos(), angle.sin()), backend=backend)
    weigh = (angle[0, 0, :, None] - angle[0, 0, None]).cos()
    logits = torch.einsum("bhid,bhjd,ijd->bhij", q, k, weigh) * WIDTH**-0.5
    close(found, logits.softmax(-1) @ v, 1e-5)


def test_affine():
    q, k, v = tensors(2, 5)
    a, b, c, d = (torch.randn(1, 1, 5, WIDTH) for _ in range(4))
    found = attention(q, k, v, transform=Affine(a, b, c, d))
    close(found, F.scaled_dot_product_attention(q * a + c, k * b + d, v), 1e-5)


# large masks


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_head_groups_equal_one_mask(name, training, monkeypatch):
    monkeypatch.setattr(sdpa, "MASK_LIMIT", 2 * 10 * 10 * 4)  # two heads of one sample
    pos = Grid((3, 3), prefix=1).positions()
    case = CASES[name](pos, 2)
    q, k, v = tensors(2, 10)
    padding = torch.ones(2, 10, dtype=torch.bool)
    padding[0, 7:] = False
    added = torch.randn(1, HEADS, 10, 10)
    arguments = {"key_padding_mask": padding, "attn_mask": added}
    if training:
        wanted = {"keep": padding[:, None, None], "added": added.double()}
        compare(case, "sdpa", q, k, v, oracle_args=wanted, **arguments)
        return
    with torch.no_grad():
        found = attention(q, k, v, bias=case.bias, backend="sdpa", **arguments)
        close(found, attention(q, k, v, bias=case.bias, backend="reference", **arguments), 1e-5)


def test_head_groups_hold_one_group_of_masks(monkeypatch):
    seen = []
    original = F.scaled_dot_product_attention

    def watch(*args, attn_mask=None, **kwargs):
        seen.append(None if attn_mask is None else attn_mask.numel())
        return original(*args, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watch)
    pos = Grid((5, 5)).positions()
    q, k, v = (t.detach() for t in tensors(4, 25))
    bias = DistanceBias((0.5, 0.2, 0.1), pos)
    monkeypatch.setattr(sdpa, "MASK_LIMIT", 625 * 4)
    attention(q, k, v, bias=bias, backend="sdpa")
    assert seen == [625] * 3
    seen.clear()  # padding makes the mask differ between samples
    monkeypatch.setattr(sdpa, "MASK_LIMIT", 4 * 625 * 4)
    attention(q, k, v, bias=bias, key_padding_mask=torch.ones(4, 25, dtype=torch.bool), backend="sdpa")
    assert seen == [2500] * 3
    monkeypatch.setattr(sdpa, "MASK_LIMIT", 1 << 30)
    seen.clear()
    attention(q, k, v, bias=bias, backend="sdpa")
    assert seen == [3 * 625]


def test_masks_are_kept_with_the_positions_and_serve_training_after_inference():
    pos = Grid((3, 3), prefix=1).positions()
    q, k, v = tensors(2, 10)
    fixed, other = DistanceBias((0.5, 0.2, 0.1), pos), DistanceBias((0.5, 0.2, 0.3), pos)
    learned = DistanceBias(leaf(HEADS), pos)
    with torch.inference_mode():
        first = attention(q, k, v, bias=fixed, backend="sdpa")
        attention(q, k, v, bias=learned, backend="sdpa")
    assert fixed.mask(torch.float32) is DistanceBias((0.5, 0.2, 0.1), pos).mask(torch.float32)
    assert fixed.mask(torch.float32) is not other.mask(torch.float32)
    assert fixed.mask(torch.bfloat16).dtype == torch.bfloat16
    out = attention(q, k, v, bias=fixed, backend="sdpa")
    assert torch.equal(out, first)
    torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    out = attention(q, k, v, bias=learned, backend="sdpa")
    assert torch.autograd.grad(out, learned.slopes, torch.randn_like(out))[0].isfinite().all()
    with pytest.raises(ShapeError, match="DistanceBias is not fixed, so no mask of it can be kept"):
        learned.mask(torch.float32)


def test_terms_of_a_sum_keep_their_own_positions():
    grid = Grid((3, 4))
    near, far = grid.positions(), Grid((3, 4), spacing=(3.0, 1.0)).positions()
    total = SumBias([DistanceBias((1.0,), far), DistanceBias((1.0,), near)])
    torch.testing.assert_close(
        total.dense(), DistanceBias((1.0,), far).dense() + DistanceBias((1.0,), near).dense()
    )
    assert total.key is None  # the positions of the first alone do not determine it
    q, k, v = tensors(1, 12, heads=1)
    close(
        attention(q, k, v, bias=total, backend="sdpa"),
        attention(q, k, v, bias=total, backend="reference"),
        1e-5,
    )


def test_positions_of_dropped_tokens_differ_between_samples():
    pos = Grid((4, 5), prefix=1).positions()
    keep = torch.stack(
        [torch.cat([torch.tensor([0]), 1 + torch.randperm(20)[:9].sort().values]) for _ in range(3)]
    )
    kept = pos.gather(keep)
    for name in ("distance fixed", "squared learned", "table with prefix", "profile", "sum"):
        torch.manual_seed(1)
        full = CASES[name](pos, 3) if name != "sum" else _sum(_distance(pos, (0.5, 0.2, 0.0)), _table(pos))
        q, k, _ = tensors(3, 21)
        whole = full.bias.dense(q=q, k=k, scale=1.0)[0]
        part = full.bias.dense(kept)
        assert part.shape == (3, HEADS, 10, 10)
        for i in range(3):
            torch.testing.assert_close(part[i], whole[:, keep[i]][:, :, keep[i]])
    squared = DistanceBias((0.5, 0.2, 0.1), kept, metric="squared")
    q, k, v = tensors(3, 10)
    outs = [attention(q, k, v, bias=squared, backend=b) for b in BACKENDS]
    close(outs[0], outs[1], 1e-5)
    close(outs[0], outs[2], 1e-5)
    across = TableBias(torch.randn(1, 7, 9), pos).dense(kept, pos)
    assert across.shape == (3, 1, 10, 21)


# lowrank


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "rule",
    [{"normalize": "max"}, {"normalize": "reference", "reference": (7, 7)}, {"spacing": (0.7, 1.3)}],
    ids=str,
)
@pytest.mark.parametrize("slopes", [(1.0, 0.3, 0.007), (0.01, 0.003, 0.0)], ids=str)
def test_lowrank_is_as_exact_as_a_dense_mask(slopes, rule, dtype):
    pos = Grid((19, 23), prefix=1).positions()
    q, k, v = (t.detach() for t in tensors(1, pos.tokens, dtype=dtype))
    bias = DistanceBias(slopes, pos, metric="squared", **rule)
    exact = [t.double() for t in (q, k, v)]
    wanted = attention(*exact, bias=bias, backend="reference")
    errors = {
        b: (attention(q, k, v, bias=bias, backend=b).double() - wanted).norm() / wanted.norm()
        for b in ("sdpa", "lowrank")
    }
    steep = dtype == torch.float32 and slopes[0] == 1.0 and "spacing" in rule
    assert errors["lowrank"] <= (1e-5 if steep else 1.2 * errors["sdpa"])


def test_auto_takes_columns_only_where_they_are_exact():
    pos = Grid((32, 33)).positions()
    for dtype, normalize, backend in (
        (torch.bfloat16, "none", "lowrank"),
        (torch.float32, "max", "lowrank"),
        (torch.float32, "none", "sdpa"),
        (torch.float64, "max", "sdpa"),
    ):
        q = torch.zeros(1, HEADS, pos.tokens, WIDTH, dtype=dtype)
        bias = DistanceBias((1.0,) * HEADS, pos, metric="squared", normalize=normalize)
        assert explain(q, q, q, bias=bias).backend == backend


def test_lowrank_refuses_what_it_cannot_hold():
    q, k, v = (t.detach() for t in tensors(1, 6, dtype=torch.bfloat16))
    pos = Grid((2, 3)).positions()
    wide = Grid((1, 600)).positions()
    moving = pos.replace(coords=pos.coords.clone().requires_grad_())
    for bias, why in (
        (LowRankBias(torch.randn(1, 1, 6, 2), torch.randn(1, 1, 6, 2)), "rounded in half precision"),
        (DistanceBias((1.0,), pos, metric="squared", wrap=True), "only squared distance without wrap"),
        (DistanceBias((1.0,), Positions(pos.coords), metric="squared"), "free coordinates"),
        (DistanceBias((1.0,), moving, metric="squared"), "free coordinates"),
    ):
        with pytest.raises(BackendUnavailable, match=why):
            attention(q, k, v, bias=bias, backend="lowrank")
    q = torch.zeros(1, 1, 600, 8, dtype=torch.bfloat16)
    with pytest.raises(BackendUnavailable, match="up to 512 cells per axis"):
        attention(q, q, q, bias=DistanceBias((1.0,), wide, metric="squared"), backend="lowrank")


# choice of the backend


def test_explain():
    pos = Grid((4, 8)).positions()
    q, k, v = tensors(1, 32)
    squared = DistanceBias((0.1, 0.2, 0.3), pos, metric="squared")
    told = explain(q, k, v, bias=squared)
    assert told.backend == "sdpa"
    assert "kept with its positions" in told.reason
    assert "lowrank" in told.refused
    assert str(told).startswith("sdpa: one dense mask")
    assert "made in each call" in explain(q, k, v, bias=DistanceBias(leaf(HEADS), pos)).reason
    term = ValueTerm(torch.randn(1, 2, WIDTH), torch.zeros(32, 32, dtype=torch.long))
    assert explain(q, k, v, value_term=term).backend == "reference"
    assert "does not return" in explain(q, k, v, value_term=term).refused["sdpa"]
    assert explain(q, k, v).reason == "there is no bias"
    assert explain(q, k, v, backend="reference").reason == "asked for by name"
    long = Grid((32, 33)).positions()
    q = torch.zeros(1, HEADS, long.tokens, WIDTH)
    told = explain(q, q, q, bias=DistanceBias((0.1, 0.2, 0.3), long, metric="squared", normalize="max"))
    assert told.backend == "lowrank"
    assert "1056 keys" in told.reason


def test_unknown_backend():
    q, k, v = tensors(1, 4)
    with pytest.raises(UnknownName, match=r"There is no backend 'sdap'. Did you mean 'sdpa'"):
        attention(q, k, v, backend="sdap")


def test_errors_say_both_values():
    pos = Grid((2, 3)).positions()
    q, k, v = tensors(2, 6)
    bias = DistanceBias((1.0,) * HEADS, pos)

    def fails(match, *args, error=ShapeError, **arguments):
        with pytest.raises(error, match=match):
            attention(*args, **arguments)

    fails("q, k, v of shape", q[0], k, v)
    fails("of one dtype on one device", q, k.double(), v)
    fails("as many keys as values", q, k, v[:, :, :3])
    fails("q as wide as k", q, k[..., :4], v)
    fails(r"dropout_p must be in \[0, 1\), got 1.0", q, k, v, dropout_p=1.0, error=OptionError)
    fails(
        "describes 6 tokens .* but there are 4 queries and 4 keys",
        q[:, :, :4],
        k[:, :, :4],
        v[:, :, :4],
        bias=bias,
    )
    fails("attn_mask must be bool", q, k, v, attn_mask=torch.ones(6, 6, dtype=torch.int64))
    fails(r"attn_mask has shape \(1, 1, 5, 6\), .* = \(2, 3, 6, 6\)", q, k, v, attn_mask=torch.ones(5, 6))
    fails("attn_mask must broadcast", q, k, v, attn_mask=torch.ones(1, 1, 1, 6, 6))
    fails(r"key_padding_mask must be bool .* of shape \(2, 6\)", q, k, v, key_padding_mask=torch.ones(2, 6))
    fails("key_padding_mask must be bool", q, k, v, key_padding_mask=torch.ones(2, 5, dtype=torch.bool))
    fails("needs batch 1", q, k, v, cu_seqlens=torch.tensor([0, 6]))
    fails("cu_seqlens must be int32 or int64", q[:1], k[:1], v[:1], cu_seqlens=torch.tensor([0.0, 6.0]))
    fails(r"cu_seqlens must rise from 0 to 6", q[:1], k[:1], v[:1], cu_seqlens=torch.tensor([0, 4]))
    fails(r"The bias has shape \(1, 2, 6, 6\)", q, k, v, bias=DistanceBias((1.0, 2.0), pos))
    fails(r"The bias has shape \(1, 3, 5, 6\)", q, k, v, bias=DenseBias(torch.zeros(1, 3, 5, 6)))
    kept = pos.gather(torch.arange(6).expand(3, -1))
    fails(r"The bias has shape \(3, 1, 6, 6\)", q, k, v, bias=DistanceBias((1.0,) * HEADS, kept))
    fails("not bound to positions", q, k, v, bias=DistanceBias((1.0,) * HEADS))
    with pytest.raises(ShapeError, match="reads the query with scaled=True; pass q, k and scale"):
        ContextBias(torch.zeros(1, 2, 8), torch.zeros(6, 6, dtype=torch.long), "query", True).dense()
    with pytest.raises(ShapeError, match=r"bias table of shape \(3, 3, 3\) .* need \(heads, 3, 5\)"):
        TableBias(torch.zeros(3, 3, 3), pos).dense()
    with pytest.raises(ShapeError, match="queries and keys of one grid"):
        TableBias(torch.zeros(3, 3, 5), Positions(pos.coords)).dense()
    with pytest.raises(ShapeError, match=r"prefix values \(heads or 1, 3\), got \(3,\)"):
        TableBias(torch.zeros(3, 3, 5), pos, torch.zeros(3))
    with pytest.raises(OptionError, match=r"metric must be one of euclidean, .* got 'euclid'"):
        DistanceBias((1.0,), pos, metric="euclid")
    with pytest.raises(OptionError, match="normalize must be one of"):
        DistanceBias((1.0,), pos, normalize="diagonal")
    with pytest.raises(OptionError, match="normalize='reference' needs the grid of the training resolution"):
        DistanceBias((1.0,), pos, normalize="reference").dense()
    with pytest.raises(ShapeError, match="one slope per head"):
        DistanceBias((), pos)
    with pytest.raises(ShapeError, match="DenseBias needs a tensor"):
        DenseBias(torch.zeros(6, 6))
    with pytest.raises(ShapeError, match="LowRankBias needs row"):
        LowRankBias(torch.zeros(1, 1, 6, 2), torch.zeros(1, 1, 6, 3))
    with pytest.raises(ShapeError, match="needs a row gate, a column gate or both"):
        GatedBias(None, None, bias)
    with pytest.raises(ShapeError, match="at least one term"):
        SumBias([])


# compilation


@pytest.mark.parametrize(
    "name", ["distance constant", "squared learned", "table with prefix", "gated", "context of key", "sum"]
)
def test_compiles_in_one_graph(name):
    torch._dynamo.reset()
    grid = Grid((3, 4), prefix=1)
    case = CASES[name](grid.positions(), 2)
    q, k, v = tensors(2, 13)
    padding = torch.ones(2, 13, dtype=torch.bool)
    padding[0, 9:] = False

    def run(q, k, v):
        return attention(q, k, v, bias=case.bias, key_padding_mask=padding)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    inputs = [q, k, v, *case.params]
    found, wanted = compiled(q, k, v), run(q, k, v)
    close(found, wanted, 1e-5)
    cotangent = torch.randn_like(wanted)
    for a, w in zip(
        torch.autograd.grad(found, inputs, cotangent),
        torch.autograd.grad(wanted, inputs, cotangent),
        strict=True,
    ):
        close(a, w, 1e-4)


def test_compiles_with_head_groups(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(sdpa, "MASK_LIMIT", 12 * 12 * 4)
    bias = DistanceBias(leaf(HEADS), Grid((3, 4)).positions())
    q, k, v = tensors(1, 12)
    compiled = torch.compile(
        lambda q, k, v: attention(q, k, v, bias=bias, backend="sdpa"), fullgraph=True, backend="aot_eager"
    )
    found, wanted = compiled(q, k, v), attention(q, k, v, bias=bias, backend="reference")
    close(found, wanted, 1e-5)
    cotangent = torch.randn_like(wanted)
    inputs = (q, k, v, bias.slopes)
    for a, w in zip(
        torch.autograd.grad(found, inputs, cotangent),
        torch.autograd.grad(wanted, inputs, cotangent),
        strict=True,
    ):
        close(a, w, 1e-4)


def test_meta_tensors():
    encoding = create_encoding("alibi2d", num_heads=HEADS)
    q, k, v = (t.to("meta") for t in tensors(2, 6))
    for backend in ("reference", "sdpa"):
        bias = encoding.bias(Grid((2, 3)).positions("meta"), 0)
        assert attention(q, k, v, bias=bias, backend=backend).shape == (2, HEADS, 6, WIDTH)
