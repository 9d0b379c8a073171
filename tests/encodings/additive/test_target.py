"""Double positions: the sum of two tables, whatever the order; causal attention over the shuffled sequence."""

import pytest
import torch

from tests.cases import cases
from vispe import Grid, Positions, create_encoding
from vispe.attention import attention
from vispe.errors import OptionError, ShapeError
from vispe.grid.token_orders import fractal, quadtree, reorder_positions, shuffled

DIM, GRID = 16, Grid((3, 4), prefix=1)
FACTS = {"dim": DIM, "grid": GRID.shape}


def orders():
    """Return orders of a grid of 3 x 4 with a prefix token."""
    order = torch.cat([torch.tensor([0]), 1 + quadtree(3, 4)])
    return {
        "raster": torch.arange(13),
        "fractal": fractal(13, 1),
        "quadtree": order,
        "random": shuffled(13, 1),
    }


@cases("of", ["sincos2d", "learned", "sincos2d(temperature=50)+learned", "fourier_learned"])
@cases("order", orders())
def test_it_is_the_table_of_the_next_position(of, order):
    order = orders()[order]
    encoding = create_encoding("target", of=of, **FACTS)
    full = encoding.following.table(GRID.positions())
    result = encoding.table(reorder_positions(GRID.positions(), order))
    torch.testing.assert_close(result[:, :-1], full[:, order[1:]])
    assert (result[:, -1] == 0).all()  # the last token has no target


def test_both_tables_add_up():
    pos = reorder_positions(GRID.positions(), fractal(13, 1))
    both = create_encoding("sincos2d+target(of=sincos2d)", **FACTS)
    plain = create_encoding("sincos2d", **FACTS)
    token_table = plain.table(GRID.positions())[:, fractal(13, 1)]
    after = torch.cat([token_table[:, 1:], torch.zeros(1, 1, DIM)], 1)
    torch.testing.assert_close(both.table(pos), token_table + after)


def test_without_an_order_it_is_that_of_the_grid():
    encoding = create_encoding("target", **FACTS)
    plain = create_encoding("sincos2d", **FACTS).table(GRID.positions())
    result = encoding.table(GRID.positions())
    torch.testing.assert_close(result[:, 1:-1], plain[:, 2:])
    assert not result[:, [0, -1]].any()
    subset = encoding.table(GRID.positions().gather(torch.tensor([[0, 12, 4, 6]])))
    torch.testing.assert_close(subset[0], result[0, [0, 12, 4, 6]])
    free = Positions(GRID.positions().coords[:, 1:])  # a sequence of points
    torch.testing.assert_close(encoding.table(free), result[:, 1:])


class Toy(torch.nn.Module):
    """One causal layer over tokens in their stored order, with the sum of both tables."""

    def __init__(self, spec):
        super().__init__()
        self.encoding = create_encoding(spec, **FACTS)
        self.qkv = torch.nn.Linear(DIM, 3 * DIM)

    def forward(self, x, pos):
        x = x + self.encoding.table(pos)
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, DIM // 2)).permute(2, 0, 3, 1, 4)
        return attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


@cases("spec", ["sincos2d+target", "learned+target(of=learned)"])
def test_tokens_with_their_order(spec):
    """Outputs depend on tokens, positions and order only, not on how the batch is stored, nor on later tokens."""
    model, x = Toy(spec), torch.randn(2, 13, DIM)
    order = torch.stack([shuffled(13, 1), fractal(13, 1)])
    y = model(x.gather(1, order[..., None].expand(-1, -1, DIM)), reorder_positions(GRID.positions(), order))
    # stored in another order first, and then brought into the same one
    stored = torch.cat([torch.tensor([0]), 1 + torch.randperm(12)])
    positions = GRID.positions().gather(stored[None])
    inverse = stored.argsort()[order]
    reordered = x[:, stored].gather(1, inverse[..., None].expand(-1, -1, DIM))
    torch.testing.assert_close(model(reordered, reorder_positions(positions, inverse)), y)
    # rows of the batch change positions with their orders
    other = model(
        x.gather(1, order[..., None].expand(-1, -1, DIM)).flip(0),
        reorder_positions(GRID.positions(), order.flip(0)),
    )
    torch.testing.assert_close(other.flip(0), y)
    # what stands later in the order is not seen, wherever it is in the grid
    changed = x.clone()
    later = order[0, 7:]
    changed[0, later] += 1.0
    late = model(
        changed.gather(1, order[..., None].expand(-1, -1, DIM)), reorder_positions(GRID.positions(), order)
    )
    torch.testing.assert_close(late[0, :7], y[0, :7])
    assert (late[0, 7:] - y[0, 7:]).abs().amax(-1).min() > 1e-6
    # where the next token is matters to the token before it: the same prefix of the order, another end
    swapped = order.clone()
    swapped[0, [7, 9]] = order[0, [9, 7]]
    ahead = model(
        x.gather(1, swapped[..., None].expand(-1, -1, DIM)), reorder_positions(GRID.positions(), swapped)
    )
    torch.testing.assert_close(ahead[0, :6], y[0, :6])
    assert (ahead[0, 6] - y[0, 6]).abs().max() > 1e-6


def test_samplers_run_before_reordering():
    sampler = create_encoding("randomized(reach=100)", **FACTS).eval()
    sampled, order = sampler.prepare(GRID.positions()), fractal(13, 1)
    encoding, plain = create_encoding("target", **FACTS), create_encoding("sincos2d", **FACTS)
    result = encoding.table(reorder_positions(sampled, order))
    torch.testing.assert_close(result[:, :-1], plain.table(sampled)[:, order[1:]])
    torch.testing.assert_close(encoding.table(sampled)[:, 1:-1], plain.table(sampled)[:, 2:])
    assert not torch.equal(result, encoding.table(reorder_positions(GRID.positions(), order)))
    with pytest.raises(ShapeError, match="ordered after a sampler has moved them"):
        encoding.table(sampler.prepare(reorder_positions(GRID.positions(), order)))
    with pytest.raises(ShapeError, match="what follows free tokens of which some are dropped"):
        encoding.table(sampled.gather(torch.tensor([[0, 3, 5]])))


def test_errors():
    with pytest.raises(OptionError, match=r"kind additive alone, got alibi2d. Use of=sincos2d"):
        create_encoding("target(of=alibi2d)", **FACTS, num_heads=2)
    with pytest.raises(OptionError, match=r"of needs a spec, got a finished sincos2d. Pass its config"):
        create_encoding("target", of=create_encoding("sincos2d", dim=16), **FACTS)
