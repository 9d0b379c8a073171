"""Gradients of learned bias tables on CPU, summed up block by block."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.attention.cases import close
from tests.cases import cases, pairwise
from vispe import Grid, attention
from vispe.attention import DistanceBias, SumBias, TableBias, explain
from vispe.attention.backends import blocked, blocks
from vispe.attention.backends.blocks.attention import BlockAttention

pytestmark = pytest.mark.usefixtures("poisoned")
HEADS = 3


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """Use strips for short inputs as well; return the shapes of their calls."""
    shapes = []
    original = BlockAttention.apply

    def apply(*args):
        shapes.append(args[0].shape)
        return original(*args)

    monkeypatch.setattr(blocked, "MIN_QUERIES", 0)
    monkeypatch.setattr(BlockAttention, "apply", apply)
    return shapes


def small_blocks(monkeypatch):
    monkeypatch.setattr(blocks.attention, "FORWARD_BLOCK", 900)
    monkeypatch.setattr(blocks.attention, "BACKWARD_BLOCK", 700)


def inputs(pos, b=2, table_heads=HEADS, dtype=torch.float32):
    """Return leaves q, k, v, table, edge, slopes, and a cotangent; q, k, v not contiguous."""
    q, k, v, cotangent = torch.randn(4, b, pos.tokens, HEADS, 8).to(dtype).transpose(2, 3)
    table = torch.randn(table_heads, *(2 * n - 1 for n in pos.grid.shape))
    leaves = (q, k, v, table, torch.randn(HEADS, 3), torch.rand(HEADS))
    return [t.clone(memory_format=torch.preserve_format).requires_grad_() for t in leaves], cotangent


def results(leaves, cotangent, pos, backend, **arguments):
    """Return the output and all gradients of a sum of a table and learned distances."""
    q, k, v, table, edge, slopes = leaves
    bias = SumBias([TableBias(table, pos, edge if pos.grid.prefix else None), DistanceBias(slopes, pos)])
    out = attention(q, k, v, bias=bias, backend=backend, **arguments)
    grads = torch.autograd.grad(out, leaves, cotangent.to(out.dtype), allow_unused=True)
    return [
        out.detach(),
        *(torch.zeros_like(t) if g is None else g for t, g in zip(leaves, grads, strict=True)),
    ]


def exact(leaves, *rest, **arguments):
    return results([t.detach().double().requires_grad_() for t in leaves], *rest, "reference", **arguments)


@pairwise
@cases("blocks", ["small", "large"])
@cases("padded", [False, True])
@cases(
    ("shape", "prefix", "table_heads"),
    [((5, 7), 0, 3), ((5, 7), 1, 1), ((9, 4), 5, 3), ((1, 6), 1, 3), ((2, 3, 4), 2, 3)],
    ids=str,
)
def test_gradients(shape, prefix, table_heads, padded, blocks, calls, monkeypatch):
    calls.clear()
    if blocks == "small":
        small_blocks(monkeypatch)
    pos = Grid(shape, prefix).positions()
    leaves, cotangent = inputs(pos, 3, table_heads)
    keep = torch.rand(3, pos.tokens) > 0.3 if padded else None
    if keep is not None:
        keep[0, 0] = True  # or the gradient of edge is rounding alone
        keep[1] = False  # a sample without keys
    expected = exact(leaves, cotangent, pos, key_padding_mask=keep)
    actual = results(leaves, cotangent, pos, "sdpa", key_padding_mask=keep)
    assert len(calls) == 1
    for i, (a, w) in enumerate(zip(actual, expected, strict=True)):
        close(a, w, 2e-6 if i == 0 else 1e-5, f"result {i}")


@cases("autocast", [False, True])
def test_half_precision(autocast, calls):
    calls.clear()
    pos = Grid((6, 5), 1).positions()
    leaves, cotangent = inputs(pos, dtype=torch.float32 if autocast else torch.bfloat16)
    with torch.no_grad():
        for t in leaves[:3]:  # the same numbers in either dtype
            t.copy_(t.bfloat16())
    expected = exact(leaves, cotangent.bfloat16(), pos)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        actual = results(leaves, cotangent, pos, "sdpa")
    assert actual[0].dtype == torch.bfloat16
    assert [g.dtype for g in actual[1:]] == [t.dtype for t in leaves]
    assert len(calls) == 1
    for i, (a, w) in enumerate(zip(actual, expected, strict=True)):
        close(a, w, 4e-3 if i == 0 else 1.2e-2, f"result {i}")


def test_gradcheck_and_gradients_of_gradients():
    pos = Grid((2, 4), 1).positions()
    keep = torch.ones(2, pos.tokens, dtype=torch.bool)
    keep[1, 5:] = False
    leaves, _ = inputs(pos)
    leaves = [t.detach().double().requires_grad_() for t in leaves]

    def run(q, k, v, table, edge, slopes):
        bias = SumBias([TableBias(table, pos, edge), DistanceBias(slopes, pos)])
        return attention(q[:, :2], k[:, :2], v[:, :2], bias=bias, key_padding_mask=keep, backend="sdpa")

    leaves = [t[:2].detach().requires_grad_() for t in leaves[3:]]
    q, k, v = (torch.randn(2, 2, pos.tokens, 2, dtype=torch.float64, requires_grad=True) for _ in range(3))
    torch.autograd.gradcheck(run, (q, k, v, *leaves), fast_mode=True)
    torch.autograd.gradgradcheck(run, (q, k, v, *leaves), fast_mode=True)


def test_checkpointing_and_repeated_backward(calls):
    pos = Grid((4, 6), 1).positions()
    leaves, cotangent = inputs(pos)

    def run(q, k, v, table):
        return attention(q, k, v, bias=TableBias(table, pos), backend="sdpa")

    out = run(*leaves[:4])
    expected = torch.autograd.grad(out, leaves[:4], cotangent, retain_graph=True)
    second = torch.autograd.grad(out, leaves[:4], cotangent)
    checkpointed = torch.autograd.grad(
        checkpoint(run, *leaves[:4], use_reentrant=False), leaves[:4], cotangent
    )
    assert len(calls) == 3
    for w, a, c in zip(expected, second, checkpointed, strict=True):
        assert torch.equal(w, a)
        assert torch.equal(w, c)


def test_no_tensor_of_the_size_of_scores_is_stored():
    pos = Grid((16, 16)).positions()
    leaves, cotangent = inputs(pos)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        out = attention(*leaves[:3], bias=TableBias(leaves[3], pos), backend="sdpa")
    assert sizes
    assert max(sizes) < 256 * 256
    (grad,) = torch.autograd.grad(out, leaves[3], cotangent)
    close(grad.sum((1, 2)) / grad.abs().sum((1, 2)), torch.zeros(HEADS), 1e-5)  # rows of dS sum to 0


@pytest.mark.compiles
@pytest.mark.slow
def test_compiles_to_a_dense_mask(calls):
    torch._dynamo.reset()
    pos = Grid((4, 5), 1).positions()
    leaves, cotangent = inputs(pos)

    def run(q, k, v):
        return attention(q, k, v, bias=TableBias(leaves[3], pos), backend="sdpa")

    actual = torch.compile(run, fullgraph=True, backend="aot_eager")(*leaves[:3])
    assert not calls
    expected = run(*leaves[:3])
    assert len(calls) == 1
    for a, w in zip(
        *(torch.autograd.grad(o, leaves[:4], cotangent) for o in (actual, expected)), strict=True
    ):
        close(a, w, 1e-5)


def test_dense_masks_for_other_calls(calls, monkeypatch):
    pos = Grid((4, 5)).positions()
    (q, k, v, table, *_), _ = inputs(pos)
    bias = TableBias(table, pos)
    for arguments in ({"is_causal": True}, {"attn_mask": torch.zeros(20, 20)}, {"dropout_p": 0.1}):
        attention(q, k, v, bias=bias, **arguments)
    attention(q, k, v[..., :4], bias=bias)
    attention(q, k, v, bias=TableBias(table.detach(), pos))
    with torch.no_grad():
        attention(q, k, v, bias=bias)
    line = Grid((20,)).positions()  # grid rows of one token
    attention(q, k, v, bias=TableBias(torch.randn(1, 39).requires_grad_(), line))
    grad = torch.func.grad(lambda t: attention(q, k, v, bias=TableBias(t, pos)).square().sum())(table)
    assert grad.shape == table.shape
    monkeypatch.setattr(blocked, "MIN_QUERIES", 41)
    attention(q, k, v, bias=bias)
    monkeypatch.setattr(blocked, "MIN_QUERIES", 40)
    assert not calls
    attention(q, k, v, bias=bias)
    monkeypatch.setattr(blocked, "KERNEL", None)
    attention(q, k, v, bias=bias)
    assert len(calls) == 1


def test_explain_reports_blocks():
    pos = Grid((8, 8)).positions()
    q = torch.randn(32, 2, 64, 8, requires_grad=True)
    said = {}
    for learned in (True, False):
        table = torch.randn(2, 15, 15, requires_grad=learned)
        said[learned] = explain(q, q, q, bias=TableBias(table, pos)).reason
    assert said == {
        True: "the mask is computed in blocks, because it is too large to cache or needs a gradient; "
        "the backward pass computes it again",
        False: "one dense mask, cached until its parameters change",
    }


@cases("scale", [1e-2, 1e-4, 1e-6])
def test_half_precision_at_tiny_scales(scale, calls):
    calls.clear()
    pos = Grid((6, 7), 1).positions()
    leaves, cotangent = inputs(pos, dtype=torch.float16)
    leaves[0] = (leaves[0].detach() * min(0.25 / scale, 16.0)).requires_grad_()
    expected = exact(leaves, cotangent, pos, scale=scale)
    actual = results(leaves, cotangent, pos, "sdpa", scale=scale)
    assert len(calls) == 1
    for mine, other in zip(actual, expected, strict=True):
        rounding = 2**-25 * mine.numel() ** 0.5  # gradients may be below what float16 holds
        assert (mine.double() - other).norm() <= 2e-3 * other.norm() + rounding
