"""The layout of bias tables for the fused kernels, index by index."""

import torch

from tests.attention import oracle
from tests.cases import cases, pairwise
from vispe import Grid
from vispe.attention.bias.lower_to_table import shifted, visible_offsets
from vispe.attention.bias.strip.adjoint import gradient_inputs
from vispe.attention.bias.strip.layout import WORD, Layout, layout_of
from vispe.attention.bias.strip.packed import pack
from vispe.attention.bias.strip.runs import build

GRIDS = [(1, 1), (1, 6), (5, 1), (5, 7), (4, 8), (3, 5), (14, 14), (9,), (2, 3, 4), (3, 2, 5)]


def parts(shape, prefix, heads=2):
    table = torch.randn(heads, *(2 * n - 1 for n in shape), dtype=torch.float64, requires_grad=True)
    edge = torch.randn(heads, 3, dtype=torch.float64, requires_grad=True)
    return table, edge


@pairwise
@cases("rows", [False, True])
@cases("prefix", [0, 1, 5])
@cases("shape", GRIDS, ids=str)
def test_each_pair_reads_its_entry(shape, prefix, rows):
    table, edge = parts(shape, prefix)
    layout = Layout(shape, prefix, rows)
    runs, ends = build(table, edge, layout)
    assert runs.shape == (2, layout.length)
    n = layout.tokens
    index = layout.base().long()[:, None] + torch.arange(n)
    read = runs[:, index.clamp(0, layout.length - 1)]
    query, key = torch.arange(n)[:, None], torch.arange(n)[None]
    chosen = torch.where(query < prefix, ends[:, 1, None, None], ends[:, 0, None, None])
    read = torch.where(key < layout.selected, chosen, read)
    expected = oracle.table_matrix(table, Grid(shape, prefix), edge)
    assert torch.equal(read, expected)

    cotangent = torch.randn_like(expected)
    ours = torch.autograd.grad(read, (table, edge), cotangent, retain_graph=True)
    theirs = torch.autograd.grad(expected, (table, edge), cotangent, allow_unused=prefix == 0)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, torch.zeros_like(mine) if other is None else other)


@pairwise
@cases("rows", [False, True])
@cases("prefix", [0, 1, 5])
@cases("shape", GRIDS, ids=str)
def test_queries_that_share_an_element(shape, prefix, rows):
    """Gradients are stored without atomic additions only if one query reads each element."""
    layout = Layout(shape, prefix, rows)
    index = layout.base().long()[:, None] + torch.arange(layout.selected, layout.tokens)
    assert layout.sharers == index.flatten().bincount().max()


@pairwise
@cases("rows", [False, True])
@cases("prefix", [0, 1, 5])
@cases("shape", GRIDS, ids=str)
def test_packed_runs_are_aligned_shifted_and_scaled(shape, prefix, rows):
    table, edge = (t.detach() for t in parts(shape, prefix))
    layout = Layout(shape, prefix, rows)
    runs, ends = build(table, edge, layout)
    packed, numbers = pack(table, edge, layout, 0.25, torch.float32, shift=False)
    address, base = (t.long() for t in layout.patches_first())
    assert (address % WORD == 0).all()
    assert packed.shape == (2, layout.copies * layout.copy_length)
    keys = torch.arange(layout.tokens - layout.selected)
    expected = runs[:, base[:, None] + keys]
    torch.testing.assert_close(packed[:, address[:, None] + keys], (expected * 4).float())
    if layout.selected:
        torch.testing.assert_close(numbers, (ends * 4).float())
    moved = shifted(table, edge, prefix > 0)
    for mine, other in zip(
        pack(table, edge, layout, 0.25, torch.float32),
        pack(*moved, layout, 0.25, torch.float32, shift=False),
        strict=True,
    ):
        assert torch.equal(mine, other)


