"""Attention compiled into one graph, and on the meta device."""

import pytest
import torch

from tests.attention.cases import CASES, HEADS, WIDTH, close, leaf, tensors
from tests.products import slow_except
from vispe import Grid, attention, create_encoding
from vispe.attention import DistanceBias
from vispe.attention.backends import sdpa

pytestmark = pytest.mark.usefixtures("poisoned")


NAMES = ["context of key", "sum", "squared learned", "distance constant", "table with prefix", "gated"]


@pytest.mark.parametrize("name", slow_except(NAMES, NAMES[:1]))
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
    actual, expected = compiled(q, k, v), run(q, k, v)
    close(actual, expected, 1e-5)
    cotangent = torch.randn_like(expected)
    for a, w in zip(
        torch.autograd.grad(actual, inputs, cotangent),
        torch.autograd.grad(expected, inputs, cotangent),
        strict=True,
    ):
        close(a, w, 1e-4)


@pytest.mark.slow
def test_compiles_with_head_groups(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(sdpa, "MASK_LIMIT", 12 * 12 * 4)
    bias = DistanceBias(leaf(HEADS), Grid((3, 4)).positions())
    q, k, v = tensors(1, 12)
    compiled = torch.compile(
        lambda q, k, v: attention(q, k, v, bias=bias, backend="sdpa"), fullgraph=True, backend="aot_eager"
    )
    actual, expected = compiled(q, k, v), attention(q, k, v, bias=bias, backend="reference")
    close(actual, expected, 1e-5)
    cotangent = torch.randn_like(expected)
    inputs = (q, k, v, bias.slopes)
    for a, w in zip(
        torch.autograd.grad(actual, inputs, cotangent),
        torch.autograd.grad(expected, inputs, cotangent),
        strict=True,
    ):
        close(a, w, 1e-4)


def test_meta_tensors():
    encoding = create_encoding("alibi2d", num_heads=HEADS)
    q, k, v = (t.to("meta") for t in tensors(2, 6))
    for backend in ("reference", "sdpa"):
        bias = encoding.bias(Grid((2, 3)).positions("meta"), 0)
        assert attention(q, k, v, bias=bias, backend=backend).shape == (2, HEADS, 6, WIDTH)
