"""Transforms against matrices written out in float64."""

import pytest
import torch

from tests.cases import cases
from vispe import Grid, create_encoding
from vispe.attention import Affine, BlockTransform, Expand, PairRotation, Transform, attention
from vispe.encodings.compose import transform_of
from vispe.errors import ShapeError

B, H, N, D = 2, 3, 5, 10


def tables(pairs, heads=1, batch=1, dtype=torch.float32):
    angle = torch.randn(batch, heads, N, pairs, dtype=dtype)
    return (
        angle,
        PairRotation(angle.cos(), angle.sin(), "half"),
        PairRotation(angle.cos(), angle.sin(), "interleaved"),
    )


def matrix(angle, layout):
    """Return the rotation (D, D) for the angles (pairs,) of one token."""
    pairs, full = len(angle), torch.eye(D, dtype=torch.float64)
    for c, a in enumerate(angle.double()):
        i, j = (c, c + pairs) if layout == "half" else (2 * c, 2 * c + 1)
        full[i, i] = full[j, j] = a.cos()
        full[i, j], full[j, i] = -a.sin(), a.sin()
    return full


@cases("layout", ["half", "interleaved"])
@cases(("pairs", "heads", "batch"), [(5, 1, 1), (3, 3, 1), (2, 1, 2), (1, 3, 2)])
def test_pair_rotation_is_a_rotation_matrix(layout, pairs, heads, batch):
    angle, half, interleaved = tables(pairs, heads, batch)
    turn = half if layout == "half" else interleaved
    x = torch.randn(B, H, N, D).requires_grad_()
    wide = angle.expand(B, H, -1, -1)
    expected = torch.stack(
        [
            torch.stack(
                [
                    torch.stack([matrix(wide[b, h, n], layout) @ x[b, h, n].double() for n in range(N)])
                    for h in range(H)
                ]
            )
            for b in range(B)
        ]
    )
    for actual in (turn.query(x), turn.key(x)):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(actual[..., 2 * pairs :], x[..., 2 * pairs :])
    torch.testing.assert_close(turn.query(x).norm(dim=-1), x.norm(dim=-1))
    inverse = PairRotation(turn.cos, -turn.sin, layout)
    torch.testing.assert_close(inverse.query(turn.query(x)), x, rtol=1e-5, atol=1e-5)
    zero = PairRotation(torch.ones_like(turn.cos), torch.zeros_like(turn.sin), layout)
    assert torch.equal(zero.query(x), x)
    assert turn.value(x) is x
    assert turn.output(x) is x


def test_scores_depend_on_differences_of_angles_only():
    rate, positions = torch.randn(4, dtype=torch.float64), torch.arange(N, dtype=torch.float64)
    q, k = (torch.randn(1, 1, 1, 8, dtype=torch.float64).expand(-1, -1, N, -1) for _ in range(2))
    for shift in (0.0, 3.7):
        angle = ((positions + shift)[:, None] * rate)[None, None]
        turn = PairRotation(angle.cos(), angle.sin(), "half")
        score = turn.query(q) @ turn.key(k).transpose(-1, -2)
        for offset in range(-N + 1, N):
            line = score[0, 0].diagonal(offset)
            torch.testing.assert_close(line, line[:1].expand_as(line))


