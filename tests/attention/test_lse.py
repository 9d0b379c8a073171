"""Log-sum-exp of the logits, sinks and softcap: values, gradients, merging, and which backends support them."""

import math

import pytest
import torch

from tests.attention.cases import CASES, HEADS, WIDTH, close, doubles, masked, tensors
from tests.cases import cases
from vispe import Grid, attention, create_encoding, explain
from vispe.attention import DistanceBias, LowRankBias, ValueTerm
from vispe.errors import BackendUnavailable, OptionError, ShapeError, UnsupportedCombination

MASKS = ("padding", "bool per head", "float", "closed rows", "causal with padding")


def definition(q, k, v, dense, keep, sinks, softcap):
    """Return output and log-sum-exp in float64, with the sink as one more column as in GPT-OSS."""
    logits = WIDTH**-0.5 * q @ k.transpose(-1, -2)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if dense is not None:
        logits = logits + dense
    if keep is not None:
        logits = torch.where(keep, logits, -math.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks[:, None, None].expand(*logits.shape[:3], 1)], -1)
    no_key = (logits == -math.inf).all(-1, keepdim=True)
    lse = logits.masked_fill(no_key, 0.0).logsumexp(-1).masked_fill(no_key[..., 0], -math.inf)
    weights = logits.masked_fill(no_key, 0.0).softmax(-1).masked_fill(no_key, 0.0)
    return (weights if sinks is None else weights[..., :-1]) @ v, lse


@cases("name", CASES)
@cases("sunk", [False, True])
@cases("softcap", [None, 0.7])
def test_values_and_gradients(name, sunk, softcap):
    pos = Grid((3, 4), prefix=1).positions()
    case = CASES[name](pos, 2)
    if softcap is not None and case.bias is not None and case.bias.replaces_product:
        return  # nothing to cap
    q, k, v = tensors(2, pos.tokens)
    sinks = torch.randn(HEADS, requires_grad=True) if sunk else None
    inputs = [q, k, v, *case.params, *([sinks] if sunk else [])]
    exact = doubles(inputs)
    params = exact[3 : 3 + len(case.params)]
    dense = case.dense(params, exact[0], exact[1], WIDTH**-0.5)
    expected = definition(*exact[:3], dense, None, exact[-1] if sunk else None, softcap)
    actual = attention(q, k, v, bias=case.bias, sinks=sinks, softcap=softcap, return_lse=True)
    cotangents = [torch.randn_like(t) for t in expected]
    for a, e, what in zip(actual, expected, ("output", "lse"), strict=True):
        close(a, e, 2e-5, what)
    ours = torch.autograd.grad(actual, inputs, [c.float() for c in cotangents], allow_unused=True)
    theirs = torch.autograd.grad(expected, exact, cotangents, allow_unused=True)
    for i, (a, e) in enumerate(zip(ours, theirs, strict=True)):
        assert (a is None) == (e is None) or not float((a if e is None else e).abs().max())
        if a is not None and e is not None:
            close(a, e, 1e-4, f"gradient of input {i}")


@cases("kind", MASKS)
@cases("sunk", [False, True])
def test_masks(kind, sunk):
    q, k, v = tensors(2, 9)
    arguments, oracle_args = masked(kind, 2, 9, 9)
    sinks = torch.randn(HEADS) if sunk else None
    added, keep = oracle_args.get("added"), oracle_args.get("keep")
    expected = definition(*doubles((q, k, v)), added, keep, None if sinks is None else sinks.double(), None)
    out, lse = attention(q, k, v, sinks=sinks, return_lse=True, **arguments)
    close(out, expected[0], 2e-5)
    assert torch.equal(lse == -math.inf, expected[1] == -math.inf)
    torch.testing.assert_close(lse.double(), expected[1], rtol=1e-5, atol=1e-5)
    only_out = attention(q, k, v, sinks=sinks, **arguments)
    torch.testing.assert_close(only_out, out)
    assert all(t.isfinite().all() for t in torch.autograd.grad(only_out.sum(), (q, k, v)))


@cases("dtype", (torch.float16, torch.bfloat16, torch.float32, torch.float64))
def test_dtypes(dtype):
    q, k, v = (t.to(dtype) for t in tensors(1, 5))
    out, lse = attention(q, k, v, return_lse=True, sinks=torch.zeros(HEADS))
    assert out.dtype == dtype
    assert lse.dtype == torch.promote_types(dtype, torch.float32)
    assert lse.shape == (1, HEADS, 5)


