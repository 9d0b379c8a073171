"""Orthogonal functions of the position: against numpy and scipy, norms, order, turned grids, gradients, errors."""

import math

import numpy as np
import pytest
import torch
from numpy.polynomial import chebyshev, legendre

import vispe
from tests.cases import cases
from vispe import Grid, Positions, create_encoding
from vispe.encodings.additive.fixed import legendre as orthogonal
from vispe.errors import OptionError, ShapeError

BASES = ["legendre", "chebyshev", "haar", "zernike"]


def built(basis="legendre", shape=(4, 5), dim=16, **options):
    torch.manual_seed(0)
    return create_encoding("legendre", dim=dim, grid=shape, basis=basis, **options)


@cases("degree", [0, 1, 2, 7, 30])
def test_polynomials_are_those_of_numpy(degree):
    t = np.linspace(-1, 1, 41)
    values = [
        torch.cat(f(torch.tensor(t), degree, False), -1) for f in (orthogonal.legendre, orthogonal.chebyshev)
    ]
    for actual, expected in zip(
        values, (legendre.legvander(t, degree), chebyshev.chebvander(t, degree)), strict=True
    ):
        np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-11, atol=1e-12)
        assert np.abs(actual.numpy()).max() <= 1 + 1e-12


def test_norms_are_one():
    # quadratures that are exact for these degrees
    nodes, weights = legendre.leggauss(40)
    line = torch.cat(orthogonal.legendre(torch.tensor(nodes), 9, True), -1).numpy()
    np.testing.assert_allclose((line * weights[:, None]).T @ line, np.eye(10), atol=1e-12)
    nodes, weights = chebyshev.chebgauss(40)
    line = torch.cat(orthogonal.chebyshev(torch.tensor(nodes), 9, True), -1).numpy()
    np.testing.assert_allclose((line * weights[:, None]).T @ line, np.eye(10), atol=1e-12)
    cells = Grid((32,)).positions().coords[0, :, 0].double()
    line = torch.cat(orthogonal.haar((2 * cells + 1) / 32 - 1, 5, True), -1)
    torch.testing.assert_close(line.T @ line * 2 / 32, torch.eye(32, dtype=torch.float64))


def test_zernike_is_orthonormal_on_the_disc_and_like_scipy():
    jacobi = pytest.importorskip("scipy.special").eval_jacobi
    nodes, weights = legendre.leggauss(30)
    radius, angle = np.sqrt((nodes + 1) / 2), np.arange(40) * 2 * np.pi / 40
    r, phi = np.meshgrid(radius, angle, indexing="ij")
    positions = torch.tensor(np.stack([r * np.sin(phi), r * np.cos(phi)], -1))
    actual = orthogonal.zernike(positions, 6, True).numpy()
    # area element: r dr dphi = d(r^2) / 2 dphi
    measure = np.broadcast_to((weights / 4)[:, None, None] * 2 * np.pi / 40, (*r.shape, 1))
    gram = np.einsum("abi,abj->ij", actual * measure, actual)
    np.testing.assert_allclose(gram, np.eye(28), atol=1e-12)
    plain, i = orthogonal.zernike(positions, 6, False).numpy(), 0
    for n in range(7):
        for m in range(-n, n + 1, 2):
            k, a = (n - abs(m)) // 2, abs(m)
            wave = np.cos(m * phi) if m >= 0 else np.sin(a * phi)
            expected = r**a * jacobi(k, 0, a, 2 * r**2 - 1) * wave
            np.testing.assert_allclose(plain[..., i], expected, atol=1e-12)
            i += 1
    assert np.abs(plain).max() <= 1 + 1e-12


@cases("shape", [(7,), (4, 6), (5, 3), (1, 1), (2, 3, 4)])
@cases("orthonormal", [False, True])
def test_features_are_products_by_total_degree_then_falling_degree(shape, orthonormal):
    encoding = built(shape=shape, degree=3, orthonormal=orthonormal)
    actual = encoding.features(encoding.place(Grid(shape).positions()))[0]
    centres = [(np.arange(n) + 0.5) / n * 2 - 1 for n in shape]
    scale = np.sqrt((2 * np.arange(4) + 1) / 2) if orthonormal else np.ones(4)
    lines = [legendre.legvander(c, 3) * scale for c in centres]
    orders = sorted(
        (d for d in np.ndindex(*(4,) * len(shape)) if sum(d) <= 3), key=lambda d: (sum(d), [-k for k in d])
    )
    expected = []
    for cell in np.ndindex(*shape):
        expected.append([math.prod(lines[a][cell[a], d[a]] for a in range(len(shape))) for d in orders])
    np.testing.assert_allclose(actual.numpy(), np.array(expected), atol=1e-12)


def test_haar_is_local_and_halves_hold_their_lower_end():
    values = torch.cat(orthogonal.haar(torch.tensor([-1.0, -0.5, 0.0, 0.5, 1.0]), 2, False), -1)
    assert values.tolist() == [
        [1, 1, 1, 0],
        [1, 1, -1, 0],
        [1, -1, 0, 1],
        [1, -1, 0, -1],
        [1, -1, 0, -1],
    ]


