"""Functions of distance: the table of a grid, other positions, and gradients of parameters of the function."""

import pytest
import torch

from tests.attention import oracle
from tests.cases import cases
from vispe import Grid, attention
from vispe.attention import DistanceBias, RadialBias
from vispe.attention.backends import blocked
from vispe.attention.bias.lower_to_table import lower_to_table, table_unsupported_reason
from vispe.errors import OptionError, ShapeError

GRIDS = [Grid((7,), 2), Grid((3, 4), 1), Grid((1, 5)), Grid((4, 1)), Grid((2, 3, 4), 1, (5.0, 0.7, 0.5))]
RULES = [
    {},
    {"metric": "manhattan", "wrap": True},
    {"metric": "chebyshev", "normalize": "max"},
    {"metric": "squared", "wrap": True, "normalize": "max"},
]


def hat(d):
    """Not 0 at distance 0, and different in every head."""
    return torch.stack([torch.cos(d) + 1, -torch.log1p(3 * d), d.square() - 2])


@cases("rule", RULES, ids=str)
@cases("grid", GRIDS, ids=str)
def test_table_and_dense_are_the_function(grid, rule):
    pos = grid.positions()
    bias = RadialBias(hat, pos, **rule)
    arguments = {"metric": "euclidean", "wrap": False, "normalize": "none", **rule}
    distance = oracle.distance_matrix(grid, **arguments)
    positioned = torch.tensor([cell is not None for cell in oracle.cells_of(grid.shape, grid.prefix)])
    expected = hat(distance.flatten()).unflatten(1, distance.shape) * (positioned[:, None] & positioned)
    torch.testing.assert_close(bias.dense()[0].double(), expected, rtol=1e-5, atol=1e-5)
    assert table_unsupported_reason(bias) is None
    table, edge = lower_to_table(bias)
    assert edge is None
    actual = oracle.table_matrix(table.double(), grid)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_the_function_is_called_with_one_distance_per_cell():
    sizes = []

    def function(d):
        sizes.append(d.numel())
        return -d[None]

    RadialBias(function).table(Grid((5, 8)))
    assert sizes == [40]


def test_dense_values_do_not_depend_on_the_position():
    grids = [Grid((3, 7), prefix) for prefix in (0, 1, 5)]
    result = [RadialBias(hat, g.positions()).dense()[..., g.prefix :, g.prefix :] for g in grids]
    assert torch.equal(result[0], result[1])
    assert torch.equal(result[0], result[2])


def test_linear_functions_equal_the_distance_bias():
    pos, slopes = Grid((4, 5), 1).positions(), torch.tensor([0.5, 2.0])
    for rule in RULES:
        line = RadialBias(lambda d: -slopes[:, None] * d, pos, **rule)
        same = DistanceBias(slopes, pos, **rule)
        torch.testing.assert_close(line.dense(), same.dense())
        torch.testing.assert_close(line.table(pos.grid), same.table(pos.grid))


def test_other_positions_and_spacing():
    pos = Grid((3, 4), 1).positions()
    moved = pos.replace(coords=pos.coords * 1.7 + 0.3)
    distance = (moved.coords[0, 1:, None] - moved.coords[0, None, 1:]).norm(dim=-1)
    result = RadialBias(hat, moved).dense()[0, :, 1:, 1:]
    torch.testing.assert_close(result, hat(distance.flatten()).unflatten(1, distance.shape))
    assert table_unsupported_reason(RadialBias(hat, moved)) is not None
    spaced = RadialBias(hat, pos, spacing=(2.0, 0.5))
    other = Grid((3, 4), 1, (2.0, 0.5))
    torch.testing.assert_close(spaced.dense(), RadialBias(hat, other.positions()).dense())
    torch.testing.assert_close(spaced.table(pos.grid), RadialBias(hat).table(other))
    chosen = pos.gather(torch.tensor([[0, 3, 5]]))
    torch.testing.assert_close(
        RadialBias(hat, chosen).dense()[0], RadialBias(hat, pos).dense()[0][:, [0, 3, 5]][:, :, [0, 3, 5]]
    )


def test_learned_functions_use_strips_with_gradients(monkeypatch):
    monkeypatch.setattr(blocked, "MIN_QUERIES", 0)
    pos = Grid((6, 8), 1).positions()
    rate = torch.tensor([0.3, 1.0, 2.0], requires_grad=True)
    q, k, v = (torch.randn(2, 3, pos.tokens, 8, requires_grad=True) for _ in range(3))
    cotangent = torch.randn(2, 3, pos.tokens, 8)
    grads = []
    for backend in ("auto", "reference"):
        bias = RadialBias(lambda d: -torch.log1p(rate[:, None] * d), pos)
        out = attention(q, k, v, bias=bias, backend=backend)
        grads.append([out, *torch.autograd.grad(out, [rate, q, k, v], cotangent)])
    for mine, other in zip(*grads, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_masks_of_fixed_functions_are_cached():
    pos, calls = Grid((3, 4)).positions(), []

    def function(d):
        calls.append(len(d))
        return -d[None]

    q = torch.randn(1, 2, 12, 8)
    for _ in range(3):
        attention(q, q, q, bias=RadialBias(function, pos, key="line"))
    assert len(calls) == 1
    assert RadialBias(function, pos).key is None
    assert RadialBias(function, pos, key="line").key != RadialBias(function, pos, key="line", wrap=True).key


def test_invalid_functions_are_refused():
    with pytest.raises(OptionError, match="metric must be one of"):
        RadialBias(hat, metric="cosine")


def test_a_function_without_heads_is_refused():
    bias = RadialBias(torch.cos, Grid((2, 3)).positions())
    with pytest.raises(
        ShapeError, match=r"must return \(heads or 1, 6\) .* got \(6,\)\. Add a leading axis for heads"
    ):
        bias.dense()
    with pytest.raises(ShapeError, match=r"return \(heads or 1, 6\)"):
        bias.table(Grid((2, 3)))
