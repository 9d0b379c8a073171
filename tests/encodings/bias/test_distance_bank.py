"""distance_bank against a loop over pairs."""

import pytest
import timm
import torch

from tests.cases import cases
from vispe import Grid, Positions, attention, create_encoding
from vispe.errors import OptionError, ShapeError

FACTS = {"dim": 12, "num_heads": 3}


def build(**options):
    return create_encoding({"name": "distance_bank", "basis": 4, **options}, **FACTS).double()


def tokens(count, batch=2):
    return torch.randn(batch, count, 12, dtype=torch.float64).requires_grad_()


def slow(encoding, pos, x, step=(1.0, 1.0, 1.0)):
    """Return the bias (b, h, n, n), pair by pair, for positions of one sample."""
    gates = encoding.gates(x).unflatten(-1, (3, 4))  # b n h r
    n, reach, out = pos.tokens, encoding.max_dist, []
    for i in range(n):
        for j in range(n):
            offset = (pos.coords[0, i] - pos.coords[0, j]) * torch.tensor(step[: pos.axes])
            entry = None
            if pos.spatial[0, i] and pos.spatial[0, j]:
                if encoding.over == "offset":
                    steps = [round(float(a)) for a in offset]
                    if all(abs(s) < reach for s in steps):
                        table = encoding.distance_bank.unflatten(1, (2 * reach - 1,) * pos.axes)
                        entry = table[(slice(None), *(s + reach - 1 for s in steps))]
                elif not (encoding.causal and offset[0] < 0):
                    distance = round(float(offset.double().norm()))
                    entry = encoding.distance_bank[:, distance] if distance < reach else None
            out.append(gates.new_zeros(2, 3) if entry is None else gates[:, i] @ entry)
    return torch.stack(out, -1).unflatten(-1, (n, n))


@cases(
    ("options", "grid"),
    [
        ({"causal": True, "max_dist": 4}, Grid((6,), 1)),
        ({"max_dist": 3}, Grid((3, 4), 2)),
        ({}, Grid((2, 3, 2), 1)),
        ({"over": "offset", "max_dist": 3}, Grid((4, 2), 1)),
        ({"over": "offset", "max_dist": 2, "grid": (3,)}, Grid((4,))),
        ({"over": "offset", "max_dist": 2, "grid": (2, 2, 2)}, Grid((2, 3, 2))),
        ({}, Grid((1, 1))),
    ],
)
def test_values_and_gradients(options, grid):
    encoding, x, pos = build(**options), tokens(grid.tokens), grid.positions()
    actual, expected = encoding.bias(pos, 0, x).dense(), slow(encoding, pos, x)
    torch.testing.assert_close(actual, expected)
    cotangent, leaves = torch.randn_like(actual), [x, *encoding.parameters()]
    ours = torch.autograd.grad(actual, leaves, cotangent)
    torch.testing.assert_close(ours, torch.autograd.grad(expected, leaves, cotangent))


def test_spacing_and_a_second_grid():
    encoding = build(spacing=(2.0, 0.5), max_dist=7)
    for shape in ((3, 4), (5, 2)):
        pos, x = Grid(shape).positions(), tokens(shape[0] * shape[1])
        torch.testing.assert_close(encoding.bias(pos, 0, x).dense(), slow(encoding, pos, x, (2.0, 0.5)))


def test_rotated_samples():
    encoding, x = build(), tokens(9)
    coords = torch.rand(1, 9, 2, dtype=torch.float64) * 6
    angle = torch.tensor(37.0, dtype=torch.float64).deg2rad()
    matrix = torch.stack([torch.stack([angle.cos(), -angle.sin()]), torch.stack([angle.sin(), angle.cos()])])
    dense = encoding.bias(Positions(coords), 0, x).dense()
    torch.testing.assert_close(encoding.bias(Positions(coords @ matrix + 3), 0, x).dense(), dense)
    mirrored = coords * torch.tensor([1.0, -1.0], dtype=torch.float64)
    torch.testing.assert_close(encoding.bias(Positions(mirrored), 0, x).dense(), dense)


def test_dropped_tokens_and_backends():
    encoding, x, pos = build(), tokens(13), Grid((3, 4), 1).positions()
    keep, rows = torch.tensor([[0, 3, 8, 1], [0, 12, 5, 6]]), torch.arange(2)[:, None]
    dense = encoding.bias(pos, 0, x).dense()
    subset = encoding.bias(pos.gather(keep), 0, x[rows, keep]).dense()
    for b in range(2):
        torch.testing.assert_close(subset[b], dense[b][:, keep[b]][:, :, keep[b]])
    q, k, v = torch.randn(3, 2, 3, 13, 4, dtype=torch.float64)
    bias = encoding.bias(pos, 0, x)
    expected = ((q @ k.mT) / 2 + dense).softmax(-1) @ v
    for backend in ("reference", "sdpa"):
        torch.testing.assert_close(attention(q, k, v, bias=bias, backend=backend), expected)


def test_a_vit():
    spec = "distance_bank(basis=3,max_dist=6)"
    model = timm.create_model("test_vit", pos_embed=spec, img_size=(48, 32), num_classes=3)
    model(torch.randn(2, 3, 48, 32)).square().sum().backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if "distance_bank" in name)


def test_errors():
    with pytest.raises(OptionError, match=r"over='offset' has no effect with causal=True"):
        build(causal=True, over="offset")
    with pytest.raises(OptionError, match=r"spacing needs one number per axis \(\(1,\)\)"):
        build(causal=True, spacing=(1.0, 2.0))
    with pytest.raises(ShapeError, match="needs 1 axis with causal=True, got 2 axes"):
        build(causal=True).bias(Grid((2, 3)).positions(), 0, tokens(6))
    with pytest.raises(ShapeError, match="distance_bank needs 2-axis positions, got 1 axis"):
        build(over="offset").bias(Grid((3,)).positions(), 0, tokens(3))
    with pytest.raises(ShapeError, match=r"reads the tokens. Pass x"):
        build().bias(Grid((2, 3)).positions(), 0)
