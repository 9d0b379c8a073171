"""FoPE against its definition, pair by pair."""

import itertools
import math

import pytest
import timm
import torch

from tests.cases import cases
from vispe import Grid, Positions, attention, create_encoding
from vispe.errors import OptionError, ShapeError


def slow(encoding, grid, head, cell):
    """Return cosines and sines of the pairs of one head at one cell, the last axis first."""
    pairs, axes = encoding.dim // encoding.num_heads // 2, grid.axes
    share = pairs // axes
    freqs = [encoding.base ** (-c / share) for c in range(share)]
    fast = [w for w in freqs if w >= 2 * math.pi / encoding.train_length]
    tables = []
    for wave, coef in ((math.cos, encoding.cos_coef), (math.sin, encoding.sin_coef)):
        table = []
        for axis in reversed(range(axes)):
            matrix = coef[axis, head]
            assert matrix.shape == (len(fast), max(min(len(fast), share // 2), 1))
            for o in range(share):
                if o < matrix.shape[1]:
                    total = matrix[:, o].sum() if encoding.norm else 1
                    table.append(
                        sum(wave(cell[axis] * w) * m for w, m in zip(fast, matrix[:, o], strict=True)) / total
                    )
                else:
                    table.append(torch.ones((), dtype=coef.dtype))
        tables.append(torch.stack([*table, *[torch.ones_like(table[0])] * (pairs - len(table))]))
    return tables


@cases(
    ("shape", "prefix", "options"),
    [
        ((2, 3), 2, {}),
        ((5,), 0, {"axes": 1, "norm": True, "base": 20.0, "train_length": 64.0}),
        ((2, 1, 3), 1, {"axes": 3, "layout": "interleaved"}),
        ((3, 2), 0, {"base": 3.0, "layout": "interleaved"}),
    ],
)
def test_formula_and_gradients(shape, prefix, options):
    encoding = create_encoding("fope", dim=32, num_heads=2, trainable=True, **options).double()
    grid = Grid(shape, prefix=prefix)
    pos = Positions(grid.positions().coords.double(), grid.positions().spatial)
    x = torch.randn(2, 2, grid.tokens, 16, dtype=torch.float64, requires_grad=True)
    transform = encoding.transform(pos, 0)
    assert torch.equal(transform.query(x)[:, :, :prefix], x[:, :, :prefix])
    expected = torch.zeros_like(x)
    first, second = (
        (slice(0, 8), slice(8, 16)) if encoding.layout == "half" else (slice(0, 16, 2), slice(1, 16, 2))
    )
    for h, (n, cell) in itertools.product(range(2), enumerate(itertools.product(*map(range, shape)), prefix)):
        cos, sin = slow(encoding, grid, h, cell)
        a, b = x[:, h, n, first], x[:, h, n, second]
        expected[:, h, n, first], expected[:, h, n, second] = a * cos - b * sin, b * cos + a * sin
    expected[:, :, :prefix] = x[:, :, :prefix]
    leaves, cotangent = [x, encoding.cos_coef, encoding.sin_coef], torch.randn_like(x)
    for side in ("query", "key"):
        actual = getattr(transform, side)(x)
        grads = [torch.autograd.grad(y, leaves, cotangent, retain_graph=True) for y in (actual, expected)]
        torch.testing.assert_close((actual, grads[0]), (expected, grads[1]))


def test_initial_frequencies_and_parameters():
    torch.manual_seed(0)
    encoding = create_encoding("fope", dim=256, num_heads=4, axes=1, base=20.0)
    assert encoding.frequencies().shape == encoding.cos_coef.shape[2:3] == (18,)  # of 32, and 16 mixtures
    assert encoding.cos_coef.shape == (1, 4, 18, 16)
    assert not any(p.requires_grad for p in encoding.parameters())
    chosen = torch.zeros(18, 16)
    chosen[range(0, 18, 2), range(9)] = 1
    noise = encoding.sin_coef - chosen
    assert noise.std().item() == pytest.approx(0.3 * math.sqrt(2 / 34), rel=0.1)
    assert abs(noise.mean().item()) < 0.01
    assert create_encoding("fope.text", dim=128, num_heads=2).axes == 1


def test_backends_spacing_and_dropped_tokens():
    encoding = create_encoding("fope", dim=32, num_heads=2, spacing=[2.0, 0.5]).eval()
    pos = Grid((3, 4), prefix=1).positions()
    q, k, v = torch.randn(3, 2, 2, 13, 16)
    with torch.no_grad():
        transform = encoding.transform(pos, 0)
        outs = [attention(q, k, v, transform=transform, backend=b) for b in ("reference", "sdpa")]
        torch.testing.assert_close(*outs)
        plain = create_encoding("fope", dim=32, num_heads=2).eval()
        plain.load_state_dict(dict(encoding.state_dict()))
        spaced = plain.transform(Grid((3, 4), prefix=1, spacing=(2.0, 0.5)).positions(), 0)
        torch.testing.assert_close(spaced.query(q), transform.query(q))
        keep = torch.tensor([[0, 12, 7], [0, 3, 4]])
        gathered = torch.stack([q[i][:, keep[i]] for i in range(2)])
        subset = encoding.transform(pos.gather(keep), 0).query(gathered)
        for i in range(2):
            torch.testing.assert_close(subset[i], transform.query(q)[i][:, keep[i]])


def test_a_vit():
    model = timm.create_model("test_vit", pos_embed="fope(trainable=true)", img_size=(48, 64))
    out = model(torch.randn(2, 3, 48, 64))
    out.backward(torch.randn_like(out))
    grads = [p.grad for name, p in model.named_parameters() if "_coef" in name]
    assert grads
    assert all(g.abs().sum() > 0 for g in grads)


def test_errors():
    with pytest.raises(
        OptionError,
        match=r"fope uses waves with a period of at most train_length=6, .* Choose train_length=7 or more",
    ):
        create_encoding("fope", dim=32, num_heads=2, train_length=6)
    with pytest.raises(OptionError, match=r"fope\(axes=3\) needs a pair of channels per axis .* got 2 pairs"):
        create_encoding("fope", dim=8, num_heads=2, axes=3)
    with pytest.raises(ShapeError, match="fope needs 2 axes, for its 8 pairs"):
        create_encoding("fope", dim=32, num_heads=2).transform(Grid((3,)).positions(), 0)
