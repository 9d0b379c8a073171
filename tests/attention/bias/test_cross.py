"""Biases between two sets of positions: cross attention, and decoding with a cache of keys and values."""

import pytest
import torch

from tests.attention.cases import CASES, HEADS, WIDTH, close, doubles, tensors
from tests.cases import cases
from vispe import Grid, attention, create_encoding, explain
from vispe.attention import CrossAttentionBias, DenseBias, DistanceBias, TableBias
from vispe.errors import BackendUnavailable, ShapeError, UnsupportedCombination

OF_POSITIONS = (
    "distance constant", "distance fixed", "distance learned", "squared learned", "table", "table shared",
    "table with prefix", "profile", "radial", "radial fixed", "offset", "radial wrapped",
)  # fmt: skip
QUERIES = {"one": [[7]], "some": [[12, 0, 5, 5]], "per sample": [[3, 1, 9], [0, 8, 8]]}


@cases("rows", QUERIES)
@cases("backend", ["auto", "reference", "sdpa"])
@cases("name", OF_POSITIONS)
def test_rows_of_the_bias_of_all_tokens(name, backend, rows):
    pos = Grid((3, 4), prefix=1).positions()
    case, index = CASES[name](pos, 2), torch.tensor(QUERIES[rows])
    index = index.expand(2, -1)
    q, k, v = tensors(2, index.shape[1], pos.tokens)
    inputs = [q, k, v, *case.params]
    exact = doubles(inputs)
    all_q = torch.zeros(2, HEADS, pos.tokens, WIDTH, dtype=torch.float64)
    for sample in range(2):
        all_q[sample, :, index[sample]] = exact[0][sample].detach()
    dense = case.dense(exact[3:], all_q, exact[1], WIDTH**-0.5)
    dense = dense.expand(2, HEADS, -1, -1).gather(
        2, index[:, None, :, None].expand(-1, HEADS, -1, pos.tokens)
    )
    logits = dense + WIDTH**-0.5 * exact[0] @ exact[1].mT
    bias = CrossAttentionBias(case.bias, pos.gather(index if rows == "per sample" else index[:1]), pos)
    out = attention(q, k, v, bias=bias, backend=backend)
    close(out, logits.softmax(-1) @ exact[2], 2e-5)
    cotangent = torch.randn_like(out)
    expected = (logits.softmax(-1) @ exact[2] * cotangent.double()).sum()
    ours = torch.autograd.grad((out * cotangent).sum(), inputs)
    for a, e in zip(ours, torch.autograd.grad(expected, exact), strict=True):
        close(a, e, 1e-4)


def test_a_bias_that_replaces_the_product():
    pos = Grid((3, 4)).positions()
    bias, index = DistanceBias((0.5, 0.2, 1.0), pos).as_logits(), torch.tensor([[2, 7]])
    q, k, v = tensors(1, 2, pos.tokens)
    expected = bias.dense()[:, :, [2, 7]].softmax(-1) @ v
    for backend in ("auto", "reference"):
        out = attention(q, k, v, bias=CrossAttentionBias(bias, pos.gather(index), pos), backend=backend)
        torch.testing.assert_close(out, expected)


def test_two_grids():
    """A decoder with fewer queries: distances are between physical coordinates."""
    coarse, fine = (Grid(s, spacing=p).positions() for s, p in (((2, 2), (2.0, 2.0)), ((4, 4), (1.0, 1.0))))
    q, k, v = tensors(1, 4, 16)
    bias = CrossAttentionBias(DistanceBias((0.5, 0.2, 1.0), fine), coarse, fine)
    distance = torch.cdist(coarse.coords.double(), fine.coords.double())
    dense = -torch.tensor([0.5, 0.2, 1.0], dtype=torch.float64)[:, None, None] * distance
    expected = (dense + WIDTH**-0.5 * q.double() @ k.double().mT).softmax(-1) @ v.double()
    close(attention(q, k, v, bias=bias), expected, 2e-5)


@cases("name", ["alibi2d", "rpb", "kerple", "fire", "gaussian2d", "t5"])
def test_encodings_while_decoding(name):
    """The newest token attends to a cache, as in the last row of attention without one."""
    pos = Grid((3, 4)).positions()
    encoding = create_encoding(name, dim=32, num_heads=2, grid=(3, 4)).eval()
    bias = encoding.bias(pos, 0)
    q, k, v = (torch.randn(2, 2, 12, 16) for _ in range(3))
    full = attention(q, k, v, bias=bias)
    last = CrossAttentionBias(bias, pos.gather(torch.tensor([[11]])), pos)
    torch.testing.assert_close(attention(q[:, :, -1:], k, v, bias=last), full[:, :, -1:])


def test_refusals():
    pos = Grid((2, 3)).positions()
    with pytest.raises(UnsupportedCombination, match="depends on positions only, got DenseBias"):
        CrossAttentionBias(DenseBias(torch.zeros(1, 1, 6, 6), pos), pos, pos)
    bias = CrossAttentionBias(TableBias(torch.zeros(1, 3, 5), pos), pos, Grid((3, 2)).positions())
    q = torch.randn(1, 2, 6, 16)
    with pytest.raises(ShapeError, match="one grid"):
        attention(q, q, q, bias=bias)
    fixed = CrossAttentionBias(DistanceBias((1.0, 0.5), pos), pos, pos)
    with pytest.raises(UnsupportedCombination, match="different positions"):
        fixed.score_mod()
    with pytest.raises(ShapeError, match="broadcast"):
        attention(q[:, :, :4], q, q, bias=fixed)
    with pytest.raises(BackendUnavailable, match=r"low rank"):
        attention(q, q, q, bias=fixed, backend="lowrank")


def test_refusal_of_the_fused_kernels(monkeypatch):
    triton = pytest.importorskip("vispe.attention.backends.triton")
    monkeypatch.setitem(triton.unsupported_reason.__globals__, "device_unsupported_reason", lambda q: None)
    pos = Grid((2, 3)).positions()
    table = TableBias(torch.zeros(1, 3, 5), pos)
    q = torch.randn(1, 2, 6, 16)
    result = explain(q, q, q, bias=CrossAttentionBias(table, Grid((3, 2)).positions(), pos))
    assert result.backend == "sdpa"
    assert "queries and keys are not on the grid of the TableBias" in result.unsupported["triton"]
    fused = CrossAttentionBias(table, pos, pos)
    assert "triton" not in explain(q, q, q, bias=fused, backend="triton").unsupported
