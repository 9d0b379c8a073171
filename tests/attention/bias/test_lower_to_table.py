"""Tables shifted to a maximum of 0: a constant per query is subtracted, separately for patches and prefix tokens."""

import torch

from tests.cases import cases, pairwise
from vispe import Grid
from vispe.attention import TableBias
from vispe.attention.bias.lower_to_table import lower_to_table, shifted, with_causal_mask

GRIDS = [Grid((3, 4), 2), Grid((5,), 1), Grid((2, 3, 2)), Grid((4, 3))]
CLOSED = float("-inf")


def _parts(grid, heads, edge_heads, offset, edge_offset):
    values = torch.randn(heads, *(2 * n - 1 for n in grid.shape)) + offset
    edge = None if edge_heads is None else torch.randn(edge_heads, 3) + torch.tensor(edge_offset)
    return values, edge


@pairwise
@cases("grid", GRIDS, ids=str)
@cases(("heads", "edge_heads"), [(2, 2), (1, 2), (2, 1), (2, None)])
@cases("offset", [0.0, 1e3, -1e3])
@cases("edge_offset", [(0.0, 0.0, 0.0), (50.0, -1e3, 0.0), (-1e3, 1e4, 1e3)])
@cases("causal", [False, True])
def test_one_constant_per_query(grid, heads, edge_heads, offset, edge_offset, causal):
    values, edge = _parts(grid, heads, edge_heads, offset, edge_offset)
    values, edge = values.double(), None if edge is None else edge.double()
    if causal and grid.prefix < 2:
        values, edge = with_causal_mask(values, edge, grid)
    table, new_edge = shifted(values, edge, bool(grid.prefix))
    pos = grid.positions()
    before, after = TableBias(values, pos, edge).dense(), TableBias(table, pos, new_edge).dense()
    assert torch.equal(before == CLOSED, after == CLOSED)
    change = (after - before).nan_to_num(0.0)  # -inf - -inf
    recorded = before.expand_as(after) != CLOSED
    constant = change.where(recorded, CLOSED).amax(-1, keepdim=True)
    torch.testing.assert_close(change, constant.expand_as(change).where(recorded, 0.0), rtol=0, atol=1e-9)
    # the largest bias of the queries of each kind is 0
    queries = [after[:, :, grid.prefix :]] + ([after[:, :, : grid.prefix]] if grid.prefix else [])
    for kind in queries:
        assert (kind.amax((0, 2, 3)).abs() <= 1e-9).all() or (heads, edge_heads) == (1, 1)


def test_heads_without_a_visible_pair():
    values = torch.full((2, 3, 3), CLOSED)
    values[1, 1, 1] = 7.0
    edge = torch.tensor([[CLOSED] * 3, [CLOSED, CLOSED, 5.0]])
    table, new_edge = shifted(values, edge, True)
    assert (table[0] == CLOSED).all()
    assert table[1, 1, 1] == 0
    assert new_edge.tolist() == [[CLOSED] * 3, [CLOSED, CLOSED, 0.0]]


def test_gradients_and_precision():
    values = (torch.randn(2, 5, 5) + 1e3).requires_grad_()
    edge = torch.randn(2, 3, dtype=torch.bfloat16).requires_grad_()
    pos = Grid((3, 3), 1).positions()
    table, new_edge = shifted(*lower_to_table(TableBias(values, pos, edge)), True)
    cotangents = torch.randn_like(table), torch.randn_like(new_edge)
    grads = torch.autograd.grad([table, new_edge], [values, edge], cotangents)
    torch.testing.assert_close(grads[0], cotangents[0])
    torch.testing.assert_close(grads[1], cotangents[1].bfloat16())
    # the difference of two float32 numbers of similar size is exact
    maximum = torch.maximum(values.flatten(1).amax(1), edge[:, 1].float())
    assert torch.equal(table.double(), values.double() - maximum.double()[:, None, None])