def test_merging_halves_of_the_keys():
    q, k, v = tensors(2, 6, 10)
    parts = [
        attention(q, k[:, :, keys], v[:, :, keys], return_lse=True) for keys in (slice(0, 3), slice(3, 10))
    ]
    outs, lses = (torch.stack(t) for t in zip(*parts, strict=True))
    merged = (lses.softmax(0)[..., None] * outs).sum(0)
    out, lse = attention(q, k, v, return_lse=True)
    torch.testing.assert_close(merged, out)
    torch.testing.assert_close(lses.logsumexp(0), lse)
    ours, theirs = (torch.autograd.grad(t.square().sum(), (q, k, v)) for t in (merged, out))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_sink_belongs_to_one_part():
    """The log-sum-exp includes the sink, so merging counts it once."""
    q, k, v = tensors(1, 6, 10)
    sinks = torch.randn(HEADS)
    first = attention(q, k[:, :, :4], v[:, :, :4], return_lse=True, sinks=sinks)
    second = attention(q, k[:, :, 4:], v[:, :, 4:], return_lse=True)
    outs, lses = (torch.stack(t) for t in zip(first, second, strict=True))
    merged = (lses.softmax(0)[..., None] * outs).sum(0)
    torch.testing.assert_close(merged, attention(q, k, v, sinks=sinks))


def test_grouped_heads_transforms_and_value_terms():
    pos = Grid((2, 4)).positions()
    encoding = create_encoding("rope_axial", dim=4 * WIDTH, num_heads=4)
    transform = encoding.transform(pos, 0)
    q, k, v = tensors(2, pos.tokens, heads=4, kv_heads=2)
    sinks, term = torch.randn(4), ValueTerm(torch.randn(4, 3, WIDTH), torch.randint(0, 3, (8, 8)))
    out, lse = attention(
        q, k, v, transform=transform, enable_gqa=True, sinks=sinks, return_lse=True, value_term=term
    )
    wide = [transform.query(q), transform.key(k).repeat_interleave(2, 1), v.repeat_interleave(2, 1)]
    expected, expected_lse = attention(*wide, sinks=sinks, return_lse=True, value_term=term)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


def test_dropout_keeps_the_log_sum_exp():
    q, k, v = tensors(1, 20)
    expected = attention(q, k, v, return_lse=True)[1]
    torch.testing.assert_close(attention(q, k, v, return_lse=True, dropout_p=0.5)[1], expected)


@cases("backend", ["sdpa", "lowrank", "flex"])
@cases("arguments", [{"return_lse": True}, {"sinks": torch.zeros(2)}, {"softcap": 5.0}])
def test_other_backends_refuse(backend, arguments):
    q = torch.randn(1, 2, 6, 16)
    bias = DistanceBias((1.0, 0.5), Grid((2, 3)).positions(), metric="squared")
    if backend == "flex":
        pytest.importorskip("triton")
    if backend == "flex" and "softcap" in arguments:
        return  # FlexAttention has a softcap
    with pytest.raises(BackendUnavailable, match=r"return_lse and sinks|softcap"):
        attention(q, q, q, bias=bias, backend=backend, **arguments)
    explanation = explain(q, q, q, bias=bias, **arguments)
    assert explanation.backend == "reference"
    assert "return_lse" in explanation.reason or "softcap" in explanation.reason


def test_a_low_rank_bias_as_logits_has_sinks():
    row, col = torch.randn(1, 2, 5, 3), torch.randn(1, 2, 5, 3)
    q, v, sinks = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4), torch.randn(2)
    bias = LowRankBias(row, col).as_logits()
    out = attention(q, q, v, bias=bias, sinks=sinks)
    logits = torch.cat([row @ col.mT, sinks[:, None, None].expand(1, 2, 5, 1)], -1)
    torch.testing.assert_close(out, logits.softmax(-1)[..., :-1] @ v)


