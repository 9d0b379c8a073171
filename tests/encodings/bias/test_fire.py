"""fire against its definition, on grids and as the causal original; threshold and initial values."""

import itertools
import math

import pytest
import torch

from tests.cases import cases
from tests.encodings.bias import offsets
from vispe import Grid, Positions, create_encoding
from vispe.errors import OptionError, ShapeError


def network(encoding, share):
    """Return the values of every head at a normalised distance, unit by unit."""
    state = {n: p.detach().double().tolist() for n, p in encoding.named_parameters()}
    units = [
        max(w[0] * share + b, 0.0) for w, b in zip(state["mlp.0.weight"], state["mlp.0.bias"], strict=True)
    ]
    return [
        sum(w * u for w, u in zip(row, units, strict=True)) + b
        for row, b in zip(state["mlp.2.weight"], state["mlp.2.bias"], strict=True)
    ]


def psi(encoding, x):
    return math.log(1 + abs(encoding.c.item() * x))


def defined(encoding):
    """Return a function of positions that gives the function of offsets."""

    def on(pos):
        corners = itertools.product(
            *([0.0, e - c] for e, c in zip(pos.extent[0].tolist(), pos.cell[0].tolist(), strict=True))
        )
        reach = max(max(math.hypot(*corner) for corner in corners), encoding.length)
        if reach == 0:
            reach = 1.0
        return lambda d: network(encoding, psi(encoding, math.hypot(*d)) / (psi(encoding, reach) + 1e-6))

    return on


def random_encoding(options="", **facts):
    encoding = offsets.create(f"fire({options})", grid=(3, 4), **facts)
    with torch.no_grad():
        encoding.mlp[2].weight.add_(torch.randn_like(encoding.mlp[2].weight))
        encoding.mlp[2].bias.add_(torch.randn_like(encoding.mlp[2].bias))
        encoding.mlp[0].bias.add_(torch.randn_like(encoding.mlp[0].bias) * 0.1)  # no kink at any distance
    return encoding


@cases("options", ["", "threshold=0,hidden=5", "threshold=100,init_c=2,hidden=7"])
def test_values(options):
    encoding = random_encoding(options)
    offsets.check_values(encoding, defined(encoding), by_field=True)


def test_routes_gradients_and_symmetry():
    encoding = random_encoding("hidden=6")
    offsets.check_routes(encoding, Grid((3, 4), 1))
    offsets.check_gradients(encoding, Grid((2, 3), 1))
    coords, extent = torch.rand(1, 9, 2).double() * 6, torch.tensor([[8.0, 8.0]]).double()
    rotated = coords @ torch.tensor([[0.6, 0.8], [-0.8, 0.6]]).double()
    result = [encoding.bias(Positions(c, extent=extent), 0).dense() for c in (coords, rotated)]
    torch.testing.assert_close(*result)


def test_samples_of_several_sizes():
    encoding = random_encoding()
    coords = torch.rand(2, 5, 2).double() * 4
    extent = torch.tensor([[5.0, 5.0], [9.0, 5.0]]).double()
    both = encoding.bias(Positions(coords, extent=extent), 0).dense()
    for i in range(2):
        one = encoding.bias(Positions(coords[i], extent=extent[i : i + 1]), 0).dense()
        torch.testing.assert_close(both[i : i + 1], one)
    assert not torch.equal(both[0], both[1])


def test_the_causal_original():
    encoding = random_encoding("causal=true,threshold=3,hidden=9")
    with torch.no_grad():
        encoding.L_multiplier.fill_(-1.5)
    pos = Grid((8,), 2).positions()
    actual = encoding.bias(pos, 0).dense()[0]
    assert not actual[:, :2].any()
    assert not actual[:, :, :2].any()
    for i, j in itertools.product(range(8), range(8)):
        share = psi(encoding, i - j) / (psi(encoding, max(4.5, i)) + 1e-6)
        expected = torch.tensor(network(encoding, share))
        torch.testing.assert_close(actual[:, i + 2, j + 2], expected, rtol=1e-4, atol=1e-5)
    offsets.check_gradients(encoding, Grid((6,), 1))


def test_the_threshold_is_half_the_training_diagonal():
    assert offsets.create("fire", grid=(4, 5)).length == pytest.approx(2.5)
    assert offsets.create("fire(spacing=[2,1],metric=manhattan)", grid=(4, 5)).length == pytest.approx(5)
    assert create_encoding("fire.causal", num_heads=2).length == 512
    assert create_encoding("fire", num_heads=2).length == 0
    small, large = Grid((3, 3)).positions(), Grid((8, 8)).positions()
    encoding = random_encoding("threshold=4")
    near = [encoding.bias(p, 0).dense()[0, :, 0, 1] for p in (small, Grid((2, 3)).positions(), large)]
    torch.testing.assert_close(near[0], near[1])  # below the threshold a step costs the same
    assert not torch.allclose(near[0], near[2])


def test_initial_bias_is_small():
    dense = offsets.create("fire", grid=(14, 14)).bias(Grid((14, 14)).positions(), 0).dense()
    assert 0 < dense.abs().max() < 0.5


def test_a_vit():
    offsets.check_vit("fire")


def test_errors():
    with pytest.raises(OptionError, match="have no effect with causal=True"):
        create_encoding("fire(causal=true,wrap=true)", num_heads=2)
    with pytest.raises(OptionError, match="eps needs a number above 0"):
        create_encoding("fire(eps=0)", num_heads=2)
    with pytest.raises(ShapeError, match="fire needs 1-axis positions, got 2 axes"):
        create_encoding("fire.causal", num_heads=2).bias(Grid((2, 2)).positions(), 0)
