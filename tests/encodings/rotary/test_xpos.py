"""xPos against its definition, and the error for bidirectional attention."""

import itertools

import pytest
import torch

import vispe
from tests.cases import cases
from vispe import Grid, Positions, attention, create_encoding
from vispe.errors import ShapeError, UnsupportedCombination


def build(dim=16, **options):
    return create_encoding("xpos", dim=dim, num_heads=2, causal=True, **options)


def slow(encoding, positions, q, k):
    """Return scores (b, h, n, n) of tokens at `positions`."""
    pairs = q.shape[-1] // 2
    half = encoding.layout == "half"
    z, w = (torch.complex(*(t.chunk(2, -1) if half else (t[..., 0::2], t[..., 1::2]))) for t in (q, k))
    scores = q.new_zeros(*q.shape[:3], q.shape[2])
    for i, j, c in itertools.product(range(len(positions)), range(len(positions)), range(pairs)):
        offset = positions[i] - positions[j]
        zeta = (2 * c + 0.4 * 2 * pairs) / (1.4 * 2 * pairs)
        factor = torch.polar(zeta ** (offset / encoding.scale_base), offset * encoding.base ** (-c / pairs))
        scores[:, :, i, j] += (z[:, :, i, c] * w[:, :, j, c].conj() * factor).real
    return scores


@cases("options", [{}, {"layout": "half", "centre": "up", "scale_base": 4.0, "base": 20.0}])
@cases("n", [5, 6])
def test_scores_and_gradients(n, options):
    encoding = build(**options)
    positions = torch.randn(n, dtype=torch.float64) * 9
    q, k = (torch.randn(2, 2, n, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    transform = encoding.transform(Positions(positions[:, None]), 0)
    actual, expected = transform.query(q) @ transform.key(k).mT, slow(encoding, positions, q, k)
    cotangent = torch.randn_like(expected)
    sides = [torch.autograd.grad(side, [q, k], cotangent) for side in (actual, expected)]
    torch.testing.assert_close((actual, sides[0]), (expected, sides[1]))
    shifted = encoding.transform(Positions(positions[:, None] + 33.3), 0)
    torch.testing.assert_close(shifted.query(q) @ shifted.key(k).mT, expected)


def test_scale_is_one_in_the_middle_of_the_full_sequence():
    for centre, middle in (("down", 3), ("up", 4)):
        encoding = build(centre=centre, scale_base=3.0)
        pos = Grid((7,), prefix=2).positions()
        norm = (encoding.transform(pos, 0).cos.square() + encoding.transform(pos, 0).sin.square())[0, 0]
        torch.testing.assert_close(norm[[0, 1, 2 + middle]], torch.ones(3, 4))
        assert (norm[2 + middle + 1] < 1).all()
        keep = torch.tensor([[0, 8, 5], [1, 2, 3]])
        subset, x = encoding.transform(pos.gather(keep), 0), torch.randn(2, 2, 9, 8)
        for i in range(2):
            for side in ("query", "key"):
                full = getattr(encoding.transform(pos, 0), side)(x)
                torch.testing.assert_close(getattr(subset, side)(x[:, :, keep[i]])[i], full[i][:, keep[i]])


def test_backends_under_a_causal_mask():
    transform = build(scale_base=8.0).transform(Grid((9,), prefix=1).positions(), 0)
    q, k, v = torch.randn(3, 2, 2, 10, 8)
    outs = [attention(q, k, v, transform=transform, is_causal=True, backend=b) for b in ("reference", "sdpa")]
    torch.testing.assert_close(*outs)
    layer = vispe.Attention(16, 2, "xpos(causal=true)")
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    assert layer(torch.randn(1, 6, 16), (6,), attn_mask=mask).isfinite().all()


def test_bidirectional_attention_raises():
    with pytest.raises(
        UnsupportedCombination, match=r"Use causal=true if attention is causal, or rope_axial.alibi"
    ):
        create_encoding("xpos", dim=16, num_heads=2)
    with pytest.raises(ShapeError, match="xpos needs 1-axis positions, got 2 axes"):
        build().transform(Grid((2, 3)).positions(), 0)
    out = vispe.Attention(16, 2, "rope_axial+alibi")(torch.randn(1, 6, 16), (6,))  # what is named works
    assert out.isfinite().all()
