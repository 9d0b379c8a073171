"""alibi_graph: path lengths as input, the grid as a graph, pairs without a path, and dropped tokens."""

import math

import pytest
import torch

import vispe
from tests.cases import cases
from tests.encodings.bias import offsets
from vispe import Grid, Positions, attention, create_encoding
from vispe.encodings.parts.bias.slopes import fixed_slopes
from vispe.errors import OptionError, ShapeError
from vispe.grid import PerToken

LENGTHS = torch.tensor([[0, 1, 4, -1], [1, 0, 2, -1], [4, 2, 0, -1], [-1, -1, -1, 0]])
SLOPES = torch.tensor(fixed_slopes("alibi", 3))[:, None, None]


def arguments(lengths, pos=None):
    pos = Grid((2, 2)).positions() if pos is None else pos
    return pos.replace(attrs={"distance": lengths})


@cases("dtype", [torch.int64, torch.float16, torch.float64])
def test_pairs_without_a_path(dtype):
    lengths = torch.stack([LENGTHS, LENGTHS.clamp(min=0) * 2]).to(dtype)
    far = offsets.create("alibi_graph").bias(arguments(lengths), 0).dense()
    steps = torch.where(lengths < 0, 5, lengths)[:, None].to(far.dtype)
    torch.testing.assert_close(far, -SLOPES.to(far.dtype) * steps)
    mask = offsets.create("alibi_graph(unreachable=mask)").bias(arguments(lengths), 0).dense()
    assert torch.equal(mask.isinf(), (lengths < 0)[:, None].expand(2, 3, 4, 4))
    torch.testing.assert_close(mask[1], far[1])


def test_infinite_lengths_mean_no_path():
    lengths = LENGTHS.float()[None]
    for unreachable in ("far", "mask"):
        encoding = offsets.create(f"alibi_graph(unreachable={unreachable})")
        result = encoding.bias(arguments(lengths.masked_fill(lengths < 0, math.inf)), 0).dense()
        assert torch.equal(result, encoding.bias(arguments(lengths), 0).dense())


def test_prefix_tokens_are_not_read():
    wide = torch.full((1, 6, 6), 1e6)
    wide[:, 2:, 2:] = LENGTHS
    for unreachable in ("far", "mask"):
        encoding = offsets.create(f"alibi_graph(unreachable={unreachable})")
        result = encoding.bias(arguments(wide, Grid((2, 2), 2).positions()), 0).dense()
        assert not result[:, :, :2].any()
        assert not result[..., :2].any()
        assert torch.equal(result[..., 2:, 2:], encoding.bias(arguments(LENGTHS[None]), 0).dense())


@cases("neighbours", ["edges", "corners"])
def test_a_grid_is_a_graph(neighbours):
    measure = {"edges": lambda d: sum(map(abs, d)), "corners": lambda d: max(map(abs, d))}[neighbours]
    encoding = offsets.create(f"alibi_graph(neighbours={neighbours})")
    slopes = fixed_slopes("alibi", 3)
    for grid in (Grid((3, 4), 1), Grid((5,)), Grid((2, 3, 2))):
        expected = offsets.slow(grid.positions(), lambda d: [-s * measure(d) for s in slopes])
        torch.testing.assert_close(encoding.bias(grid.positions(), 0).dense()[0].double(), expected)
        spaced = Grid(grid.shape, grid.prefix, spacing=(2.0,) * grid.axes).positions()
        assert torch.equal(encoding.bias(spaced, 0).dense(), encoding.bias(grid.positions(), 0).dense())
    offsets.check_routes(encoding, Grid((3, 4), 1))


def test_lengths_follow_dropped_tokens():
    keep = torch.tensor([[3, 0], [1, 2]])
    for unreachable in ("far", "mask"):
        encoding = offsets.create(f"alibi_graph(unreachable={unreachable})")
        full = encoding.bias(arguments(LENGTHS[None]), 0).dense()[0]
        gathered = encoding.bias(encoding.prepare(arguments(LENGTHS[None])).gather(keep), 0).dense()
        for i in range(2):
            assert torch.equal(gathered[i], full[:, keep[i]][:, :, keep[i]])
        prepared_twice = encoding.prepare(encoding.prepare(arguments(LENGTHS[None])))
        assert torch.equal(encoding.bias(prepared_twice, 0).dense()[0], full)
        with pytest.raises(ShapeError, match=r"needs prepare.pos. before tokens are dropped"):
            encoding.bias(arguments(PerToken(LENGTHS[None], (1, 2))).gather(keep), 0)
        with pytest.raises(ShapeError, match=r"needs prepare.pos. before tokens are dropped"):
            encoding.bias(arguments(LENGTHS[None]).gather(keep), 0)


def test_attention_and_gradients():
    lengths = (torch.rand(2, 4, 4) * 3).masked_fill(LENGTHS < 0, -1)
    q, k, v = torch.randn(3, 2, 3, 4, 8)
    for unreachable in ("far", "mask"):
        encoding = offsets.create(f"alibi_graph(unreachable={unreachable},slopes=learned)")
        bias = encoding.bias(arguments(lengths), 0)
        expected = (q @ k.transpose(-1, -2) / 8**0.5 + bias.dense()).softmax(-1) @ v
        for backend in ("reference", "sdpa"):
            torch.testing.assert_close(attention(q, k, v, bias=bias, backend=backend), expected)
    cotangent = torch.randn(2, 3, 4, 4)
    encoding = offsets.create("alibi_graph(slopes=learned,softplus=true)")
    encoding.bias(arguments(lengths), 0).dense().backward(cotangent)
    steps = torch.where(lengths < 0, lengths.amax((1, 2), keepdim=True) + 1, lengths)[:, None]
    expected = -(steps * cotangent).sum((0, 2, 3)) * encoding.slope.detach().sigmoid()
    torch.testing.assert_close(encoding.slope.grad, expected)


def test_a_layer_takes_lengths():
    layer = vispe.Attention(24, 3, "alibi_graph(unreachable=mask)")
    x = torch.randn(1, 4, 24)
    pos = arguments(LENGTHS[None], Positions(torch.rand(1, 4, 2)))
    changed = x.clone()
    changed[:, 3] += 1.0  # no path leads to it
    torch.testing.assert_close(layer(x, pos)[:, :3], layer(changed, pos)[:, :3])


def test_a_vit():
    offsets.check_vit("alibi_graph")


def test_errors():
    encoding = offsets.create("alibi_graph")
    with pytest.raises(ShapeError, match="needs path lengths for tokens that are not on a grid"):
        encoding.bias(Positions(torch.rand(1, 4, 2)), 0)
    with pytest.raises(ShapeError, match=r"shape \(1 or b, 5, 5\), prefix tokens included, got \(1, 4, 4\)"):
        encoding.prepare(arguments(LENGTHS[None], Grid((2, 2), 1).positions()))
    with pytest.raises(ShapeError, match=r"got \(4, 4\)"):
        encoding.bias(arguments(LENGTHS), 0)
    with pytest.raises(OptionError, match="unreachable must be one of far, mask, got 'near'"):
        create_encoding("alibi_graph(unreachable=near)", num_heads=2)
