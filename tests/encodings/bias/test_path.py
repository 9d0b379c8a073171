"""path against its definition, one reflection after the other, and the projections of its steps."""

import pytest
import torch
from torch.nn import functional as F

from tests.cases import cases
from vispe import Attention, Grid, Positions, attention, create_encoding
from vispe.encodings.bias.content.path import PathScores
from vispe.errors import ShapeError, UnsupportedCombination


def build(**options):
    return create_encoding(
        "path", **{"dim": 12, "num_heads": 2, "causal": True, "rank": 5, **options}
    ).double()


def slow(q, k, w, beta, g, scale, prefix=0):
    """Return the logits (b, h, n, n), walking from each key to each query."""
    b, heads, n, width = q.shape
    out = torch.full((b, heads, n, n), -torch.inf, dtype=torch.float64)
    eye = torch.eye(width, dtype=torch.float64)
    for s in range(b):
        for h in range(heads):
            for j in range(n):
                key, gate = k[s, h, j], 0.0
                for i in range(j, n):
                    if i > j and j >= prefix:
                        key = (eye - beta[s, h, i] * torch.outer(w[s, h, i], w[s, h, i])) @ key
                        gate = gate + (0.0 if g is None else g[s, h, i])
                    out[s, h, i, j] = scale * (q[s, h, i] @ key + gate)
    return out


def steps(encoding, x):
    """Return w, b and g of the tokens, one by one."""
    b, n, _ = x.shape
    low = x @ encoding.down.weight.T @ encoding.up.weight.T
    w = torch.zeros(b, 2, n, 6, dtype=torch.float64)
    for s in range(b):
        for t in range(n):
            mixed = sum(low[s, t - 2 + i] * encoding.conv.weight[:, 0, i] for i in range(3) if t - 2 + i >= 0)
            heads = F.silu(mixed).reshape(2, 6)
            w[s, :, t] = heads / heads.norm(dim=-1, keepdim=True)
    beta = 2 * encoding.beta(x).sigmoid().mT
    return w, beta, None if encoding.forget is None else F.logsigmoid(encoding.forget(x)).mT


@cases("gate", [False, True])
@cases(("tokens", "prefix"), [(5, 0), (4, 2), (1, 0)])
def test_logits_and_backends(gate, tokens, prefix):
    encoding, pos = build(gate=gate), Grid((tokens,), prefix).positions()
    n = pos.tokens
    x = torch.randn(2, n, 12, dtype=torch.float64)
    q, k, v = torch.randn(3, 2, 2, n, 6, dtype=torch.float64)
    bias = encoding.bias(pos, 0, x)
    wide = [torch.zeros(2, 2, n, 6).double(), *(torch.zeros(2, 2, n).double() for _ in range(2))]
    for full, patches in zip(wide, steps(encoding, x[:, prefix:]), strict=True):
        full[:, :, prefix:] = 0 if patches is None else patches
    expected = slow(q, k, *wide, 0.3, prefix)
    torch.testing.assert_close(bias.dense(q=q, k=k, scale=0.3), expected)
    torch.testing.assert_close(bias.dense(q=q, k=k, scale=0.3, heads=slice(1, 2)), expected[:, 1:])
    for backend in ("reference", "sdpa", "auto"):
        actual = attention(q, k, v, bias=bias, scale=0.3, backend=backend)
        torch.testing.assert_close(actual, expected.softmax(-1) @ v)


def test_grouped_queries_share_steps_of_key_heads():
    q, (k, w) = torch.randn(1, 4, 5, 6).double(), torch.randn(2, 1, 2, 5, 6).double()
    w, beta = F.normalize(w, dim=-1), 2 * torch.rand(1, 2, 5).double()
    g, pos = -torch.rand(1, 4, 5).double(), Grid((5,)).positions()
    result = attention(q, k, k, bias=PathScores(pos, w, beta, g), enable_gqa=True)
    k, w, beta = (t.repeat_interleave(2, 1) for t in (k, w, beta))
    torch.testing.assert_close(result, slow(q, k, w, beta, g, 6**-0.5).softmax(-1) @ k)


def test_later_tokens_have_no_effect():
    layer = Attention(12, 2, "path(causal=true,gate=true)").double()
    x = torch.randn(1, 8, 12, dtype=torch.float64)
    changed = x.clone()
    changed[:, 5] += 1
    first, second = (layer(t, Grid((6,), prefix=2)) for t in (x, changed))
    torch.testing.assert_close(first[:, :5], second[:, :5])
    assert not torch.allclose(first[:, 5:], second[:, 5:])


def test_gradients():
    layer = Attention(4, 2, "path(causal=true,gate=true,rank=2)").double()
    names = [n for n, _ in layer.named_parameters() if "pos_enc" in n]
    x = torch.randn(1, 4, 4, dtype=torch.float64)

    def out(x, *values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x, (4,)))

    leaves = [x, *(layer.get_parameter(n).detach().clone() for n in names)]
    assert torch.autograd.gradcheck(out, [t.requires_grad_() for t in leaves], fast_mode=True)


def test_long_paths_are_finite():
    encoding, pos = build().float(), Grid((300,)).positions()
    q = torch.randn(1, 2, 300, 6)
    with torch.no_grad():
        encoding.beta.bias.fill_(8)  # near 2: plain reflections, which keep every length
    dense = encoding.bias(pos, 0, torch.randn(1, 300, 12)).dense(q=q, k=q, scale=1.0)
    longest = (q.norm(dim=-1)[..., None] * q.norm(dim=-1)[..., None, :]).tril()
    assert (dense.tril().nan_to_num(neginf=0).abs() <= longest * 1.001 + 1e-3).all()


def test_errors():
    with pytest.raises(
        UnsupportedCombination, match="Use causal=true if attention is causal, or grape_alibi"
    ):
        build(causal=False)
    encoding, x = build(), torch.zeros(1, 4, 12).double()
    with pytest.raises(
        ShapeError, match=r"path needs 1-axis positions, got 2 axes .*Use tapa or grape_alibi"
    ):
        encoding.bias(Grid((2, 2)).positions(), 0, x)
    with pytest.raises(ShapeError, match=r"path reads the tokens\. Pass x \(b, n, d\) to bias"):
        encoding.bias(Grid((4,)).positions(), 0)
    with pytest.raises(ShapeError, match=r"some have been dropped. Keep all"):
        encoding.bias(Grid((4,)).positions().gather(torch.tensor([[0, 2]])), 0, x[:, :2])
    assert encoding.bias(Positions(torch.arange(4.0)[None, :, None]), 0, x).pos.grid is None


@cases("gate", [False, True])
def test_tokens_without_a_position_are_not_in_the_sequence(gate):
    encoding, x = build(gate=gate), torch.randn(2, 7, 12, dtype=torch.float64)
    q, k = torch.randn(2, 2, 2, 7, 6, dtype=torch.float64)
    spatial = torch.tensor([[1, 0, 1, 1, 0, 0, 1], [0, 1, 1, 0, 1, 1, 1]]).bool()
    pos = Positions(torch.arange(7.0)[None, :, None].expand(2, 7, 1), spatial)
    logits = encoding.bias(pos, 0, x).dense(q=q, k=k)
    for b, at in enumerate(spatial):
        spatial_positions = Positions(torch.arange(float(at.sum()))[None, :, None])
        short = encoding.bias(spatial_positions, 0, x[b : b + 1, at]).dense(
            q=q[b : b + 1, :, at], k=k[b : b + 1, :, at]
        )
        torch.testing.assert_close(logits[b][:, at][:, :, at], short[0])
