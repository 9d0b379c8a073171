"""spder, shifted_gaussian and sincos3d_points against their formulas, on free coordinates and on grids."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import cases
from vispe import Grid, Positions, create_encoding
from vispe.errors import OptionError, ShapeError

sides = st.integers(1, 4)


def centres_of(shape):
    """Return the cell centres as fractions of the field."""
    lines = [(torch.arange(n, dtype=torch.float64) + 0.5) / n for n in shape]
    return torch.stack(torch.meshgrid(*lines, indexing="ij"), -1).flatten(0, -2)


def close(a, b, tol=2e-5):
    torch.testing.assert_close(a.double(), b.double(), rtol=tol, atol=tol)


ALL = [
    ("spder", {"layers": 2, "hidden": 5}, 2),
    ("spder", {"project": False, "axes": 3}, 3),
    ("spder", {"axes": 1}, 1),
    ("shifted_gaussian", {}, 2),
    ("shifted_gaussian", {"project": True, "centres": 9, "axes": 3}, 3),
    ("shifted_gaussian", {"divisor": "batch", "axes": 1}, 1),
    ("sincos3d_points", {"features": 8}, 3),
    ("sincos3d_points", {"mlp": False}, 3),
]
SHAPES = {1: [(7,), (3,)], 2: [(3, 5), (4, 2)], 3: [(2, 3, 5), (1, 4, 2)]}


@cases(("name", "options", "axes"), ALL)
def test_tables_encode_the_centres_of_cells(name, options, axes):
    encoding = create_encoding(name, dim=12, **options)
    for shape in [*SHAPES[axes], SHAPES[axes][0]]:
        grid = Grid(shape, prefix=2, spacing=(3.0, 0.5, 1.5)[:axes])
        points = centres_of(shape).float()
        if name == "spder":
            points = 2 * points - 1
        if name == "sincos3d_points":
            points = points.flip(-1)
        table = encoding.table(grid.positions())
        assert table.shape == (1, grid.tokens, 12)
        assert (table[:, :2] == 0).all()
        close(table[0, 2:], encoding.encode(points))


@cases(("name", "options", "axes"), ALL)
def test_free_coordinates_and_normalize(name, options, axes):
    encoding = create_encoding(name, dim=12, normalize=False, **options)
    coords = torch.rand(2, 5, axes)
    expected = encoding.encode(coords.flip(-1) if name == "sincos3d_points" else coords)
    close(encoding.table(Positions(coords)), expected)
    field = torch.full((1, axes), 4.0)
    scaled = create_encoding(encoding.config | {"normalize": True})
    scaled.load_state_dict(dict(encoding.state_dict()))
    other = coords / 4 * 2 - 1 if name == "spder" else coords / 4
    close(
        scaled.table(Positions(coords, extent=field)),
        encoding.encode(other.flip(-1) if name == "sincos3d_points" else other),
    )


@cases(("name", "options", "axes"), ALL)
def test_dropped_tokens_and_gradients_to_coordinates(name, options, axes):
    encoding = create_encoding(name, dim=12, **options)
    pos = Grid(SHAPES[axes][0], prefix=1).positions()
    keep = torch.stack([torch.randperm(pos.tokens)[:3] for _ in range(4)])
    torch.testing.assert_close(encoding.table(pos.gather(keep)), encoding.table(pos)[0][keep])
    if options.get("divisor") != "batch":
        double = encoding.double()
        coords = torch.rand(1, 3, axes, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(lambda c: double.encode(c), coords)
    cotangent = torch.randn(1, pos.tokens, 12)
    for p in encoding.parameters():
        p.requires_grad_(True)
    out = encoding.table(pos)
    if out.requires_grad:
        out.backward(cotangent.to(out.dtype))
        assert all(p.grad.isfinite().all() and p.grad.abs().sum() > 0 for p in encoding.parameters())


@given(h=sides, w=sides, times=st.sampled_from([3, 5]))
def test_grids_of_odd_multiples_share_centres(h, w, times):
    for name in ("spder", "shifted_gaussian"):
        encoding = create_encoding(name, dim=8)
        small = encoding.table(Grid((h, w)).positions())[0].reshape(h, w, 8)
        large = encoding.table(Grid((times * h, times * w)).positions())[0].reshape(times * h, times * w, 8)
        close(large[times // 2 :: times, times // 2 :: times], small, 1e-4)


def test_spder_formula_and_zero():
    encoding = create_encoding("spder", dim=7, axes=2, hidden=4, layers=2, omega=5.0)
    x = torch.randn(6, 2)
    y = x.double()
    for layer in encoding.sines:
        u = 5 * (y @ layer.weight.double().t() + layer.bias.double())
        y = torch.tensor([[math.sin(v) * math.sqrt(abs(v)) for v in row] for row in u.tolist()]).double()
    close(encoding.encode(x), y @ encoding.to_dim.weight.double().t() + encoding.to_dim.bias.double(), 1e-4)
    layer = create_encoding("spder", dim=7, axes=2, project=False)
    with torch.no_grad():
        layer.sines[0].bias.zero_()
    zero = torch.zeros(3, 2, requires_grad=True)
    layer.encode(zero).backward(torch.randn(3, 7))
    assert zero.grad.abs().max() < 1e-12
    assert layer.sines[0].weight.grad.isfinite().all()


def test_spder_initialisation():
    torch.manual_seed(0)
    encoding = create_encoding("spder", dim=300, axes=3, layers=2, omega=30.0)
    first, second = (layer.weight.abs().max().item() for layer in encoding.sines)
    assert 0.9 / 3 < first <= 1 / 3
    bound = math.sqrt(6 / 300) / 30
    assert 0.9 * bound < second <= bound
    assert encoding.to_dim.weight.std().item() == pytest.approx(0.02, rel=0.1)


@cases("divisor", ["constant", "batch", "none"])
def test_shifted_gaussian_formula(divisor):
    encoding = create_encoding("shifted_gaussian", dim=11, centres=5, sigma=0.15, divisor=divisor)
    assert encoding.centre_points() == (0, 0.2, 0.4, 0.6, 0.8)
    x = torch.rand(9, 2)
    rows = torch.tensor(
        [[math.exp(-((v - k / 5) ** 2) / (2 * 0.15**2)) for v in p for k in range(5)] for p in x.tolist()]
    )
    middle = [math.exp(-((0.4 - k / 5) ** 2) / (2 * 0.15**2)) for k in range(5)] * 2
    scale = {
        "constant": math.sqrt(sum(m * m for m in middle)),
        "batch": rows.norm(dim=1).max().item(),
        "none": 1.0,
    }[divisor]
    result = encoding.encode(x)
    assert (result[:, 10] == 0).all()
    close(result[:, :10], rows / scale)
    one = encoding.encode(x[:1])
    assert torch.allclose(one, result[:1]) == (divisor != "batch")


def test_shifted_gaussian_accepts_centres():
    encoding = create_encoding("shifted_gaussian(centres=[0.1,0.9])", dim=4)
    assert encoding.centre_points() == (0.1, 0.9)
    assert create_encoding(encoding.config).centre_points() == (0.1, 0.9)


def test_sincos3d_points_formula():
    encoding = create_encoding("sincos3d_points", dim=26, features=8, temperature=100.0, mlp=False)
    p = torch.rand(4, 3)
    rows = []
    for point in p.tolist():
        row = []
        for c in (point[1], point[0], point[2]):
            for i in range(8):
                angle = 2 * math.pi * c / 100.0 ** (2 * (i // 2) / 8)
                row.append(math.cos(angle) if i % 2 else math.sin(angle))
        rows.append([*row, 0.0, 0.0])
    close(encoding.encode(p), torch.tensor(rows))
    mlp = create_encoding("sincos3d_points", dim=10, features=8, temperature=100.0)
    hidden = (encoding.encode(p)[:, :24] @ mlp.first.weight.t() + mlp.first.bias).clamp(min=0)
    close(mlp.encode(p), hidden @ mlp.second.weight.t() + mlp.second.bias)
    assert create_encoding("sincos3d_points", dim=10).first.in_features == 384


def test_stacked_layers_of_spder():
    spder = create_encoding("spder", dim=6, layers=2, hidden=5, project=False, omega=11.0)
    first, last = (
        create_encoding("spder", dim=d, axes=a, project=False, omega=11.0) for a, d in ((2, 5), (5, 6))
    )
    first.load_state_dict({f"sines.0.{n}": p for n, p in spder.sines[0].named_parameters()})
    last.load_state_dict({f"sines.0.{n}": p for n, p in spder.sines[1].named_parameters()})
    x = torch.rand(7, 2, requires_grad=True)
    close(last.encode(first.encode(x)), spder.encode(x))
    last.encode(first.encode(x)).sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in (x, *first.parameters(), *last.parameters()))
    with pytest.raises(ShapeError, match="spder needs 5-axis positions, got 2 axes"):
        last.table(Grid((2, 3)).positions())
    with pytest.raises(ShapeError, match=r"coordinates \(..., 5\), got \(7, 4\)"):
        last.encode(torch.rand(7, 4))


def test_half_precision_parameters_are_computed_in_float32():
    for name, options, axes in ALL:
        encoding = create_encoding(name, dim=12, **options)
        expected = encoding.bfloat16().float().encode(torch.full((2, axes), 0.3))
        assert torch.equal(encoding.bfloat16().encode(torch.full((2, axes), 0.3)), expected)


@cases(
    ("spec", "facts", "message"),
    [
        ("spder", {"dim": 0}, "dim needs an integer above 0, got dim=0"),
        ("spder(axes=4097)", {}, "axes needs an integer from 1 to 4096, got axes=4097"),
        ("shifted_gaussian(axes=4)", {}, "axes needs an integer from 1 to 3, got axes=4"),
        ("spder(axes=3)", {"grid": (2, 3)}, r"axes=2 for the grid \(2, 3\) of the model, got axes=3"),
        ("spder(layers=0)", {}, "layers needs an integer above 0, got layers=0"),
        ("spder(hidden=0)", {}, "hidden needs an integer above 0, got hidden=0"),
        ("spder(omega=-1)", {}, "omega needs a number above 0, got omega=-1"),
        ("spder(project=1)", {}, "project is true or false, got project=1"),
        ("spder(project=false,hidden=3)", {}, "hidden=3 has no effect on one layer with project=False"),
        ("spder(normalize=max)", {}, "normalize is true or false, got normalize='max'"),
        ("shifted_gaussian(sigma=0)", {}, "sigma needs a number above 0, got sigma=0"),
        ("shifted_gaussian(divisor=max)", {}, "divisor must be one of constant, batch, none, got 'max'"),
        ("shifted_gaussian(centres=7)", {}, "7 centres on each of 2 axes, which do not fit into dim=12"),
        (
            "shifted_gaussian(centres=0)",
            {},
            "centres needs an integer above 0, or a list of 1 or more finite numbers, got centres=0",
        ),
        (
            "shifted_gaussian(centres=[a])",
            {},
            "centres needs an integer above 0, or a list of 1 or more finite numbers, got centres=",
        ),
        (
            "shifted_gaussian(centres=[])",
            {},
            "centres needs an integer above 0, or a list of 1 or more finite numbers, got centres=",
        ),
        ("shifted_gaussian(project=2)", {}, "project is true or false, got project=2"),
        ("sincos3d_points", {"dim": 5}, "dim needs an integer of 6 or more, got dim=5"),
        (
            "sincos3d_points(features=3)",
            {},
            "features needs an integer above 0 and divisible by 2, got features=3",
        ),
        ("sincos3d_points(features=6,mlp=false)", {}, "3 x 6 features, which do not fit into dim=12"),
        ("sincos3d_points(temperature=0)", {}, "temperature needs a number above 0, got temperature=0"),
        ("sincos3d_points(mlp=2)", {}, "mlp is true or false, got mlp=2"),
    ],
)
def test_option_errors(spec, facts, message):
    with pytest.raises(OptionError, match=message):
        create_encoding(spec, **{"dim": 12, **facts})


def test_shape_errors():
    encoding = create_encoding("shifted_gaussian", dim=12)
    with pytest.raises(ShapeError, match="shifted_gaussian needs 2-axis positions, got 3 axes"):
        encoding.table(Grid((2, 2, 2)).positions())
    with pytest.raises(ShapeError, match=r"coordinates \(\.\.\., 2\), got \(4, 3\) torch.float32"):
        encoding.encode(torch.rand(4, 3))
    with pytest.raises(ShapeError, match=r"got \(4, 2\) torch.int64"):
        encoding.encode(torch.ones(4, 2, dtype=torch.int64))
