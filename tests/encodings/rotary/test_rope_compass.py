"""rope_compass: the rotation of rope_mixed with frequencies in polar form, its initial values and its mixing."""

import math

import pytest
import scipy.fft
import torch

from tests.cases import cases
from vispe import Grid, create_encoding
from vispe.errors import ShapeError


def build(**options):
    torch.manual_seed(0)
    encoding = create_encoding("rope_compass", **{"dim": 40, "num_heads": 2, **options})
    # away from the start
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter += 0.5 * torch.randn_like(parameter)
    return encoding


@cases("options", [{}, {"mixing": "none"}, {"dim": 48, "rotated": 0.5}, {"layout": "half"}])
def test_rotation_is_that_of_mixed_rope_with_the_same_frequencies(options):
    encoding = build(**options)
    shared = {name: value for name, value in options.items() if name != "mixing"}
    mixed = create_encoding("rope_mixed", **{"dim": 40, "num_heads": 2, **shared})
    magnitudes = encoding.magnitudes.detach().double()
    angles = encoding.angle_parameters.detach().double()
    if options.get("mixing") != "none":
        spectrum = scipy.fft.fft(angles.numpy(), norm="ortho")
        angles = torch.from_numpy(spectrum.real - spectrum.imag)
    with torch.no_grad():
        mixed.freqs.copy_(torch.stack([magnitudes * angles.cos(), magnitudes * angles.sin()]))
    for shape in ((3, 5), (7, 2)):
        pos = Grid(shape, prefix=1).positions()
        x = torch.randn(1, 2, pos.tokens, options.get("dim", 40) // 2)
        expected = mixed.transform(pos, 0).query(x)
        torch.testing.assert_close(encoding.transform(pos, 0).query(x), expected, rtol=1e-4, atol=1e-4)


@cases("mixing", ["dft", "none"])
def test_initial_values(mixing):
    torch.manual_seed(0)
    encoding = create_encoding("rope_compass", dim=4096, num_heads=4, mixing=mixing)
    expected = torch.tensor([10 ** (-i / 512) for i in range(512)])
    torch.testing.assert_close(encoding.magnitudes.detach(), expected.expand(4, 512))
    # uniform on the circle: neither the mean direction nor that of twice the angle (an axis) stands out
    angles = encoding.directions().detach()
    for times in (1, 2, 4):
        mean = torch.exp(1j * times * angles).mean()
        assert mean.abs() < 3 / math.sqrt(angles.numel())
    assert -1e-3 <= angles.min() < 0.05
    assert 2 * math.pi - 0.05 < angles.max() <= 2 * math.pi + 1e-3


@cases("mixing", ["dft", "none"])
def test_mixing_makes_angles_depend_on_all_parameters_of_a_head(mixing):
    encoding = build(mixing=mixing)
    (gradient,) = torch.autograd.grad(encoding.directions()[1, 3], encoding.angle_parameters)
    assert not gradient[0].any()
    assert gradient[1].count_nonzero() == (10 if mixing == "dft" else 1)


def test_magnitudes_do_not_change_directions():
    encoding = build()
    before = encoding.frequencies().detach()
    with torch.no_grad():
        encoding.magnitudes.mul_(3)
    torch.testing.assert_close(encoding.frequencies().detach(), 3 * before)


def test_tables_follow_the_parameters():
    encoding, pos = build().eval(), Grid((3, 4)).positions()
    x = torch.randn(1, 2, 12, 20)
    with torch.no_grad():
        before = encoding.transform(pos, 0).query(x)
        encoding.load_state_dict(create_encoding("rope_compass", dim=40, num_heads=2).state_dict())
        assert not torch.allclose(encoding.transform(pos, 0).query(x), before)


def test_errors():
    with pytest.raises(ShapeError, match="rope_compass"):
        build().transform(Grid((2, 2, 2)).positions(), 0)
