"""Orders are permutations that do not change the prompt; ordered positions have the next position as attribute."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import cases
from vispe import Grid, Positions
from vispe.errors import OptionError, ShapeError
from vispe.grid.token_orders import (
    TARGET,
    TARGET_CELL,
    fractal,
    inputs_and_targets,
    quadtree,
    raster,
    reorder_positions,
    shuffled,
)

lengths = st.tuples(st.integers(1, 70), st.integers(0, 70)).map(lambda x: (max(x), min(x)))


@settings(deadline=None, derandomize=True, max_examples=60)
@given(lengths)
def test_orders_are_permutations_behind_the_prompt(sizes):
    tokens, prompt = sizes
    for order in (fractal(tokens, prompt), shuffled(tokens, prompt), shuffled(torch.rand(2, tokens), prompt)):
        rows = order.reshape(-1, tokens).tolist()
        assert all(row[:prompt] == list(range(prompt)) for row in rows)
        assert all(sorted(row) == list(range(tokens)) for row in rows)
    assert raster(tokens).tolist() == list(range(tokens))


def recursive(levels, start, stop, depth=0):
    """Collect the middles of a bisection by depth, left to right."""
    if start < stop:
        middle = (start + stop) // 2
        levels.setdefault(depth, []).append(middle)
        recursive(levels, start, middle, depth + 1)
        recursive(levels, middle + 1, stop, depth + 1)
    return levels


@cases("tokens", [1, 2, 7, 16, 31, 50])
def test_fractal_halves_level_by_level(tokens):
    order, levels = fractal(tokens, 3 if tokens > 3 else 0).tolist(), {}
    prompt = 3 if tokens > 3 else 0
    position = prompt
    for _, middles in sorted(recursive(levels, prompt, tokens).items()):
        assert sorted(order[position : position + len(middles)]) == middles
        position += len(middles)
    assert position == tokens


@settings(deadline=None, derandomize=True, max_examples=40)
@given(st.integers(1, 9), st.integers(1, 9))
def test_quadtree_covers_the_grid_from_its_centre(height, width):
    order = quadtree(height, width).tolist()
    assert sorted(order) == list(range(height * width))
    assert order[0] == height // 2 * width + width // 2
    assert torch.equal(quadtree(1, width), fractal(width))


def test_quadtree_spreads_over_the_grid():
    """After the centre and the four quadrant centres, every quadrant of the grid has a token."""
    first = quadtree(8, 8)[:5]
    quarters = {(int(n) // 32, int(n) % 8 // 4) for n in first[1:]}
    assert quarters == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_random_orders_sort_their_keys():
    keys = torch.tensor([[0.9, 0.1, 0.5, 0.5, 0.2]])
    assert shuffled(keys).tolist() == [[1, 4, 2, 3, 0]]
    assert shuffled(keys, 2).tolist() == [[0, 1, 4, 2, 3]]
    one, other = (shuffled(20, generator=torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(one, other)


def test_inputs_and_targets():
    x = torch.tensor([[10, 11, 12, 13], [20, 21, 22, 23]])
    inputs, targets = inputs_and_targets(x, torch.tensor([2, 0, 3, 1]))
    assert inputs.tolist() == [[12, 10, 13], [22, 20, 23]]
    assert targets.tolist() == [[10, 13, 11], [20, 23, 21]]
    with pytest.raises(ShapeError, match=r"must have shape \(4,\) or \(2, 4\), got \(3,\)"):
        inputs_and_targets(x, torch.arange(3))


def test_ordered_positions_have_the_next_position():
    grid = Grid((2, 3), prefix=1, spacing=(2.0, 1.0))
    order = torch.cat([torch.tensor([0]), 1 + quadtree(2, 3)])
    pos = reorder_positions(grid.positions(), order)
    plain = grid.positions()
    assert torch.equal(pos.coords, plain.coords[:, order])
    assert torch.equal(pos.attrs[TARGET].values[:, :-1], pos.coords[:, 1:])
    assert pos.attrs[TARGET_CELL].values.tolist() == [[*(order[1:] - 1).tolist(), -1]]
    subset = pos.gather(torch.tensor([[0, 2, 5]]))  # dropped tokens take their targets along
    assert subset.attrs[TARGET_CELL].values[0].tolist() == [order[n + 1].item() - 1 for n in (0, 2, 5)]
    free = reorder_positions(Positions(torch.rand(2, 4, 2)), torch.tensor([[3, 1, 0, 2], [0, 1, 2, 3]]))
    assert free.attrs[TARGET_CELL].values.tolist() == [[1, 0, 2, -1], [1, 2, 3, -1]]


def test_an_order_with_a_repeated_token_raises():
    message = r"must be a permutation of the token indices 0 to 3, got \[0, 0, 1, 2\]"
    for order in (torch.tensor([0, 0, 1, 2]), torch.tensor([[1, 0, 3, 2], [0, 0, 1, 2]])):
        with pytest.raises(OptionError, match=message):
            reorder_positions(Grid((4,)).positions(), order)
        with pytest.raises(OptionError, match=message):
            inputs_and_targets(torch.zeros(2, 4), order)


def test_errors():
    with pytest.raises(OptionError, match="prompt must be an integer from 0 to 4 tokens, got prompt=5"):
        fractal(4, 5)
    with pytest.raises(OptionError, match="a positive number of tokens, an integer, got 0"):
        quadtree(3, 0)
    with pytest.raises(OptionError, match="a generator has no effect"):
        shuffled(torch.rand(3), generator=torch.Generator())
    with pytest.raises(
        ShapeError, match=r"The order of 7 tokens, including the prefix, must have shape \(7,\)"
    ):
        reorder_positions(Grid((2, 3), prefix=1).positions(), torch.arange(6))
