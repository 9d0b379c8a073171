"""hope_hyperbolic against its definition with cosh and sinh, and where these would overflow."""

import math

import pytest
import timm
import torch

from tests.cases import cases
from vispe import Grid, Positions, attention, create_encoding
from vispe.errors import OptionError, ShapeError


def slow(encoding, q, k, coords, spatial, scale):
    """Return the logits (b, h, n, n), pair of channels by pair of channels."""
    b, heads, n, _ = q.shape
    out = torch.zeros(b, heads, n, n, dtype=torch.float64)
    decay = encoding.decay().tolist()
    spacing = encoding.spacing or (1.0,) * encoding.axes
    for s in range(b):
        for i in range(n):
            for j in range(n):
                if not (spatial[s % len(spatial), i] and spatial[s % len(spatial), j]):
                    out[s, :, i, j] = scale * (q[s, :, i] * k[s, :, j]).sum(-1)
                    continue
                used = 0
                for axis in range(encoding.axes):
                    gap = (
                        float(coords[s % len(coords), i, axis] - coords[s % len(coords), j, axis])
                        * spacing[axis]
                    )
                    for c in range(encoding.pairs):
                        w = encoding.temperature ** (-c / encoding.pairs)
                        q1, q2, k1, k2 = (
                            q[s, :, i, used],
                            q[s, :, i, used + 1],
                            k[s, :, j, used],
                            k[s, :, j, used + 1],
                        )
                        cosh, sinh = math.cosh(gap * w), math.sinh(gap * w)
                        pair = (q1 * k1 + q2 * k2) * cosh + (q1 * k2 + q2 * k1) * sinh
                        out[s, :, i, j] += scale * math.exp(-abs(gap) * decay[axis]) * pair
                        used += 2
                out[s, :, i, j] += scale * (q[s, :, i, used:] * k[s, :, j, used:]).sum(-1)
    return out


def content(tokens, width):
    return torch.randn(3, 2, 2, tokens, width, dtype=torch.float64).unbind()


def build(**options):
    encoding = create_encoding("hope_hyperbolic", **{"dim": 12, "num_heads": 2, **options}).double()
    with torch.no_grad():
        encoding.raw.normal_()
    return encoding


@cases(
    ("grid", "options"),
    [
        (Grid((2, 3), 2), {}),
        (Grid((3, 3)), {"dim": 16, "temperature": 10.0, "spacing": (0.5, 0.1)}),
        (Grid((5,), 1), {"axes": 1}),
        (Grid((2, 1, 2)), {"axes": 3, "dim": 16}),
    ],
)
def test_logits_and_backends(grid, options):
    encoding = build(**options)
    width = encoding.dim // 2
    pos, (q, k, v) = grid.positions(), content(grid.tokens, width)
    bias = encoding.bias(pos, 0)
    expected = slow(encoding, q, k, pos.coords, pos.spatial, 0.3)
    torch.testing.assert_close(bias.dense(q=q, k=k, scale=0.3), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        bias.dense(q=q, k=k, scale=0.3, heads=slice(1, 2)), expected[:, 1:], rtol=1e-5, atol=1e-5
    )
    for backend in ("reference", "sdpa", "auto"):
        actual = attention(q, k, v, bias=bias, scale=0.3, backend=backend)
        torch.testing.assert_close(actual, expected.softmax(-1) @ v, rtol=1e-5, atol=1e-5)


def test_a_line_is_a_line_in_the_plane():
    line, plane = build(axes=1, dim=12), build(axes=2, dim=24)
    with torch.no_grad():
        plane.raw.copy_(line.raw.expand(2))
    q, k, _ = content(4, 6)
    positions = torch.randn(2, 4, 1, dtype=torch.float64)
    zeros = torch.zeros_like(q)
    wide = [torch.cat([x, zeros], -1) for x in (q, k)]  # nothing in the channels of the second axis
    result = plane.bias(Positions(torch.cat([positions, positions * 3], -1)), 0).dense(
        q=wide[0], k=wide[1], scale=1.0
    )
    torch.testing.assert_close(result, line.bias(Positions(positions), 0).dense(q=q, k=k, scale=1.0))


def test_shifts_change_nothing_and_far_pairs_vanish():
    encoding, (q, k, _) = build(), content(5, 6)
    positions = torch.randn(2, 5, 2, dtype=torch.float64)
    first, second = (encoding.bias(Positions(p), 0).dense(q=q, k=k) for p in (positions, positions + 5))
    torch.testing.assert_close(first, second)
    far = encoding.float().bias(Grid((1, 900)).positions(), 0)
    ones = torch.ones(1, 2, 900, 6)
    scores = far.dense(q=ones, k=ones, heads=slice(0, 1))[0, 0, 0]
    assert scores.isfinite().all()  # cosh(900) is beyond float32
    assert (scores.diff() <= 0).all()


def test_gradients():
    encoding, (q, k, _) = build(), content(4, 6)
    positions = torch.randn(2, 4, 2, dtype=torch.float64)

    def dense(raw, coords, q, k):
        class Dense(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.encoding = encoding

            def forward(self):
                return encoding.bias(Positions(coords), 0).dense(q=q, k=k)

        return torch.func.functional_call(Dense(), {"encoding.raw": raw}, ())

    leaves = (encoding.raw.detach().clone(), positions, q, k)
    assert torch.autograd.gradcheck(dense, tuple(x.requires_grad_() for x in leaves), fast_mode=True)


def test_a_vit():
    model = timm.create_model("test_vit", pos_embed="hope_hyperbolic", img_size=64)
    out = model(torch.randn(2, 3, 64, 64))
    out.backward(torch.randn_like(out))
    assert all(block.attn.pos_enc.raw.grad is not None for block in model.blocks)
    assert model.blocks[0].attn.pos_enc.raw.grad.all()


def test_errors():
    with pytest.raises(OptionError, match="a pair of channels per axis, got 4 channels per head for 3 axes"):
        create_encoding("hope_hyperbolic", dim=8, num_heads=2, axes=3)
    with pytest.raises(OptionError, match=r"temperature needs a number of 1 or more, got temperature=0\.5"):
        create_encoding("hope_hyperbolic", dim=8, num_heads=2, temperature=0.5)
    with pytest.raises(
        ShapeError, match=r"needs 2-axis positions, got 1 axis .*\. Use hope_hyperbolic\(axes=1\)"
    ):
        build().bias(Grid((4,)).positions(), 0)
    with pytest.raises(ShapeError, match="logits of hope_hyperbolic need queries and keys"):
        build().bias(Grid((2, 2)).positions(), 0).dense()
