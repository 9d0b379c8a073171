"""How longer inputs read a table: the rules on one axis, and on grids axis by axis."""

from itertools import product

import pytest
import torch

from tests.cases import cases
from vispe import Grid, create_encoding
from vispe.encodings.additive.trained.learned import extended_indices, resample, table_indices
from vispe.errors import OptionError

RULES = ["tile", "nearest", "linear"]


@cases("entries", [1, 2, 5, 9])
@cases("tokens", [1, 2, 5, 13, 45])
def test_rules_against_their_definitions(tokens, entries):
    group = -(-tokens // entries)
    expected = {
        "tile": [i % entries for i in range(tokens)],
        "nearest": [i // group for i in range(tokens)],
        "linear": [i * (entries - 1) / max(tokens - 1, 1) for i in range(tokens)],
    }
    for rule, numbers in expected.items():
        actual = table_indices(tokens, entries, rule)
        assert actual.tolist() == pytest.approx(numbers, abs=1e-12)
        assert 0 <= actual.min() <= actual.max() <= entries - 1
        if tokens == entries:
            assert actual.tolist() == list(range(tokens))


def test_the_jump_of_the_authors():
    assert extended_indices(4, 5, 20).tolist() == [0, 4, 8, 12]
    assert extended_indices(5, 5, 23).tolist() == [0, 4, 8, 12, 16]
    assert extended_indices(6, 5, 20).tolist() == [0, 1, 2, 3, 4, 5]
    assert extended_indices(3, 5, 4).tolist() == [0, 1, 2]


@cases("rule", RULES)
@cases("new", [(7, 9), (2, 6), (3, 1)])
def test_grids_are_extended_per_axis(rule, new):
    old = (3, 4)
    table = torch.randn(1, 12, 5, dtype=torch.float64)
    rows, columns = (table_indices(n, o, rule) for n, o in zip(new, old, strict=True))
    image, expected = table.reshape(*old, 5), torch.zeros(*new, 5, dtype=torch.float64)
    for (y, row), (x, column) in product(enumerate(rows.tolist()), enumerate(columns.tolist())):
        for r, c in product(range(3), range(4)):  # every entry, by its distance on both axes
            expected[y, x] += max(0, 1 - abs(row - r)) * max(0, 1 - abs(column - c)) * image[r, c]
    actual = resample(table, old, new, rule).reshape(*new, 5)
    torch.testing.assert_close(actual, expected)


@cases("rule", RULES)
def test_training_grid_is_unchanged_and_others_read_the_table(rule):
    encoding = create_encoding("learned", dim=6, grid=(3, 4), resample=rule)
    table = encoding.weight.detach()
    assert torch.equal(encoding.table(Grid((3, 4)).positions()), table)
    result = encoding.table(Grid((6, 8)).positions()).reshape(6, 8, 6)
    grid_table = table.reshape(3, 4, 6)
    if rule == "tile":
        assert torch.equal(result, grid_table.repeat(2, 2, 1))
    elif rule == "nearest":
        assert torch.equal(result, grid_table.repeat_interleave(2, 0).repeat_interleave(2, 1))
    else:
        for corner in ((0, 0), (0, -1), (-1, 0), (-1, -1)):
            torch.testing.assert_close(result[corner], grid_table[corner])


@cases("rule", RULES)
def test_weights_of_a_smaller_grid_are_extended_when_loaded(rule):
    small = create_encoding("learned", dim=6, grid=(3, 4), resample=rule)
    large = create_encoding("learned", dim=6, grid=(6, 7), resample=rule)
    large.load_state_dict(small.state_dict())
    grid = Grid((6, 7)).positions()
    torch.testing.assert_close(large.table(grid), small.table(grid))


def test_errors():
    with pytest.raises(
        OptionError, match="resample must be one of bicubic, tile, nearest, linear, got 'cubic'"
    ):
        create_encoding("learned(resample=cubic)", dim=4, grid=(2, 2))
    with pytest.raises(OptionError, match="rule must be one of tile, nearest, linear, got 'bicubic'"):
        table_indices(3, 2, "bicubic")
    with pytest.raises(
        OptionError, match="extended_indices needs an integer above 0 for longest, got longest=0"
    ):
        extended_indices(3, 2, 0)
