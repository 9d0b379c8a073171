"""Layout of the terms of decomposed biases as lines and slots, compared with loops."""

import itertools

import torch

from tests.cases import cases
from vispe.attention.backends.triton.content.axis_tables import lay_out, rows_of, slots_of


@cases("shape,prefix,sizes", [((3, 5), 2, (16, 32)), ((1, 17), 0, (32,)), ((9, 2), 1, (16, 64))])
def test_lines_and_slots(shape, prefix, sizes):
    (gh, gw), slots = shape, slots_of(shape, prefix, sizes)
    n = prefix + gh * gw
    rows, cols = torch.randn(2, 3, n, gh + 1), torch.randn(2, 3, n, gw + 1)
    lines = torch.full((2, 3, n, slots.lines), float("-inf"))
    lines[..., :gh], lines[..., -2] = rows[..., :gh], rows[..., gh]
    lines[..., slots.high : slots.high + gw], lines[..., -1] = cols[..., :gw], cols[..., gw]
    expected = torch.full((2, 3, slots.lines, slots.size), float("-inf"))
    for y, x in itertools.product(range(gh), range(gw)):
        panel, column = divmod(x, slots.width)
        slot = (panel * slots.high + y) * slots.width + column
        expected[..., slot] = lines[:, :, prefix + y * gw + x] / 0.25
    for k in range(prefix):
        expected[..., slots.high * slots.wide + k] = lines[:, :, k] / 0.25
    assert torch.equal(lay_out(rows, cols, slots, 0.25), expected)


@cases("shape", [(3, 5), (1, 40), (40, 1), (37, 37), (14, 31)])
def test_tiles_fit_the_rows(shape):
    slots = slots_of(shape, 1, (64, 128))
    assert slots.high >= shape[0]
    assert shape[1] <= slots.wide < shape[1] + slots.width
    for size in (64, 128):
        assert slots.high % rows_of(shape[0], slots.width, size) == 0
