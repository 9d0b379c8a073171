"""Transforms in a row, calibrations, expansions of several kinds, and rotations with tables of keys."""

import pytest
import torch
from torch.nn import functional as F

from tests.cases import cases
from vispe import attention
from vispe.attention import Affine, BlockTransform, Calibrate, Chain, Expand, PairRotation
from vispe.attention.backends import triton
from vispe.attention.call import Call
from vispe.errors import OptionError, ShapeError

B, H, N, D = 2, 4, 5, 8


def qkv(kv_heads=H, dtype=torch.float32):
    return [torch.randn(B, h, N, D, dtype=dtype, requires_grad=True) for h in (H, kv_heads, kv_heads)]


def rotation(values=False, keys=False, layout="half", heads=1):
    angle, other = torch.randn(2, 1, heads, N, 3).unbind(0)
    tables = (other.cos() * 1.3, other.sin() * 1.3) if keys else None
    return PairRotation(angle.cos(), angle.sin(), layout, values, tables)


def blocks():
    matrices = torch.randn(4, 1, H, N, 2, 4, 4)
    return BlockTransform(q=matrices[0], k=matrices[1], v=matrices[2], out=matrices[3])


def test_a_chain_applies_its_transforms_in_order():
    q, k, v = qkv()
    first, second = blocks(), rotation(values=True)
    chain = Chain(first, second)
    assert torch.equal(chain.query(q), second.query(first.query(q)))
    assert torch.equal(chain.key(k), second.key(first.key(k)))
    assert torch.equal(chain.value(v), second.value(first.value(v)))
    assert torch.equal(chain.output(v), first.output(second.output(v)))
    for mine, other in zip(
        chain.inputs(q, k, v), (chain.query(q), chain.key(k), chain.value(v)), strict=True
    ):
        assert torch.equal(mine, other)


@cases("kv_heads", [H, 2])
def test_calibration_equals_its_formula(kv_heads):
    q, k, _ = qkv(kv_heads)
    q_up, q_down = torch.randn(H, D, 3, requires_grad=True), torch.randn(H, 3, D, requires_grad=True)
    k_up, k_down = torch.randn(kv_heads, D, D), torch.randn(kv_heads, D, D)
    turn = Calibrate(q_up, q_down, k_up, k_down)

    def formula(x, up, down):
        inner = torch.einsum("bhnd,hdr->bhnr", x, up)
        return x * (1 + torch.tanh(torch.einsum("bhnr,hrd->bhnd", inner * inner.sigmoid(), down)) / 2)

    torch.testing.assert_close(turn.query(q), formula(q, q_up, q_down))
    torch.testing.assert_close(turn.key(k), formula(k, k_up, k_down))
    cotangent = torch.randn(B, H, N, D)
    grads = [
        torch.autograd.grad(out, [q, q_up, q_down], cotangent)
        for out in (turn.query(q), formula(q, q_up, q_down))
    ]
    for mine, other in zip(*grads, strict=True):
        torch.testing.assert_close(mine, other)
    assert Calibrate(q_up, q_down).key(k) is k
    with pytest.raises(ShapeError, match="both matrices for keys, got only up"):
        Calibrate(q_up, q_down, k_up)
    assert turn.query(q.half()).dtype == torch.float16
    expected = formula(q, q_up, q_down)
    with torch.autocast("cpu", torch.bfloat16):  # which rounds none of it
        torch.testing.assert_close(turn.query(q), expected)


@cases("layout", ["half", "interleaved"])
@cases("values", [False, True])
def test_separate_tables_of_keys(layout, values):
    q, k, v = qkv()
    turn = rotation(values, True, layout)
    key_transform = turn.of_keys
    queries, keys = (
        PairRotation(turn.cos, turn.sin, layout),
        PairRotation(key_transform.cos, key_transform.sin, layout),
    )
    assert torch.equal(turn.query(q), queries.query(q))
    assert torch.equal(turn.key(k), keys.query(k))
    assert torch.equal(turn.value(v), keys.query(v) if values else v)
    back = PairRotation(turn.cos, -turn.sin, layout)
    assert torch.equal(turn.output(v), back.query(v) if values else v)
    for mine, other in zip(turn.inputs(q, k, v), (turn.query(q), turn.key(k), turn.value(v)), strict=True):
        assert torch.equal(mine, other)
    with pytest.raises(ShapeError, match="tables of the keys with the shape"):
        PairRotation(
            turn.cos, turn.sin, layout, keys=(key_transform.cos[..., :1], key_transform.sin[..., :1])
        )


