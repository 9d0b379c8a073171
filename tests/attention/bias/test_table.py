"""The table form of translation-invariant biases: values, gradients, dimensions, and distances at zero."""

import itertools

import pytest
import torch

from tests.attention import oracle
from tests.cases import cases, pairwise
from vispe import Grid, Positions, attention
from vispe.attention import DistanceBias, ProfileBias, SumBias, TableBias
from vispe.errors import ShapeError, UnsupportedCombination

METRICS = ("euclidean", "manhattan", "chebyshev", "squared")
GRIDS = [
    Grid((5,), prefix=1),
    Grid((3, 4), prefix=2),
    Grid((4, 4), spacing=(0.3, 0.7)),
    Grid((1, 6), prefix=1, spacing=(2.0, 0.1)),
    Grid((1, 1)),
    Grid((2, 3, 2), prefix=1, spacing=(2.0, 1.0, 0.5)),
]


@pairwise
@cases("grid", GRIDS, ids=lambda g: "x".join(map(str, g.shape)))
@cases("wrap", [False, True])
@cases("normalize", ["none", "max", "reference"])
@cases("metric", METRICS)
def test_distance_equals_its_table_and_the_definition(metric, normalize, wrap, grid):
    reference = (6, 5, 4)[: grid.axes] if normalize == "reference" else None
    slopes = torch.rand(3).requires_grad_()
    pos = grid.positions()
    bias = DistanceBias(slopes, pos, metric=metric, wrap=wrap, normalize=normalize, reference=reference)
    dense = bias.dense()
    matrix = oracle.distance_matrix(grid, metric, wrap, normalize, reference)
    torch.testing.assert_close(
        dense.double(), (-slopes.double()[:, None, None] * matrix)[None], rtol=1e-6, atol=1e-6
    )
    table = bias.table(grid)
    assert table.shape == (3, *(2 * n - 1 for n in grid.shape))
    read = TableBias(table, pos).dense()
    torch.testing.assert_close(read, dense, rtol=1e-6, atol=1e-6)
    cotangent = torch.randn_like(dense)
    direct, through = (torch.autograd.grad(x, slopes, cotangent)[0] for x in (dense, read))
    torch.testing.assert_close(through, direct, rtol=1e-5, atol=1e-5)
    expected = -(cotangent[0].double() * matrix).sum((1, 2))
    torch.testing.assert_close(direct.double(), expected, rtol=1e-5, atol=1e-5)


@cases("grid", GRIDS, ids=lambda g: "x".join(map(str, g.shape)))
@cases("edges", [False, True])
def test_gradient_of_a_table_is_exact(grid, edges):
    pos, heads = grid.positions(), 2
    values = torch.randn(heads, *(2 * n - 1 for n in grid.shape), dtype=torch.float64, requires_grad=True)
    prefix = torch.randn(heads, 3, dtype=torch.float64, requires_grad=True) if edges else None
    cotangent = torch.randn(1, heads, pos.tokens, pos.tokens, dtype=torch.float64)
    dense = TableBias(values, pos, prefix).dense()
    assert torch.equal(dense[0], oracle.table_matrix(values, grid, prefix))
    params = [values] if prefix is None else [values, prefix]
    grads = torch.autograd.grad(dense, params, cotangent)
    expected, wanted_edges = torch.zeros_like(values), torch.zeros(heads, 3, dtype=torch.float64)
    entries = oracle.table_entries(grid)
    for i, j in itertools.product(range(pos.tokens), repeat=2):
        if isinstance(entries[i][j], int):
            wanted_edges[:, entries[i][j]] += cotangent[0, :, i, j]
        else:
            expected[(slice(None), *entries[i][j])] += cotangent[0, :, i, j]
    torch.testing.assert_close(grads[0], expected, rtol=0, atol=1e-13)
    if edges:
        torch.testing.assert_close(grads[1], wanted_edges, rtol=0, atol=1e-13)


def test_softmax_gradient_sums_to_zero_over_all_offsets():
    # a constant added to every logit of a row changes nothing, so offsets and prefix entries cancel
    grid = Grid((3, 4), prefix=2)
    pos = grid.positions()
    values, prefix = torch.randn(3, 5, 7, requires_grad=True), torch.randn(3, 3, requires_grad=True)
    q, k, v = (torch.randn(2, 3, pos.tokens, 8) for _ in range(3))
    for backend in ("reference", "sdpa"):
        out = attention(q, k, v, bias=TableBias(values, pos, prefix), backend=backend)
        grads = torch.autograd.grad(out, (values, prefix), torch.randn_like(out))
        total = grads[0].sum((1, 2)) + grads[1].sum(1)
        assert total.abs().max() < 1e-5
        assert grads[0].abs().max() > 1e-3


