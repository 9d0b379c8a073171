"""Tiles that a bias hides are skipped; results equal those in float64. `test_interpreter` runs this file."""

import pytest
import torch

from tests.attention.bias_matrix import agrees
from tests.attention.cases import HEADS, doubles, tensors
from vispe import Grid, attention, create_encoding
from vispe.attention import DistanceBias, SumBias, TableBias

GRID = Grid((13, 16), 1)  # tiles of 64 hold four rows
LIMITS = {torch.float32: (2e-6, 1e-5)}


def rows_in_sight(pos, rows):
    """Return a table of keys so many rows above and below the query; its first rows belong to keys far below."""
    values = torch.randn(HEADS, 25, 31)
    below, above = rows
    values[:, : 12 - below] = -torch.inf
    values[:, 12 + above + 1 :] = -torch.inf
    return TableBias(values, pos, torch.randn(HEADS, 3), is_sparse=True)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("with_distances", [False, True], ids=["alone", "with distances"])
@pytest.mark.parametrize("rows", [(0, 12), (12, 0), (1, 2), (0, 0)], ids=str)
def test_output_and_gradients(padded, with_distances, rows):
    pos = GRID.positions()
    slopes = torch.tensor([0.1, 0.3, 0.0], requires_grad=True)
    leaves = [*tensors(2, GRID.tokens), *([slopes] if with_distances else [])]
    exact = doubles(leaves)
    keep = torch.rand(2, GRID.tokens) > 0.3 if padded else None
    if padded:
        keep[:, 0] = True  # no query is without a key
    hidden = rows_in_sight(pos, rows)
    wide = TableBias(hidden.values.double(), pos, hidden.prefix.double())

    def attend(arguments, table, backend):
        terms = [table, *(DistanceBias(m, pos) for m in arguments[3:])]
        bias = SumBias(terms) if len(terms) > 1 else table
        return attention(*arguments[:3], bias=bias, key_padding_mask=keep, backend=backend)

    result = attend(leaves, hidden, "triton")
    agrees(result, attend(exact, wide, "reference"), leaves, exact, LIMITS)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy of infinite values
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("prefix", "tile", "spoil"), [(1, slice(1, 65), slice(129, 193)), (0, slice(64, 128), slice(192, 208))]
)
def test_hidden_values_are_not_read(padded, prefix, tile, spoil):
    """Infinite values outside the visible range of a tile have no effect; zero times infinity would be NaN."""
    grid = Grid(GRID.shape, prefix)
    pos = grid.positions()
    q, k, v = tensors(1, grid.tokens)
    keep = torch.ones(1, grid.tokens, dtype=torch.bool) if padded else None
    bias, result = rows_in_sight(pos, (0, 12)), []
    for spoiled in (False, True):
        # a whole tile, or without a prefix the narrow one behind them all
        values = v.clone()
        if spoiled:
            values[:, :, spoil] = torch.inf
        out = attention(q, k, values, bias=bias, key_padding_mask=keep, backend="triton")[:, :, tile]
        grads = torch.autograd.grad(out.sum(), [q, v])
        result.append([out, *(g[:, :, tile] for g in grads)])
    for whole, mine in zip(*result, strict=True):
        assert whole.isfinite().all()
        assert torch.equal(whole, mine)
    # a table that does not say that it is_sparse has them all read
    bias = TableBias(bias.values, pos, bias.prefix)
    assert attention(q, k, values, bias=bias, backend="triton")[:, :, 64:128].isnan().all()


@pytest.mark.parametrize("directions", ["halves", "triangles", "corners-none"])
def test_lookhere_on_several_tiles(directions):
    encoding = create_encoding(f"lookhere(directions={directions})", num_heads=4, depth=2)
    pos = GRID.positions()
    leaves = tensors(1, GRID.tokens, heads=4)
    exact = doubles(leaves)
    bias = encoding.bias(pos, 1)
    assert bias.is_sparse
    result = attention(*leaves, bias=bias, backend="triton")
    agrees(result, attention(*exact, bias=bias, backend="reference"), leaves, exact, LIMITS)
