"""rollpe against torch.roll, the Fourier shift theorem and RoPE with frequencies in equal steps."""

import math

import pytest
import timm
import torch

from tests.cases import cases
from vispe import Grid, Positions, attention, create_encoding
from vispe.errors import OptionError, ShapeError


def build(**options):
    return create_encoding("rollpe", **{"dim": 36, "num_heads": 2, **options})


@cases(
    ("shapes", "options", "channels"),
    [
        (((3, 5), (12, 2)), {}, 9),
        (((2, 3), (1, 1)), {"dim": 40, "speed": -2.0}, 9),
        (((5,), (29,)), {"axes": 1, "dim": 16}, 7),
        (((2, 3, 2), (1, 2, 4)), {"axes": 3, "head_dim": 11}, 3),
    ],
)
def test_whole_positions_are_rolls(shapes, options, channels):
    encoding = build(**options)
    width = options.get("head_dim", options.get("dim", 36) // 2)
    for shape in shapes:
        pos = Grid(shape, prefix=2).positions()
        x = torch.randn(2, 2, pos.tokens, width, dtype=torch.float64)
        transform = encoding.transform(pos, 0)
        actual, expected = transform.query(x), x.clone()
        for token in range(2, pos.tokens):
            for axis, step in enumerate(pos.coords[0, token].tolist()):
                part = slice(axis * channels, (axis + 1) * channels)
                shift = round(step * options.get("speed", 1))
                expected[:, :, token, part] = x[:, :, token, part].roll(shift, -1)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(actual, transform.key(x))
        assert torch.equal(actual[:, :, :2], x[:, :, :2])


def test_positions_between_integers_shift_the_phase_of_every_wave():
    encoding = build(dim=22, axes=1)  # 11 channels
    coords = torch.tensor([[[0.3], [-7.25], [40.5]]], dtype=torch.float64)
    x = torch.randn(1, 2, 3, 11, dtype=torch.float64)
    actual = encoding.transform(Positions(coords), 0).query(x)
    waves = torch.arange(6, dtype=torch.float64)
    phase = torch.exp(-2j * math.pi * waves * coords / 11)
    expected = torch.fft.irfft(torch.fft.rfft(x) * phase[:, None], 11)
    torch.testing.assert_close(actual, expected)


def test_equals_rope_in_the_fourier_basis():
    encoding = build(dim=18, axes=1)  # 9 channels, 4 waves
    coords = 5 * torch.randn(1, 6, 1, dtype=torch.float64)
    q, k = torch.randn(2, 1, 2, 6, 9, dtype=torch.float64)
    transform = encoding.transform(Positions(coords), 0)
    actual = transform.query(q) @ transform.key(k).mT
    expected = torch.zeros_like(actual)
    offset = coords - coords.mT
    q_waves, k_waves = torch.fft.rfft(q, norm="ortho"), torch.fft.rfft(k, norm="ortho")
    for wave in range(5):
        pair = q_waves[..., wave, None] * k_waves[..., wave, None].conj().mT
        weight = 2.0 if wave else 1.0
        expected += weight * (pair * torch.exp(-2j * math.pi * wave / 9 * offset)).real
    torch.testing.assert_close(actual, expected)


def test_the_period():
    encoding, x = build(), torch.randn(1, 2, 2, 18, dtype=torch.float64)
    coords = torch.tensor([[[1.0, 2], [1 + 9, 2 - 18]]], dtype=torch.float64)
    rolls = encoding.rolls(Positions(coords))
    torch.testing.assert_close(rolls[:, :, 0], rolls[:, :, 1])
    assert encoding.transform(Positions(coords), 0).query(x).shape == x.shape


def test_precision_of_far_positions():
    encoding, m = build(dim=22, axes=1), 11
    near, far = (encoding.rolls(Positions(torch.tensor([[[x]]]))) for x in (2.5, 2.5 + m * 2**15))
    torch.testing.assert_close(near, far, rtol=0, atol=0)


@cases("backend", ["reference", "sdpa"])
def test_gradients(backend):
    encoding = build(dim=12)
    pos = Positions(torch.randn(2, 4, 2, dtype=torch.float64))
    tensors = torch.randn(3, 2, 2, 4, 6, dtype=torch.float64).unbind()

    def out(q, k, v):
        return attention(q, k, v, transform=encoding.transform(pos, 0), backend=backend)

    leaves = tuple(x.clone().requires_grad_() for x in tensors)
    assert torch.autograd.gradcheck(out, leaves, fast_mode=True)


def test_a_vit():
    model = timm.create_model("test_vit", pos_embed="rollpe", img_size=64).eval()
    out = model(torch.randn(2, 3, 64, 64))
    out.backward(torch.randn_like(out))
    assert model.blocks[0].attn.qkv.weight.grad.any()


def test_errors():
    with pytest.raises(
        OptionError, match=r"rollpe needs 3 channels per head and axis or more, got head_dim=5"
    ):
        build(dim=10)
    with pytest.raises(OptionError, match=r"rollpe needs a speed other than 0"):
        build(speed=0)
    with pytest.raises(OptionError, match=r"spacing needs one number for each of 2 axes"):
        build(spacing=(1.0,))
    with pytest.raises(ShapeError, match=r"got 3 axes .*\. Use rollpe\(axes=3\)"):
        build().transform(Grid((2, 2, 2)).positions(), 0)
