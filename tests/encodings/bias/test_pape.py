"""pape against its definition, pair by pair, and the invariance of the radial form to every rotation."""

import math

import pytest
import timm
import torch
from torch.nn import functional as F

from tests.cases import cases
from vispe import Grid, Positions, attention, create_encoding
from vispe.errors import OptionError, ShapeError

RI = "pape.ri"


def build(spec="pape", **options):
    return create_encoding(spec, dim=12, num_heads=3, **options).double()


def definition(encoding, coords, x):
    """Return the bias by loops over heads, parabolas and pairs; coords (n, axes)."""
    n, heads, scale = len(coords), encoding.num_heads, (encoding.dim / encoding.num_heads) ** -0.5
    rows = []
    for sample in x:
        for h in range(heads):
            for i in range(n):
                for j in range(n):
                    gap, total = coords[j] - coords[i], 0
                    if encoding.form == "radial":
                        a = F.softplus(encoding.a.weight[h] @ sample[i])
                        total = -a * encoding.position_scales[0, h, 0, 0] ** 2 * (gap @ gap)
                    else:
                        count = encoding.parabolas or encoding.axes
                        a, b = (encoding.ab.weight @ sample[i]).reshape(2, heads, count)[:, h]
                        for m in range(count):
                            step = encoding.position.weight[h * count + m] @ gap
                            total = total - F.softplus(a[m]) * step**2 - b[m] * step
                    rows.append(scale * total)
    return torch.stack(rows).reshape(len(x), heads, n, n)


@cases("spec", ["pape", "pape(parabolas=1)", RI])
@cases("shape", [(3,), (2, 3), (2, 1, 2)])
def test_values_and_gradients(spec, shape):
    encoding = build(spec, axes=len(shape))
    pos = Grid(shape).positions()
    x = torch.randn(2, pos.tokens, 12, dtype=torch.float64, requires_grad=True)
    actual, expected = encoding.bias(pos, 0, x).dense(), definition(encoding, pos.coords[0].double(), x)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)
    leaves, cotangent = [x, *encoding.parameters()], torch.randn_like(actual)
    sides = (torch.autograd.grad(y, leaves, cotangent) for y in (actual, expected))
    torch.testing.assert_close(*sides, rtol=1e-6, atol=1e-7)


@cases("spec", ["pape", RI])
def test_spacing(spec):
    x = torch.randn(1, 6, 12, dtype=torch.float64)
    torch.manual_seed(0)
    encoding = build(spec, spacing=[2, 0.5])
    coords = Grid((2, 3)).positions().coords[0].double() * torch.tensor([2, 0.5])
    torch.testing.assert_close(
        encoding.bias(Grid((2, 3)).positions(), 0, x).dense(), definition(encoding, coords, x)
    )


@cases("spec", ["pape", RI])
def test_prefix_and_dropped_tokens(spec):
    encoding = build(spec)
    pos = Grid((3, 4), prefix=2).positions()
    x = torch.randn(2, 14, 12, dtype=torch.float64)
    dense = encoding.bias(pos, 0, x).dense()
    assert not dense[:, :, :2].any()
    assert not dense[..., :2].any()
    torch.testing.assert_close(
        dense[:, :, 2:, 2:], encoding.bias(Grid((3, 4)).positions(), 0, x[:, 2:]).dense()
    )
    keep = torch.tensor([[0, 1, 5, 13], [0, 1, 2, 9]])
    subset = encoding.bias(pos.gather(keep), 0, torch.stack([x[i, k] for i, k in enumerate(keep)])).dense()
    for i, indices in enumerate(keep):
        torch.testing.assert_close(subset[i], dense[i][:, indices][:, :, indices])


@cases("degrees", [37, 90, 201.5])
def test_radial_form_is_invariant_to_rotation_about_any_point(degrees):
    x = torch.randn(2, 9, 12, dtype=torch.float64)
    coords, centre = torch.rand(1, 9, 2, dtype=torch.float64) * 20, torch.randn(2, dtype=torch.float64)
    angle = math.radians(degrees)
    matrix = [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]
    matrix = torch.tensor(matrix, dtype=torch.float64)
    transformed = (coords - centre) @ matrix.T * torch.tensor([1.0, -1.0]) + 3
    for spec, same in ((RI, True), ("pape", False)):
        encoding = build(spec)
        base, rotated = (encoding.bias(Positions(c), 0, x).dense() for c in (coords, transformed))
        assert torch.allclose(base, rotated, rtol=1e-9, atol=1e-9) == same
        shifted = encoding.bias(Positions(coords + 5), 0, x).dense()
        torch.testing.assert_close(base, shifted, rtol=1e-9, atol=1e-9)


def test_radial_form_on_three_axes_is_invariant_to_rotation():
    x, coords = torch.randn(1, 7, 12, dtype=torch.float64), torch.randn(1, 7, 3, dtype=torch.float64)
    matrix = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))[0]
    encoding = build(RI, axes=3)
    torch.testing.assert_close(
        encoding.bias(Positions(coords), 0, x).dense(),
        encoding.bias(Positions(coords @ matrix), 0, x).dense(),
    )


@cases(("spec", "backend"), [("pape", "sdpa"), ("pape", "lowrank"), (RI, "sdpa")])
def test_backends_agree(spec, backend):
    encoding, pos = build(spec), Grid((3, 5), prefix=1).positions()
    x = torch.randn(2, 16, 12, dtype=torch.float64)
    q, k, v, cotangent = torch.randn(4, 2, 3, 16, 4, dtype=torch.float64)
    result = []
    for name in ("reference", backend):
        leaves = [x.clone().requires_grad_(), *encoding.parameters()]
        out = attention(q, k, v, bias=encoding.bias(pos, 0, leaves[0]), backend=name)
        result.append((out, *torch.autograd.grad(out, leaves, cotangent)))
    torch.testing.assert_close(*result, rtol=1e-6, atol=1e-7)


def test_precision_far_from_the_origin():
    encoding = build().float()
    x, grid = torch.randn(1, 300, 12), Grid((2, 150))
    result = encoding.bias(grid.positions(), 0, x).dense()
    exact = encoding.double().bias(grid.positions(), 0, x.double()).dense()
    assert (result - exact).abs().max() < 1e-5 * exact.abs().max()


@cases("spec", ["pape", RI])
def test_a_vit(spec):
    model = timm.create_model("test_vit", pos_embed=spec, img_size=64)
    for size in (64, 96):
        model.set_input_size((size, 64))
        out = model(torch.randn(2, 3, size, 64))
        torch.autograd.backward(out, torch.randn_like(out))
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_errors():
    with pytest.raises(OptionError, match=r"parabolas=2 has no effect with form='radial'"):
        build(RI, parabolas=2)
    with pytest.raises(OptionError, match=r"needs dim to be a multiple of num_heads, got dim=10"):
        create_encoding("pape", dim=10, num_heads=3)
    with pytest.raises(ShapeError, match=r"pape reads the tokens. Pass x"):
        build().bias(Grid((2, 3)).positions(), 0)
    with pytest.raises(ShapeError, match=r"pape needs 2-axis positions, got 3 axes .*Use pape\(axes=3\)"):
        build().bias(Grid((2, 3, 2)).positions(), 0)