@pairwise
@cases("rows", [False, True])
@cases("prefix", [0, 1, 5, 11])
@cases("shape", GRIDS, ids=str)
def test_runs_of_patches(shape, prefix, rows):
    table, edge = (t.detach() for t in parts(shape, prefix))
    layout = Layout(shape, prefix, rows)
    runs, _ = build(table, edge, layout)
    packed, _ = pack(table, edge, layout, 1.0, torch.float64, shift=False)
    address, base = layout.patches_first()
    assert (address % WORD == 0).all()
    assert address.dtype == base.dtype == torch.int32
    # patches first, also in the order of queries; rows have all tokens in their positions
    order = torch.arange(layout.tokens).roll(-layout.selected)
    expected = oracle.table_matrix(table, Grid(shape, prefix), edge)[:, order][..., layout.selected :]
    key = torch.arange(layout.tokens - layout.selected)
    torch.testing.assert_close(packed[:, address.long()[:, None] + key], expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(runs[:, base.long()[:, None] + key], expected)


@pairwise
@cases("rows", [False, True])
@cases("prefix", [0, 1, 5])
@cases("shape", GRIDS, ids=str)
@cases("heads", [(2, 2), (1, 2), (2, 1), (1, 1), (2, None)], ids=str)
def test_gradient_of_the_table_without_the_runs(shape, prefix, rows, heads):
    layout, (of_table, of_edge) = Layout(shape, prefix, rows), heads
    table = torch.randn(of_table, *(2 * n - 1 for n in shape), requires_grad=True)
    edge = None if of_edge is None else torch.randn(of_edge, 3, requires_grad=True)
    leaves = [table] if edge is None else [table, edge]
    runs, ends = build(table, edge, layout)
    mine = gradient_inputs(table, edge, layout)
    assert [t.shape for t in mine] == [runs.shape, ends.shape]
    assert all(t.untyped_storage().nbytes() == 4 for t in mine)
    # kernels do not write elements that no query reads
    is_read = torch.zeros(layout.length, dtype=torch.bool)
    is_read[layout.base().long()[:, None] + torch.arange(layout.selected, layout.tokens)] = True
    cotangents = torch.randn_like(runs) * is_read, torch.randn_like(ends) * bool(layout.selected)
    ours = torch.autograd.grad(mine, leaves, cotangents)
    theirs = torch.autograd.grad((runs * cotangents[0]).sum() + (ends * cotangents[1]).sum(), leaves)
    for actual, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_float16_keeps_infinity():
    table = torch.tensor([[[-1e4, 0.0, float("-inf")]]])
    layout = Layout((1, 2), 0, False)
    packed, _ = pack(table, None, layout, 1.0, torch.float16)
    assert packed.isinf().any()
    assert packed[packed.isfinite()].min() == -1e4


def test_layouts_of_large_and_small_grids():
    assert not layout_of((32, 32), 1).rows
    assert not layout_of((37, 37), 1).rows
    assert layout_of((5, 7), 1).rows
    big = layout_of((64, 64), 5)
    assert big.copies == 1
    assert big.copy_length < big.tokens**2 / 30


def test_addresses_beyond_32_bits():
    layout, small = Layout((513, 513), 1, False), Layout((33, 33), 1, False)
    assert small.patches_first()[0].dtype == torch.int32
    address, _ = layout.patches_first()
    y, x = torch.meshgrid(*[torch.arange(513)] * 2, indexing="ij")
    base = ((x * (2 * 513 - 1) + 512 - y) * 513).flatten() + 1  # after the prefix token
    assert torch.equal(address[:-1], base + -base % 8 * (1 + layout.copy_length))
    assert address.max() > 1 << 31


def test_visible_range_in_tokens():
    table = torch.full((2, 5, 7), -torch.inf)  # a grid of 3 x 4
    table[0, 2:, :] = 0.0  # keys in the query's row and above
    table[1, 2, 3] = table[1, 1, 2] = 1.0  # itself, and the key one row down and one column right
    assert visible_offsets(table, 2).tolist() == [[-11, 3], [0, 5]]
    assert visible_offsets(torch.zeros(1, 3, 3, 5), 2).tolist() == [[-11, 11]] * 2  # 2 x 2 x 3
    assert visible_offsets(torch.full((1, 5), -torch.inf), 1).tolist() == [[0, 0]]


def test_prefix_biases_of_a_grid_without_prefix_tokens():
    table, edge = torch.randn(1, 5, 7, requires_grad=True), torch.randn(2, 3, requires_grad=True)
    runs, ends = gradient_inputs(table, edge, Layout((3, 4), 0, False))
    assert len(runs) == len(ends) == 1
    of_table, of_edge = torch.autograd.grad(
        (runs, ends), (table, edge), (torch.ones(runs.shape), torch.ones(ends.shape))
    )
    assert of_table.abs().sum() > 0
    assert torch.equal(of_edge, torch.zeros(2, 3))
