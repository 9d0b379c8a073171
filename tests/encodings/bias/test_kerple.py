"""kerple against its definition, the constraints on its rates, and weighted logits."""

import math

import pytest
import torch
from torch.nn import functional as F

from tests.cases import cases
from tests.encodings.bias import offsets
from vispe import Grid, Positions, attention, create_encoding
from vispe.errors import OptionError, ShapeError


def rates(encoding):
    """Return p and a of every head as numbers."""
    top = 2.0 if encoding.kernel == "power" else None
    p, a = encoding.p.detach().double(), encoding.a.detach().double()
    if encoding.positive == "clamp":
        return p.clamp(0.01, top).tolist(), a.clamp(min=0.01).tolist()
    return (2 * p.sigmoid() if top else F.softplus(p)).tolist(), F.softplus(a).tolist()


def defined(encoding):
    p, a = rates(encoding)
    if encoding.kernel == "log":
        return lambda d: [-x * math.log(1 + y * d) for x, y in zip(p, a, strict=True)]
    return lambda d: [-y * d**x if d else 0.0 for x, y in zip(p, a, strict=True)]


@cases("positive", ["softplus", "clamp"])
@cases("kernel", ["log", "power"])
def test_values(kernel, positive):
    encoding = offsets.create(f"kerple.{kernel}(positive={positive})")
    with torch.no_grad():
        encoding.p.add_(torch.tensor([-2.5, 0.0, 2.5]))
    offsets.check_values(encoding, offsets.of_length(defined(encoding)))


@cases("kernel", ["log", "power"])
def test_gradients_routes_and_symmetry(kernel):
    encoding = offsets.create(f"kerple.{kernel}")
    offsets.check_routes(encoding, Grid((3, 4), 1))
    offsets.check_turned(encoding)
    offsets.check_gradients(encoding, Grid((2, 3), 1))


def test_gradients_of_coordinates_are_finite():
    coords = (torch.rand(1, 4, 2, dtype=torch.float64) * 3).requires_grad_()
    for kernel in ("log", "power"):
        bias = offsets.create(f"kerple.{kernel}").bias(Positions(coords), 0).dense()
        assert torch.autograd.grad(bias, coords, torch.randn_like(bias))[0].isfinite().all()


def test_both_constraints_start_equally():
    for kernel in ("log", "power"):
        slopes = []
        for positive in ("softplus", "clamp"):
            torch.manual_seed(3)
            p, a = rates(offsets.create(f"kerple.{kernel}(positive={positive})"))
            slopes.append(torch.tensor([p, a]))
        torch.testing.assert_close(*slopes, rtol=1e-5, atol=1e-6)
        assert (slopes[0] > 0).all()
        assert (slopes[0] < torch.tensor([[2.0], [1.0]])).all()


@cases("positive", ["softplus", "clamp"])
def test_rates_start_uniformly_up_to_their_bounds(positive):
    encoding = create_encoding("kerple", num_heads=500, positive=positive)
    for rate, bound in zip(map(torch.tensor, rates(encoding)), (2.0, 1.0), strict=True):
        assert 0 < rate.min() < 0.02 * bound
        assert 0.98 * bound < rate.max() < bound


def test_clamped_rates_outside_the_bounds_learn():
    encoding = offsets.create("kerple(positive=clamp,eps=0.5)")
    with torch.no_grad():
        encoding.a.fill_(-3.0)
    dense = encoding.bias(Grid((2, 3)).positions(), 0).dense()
    torch.testing.assert_close(dense[0, :, 0, 2], -encoding.p.clamp(min=0.5) * math.log(2.0))
    dense.sum().backward()
    assert (encoding.a.grad != 0).all()
    assert encoding.a.eq(-3).all()


def test_weighted_logits():
    grid = Grid((2, 3), 1)
    encoding, q, k = offsets.create("kerple.power(weighted=true)"), *torch.randn(2, 2, 3, 7, 8)
    bias = encoding.bias(grid.positions(), 0)
    p, a = 2 * encoding.weight_p.sigmoid(), F.softplus(encoding.weight_a)
    weight = offsets.slow(
        grid.positions(),
        offsets.of_length(
            lambda d: [-y * d**x if d else 0.0 for x, y in zip(p.tolist(), a.tolist(), strict=True)]
        ),
    )
    expected = 0.4 * (q @ k.transpose(-1, -2)).double() * weight.exp()
    expected = expected + offsets.slow(grid.positions(), offsets.of_length(defined(encoding)))
    torch.testing.assert_close(bias.dense(q=q, k=k, scale=0.4).double(), expected, rtol=1e-5, atol=1e-5)
    actual = attention(q, k, k, bias=bias, scale=0.4)
    torch.testing.assert_close(actual, (expected.softmax(-1) @ k.double()).float())
    part = bias.dense(q=q, k=k, scale=0.4, heads=slice(1, 3)).double()
    torch.testing.assert_close(part, expected[:, 1:], rtol=1e-5, atol=1e-5)
    offsets.check_gradients(encoding, grid, lambda b: b.dense(q=q.double(), k=k.double(), scale=0.4))
    with pytest.raises(ShapeError, match="q, k and scale"):
        bias.dense()


def test_a_vit():
    offsets.check_vit("kerple.power")


@cases(
    ("options", "message"),
    [
        ("eps=0.1", "eps=0.1 has no effect with positive='softplus'. Omit it"),
        ("kernel=cubic", "kernel must be one of log, power, got 'cubic'"),
        ("reference=[3,4]", "has no effect with normalize='none'"),
        ("normalize=reference,reference=[3,4],spacing=[1]", "needs one number for each of 1 axis"),
        ("spacing=[1,1,1,1]", "kerple needs 1 or 2 or 3 axes, got spacing="),
    ],
)
def test_option_errors(options, message):
    with pytest.raises(OptionError, match=message):
        create_encoding(f"kerple({options})", num_heads=2)


def test_spacing_fixes_the_axes():
    encoding = offsets.create("kerple(spacing=[2,0.5])")
    wide = encoding.bias(Grid((3, 4)).positions(), 0).dense()
    torch.testing.assert_close(wide, encoding.bias(Grid((3, 4), spacing=(2.0, 0.5)).positions(), 0).dense())
    with pytest.raises(ShapeError, match="kerple needs 2-axis positions, got 1 axis"):
        encoding.bias(Grid((3,)).positions(), 0)
