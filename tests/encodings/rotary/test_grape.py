"""grape, grape_alibi and grape_path against their definitions."""

import math

import pytest
import torch
from torch.nn import functional as F

from tests.attention import oracle
from tests.cases import cases
from vispe import Attention, Grid, Positions, create_encoding
from vispe.attention import attention
from vispe.encodings.parts.rotary.grape_rank2 import rank2_rotation, rotate_rank2
from vispe.errors import OptionError, ShapeError

FACTS = {"dim": 24, "num_heads": 3}


def build(spec, **facts):
    encoding = create_encoding(spec, **{**FACTS, **facts})
    with torch.no_grad():
        for p in encoding.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    return encoding


def content(n):
    return torch.randn(2, 2, 3, n, 8).unbind(0)


@cases("scale", [1.0, 1e-4, 0.0])
def test_rank2_rotations(scale):
    a, b = torch.randn(2, 6, dtype=torch.float64) * math.sqrt(scale)
    angle, x = torch.randn(5, dtype=torch.float64), torch.randn(5, 6, dtype=torch.float64)
    generator = a[:, None] * b - b[:, None] * a
    expected = torch.linalg.matrix_exp(angle[:, None, None] * generator)
    actual = rank2_rotation(a, b, angle)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(rotate_rank2(x, a, b, angle), (expected @ x[..., None])[..., 0])
    parallel = rank2_rotation(a, 2 * a, angle)
    torch.testing.assert_close(parallel, torch.eye(6, dtype=torch.float64).expand(5, 6, 6))
    if scale:
        inputs = tuple(t.clone().requires_grad_() for t in (x, a, b, angle))
        assert torch.autograd.gradcheck(rotate_rank2, inputs, fast_mode=True)


