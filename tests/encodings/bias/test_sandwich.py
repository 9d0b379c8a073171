"""sandwich against inner products of sinusoids, and on grids against sums of cosines."""

import math

import pytest
import torch

from tests.cases import cases
from tests.encodings.bias import offsets
from vispe import Grid, create_encoding
from vispe.errors import OptionError


def defined(width=128, base=10000.0, heads=offsets.HEADS):
    rates = [base ** (-2 * c / width) for c in range(width // 2)]
    return offsets.of_length(
        lambda d: [sum(math.cos(w * d) - 1 for w in rates) / (8 * h / heads) for h in range(1, heads + 1)]
    )


@cases("options", [{}, {"width": 6, "base": 50.0}, {"width": 20}])
def test_values(options):
    offsets.check_values(create_encoding("sandwich", num_heads=3, **options), defined(**options))


def test_it_is_the_product_of_sinusoids_on_a_line():
    positions = torch.arange(9.0).double()[:, None]
    angle = positions * 10000.0 ** (-torch.arange(64).double() / 64)
    table = torch.cat([angle.sin(), angle.cos()], -1)
    expected = (table @ table.T - 64) / (torch.arange(1, 5) * 2.0)[:, None, None]
    actual = create_encoding("sandwich", num_heads=4).bias(Grid((9,)).positions(), 0).dense()[0]
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


def test_routes_symmetry_and_masks():
    encoding = offsets.create("sandwich")
    offsets.check_routes(encoding, Grid((3, 4), 1))
    offsets.check_turned(encoding)
    pos = Grid((3, 4)).positions()
    assert encoding.bias(pos, 0).key == encoding.bias(pos, 3).key
    assert encoding.bias(pos, 0).key != offsets.create("sandwich(width=64)").bias(pos, 0).key
    assert not list(encoding.parameters())


def test_a_vit():
    offsets.check_vit("sandwich")


def test_option_errors():
    with pytest.raises(OptionError, match="width needs an integer above 0 and divisible by 2, got width=5"):
        create_encoding("sandwich(width=5)", num_heads=2)
