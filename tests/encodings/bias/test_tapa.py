"""tapa against its definition, pair by pair, and its invariances."""

import math

import pytest
import timm
import torch

from tests.cases import cases
from vispe import Grid, Positions, attention, create_encoding
from vispe.errors import BackendUnavailable, OptionError, ShapeError


def slow(q, k, coords, spatial, theta=0.5, alpha=0.1, spacing=1.0):
    """Return the logits (b, h, n, n), pair by pair."""
    b, heads, n, width = q.shape
    out, split = torch.zeros(b, heads, n, n, dtype=torch.float64), round(theta * width)
    for s in range(b):
        coord_list = (coords[s % len(coords)] * torch.tensor(spacing)).tolist()
        for h in range(heads):
            for i in range(n):
                for j in range(n):
                    x, y = q[s, h, i], k[s, h, j]
                    amplitude = (x[:split] * y[:split]).sum() / math.sqrt(theta * width)
                    phase = (x[split:] * y[split:]).sum() / math.sqrt((1 - theta) * width)
                    d = math.dist(coord_list[i], coord_list[j])
                    reach = d**alpha if d else 0.0
                    positioned = spatial[s % len(coords), i] and spatial[s % len(coords), j]
                    logit = amplitude * torch.cos(2 * math.pi * reach * phase)
                    out[s, h, i, j] = logit if positioned else (x * y).sum() / math.sqrt(width)
    return out


def content(tokens, width=6):
    return torch.randn(3, 2, 2, tokens, width, dtype=torch.float64).unbind()


@cases(
    ("grid", "options"),
    [
        (Grid((2, 3), 2), {}),
        (Grid((3, 3)), {"theta": 0.3, "alpha": 1.5}),
        (Grid((1, 4), 1), {"alpha": 0.0, "spacing": (2.0, 0.3)}),
        (Grid((5,), 1), {"theta": 0.7}),
        (Grid((2, 1, 2)), {"alpha": 0.5}),
    ],
)
def test_logits_and_backends(grid, options):
    pos, (q, k, v) = grid.positions(), content(grid.tokens)
    bias = create_encoding("tapa", dim=12, num_heads=2, **options).bias(pos, 0)
    expected = slow(q, k, pos.coords, pos.spatial, **options)
    # powers of distances are in float32, as coordinates of grids
    close = {"rtol": 1e-5, "atol": 1e-4}
    torch.testing.assert_close(bias.dense(q=q, k=k, scale=6**-0.5), expected, **close)
    for backend in ("reference", "sdpa", "auto"):
        actual = attention(q, k, v, bias=bias, backend=backend)
        torch.testing.assert_close(actual, expected.softmax(-1) @ v, **close)
    one = bias.dense(q=q, k=k, heads=slice(1, 2))
    torch.testing.assert_close(one, expected[:, 1:], **close)


def test_invariant_to_rigid_motions():
    encoding, (q, k, _) = create_encoding("tapa", dim=12, num_heads=2), content(5)
    positions = torch.randn(2, 5, 2, dtype=torch.float64) * 3
    angle = torch.tensor(37 * math.pi / 180, dtype=torch.float64)
    matrix = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()]).reshape(2, 2)
    transformed = positions @ matrix.T * torch.tensor([1.0, -1.0]) + torch.tensor([3.0, -7.0])
    first, second = (encoding.bias(Positions(p), 0).dense(q=q, k=k) for p in (positions, transformed))
    torch.testing.assert_close(first, second)


def test_alpha_of_zero_distinguishes_a_token_from_others_only():
    encoding, (q, k, _) = create_encoding("tapa(alpha=0)", dim=12, num_heads=2), content(4)
    near, far = (encoding.bias(Grid((4,), spacing=(s,)).positions(), 0).dense(q=q, k=k) for s in (1.0, 9.0))
    torch.testing.assert_close(near, far)


def test_gradients_reach_content_and_coordinates():
    encoding, (q, k, _) = create_encoding("tapa", dim=12, num_heads=2), content(4)
    positions = torch.randn(2, 4, 2, dtype=torch.float64)
    positions[:, 1] = positions[:, 0]  # two tokens in one position

    def dense(q, k, coords):
        return encoding.bias(Positions(coords), 0).dense(q=q, k=k)

    leaves = [x.requires_grad_() for x in (q, k, positions)]
    assert torch.autograd.gradcheck(lambda q, k: dense(q, k, positions.detach()), leaves[:2], fast_mode=True)
    out = dense(*leaves)
    grads = torch.autograd.grad((out * torch.randn_like(out)).sum(), leaves)
    assert all(g.isfinite().all() for g in grads)
    assert grads[2].any()


def test_a_vit():
    model = timm.create_model("test_vit", pos_embed="tapa", img_size=64)
    out = model(torch.randn(2, 3, 64, 64))
    out.backward(torch.randn_like(out))
    assert all(block.attn.qkv.weight.grad.any() for block in model.blocks)


def test_errors():
    for theta in (0.1, 0.9):
        with pytest.raises(
            OptionError, match=f"channels of both kinds, got theta={theta} of 4 channels per head"
        ):
            create_encoding("tapa", dim=8, num_heads=2, theta=theta)
    pos, q = Grid((2, 2)).positions(), torch.randn(1, 2, 4, 4)
    bias = create_encoding("tapa", dim=8, num_heads=2).bias(pos, 0)
    with pytest.raises(ShapeError, match=r"The logits of tapa need queries and keys.* Pass q and k"):
        bias.dense()
    with pytest.raises(BackendUnavailable):
        attention(q, q, q, bias=bias, backend="flex")
    with pytest.raises(ShapeError, match="tapa needs 1-axis positions, got 2 axes"):
        create_encoding("tapa(spacing=[2])", dim=8, num_heads=2).bias(pos, 0)


@cases("spec", ["tapa", "self_extend", "hope_hyperbolic"])
def test_logits_are_exact_under_autocast(spec):
    encoding, pos = create_encoding(spec, dim=16, num_heads=2), Grid((2, 3)).positions()
    q, k, _ = content(6, 8)
    q, k = q.float(), k.float()
    expected = encoding.bias(pos, 0).dense(q=q, k=k, scale=0.5)
    with torch.autocast("cpu", torch.bfloat16):
        actual = encoding.bias(pos, 0).dense(q=q, k=k, scale=0.5)
    assert torch.equal(actual, expected)