def test_tables_of_profiles_and_sums():
    grid = Grid((3, 4), spacing=(2.0, 1.0))
    pos = grid.positions()
    profile = ProfileBias(torch.randn(3), torch.randn(1, 5, 7), pos)
    near = DistanceBias((0.5, 0.2, 0.1), pos)
    moved = DistanceBias((1.0,), pos, spacing=(1.0, 3.0))
    total = SumBias([profile, near, moved])
    for bias in (profile, near, moved, total):
        assert bias.invariant
        read = TableBias(bias.table(grid), pos).dense()
        torch.testing.assert_close(read.expand(1, 3, -1, -1), bias.dense().expand(1, 3, -1, -1))


def test_spacing_of_a_bias_replaces_that_of_any_positions():
    bias = DistanceBias((1.0,), None, spacing=(2.0, 1.0))
    for grid in (Grid((2, 3)), Grid((2, 3), spacing=(5.0, 7.0))):
        assert bias.dense(grid.positions())[0, 0, 0].tolist() == pytest.approx(
            [0, -1, -2, -2, -(5**0.5), -(8**0.5)]
        )
        assert bias.table(grid)[0, 0].tolist() == pytest.approx(
            [-(8**0.5), -(5**0.5), -2, -(5**0.5), -(8**0.5)]
        )


def test_biases_without_a_table_are_refused():
    pos = Grid((2, 2), prefix=1).positions()
    edged = TableBias(torch.zeros(1, 3, 3), pos, torch.zeros(1, 3))
    assert not edged.invariant
    with pytest.raises(UnsupportedCombination, match="depends on more than the offset"):
        edged.table(pos.grid)
    with pytest.raises(ShapeError, match=r"needs shape \(heads, 5, 3\)"):
        TableBias(torch.zeros(1, 3, 3)).table(Grid((3, 2)))


@cases("wrap", [False, True])
@cases("metric", METRICS)
def test_learned_coordinates_have_finite_gradients_at_distance_zero(metric, wrap):
    grid = Grid((3, 3), prefix=1)
    base = grid.positions()
    coords = base.coords.clone()
    coords[0, 4] = coords[0, 3]  # two tokens in one position
    coords.requires_grad_()
    pos = base.replace(coords=coords)
    bias = DistanceBias((0.5, 0.2), pos, metric=metric, wrap=wrap, normalize="max")
    assert not pos.static
    first, second = bias.dense(), bias.dense()
    assert first is not second
    grad = torch.autograd.grad(first, coords, torch.randn_like(first))[0]
    assert grad.isfinite().all()
    assert (grad[0, 0] == 0).all()  # the prefix token has no position
    assert torch.autograd.grad(bias.mask(torch.float32).sum(), coords)[0].isfinite().all()
    if metric != "chebyshev":  # which has edges where the largest axis changes
        free = torch.rand(1, 5, 2, dtype=torch.float64) * 4
        field = torch.tensor([[4.0, 4.0]], dtype=torch.float64)

        def run(x):
            return DistanceBias((1.0,), Positions(x, extent=field), metric=metric, wrap=wrap).dense()

        assert torch.autograd.gradcheck(run, (free.requires_grad_(),))


@cases("n", [2, 10, 38, 64])
@cases("spacing", [0.1, 0.3, 1 / 3, 0.7, 1.1, 14.0])
def test_the_divisor_survives_rounding_of_the_spacing(spacing, n):
    grid = Grid((n, 2), spacing=(spacing, spacing))
    bias = DistanceBias((1.0,), grid.positions(), metric="chebyshev", wrap=True, normalize="max")
    assert bias.dense().min().item() == pytest.approx(-1, abs=1e-5)
    assert bias.table(grid).min().item() == pytest.approx(-1, abs=1e-5)


def test_free_coordinates_beyond_the_field_wrap():
    field = torch.tensor([[4.0, 4.0]])
    inside = torch.rand(1, 6, 2) * 4
    outside = inside + torch.randint(-2, 3, (1, 6, 2)) * 4.0
    for metric in METRICS:
        a, b = (
            DistanceBias((1.0,), Positions(c, extent=field), metric=metric, wrap=True).dense()
            for c in (inside, outside)
        )
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_a_separate_field_for_each_sample():
    # images of different size packed in one batch: each is measured by its own extent
    grids = [Grid((2, 3)), Grid((3, 2)), Grid((1, 6))]
    coords = torch.cat([g.positions().coords for g in grids])
    extent = torch.tensor([[float(n) for n in g.shape] for g in grids])
    for wrap in (False, True):
        rule = {"metric": "euclidean", "wrap": wrap, "normalize": "max"}
        packed = DistanceBias((0.5, 0.2), Positions(coords, extent=extent), **rule).dense()
        for i, grid in enumerate(grids):
            torch.testing.assert_close(
                packed[i : i + 1], DistanceBias((0.5, 0.2), grid.positions(), **rule).dense()
            )