@cases("shape", [(7,), (3, 4), (2, 2, 3)])
@cases("shared", [True, False])
def test_canonical_planes(shape, shared):
    encoding = build(f"grape(shared={shared},base=50)")
    grid = Grid(shape, prefix=1)
    pos = grid.positions()
    q = content(grid.tokens)[0]
    result = encoding.transform(pos, 0).query(q)
    for h, c in ((0, 0), (1, 3), (2, 2)):
        rate = encoding.log_freq[c] if shared else encoding.log_freq[h, c]
        angle = -pos.coords[0, :, c % len(shape)] * (rate / 16).exp()
        pair = torch.complex(q[:, h, :, c], q[:, h, :, c + 4]) * torch.polar(torch.ones(grid.tokens), angle)
        torch.testing.assert_close(result[:, h, :, c], pair.real, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(result[:, h, :, c + 4], pair.imag, rtol=1e-4, atol=1e-5)
    fresh = create_encoding("grape.text", **FACTS)
    torch.testing.assert_close(fresh.frequencies(), 10000.0 ** -(torch.arange(4) / 4))


@cases("spec", ["grape", "grape(shared=false)", "grape(planes=rank2)"])
def test_logits_depend_on_offsets_only_and_norms_are_preserved(spec):
    encoding = build(spec).double()
    q, k = (t.double() for t in content(12))
    coords = torch.rand(1, 12, 2, dtype=torch.float64) * 5
    logits = []
    for shift in (0.0, 7.5):
        transform = encoding.transform(Positions(coords + shift), 0)
        rotated = transform.query(q)
        torch.testing.assert_close(rotated.norm(dim=-1), q.norm(dim=-1))
        logits.append(rotated @ transform.key(k).transpose(-1, -2))
    torch.testing.assert_close(logits[0], logits[1])
    if "rank2" in spec:
        a, b = encoding.a.reshape(3, 2, 4), encoding.b.reshape(3, 2, 4)
        point = coords[0, 5]
        for h in range(3):
            blocks = [rank2_rotation(a[h, i], b[h, i], point[i]) for i in range(2)]
            output = q[:, h, 5] @ torch.block_diag(*blocks).t()
            result = encoding.transform(Positions(coords), 0).query(q)[:, h, 5]
            torch.testing.assert_close(result, output)


@cases("gates", ["none", "key", "query", "query_key"])
@cases("shape", [(3, 4), (2, 2, 3), (5,)])
@cases("l2_norm", [True, False])
def test_gated_alibi(gates, shape, l2_norm):
    if gates == "none" and not l2_norm:
        return
    encoding = build(f"grape_alibi(gates={gates},l2_norm={l2_norm})")
    grid = Grid(shape, prefix=2, spacing=(2.0, 0.5, 1.0)[: len(shape)])
    q, k = content(grid.tokens)
    distance = oracle.distance_matrix(grid, "euclidean", False, "none").float()
    gate = torch.zeros(2, 3, grid.tokens, grid.tokens)
    for name, vector, x in (("query", encoding.v, q), ("key", encoding.u, k)):
        if vector is not None:
            unit = vector / vector.norm(dim=1, keepdim=True) if l2_norm else vector
            g = F.softplus(torch.einsum("bhnd,hd->bhn", x, unit) / math.sqrt(8))
            gate = gate + (g[..., None] if name == "query" else g[:, :, None])
    gate = gate * F.softplus(encoding.omega)[:, None, None] if gates != "none" else gate + 1
    slopes = torch.tensor(encoding.head_slopes())[:, None, None]
    bias = encoding.bias(grid.positions(), 0)
    result = bias.dense(q=q, k=k)
    torch.testing.assert_close(result.expand(2, -1, -1, -1), -slopes * gate * distance, rtol=1e-4, atol=1e-5)
    assert (result[..., :2, :] == 0).all()
    assert (result[..., :2] == 0).all()
    v = torch.randn(2, 3, grid.tokens, 8)
    output = ((q @ k.transpose(-1, -2)) * 8**-0.5 + result).softmax(-1) @ v
    for backend in ("reference", "sdpa"):
        torch.testing.assert_close(
            attention(q, k, v, bias=bias, backend=backend), output, rtol=1e-4, atol=1e-5
        )


def test_gates_have_unit_scale_initially():
    """Directions from N(0, 1 / d_h), softplus(omega) of 1."""
    encoding = create_encoding("grape_alibi(gates=query_key)", dim=512, num_heads=2)
    for direction in (encoding.u, encoding.v):
        assert 0.9 < direction.std() * 256**0.5 < 1.1
    torch.testing.assert_close(F.softplus(encoding.omega), torch.ones_like(encoding.omega))


def test_gated_alibi_with_dropped_tokens_and_causal():
    encoding = build("grape_alibi")
    pos = Grid((3, 4), prefix=1).positions()
    q, k = content(13)
    keep = torch.tensor([[0, 4, 9], [0, 12, 3]])
    full = encoding.bias(pos, 0).dense(q=q, k=k)
    index = keep[:, None, :, None].expand(-1, 3, -1, 8)
    subset = encoding.bias(pos.gather(keep), 0).dense(q=q.gather(2, index), k=k.gather(2, index))
    for i in range(2):
        torch.testing.assert_close(subset[i], full[i][:, keep[i]][:, :, keep[i]], rtol=1e-5, atol=1e-6)
    causal = create_encoding("grape_alibi(gates=none,causal=true)", dim=8, num_heads=1)
    dense = causal.bias(Grid((4,), prefix=1).positions(), 0).dense()[0, 0]
    steps = torch.tensor([[max(i - j, 0) if min(i, j) > 0 else 0 for j in range(5)] for i in range(5)])
    torch.testing.assert_close(dense, -(2.0**-8) * steps.float())


def test_paths_against_a_loop():
    encoding = build("grape_path(p_dim=4,base=100)")
    x = torch.randn(2, 6, 24)
    pos = Grid((5,), prefix=1).positions()
    result = encoding.bias(pos, 0, x).dense()
    assert (result[..., :1, :] == 0).all()
    assert (result[..., :1] == 0).all()
    p = encoding.c_p(x[:, 1:]).reshape(2, 5, 3, 4)
    slopes = (2**-4, 2**-8, 2**-2)
    for b, h, t, j in ((0, 0, 4, 1), (1, 2, 3, 0), (0, 1, 2, 2), (1, 1, 1, 3)):
        total = torch.zeros(())
        for step in range(j + 1, t + 1):
            row = p[b, step, h] / p[b, step, h].square().mean().sqrt()
            phase = torch.polar(torch.ones(2), -step * torch.tensor([1.0, 0.1]))
            z = torch.complex(row[:2], row[2:]) * phase
            total = total + slopes[h] * F.logsigmoid(p[b, t, h] @ torch.cat([z.real, z.imag]) / 4)
        torch.testing.assert_close(result[b, h, t + 1, j + 1], total, rtol=1e-4, atol=1e-5)
    layer = Attention(24, 3, "grape_path")
    assert layer(x, Grid((6,)), attn_mask=torch.ones(6, 6).bool().tril()).isfinite().all()


def test_tokens_without_a_position_are_not_on_the_path():
    encoding, x = build("grape_path"), torch.randn(2, 6, 24)
    grid = Grid((4,), prefix=2).positions()
    expected = encoding.bias(grid, 0, x).dense()
    free = Positions(grid.coords, grid.spatial, grid.extent)
    torch.testing.assert_close(encoding.bias(free, 0, x).dense(), expected)
    # tokens without a position between and behind the others, different in each sample
    order = torch.tensor([[2, 0, 3, 4, 1, 5], [2, 3, 4, 5, 0, 1]])
    coords, spatial = grid.coords.expand(2, -1, -1), grid.spatial.expand(2, -1)
    mixed = Positions(coords.gather(1, order[..., None]), spatial.gather(1, order), grid.extent)
    result = encoding.bias(mixed, 0, x.gather(1, order[..., None].expand(-1, -1, 24))).dense()
    for i, at in enumerate(order):
        torch.testing.assert_close(result[i], expected[i][:, at][:, :, at])


@cases(
    ("spec", "facts", "message"),
    [
        ("grape", {"num_heads": 5}, "grape needs dim to be a multiple of num_heads, got dim=24, num_heads=5"),
        ("grape", {"num_heads": 8}, "grape needs an even head_dim, got dim / num_heads = 3"),
        ("grape(planes=free)", {}, "planes must be one of canonical, rank2, got 'free'"),
        ("grape(base=0)", {}, "base needs a number above 0, got base=0"),
        ("grape(shared=2)", {}, "shared is true or false, got shared=2"),
        ("grape(planes=rank2,scale=1)", {}, "shared and scale have no effect with planes='rank2'"),
        (
            "grape_alibi",
            {"num_heads": 5},
            "grape_alibi needs dim to be a multiple of num_heads, got dim=24, num_heads=5",
        ),
        ("grape_alibi(gates=both)", {}, "gates must be one of none, key, query, query_key, got 'both'"),
        (
            "grape_alibi(slopes=learned)",
            {},
            "slopes must be one of alibi, geometric, constant, got 'learned'",
        ),
        ("grape_alibi(normalize=reference)", {}, "normalize must be one of max, none, got 'reference'"),
        ("grape_alibi(metric=l2)", {}, "metric must be one of euclidean"),
        ("grape_alibi(wrap=1)", {}, "wrap is true or false, got wrap=1"),
        ("grape_alibi(causal=true,wrap=true)", {}, "have no effect with causal=True"),
        ("grape_alibi(gates=none,l2_norm=false)", {}, "l2_norm=False has no effect with gates='none'"),
        (
            "grape_alibi(spacing=[1,-1])",
            {},
            r"spacing needs a list of numbers above 0, got spacing=\[1, -1\]",
        ),
        ("grape_path(p_dim=3)", {}, "p_dim needs an integer above 0 and divisible by 2, got p_dim=3"),
        ("grape_path", {"num_heads": 0}, "num_heads needs an integer above 0, got num_heads=0"),
    ],
)
def test_option_errors(spec, facts, message):
    with pytest.raises(OptionError, match=message):
        create_encoding(spec, **{**FACTS, **facts})


def test_shape_errors():
    with pytest.raises(ShapeError, match=r"channels for each of 3 axes, .* head_dim=4"):
        create_encoding("grape", dim=8, num_heads=2).transform(Grid((2, 2, 2)).positions(), 0)
    with pytest.raises(ShapeError, match="needs 1 axis with causal=True, got 2"):
        build("grape_alibi(causal=true)").bias(Grid((2, 2)).positions(), 0)
    with pytest.raises(ShapeError, match="needs keys for its gates"):
        build("grape_alibi").bias(Grid((2, 2)).positions(), 0).dense()
    path, pos = build("grape_path"), Grid((4,)).positions()
    with pytest.raises(ShapeError, match=r"grape_path reads the tokens. Pass x"):
        path.bias(pos, 0)
    with pytest.raises(ShapeError, match="some have been dropped"):
        path.bias(pos.gather(torch.tensor([[0, 2]])), 0, torch.ones(1, 2, 24))