@cases("backend", ["reference", "sdpa", "auto"])
def test_query_groups_with_separate_tables_share_keys(backend):
    q, k, v = qkv(kv_heads=2)
    angle, other = torch.randn(1, H, N, 3), torch.randn(1, 1, N, 3)
    turn = PairRotation(angle.cos(), angle.sin(), "half", keys=(other.cos(), other.sin()))
    out = attention(q, k, v, transform=turn, enable_gqa=True, backend=backend)
    k, v = (t.repeat_interleave(H // 2, 1) for t in (k, v))
    torch.testing.assert_close(out, attention(turn.query(q), turn.key(k), v, backend="reference"))


def test_a_quarter_turn_of_the_keys_gives_the_imaginary_part():
    """As complex numbers: Re(z conj w) and, rotated by 90 degrees, Im(z conj w)."""
    q, k, _ = (t.detach() for t in qkv())
    angle = torch.randn(1, 1, N, D // 2)
    plain = PairRotation(angle.cos(), angle.sin(), "half")
    rotated = PairRotation(angle.sin(), -angle.cos(), "half", keys=(angle.cos(), angle.sin()))
    z = torch.complex(*plain.query(q).chunk(2, -1))
    w = torch.complex(*plain.key(k).chunk(2, -1))
    product = z @ w.conj().mT
    torch.testing.assert_close(plain.query(q) @ plain.key(k).mT, product.real)
    torch.testing.assert_close(rotated.query(q) @ rotated.key(k).mT, product.imag)


@cases("magnitude", [None, "softplus"])
@cases("width", [D, 3])
def test_expansion_weighs_channels_by_cosines(magnitude, width):
    q, k, _ = qkv()
    a, b = torch.randn(2, 1, H, N, width).unbind(0)
    scores = []
    for layout in ("half", "interleaved"):
        turn = Expand(a.cos(), a.sin(), (b.cos(), b.sin()), magnitude, layout)
        assert turn.query(q).shape[-1] == D + width
        scores.append(turn.query(q) @ turn.key(k).mT)
    m = F.softplus if magnitude else lambda x: x
    weigh = torch.cos(a[:, :, :, None] - b[:, :, None])
    expected = (m(q[..., :width])[:, :, :, None] * m(k[..., :width])[:, :, None] * weigh).sum(-1)
    expected = expected + q[..., width:] @ k[..., width:].mT
    for actual in scores:
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ShapeError, match=f"{D + 1} angles, but head_dim is {D}"):
        Expand(*torch.randn(2, 1, 1, N, D + 1).unbind(0)).query(q)
    with pytest.raises(OptionError, match="magnitude must be None or 'softplus', got 'relu'"):
        Expand(a.cos(), a.sin(), magnitude="relu")
    with pytest.raises(ShapeError, match="for those of keys"):
        Expand(a, a, (a[..., :1], a[..., :1]))


@cases("backend", ["reference", "sdpa", "auto"])
def test_backends(backend):
    q, k, v = qkv()
    up = torch.randn(H, D, D)
    angle = torch.randn(1, 1, N, D)
    for turn in (
        Chain(Calibrate(up, up, up, up), Affine(q_mul=torch.tensor(2.0)), rotation(True, True)),
        Expand(angle.cos(), angle.sin(), magnitude="softplus"),
    ):
        actual = attention(q, k, v, transform=turn, scale=0.3, backend=backend)
        logits = 0.3 * turn.query(q) @ turn.key(k).mT
        expected = turn.output(logits.softmax(-1) @ turn.value(v))
        cotangent = torch.randn_like(expected)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
        grads = [torch.autograd.grad(out, [q, k, v], cotangent) for out in (actual, expected)]
        for mine, other in zip(*grads, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_fused_kernels_count_the_columns_that_a_transform_adds(monkeypatch):
    monkeypatch.setattr(triton, "device_unsupported_reason", lambda x: None)
    q = torch.randn(1, 2, 6, 80)
    angle = torch.randn(1, 1, 6, 80)
    wide = Expand(angle.cos(), angle.sin())
    for turn, refusal in (
        (None, None),
        (wide, "head_dim up to 128, got 160"),
        (Chain(Affine(), wide), "head_dim up to 128, got 160"),
    ):
        reason = triton.unsupported_reason(Call(q, q, q, transform=turn))
        assert reason == refusal if refusal is None else refusal in reason