@cases("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once_at_the_end(dtype):
    angle, turn, _ = tables(5)
    blocks = BlockTransform(q=torch.randn(1, 1, N, 2, 5, 5))
    affine = Affine(q_mul=torch.randn(1, 1, N, D), q_add=torch.randn(1, 1, N, D))
    expand = Expand(torch.randn(1, 1, N, D), torch.randn(1, 1, N, D))
    x = torch.randn(B, H, N, D).to(dtype)
    for transform in (turn, blocks, affine, expand):
        assert torch.equal(transform.query(x), transform.query(x.float()).to(dtype))
    del angle


def test_block_transform():
    parts = {name: torch.randn(1, H, N, 3, 3, 3) for name in ("q", "k", "v", "out")}
    transform = BlockTransform(**parts)
    x = torch.randn(B, H, N, D)
    for name, act in zip(
        parts, (transform.query, transform.key, transform.value, transform.output), strict=True
    ):
        m = parts[name]
        full = torch.stack([torch.stack([torch.block_diag(*m[0, h, n]) for n in range(N)]) for h in range(H)])
        expected = torch.cat([torch.einsum("hnij,bhnj->bhni", full, x[..., :9]), x[..., 9:]], -1)
        torch.testing.assert_close(act(x), expected, rtol=1e-5, atol=1e-5)
    separate = BlockTransform(k=parts["k"])
    assert separate.query(x) is x
    assert separate.value(x) is x


def test_affine_expand_identity():
    x = torch.randn(B, H, N, D)
    mul, add = torch.randn(1, 1, N, D), torch.randn(1, 1, N, D)
    torch.testing.assert_close(Affine(q_mul=mul, k_add=add).query(x), x * mul)
    torch.testing.assert_close(Affine(q_mul=mul, k_add=add).key(x), x + add)
    torch.testing.assert_close(Expand(mul, add).key(x), torch.cat([x * mul, x * add], -1))
    assert Transform().query(x) is Transform().key(x) is Transform().value(x) is Transform().output(x) is x


def test_errors():
    t = torch.zeros(1, 1, N, 4)
    with pytest.raises(ShapeError, match="layout must be 'half' or 'interleaved', got 'halved'"):
        PairRotation(t, t, "halved")
    with pytest.raises(
        ShapeError, match=r"equal shape \(b, h, n, pairs\), got \(1, 1, 5, 4\) and \(1, 1, 5, 3\)"
    ):
        PairRotation(t, t[..., :3], "half")
    with pytest.raises(ShapeError, match="PairRotation has 4 pairs of channels, but head_dim is 6"):
        PairRotation(t, t, "half").query(torch.zeros(1, 1, N, 6))
    with pytest.raises(ShapeError, match=r"needs q of shape \(b, h, n, blocks, s, s\), got \(1, 1, 5, 4\)"):
        BlockTransform(q=t)
    with pytest.raises(ShapeError, match="BlockTransform covers 12 channels, but head_dim is 6"):
        BlockTransform(v=torch.zeros(1, 1, N, 4, 3, 3)).value(torch.zeros(1, 1, N, 6))
    with pytest.raises(ShapeError, match="Expand needs cos and sin of equal shape"):
        Expand(t, t[..., :3])


@cases("key_heads", [1, 2])
@cases(
    "spec",
    [
        "rope_mixed",
        "rope_mixed(rotated=0.5)",
        "liere(block=3)",
        "string(block=3)",
        "rope_sphere",
        "pope(rotated=0.5)",
        "fope",
        "psc+rope_mixed",
        "seqpe",
    ],
)
def test_transforms_per_query_head_repeat_grouped_keys_and_values(spec, key_heads):
    encoding = create_encoding(spec, dim=32, num_heads=4, depth=1, grid=(2, 3)).eval()
    with torch.no_grad():
        for p in encoding.parameters():
            p.add_(torch.randn_like(p) * 0.3)
        transform = transform_of(encoding.parts(), Grid((2, 3), prefix=1).positions(), 0)
    inputs = [torch.randn(2, heads, 7, 8, requires_grad=True) for heads in (4, key_heads, key_heads)]
    q, k, v = inputs
    out = attention(q, k, v, transform=transform, enable_gqa=True)
    repeated = [t.repeat_interleave(4 // key_heads, 1) for t in (k, v)]
    expected = attention(q, *repeated, transform=transform)
    torch.testing.assert_close(out, expected)
    weights = torch.randn_like(out)
    for gradient, reference in zip(
        torch.autograd.grad((out * weights).sum(), inputs),
        torch.autograd.grad((expected * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(gradient, reference)
