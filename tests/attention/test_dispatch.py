"""The lowrank backend, the choice of a backend, and errors."""

import pytest
import torch

from tests.attention.cases import HEADS, WIDTH, leaf, tensors
from tests.cases import cases
from vispe import Grid, Positions, attention, explain
from vispe.attention import (
    ContextBias,
    DenseBias,
    DistanceBias,
    GatedBias,
    LowRankBias,
    SumBias,
    TableBias,
    ValueTerm,
)
from vispe.attention.backends import sdpa
from vispe.errors import BackendUnavailable, OptionError, ShapeError, UnknownName

pytestmark = pytest.mark.usefixtures("poisoned")


@cases("dtype", [torch.float32, torch.bfloat16])
@cases(
    "rule",
    [{"normalize": "max"}, {"normalize": "reference", "reference": (7, 7)}, {"spacing": (0.7, 1.3)}],
    ids=str,
)
@cases("slopes", [(1.0, 0.3, 0.007), (0.01, 0.003, 0.0)], ids=str)
def test_lowrank_is_as_exact_as_a_dense_mask(slopes, rule, dtype):
    pos = Grid((19, 23), prefix=1).positions()
    q, k, v = (t.detach() for t in tensors(1, pos.tokens, dtype=dtype))
    bias = DistanceBias(slopes, pos, metric="squared", **rule)
    exact = [t.double() for t in (q, k, v)]
    expected = attention(*exact, bias=bias, backend="reference")
    errors = {
        b: (attention(q, k, v, bias=bias, backend=b).double() - expected).norm() / expected.norm()
        for b in ("sdpa", "lowrank")
    }
    steep = dtype == torch.float32 and slopes[0] == 1.0 and "spacing" in rule
    assert errors["lowrank"] <= (1e-5 if steep else 1.2 * errors["sdpa"])


def test_auto_selects_columns_only_where_they_are_exact():
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


def test_refusals_of_lowrank():
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
    plan = explain(q, k, v, bias=squared)
    assert plan.backend == "sdpa"
    assert "cached with its positions" in plan.reason
    assert "lowrank" in plan.unsupported
    assert str(plan).startswith("sdpa: one dense mask")
    assert "computed in each call" in explain(q, k, v, bias=DistanceBias(leaf(HEADS), pos)).reason
    term = ValueTerm(torch.randn(1, 2, WIDTH), torch.zeros(32, 32, dtype=torch.long))
    assert explain(q, k, v, value_term=term).backend == "reference"
    assert "does not return" in explain(q, k, v, value_term=term).unsupported["sdpa"]
    assert explain(q, k, v).reason == "there is no bias"
    assert explain(q, k, v, backend="reference").reason == "selected by name"
    long = Grid((32, 33)).positions()
    q = torch.zeros(1, HEADS, long.tokens, WIDTH)
    plan = explain(q, q, q, bias=DistanceBias((0.1, 0.2, 0.3), long, metric="squared", normalize="max"))
    assert plan.backend == "lowrank"
    assert "number of keys: 1056" in plan.reason