def test_the_gradient_of_a_sink_with_a_small_probability_is_exact():
    """Relative to float64; it was off by 1e-3 where rows attend to the sink with a probability of 1e-4."""
    row, col, v = (torch.randn(2, 3, 7, 5, dtype=torch.float64) for _ in range(3))
    bias, cotangent = LowRankBias(row.float(), col.float()).as_logits(), torch.randn_like(v)
    sinks = torch.tensor([-10.0, -5.0, 20.0], requires_grad=True)  # logits of about 2
    out = attention(row.float(), row.float(), v.float(), bias=bias, sinks=sinks)
    (actual,) = torch.autograd.grad(out, sinks, cotangent.float())
    exact = sinks.detach().double().requires_grad_()
    logits = torch.cat(
        [bias.row.double() @ bias.col.double().mT, exact[:, None, None].expand(2, 3, 7, 1)], -1
    )
    out = logits.softmax(-1)[..., :-1] @ v.float().double()
    (expected,) = torch.autograd.grad(out, exact, cotangent.float().double())
    assert ((actual - expected).abs() <= 1e-5 * expected.abs()).all(), (actual, expected)


def test_bad_arguments():
    q = torch.randn(1, 2, 6, 8)
    with pytest.raises(ShapeError, match=r"sinks must have shape \(2,\)"):
        attention(q, q, q, sinks=torch.zeros(3))
    with pytest.raises(ShapeError, match=r"sinks must be floating point"):
        attention(q, q, q, sinks=torch.zeros(2, dtype=torch.long))
    for softcap in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(OptionError, match="softcap must be positive"):
            attention(q, q, q, softcap=softcap)
    bias = DistanceBias((1.0, 0.5), Grid((2, 3)).positions()).as_logits()
    with pytest.raises(UnsupportedCombination, match="softcap"):
        attention(q, q, q, bias=bias, softcap=1.0)


def test_equal_to_gpt_oss_and_gemma2():
    """The eager attention of transformers, where sinks are `s_aux`."""
    gpt = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    gemma = pytest.importorskip("transformers.models.gemma2.modeling_gemma2")
    q, k, v = tensors(2, 7, heads=4, kv_heads=2)
    module = torch.nn.Module().eval()
    module.num_key_value_groups, module.sinks = 2, torch.randn(4)
    mask = torch.randn(2, 1, 7, 7)
    theirs = gpt.eager_attention_forward(module, q, k, v, mask, 0.3)[0].transpose(1, 2)
    ours = attention(q, k, v, attn_mask=mask, scale=0.3, enable_gqa=True, sinks=module.sinks)
    torch.testing.assert_close(ours, theirs)
    theirs = gemma.eager_attention_forward(module, q, k, v, mask, scaling=0.3, softcap=0.5)[0].transpose(1, 2)
    ours = attention(q, k, v, attn_mask=mask, scale=0.3, enable_gqa=True, softcap=0.5)
    torch.testing.assert_close(ours, theirs)


def test_gradients_of_rows_far_from_zero():
    """Weights from a rounded log-sum-exp of -4,000 would have relative errors of 1e-4."""
    pos = Grid((40,)).positions()
    q, k, v = tensors(1, 40)
    slopes = torch.full((HEADS,), 1.0, requires_grad=True)
    keys = torch.zeros(1, 40, dtype=torch.bool)
    keys[0, :3] = True

    def gradient(q, k, v, slopes):
        bias = DistanceBias(slopes, pos, metric="squared")
        lse = attention(q, k, v, bias=bias, key_padding_mask=keys, return_lse=True)[1]
        return torch.autograd.grad(lse[:, :, 3:].sum(), (q, k, slopes))

    exact = doubles((q, k, v, slopes))
    for a, e in zip(gradient(q, k, v, slopes), gradient(*exact), strict=True):
        close(a, e, 3e-6)


def test_no_keys():
    q, k = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 0, 8)
    out, lse = attention(q, k, k, return_lse=True)
    assert (out == 0).all()
    assert (lse == -math.inf).all()


@pytest.mark.slow
def test_compiled():
    q, k, v = tensors(1, 6)
    sinks = torch.randn(HEADS, requires_grad=True)

    def function(q, k, v, sinks):
        return attention(q, k, v, sinks=sinks, softcap=2.0, return_lse=True)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    ours, theirs = compiled(q, k, v, sinks), function(q, k, v, sinks)
    for a, e in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, e)
    grads = [torch.autograd.grad(sum(t.sum() for t in r), (q, k, v, sinks)) for r in (ours, theirs)]
    for a, e in zip(*grads, strict=True):
        torch.testing.assert_close(a, e)