def test_a_turned_square_mixes_zernike_functions_of_one_order_only():
    encoding = built("zernike", shape=(5, 5), degree=5)
    pos = Grid((5, 5)).positions()
    features = encoding.features(encoding.place(pos))[0]
    rotated = features.unflatten(0, (5, 5)).rot90(1, (0, 1)).flatten(0, 1)
    i = 0
    for n in range(6):
        for m in range(-n, n + 1, 2):
            a, j = abs(m), i - m  # j: where -m is
            cos, sin = math.cos(a * math.pi / 2), math.sin(a * math.pi / 2)
            result = rotated[:, i]
            # rows run down, so this turn brings the angle phi to phi plus or minus a quarter
            options = [cos * features[:, i] + s * sin * features[:, j] for s in (1, -1)]
            assert any(torch.allclose(result, o, atol=1e-9) for o in options), (n, m)
            i += 1
    # and radii are equal in all poses
    assert torch.allclose(rotated[:, 4], features[:, 4])


@cases("basis", BASES)
@cases("shape", [(3, 4), (9, 2), (40, 40)])
def test_every_grid_is_mapped_to_the_same_domain(basis, shape):
    encoding = built(basis, shape=(4, 5))
    coords = encoding.place(Grid(shape, prefix=2).positions())[0, 2:]
    reach = coords.square().sum(-1).sqrt() if basis == "zernike" else coords.abs()
    assert reach.max() < 1
    assert torch.allclose(coords.mean(0), torch.zeros(2, dtype=torch.float64), atol=1e-12)
    assert encoding.table(Grid(shape, prefix=2).positions()).abs().max() < 1  # nothing grows
    spaced = encoding.table(Grid(shape, spacing=(0.5, 0.5)).positions())
    torch.testing.assert_close(spaced, encoding.table(Grid(shape).positions()))


def test_the_table_is_a_linear_map_of_gained_functions():
    encoding = built(degree=2).double()
    pos = Grid((3, 5), prefix=1).positions()
    with torch.no_grad():
        encoding.gain.copy_(torch.tensor([2.0, 3.0, 5.0]))
    features = encoding.features(encoding.place(pos))
    gained = features * torch.tensor([2.0, 3, 3, 5, 5, 5]).double()
    expected = torch.nn.functional.linear(gained, encoding.to_dim.weight, encoding.to_dim.bias)
    actual = encoding.table(pos)
    torch.testing.assert_close(actual[:, 1:], expected[:, 1:], rtol=1e-6, atol=1e-7)
    assert not actual[:, 0].any()
    assert built(degree=2).gain.tolist() == pytest.approx([6**-0.5] * 3)


@cases("basis", ["legendre", "chebyshev", "zernike"])
def test_gradients(basis):
    encoding = built(basis, degree=4, dim=3).double()
    # the centre of the field is among the points
    points = torch.tensor([[[0.0, 0.0], [0.3, -0.6], [-0.5, 0.2]]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(encoding.encode, (points,), fast_mode=True)
    parameters = tuple(encoding.parameters())
    cotangent = torch.randn(1, 3, 3, dtype=torch.float64)
    grads = torch.autograd.grad(encoding.encode(points), parameters, cotangent)
    features = encoding.features(points.detach())
    torch.testing.assert_close(
        grads[1], torch.einsum("bnd,bnf->df", cotangent, features * encoding.gain[encoding._totals])
    )


def test_dtypes():
    encoding = built()
    pos = Grid((4, 5)).positions()
    exact = built().double().table(pos.replace(coords=pos.coords.double()))
    assert encoding.table(pos).dtype == torch.float32
    assert exact.dtype == torch.float64
    torch.testing.assert_close(encoding.table(pos).double(), exact, rtol=1e-5, atol=1e-7)


@cases(
    ("options", "message"),
    [
        ({"degree": -1}, "degree needs an integer of 0 or more, got degree=-1"),
        ({"basis": "haar", "degree": 12}, r"degree=12, basis='haar' has \d+ features, more than 4096"),
        ({"basis": "bessel"}, "basis must be one of legendre, chebyshev, haar, zernike"),
        ({"basis": "zernike", "shape": (4,)}, "basis='zernike' needs 2 axes, got 1"),
    ],
)
def test_options(options, message):
    with pytest.raises(OptionError, match=message):
        built(**options)


@cases("basis", BASES)
def test_positions_outside_the_domain_raise(basis):
    encoding = built(basis)
    with pytest.raises(
        ShapeError, match=r"legendre needs positions in .*, got one at 1\.\d* from the centre"
    ):
        encoding.encode(torch.tensor([[1.5, 0.0]]))
    inside = Positions(torch.tensor([[[0.0, 0.0], [3.0, 4.0]]]), extent=torch.tensor([[4.0, 5.0]]))
    assert encoding.table(inside).shape == (1, 2, 16)
    with pytest.raises(ShapeError, match="whose extent contains all coordinates"):
        encoding.table(inside.replace(coords=inside.coords + 3))


def test_a_timm_model():
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    options = {"img_size": 32, "patch_size": 8, "depth": 1, "embed_dim": 24, "num_heads": 3, "num_classes": 2}
    model = timm.create_model(
        "vit_tiny_patch16_224", pos_embed="legendre(degree=3)", dynamic_img_size=True, **options
    )
    for size in ((32, 32), (32, 56)):
        out = model(torch.randn(2, 3, *size))
        out.backward(torch.randn_like(out))
    assert model.pos_enc.gain.grad.abs().min() > 0
    assert vispe.describe(model)
