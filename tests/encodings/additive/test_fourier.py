"""fourier: values by loops, bases, ranges of coordinates, laws of the features, and refusals."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import cases
from vispe import Grid, Positions, create_encoding
from vispe.errors import OptionError, ShapeError

sides = st.integers(1, 7)
quick = settings(max_examples=30, deadline=None, derandomize=True)


def fourier(dim=8, dtype=torch.float64, **options):
    return create_encoding("fourier", dim=dim, **options).to(dtype)


@cases("two_pi", [True, False])
@cases("axes", [1, 2, 3])
def test_values_and_gradients(two_pi, axes):
    encoding = fourier(dim=9, axes=axes, two_pi=two_pi, learned=True, scale=2.0)
    x = torch.randn(2, 5, axes, dtype=torch.float64, requires_grad=True)
    actual = encoding.encode(x)
    factor = 2 * math.pi if two_pi else 1.0
    for b in range(2):
        for n in range(5):
            angles = [
                factor * sum(f * p for f, p in zip(row, x[b, n].tolist(), strict=True))
                for row in encoding.frequency.tolist()
            ]
            expected = [math.sin(a) for a in angles] + [math.cos(a) for a in angles] + [0.0]
            assert actual[b, n].tolist() == pytest.approx(expected, abs=1e-12)
    assert torch.autograd.gradcheck(encoding.encode, x)
    cotangent = torch.randn_like(actual)
    actual.backward(cotangent)
    angle = factor * x.detach() @ encoding.frequency.detach().t()
    inner = cotangent[..., :4] * angle.cos() - cotangent[..., 4:8] * angle.sin()
    torch.testing.assert_close(
        encoding.frequency.grad, factor * torch.einsum("bnm,bna->ma", inner, x.detach())
    )


def test_the_random_basis_is_stored_and_not_trained():
    torch.manual_seed(0)
    encoding = create_encoding("fourier(scale=3)", dim=20000)
    assert encoding.frequency.std().item() == pytest.approx(3.0, rel=0.02)
    assert not encoding.frequency.requires_grad
    assert set(encoding.state_dict()) == {"frequency"}
    assert create_encoding("fourier(learned=true)", dim=8).frequency.requires_grad
    assert create_encoding("fourier.tancik", dim=8).scale == 10
    before = encoding.frequency.clone()
    encoding.reset_parameters()
    assert not torch.equal(before, encoding.frequency)


def test_fixed_bases():
    x = torch.rand(6, 2, dtype=torch.float64)
    basic = fourier(basis="identity")
    assert not list(basic.parameters())
    angle = 2 * math.pi * x
    expected = torch.cat([angle.sin(), angle.cos(), torch.zeros(6, 4)], 1)
    torch.testing.assert_close(basic.encode(x), expected)
    octaves = fourier(dim=13, basis="octaves")  # 3 octaves, one channel left
    angle = torch.cat([x[:, a : a + 1] * math.pi * 2.0 ** torch.arange(3) for a in (0, 1)], 1)
    expected = torch.cat([angle.sin(), angle.cos(), torch.zeros(6, 1)], 1)
    torch.testing.assert_close(octaves.encode(x), expected)
    torch.testing.assert_close(fourier(dim=13, basis="octaves", learned=True).encode(x), expected)
    plain = fourier(basis="none", dim=3)
    torch.testing.assert_close(plain.encode(x), torch.cat([x, torch.zeros(6, 1)], 1))
    for name, basis in (("basic", "identity"), ("nerf", "octaves")):
        assert create_encoding(f"fourier.{name}", dim=8).basis == basis


def test_axes_have_different_codes():
    for encoding in (fourier(dim=16), fourier(dim=16, basis="identity"), fourier(dim=16, basis="octaves")):
        a, b = encoding.encode(torch.tensor([[0.0, 0.3], [0.3, 0.0]], dtype=torch.float64))
        assert (a - b).abs().max() > 0.01


def test_a_projection_starts_small():
    torch.manual_seed(0)
    encoding = create_encoding("fourier(project=true,features=64)", dim=500)
    assert encoding.to_dim.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert (encoding.to_dim.bias == 0).all()
    x = torch.rand(3, 2)
    angle = 2 * math.pi * x @ encoding.frequency.t()
    waves = torch.cat([angle.sin(), angle.cos()], -1)
    torch.testing.assert_close(encoding.encode(x), encoding.to_dim(waves))


@cases(
    ("normalize", "expected"),
    [
        ("field", lambda y, x: ((y + 0.5) / 3, (x + 0.5) / 5)),
        ("common", lambda y, x: ((y + 0.5) / 5, (x + 0.5) / 5)),
        ("reference", lambda y, x: ((y + 0.5) / 4, (x + 0.5) / 4)),
        ("corners", lambda y, x: (y - 1, x / 2 - 1)),
        ("none", lambda y, x: (y, x)),
    ],
)
def test_ranges_of_coordinates(normalize, expected):
    encoding = fourier(normalize=normalize, grid=(2, 4))
    pos = Grid((3, 5), prefix=2).positions()
    coords = encoding.place(pos)[0, 2:]
    cells = [expected(y, x) for y in range(3) for x in range(5)]
    torch.testing.assert_close(coords, torch.tensor(cells, dtype=torch.float32))
    torch.testing.assert_close(
        encoding.table(pos)[0, 2:], encoding.encode(coords.double()), rtol=0, atol=1e-5
    )
    keep = torch.tensor([[0, 1, 7, 3]])
    torch.testing.assert_close(encoding.table(pos.gather(keep))[0], encoding.table(pos)[0, keep[0]])
    if normalize == "reference":
        arguments = Grid((3, 5), reference=(8, 2)).positions()
        torch.testing.assert_close(encoding.place(arguments)[0], (arguments.coords[0] + 0.5) / 8)
        with pytest.raises(ShapeError, match="normalize='reference' needs the shape of the training grid"):
            fourier(normalize="reference").table(Positions(torch.zeros(1, 2, 2)))
    if normalize == "corners":
        assert (encoding.place(Grid((1, 1)).positions()) == -1).all()


@quick
@given(h=sides, w=sides, factor=st.sampled_from([3, 5]))
def test_the_same_field_has_the_same_code_at_other_resolutions(h, w, factor):
    encoding = fourier()
    small = encoding.table(Grid((h, w)).positions())[0].reshape(h, w, 8)
    fine = encoding.table(Grid((h * factor, w * factor)).positions())[0].reshape(h * factor, w * factor, 8)
    middle = factor // 2  # centres coincide for odd factors
    torch.testing.assert_close(fine[middle::factor, middle::factor], small, rtol=0, atol=1e-5)


@quick
@given(
    h=sides,
    w=sides,
    basis=st.sampled_from(["gaussian", "identity", "octaves"]),
    normalize=st.sampled_from(["field", "common", "reference", "corners", "none"]),
)
def test_products_depend_on_offsets_only(h, w, basis, normalize):
    encoding = fourier(basis=basis, normalize=normalize, grid=(3, 4))
    table = encoding.table(Grid((h + 1, w + 1)).positions())[0].double()
    product = (table @ table.t()).reshape(h + 1, w + 1, h + 1, w + 1)
    torch.testing.assert_close(product[1:, 1:, 1:, 1:], product[:-1, :-1, :-1, :-1], rtol=0, atol=1e-4)


def test_expected_products_depend_on_distance():
    torch.manual_seed(0)
    encoding = fourier(dim=40000, scale=0.7)
    x = torch.tensor([[0.0, 0.0], [0.3, 0.0], [0.0, 0.3], [-0.18, 0.24]], dtype=torch.float64)
    waves = encoding.encode(x)
    product = waves[1:] @ waves[0] / 20000
    expected = math.exp(-2 * math.pi**2 * 0.7**2 * 0.09)
    assert product.tolist() == pytest.approx([expected] * 3, abs=0.02)


def test_half_precision_parameters():
    low = fourier(dtype=torch.bfloat16, scale=10.0)
    exact = fourier(scale=10.0)
    exact.load_state_dict(low.state_dict())
    x = torch.rand(50, 2)
    result = low.encode(x)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), exact.encode(x.double()), rtol=0, atol=1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(low.encode(x), result)


@cases(
    ("options", "message"),
    [
        ({"dim": 0}, "dim needs an integer above 0, got dim=0"),
        ({"axes": 4}, "axes needs an integer from 1 to 3, got axes=4"),
        ({"axes": 3, "grid": (2, 2)}, r"axes=2 for the grid \(2, 2\) of the model, got axes=3"),
        (
            {"normalize": "unit"},
            "normalize must be one of field, common, reference, corners, none, got 'unit'",
        ),
        ({"basis": "random"}, "basis must be one of gaussian, identity, octaves, none, got 'random'"),
        ({"two_pi": 1}, "two_pi is true or false, got two_pi=1"),
        ({"learned": 1}, "learned is true or false, got learned=1"),
        ({"project": "yes"}, "project is true or false, got project='yes'"),
        ({"scale": 0}, "scale needs a number above 0, got scale=0"),
        ({"basis": "identity", "scale": 2}, "scale=2 has no effect with basis='identity'"),
        ({"basis": "none", "learned": True}, "learned and two_pi have no effect with basis='none'"),
        ({"features": 7}, "even number of features, got features=7"),
        ({"features": 10}, "10 features, which do not fit into dim=8. Use fewer, or project=true"),
        (
            {"basis": "octaves", "features": 6},
            "a multiple of 4 features with basis='octaves', got features=6",
        ),
        ({"basis": "identity", "features": 8}, "exactly 4 features with basis='identity', got features=8"),
        ({"basis": "none", "features": 3}, "exactly 2 features with basis='none', got features=3"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(OptionError, match=message):
        fourier(**options)


def test_shapes_are_checked():
    with pytest.raises(ShapeError, match=r"floating-point coordinates \(..., 2\), got \(3, 3\)"):
        fourier().encode(torch.zeros(3, 3))
    with pytest.raises(ShapeError, match="fourier needs 2-axis positions, got 1 axis"):
        fourier().table(Grid((3,)).positions())