@cases("batch", [1, 2])
def test_repeated_calls_are_equal(batch, monkeypatch):
    monkeypatch.setattr(sdpa, "MIN_SWAPPED_KEYS", 2)
    pos = Grid((3, 4), prefix=1).positions()
    bias = DistanceBias((0.5, 0.2, 0.1), pos)
    cotangent = torch.randn(batch, HEADS, 13, WIDTH)

    def results(q, k, v, **arguments):
        out = attention(q, k, v, **arguments)
        return out, *torch.autograd.grad(out, (q, k, v), cotangent.to(out.dtype))

    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for scale in (None, 0.3):
            inputs = tensors(batch, 13, dtype=dtype)
            with torch.no_grad():  # the first call of these shapes
                attention(*inputs, bias=bias, scale=scale)
            assert sdpa.cached_mask(*inputs, bias) is not None
            for other in (inputs, tensors(batch, 13, dtype=dtype)):
                same_bias = DistanceBias((0.5, 0.2, 0.1), pos)
                actual = results(*other, bias=same_bias, scale=scale)
                expected = results(*other, bias=bias, scale=scale, backend="sdpa")
                assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    for width in (WIDTH // 2, 2 * WIDTH):  # values of another width than queries
        q, k, _ = tensors(batch, 13)
        v = torch.randn(batch, HEADS, 13, width, requires_grad=True)
        first, same_bias = (attention(q, k, v, bias=bias) for _ in range(2))
        assert sdpa.cached_mask(q, k, v, bias) is not None
        assert torch.equal(first, same_bias)
        reference = attention(q, k, v, bias=bias, backend="reference")
        torch.testing.assert_close(same_bias, reference, rtol=0, atol=1e-6)
    q, k, v = tensors(batch, 13)
    assert sdpa.cached_mask(q, k, v, DistanceBias((0.5, 0.2, 0.3), pos)) is None
    assert (
        sdpa.cached_mask(q, k, v, DistanceBias((0.5, 0.2, 0.1), Grid((3, 4), prefix=1).positions())) is None
    )
    assert sdpa.cached_mask(q, k, v, DistanceBias(leaf(HEADS), pos)) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(q, k, v, bias=bias).dtype == torch.bfloat16
    with pytest.raises(ShapeError, match="as many keys as values"):
        attention(q, k, v[:, :, :3], bias=bias)
    with pytest.raises(ShapeError, match="with one dtype on one device"):
        attention(q, k.double(), v, bias=bias)
    keep = torch.ones(batch, 13, dtype=torch.bool)
    keep[:, 5] = False
    masked = attention(q, k, v, bias=bias, key_padding_mask=keep)
    assert torch.equal(masked, attention(q, k, v, bias=bias, key_padding_mask=keep, backend="sdpa"))
    assert (attention(q, k, v, bias=bias, dropout_p=0.5) != attention(q, k, v, bias=bias)).any()


def test_a_named_backend_does_not_affect_later_calls():
    pos = Grid((32, 33)).positions()
    q = torch.randn(1, HEADS, pos.tokens, WIDTH)
    bias = DistanceBias((0.1, 0.2, 0.3), pos, metric="squared", normalize="max")
    attention(q, q, q, bias=bias, backend="sdpa")
    assert sdpa.cached_mask(q, q, q, bias) is None
    attention(q, q, q, bias=bias)  # takes columns
    assert sdpa.cached_mask(q, q, q, bias) is None


def test_unknown_backend():
    q, k, v = tensors(1, 4)
    with pytest.raises(UnknownName, match=r"Unknown backend 'sdap'. Did you mean 'sdpa'"):
        attention(q, k, v, backend="sdap")


def test_errors_report_both_values():
    pos = Grid((2, 3)).positions()
    q, k, v = tensors(2, 6)
    bias = DistanceBias((1.0,) * HEADS, pos)

    def fails(match, *args, error=ShapeError, **arguments):
        with pytest.raises(error, match=match):
            attention(*args, **arguments)

    fails("q, k, v of shape", q[0], k, v)
    fails("with one dtype on one device", q, k.double(), v)
    fails("as many keys as values", q, k, v[:, :, :3])
    fails("equal head_dim", q, k[..., :4], v)
    fails(r"dropout_p must be in \[0, 1\), got 1.0", q, k, v, dropout_p=1.0, error=OptionError)
    fails(
        "is defined for 6 tokens .* got 4 queries and 4 keys",
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
    fails("needs batch size 1", q, k, v, cu_seqlens=torch.tensor([0, 6]))
    fails("cu_seqlens must be int32 or int64", q[:1], k[:1], v[:1], cu_seqlens=torch.tensor([0.0, 6.0]))
    fails(r"cu_seqlens must increase from 0 to 6", q[:1], k[:1], v[:1], cu_seqlens=torch.tensor([0, 4]))
    fails(r"The bias has shape \(1, 2, 6, 6\)", q, k, v, bias=DistanceBias((1.0, 2.0), pos))
    fails(r"The bias has shape \(1, 3, 5, 6\)", q, k, v, bias=DenseBias(torch.zeros(1, 3, 5, 6)))
    subset = pos.gather(torch.arange(6).expand(3, -1))
    fails(r"The bias has shape \(3, 1, 6, 6\)", q, k, v, bias=DistanceBias((1.0,) * HEADS, subset))
    fails("not bound to positions", q, k, v, bias=DistanceBias((1.0,) * HEADS))
    with pytest.raises(ShapeError, match="with dot='query' and scaled=True needs q, k and scale"):
        ContextBias(torch.zeros(1, 2, 8), torch.zeros(6, 6, dtype=torch.long), "query", True).dense()
    with pytest.raises(ShapeError, match=r"needs shape \(heads, 3, 5\), got \(3, 3, 3\)"):
        TableBias(torch.zeros(3, 3, 3), pos).dense()
    with pytest.raises(ShapeError, match="queries and keys of one grid"):
        TableBias(torch.zeros(3, 3, 5), Positions(pos.coords)).dense()
    with pytest.raises(ShapeError, match=r"prefix values \(heads or 1, 3\), got \(3,\)"):
        TableBias(torch.zeros(3, 3, 5), pos, torch.zeros(3))
    with pytest.raises(OptionError, match=r"metric must be one of euclidean, .* got 'euclid'"):
        DistanceBias((1.0,), pos, metric="euclid")
    with pytest.raises(OptionError, match="normalize must be one of"):
        DistanceBias((1.0,), pos, normalize="diagonal")
    with pytest.raises(
        OptionError, match="normalize='reference' needs the grid shape of the training resolution"
    ):
        DistanceBias((1.0,), pos, normalize="reference").dense()
    with pytest.raises(ShapeError, match="one slope per head"):
        DistanceBias((), pos)
    with pytest.raises(ShapeError, match="DenseBias needs a tensor"):
        DenseBias(torch.zeros(6, 6))
    with pytest.raises(ShapeError, match="LowRankBias needs row"):
        LowRankBias(torch.zeros(1, 1, 6, 2), torch.zeros(1, 1, 6, 3))
    with pytest.raises(ShapeError, match="needs row, col or both"):
        GatedBias(None, None, bias)
    with pytest.raises(ShapeError, match="at least one term"):
        SumBias([])
