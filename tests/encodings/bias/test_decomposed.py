"""decomposed against timm's SAM, its definition pair by pair, and the claims of its docstring."""

import itertools

import pytest
import timm
import torch
from timm.models.vision_transformer_sam import Attention as SamAttention
from torch.nn import functional as F

import vispe
from tests.attention import oracle
from tests.cases import cases
from tests.encodings.bias.products import DIM, HEADS, WIDTH, check_dropped_tokens, content, random_encoding
from vispe import Grid, Positions, attention, create_encoding
from vispe.encodings.bias.offsets.decomposed import TABLES
from vispe.errors import EncodingMismatch, OptionError, ShapeError

GRIDS = [Grid((5,), 1), Grid((3, 4), 2), Grid((1, 6)), Grid((2, 3, 2), 1)]


def build(grid, **options):
    return random_encoding("decomposed", grid=grid, **options)


def slow(encoding, grid, q, k, v):
    """Return attention with the vector of every pair of tokens written out."""
    cells = oracle.cells_of(grid.shape, grid.prefix)
    vectors = torch.zeros(HEADS, len(cells), len(cells), WIDTH, dtype=torch.float64)
    for (i, p), (j, o) in itertools.product(enumerate(cells), enumerate(cells)):
        for axis, name in enumerate(encoding.names if p is not None and o is not None else ()):
            row = getattr(encoding, name)[p[axis] - o[axis] + encoding.grid[axis] - 1]
            vectors[:, i, j] = vectors[:, i, j] + row.reshape(-1, WIDTH)
    read = torch.einsum("bhid,hijd->bhij", q, vectors) * (WIDTH**-0.5 if encoding.scaled else 1)
    return (WIDTH**-0.5 * q @ k.mT + read).softmax(-1) @ v


@cases("options", [{}, {"scaled": True, "shared": False}], ids=str)
def test_attention_and_all_gradients(options):
    for grid in GRIDS:
        encoding = build(grid.shape, **options)
        leaves = [t.requires_grad_() for t in content(grid.tokens)]
        every = [*leaves, *encoding.parameters()]
        expected = slow(encoding, grid, *leaves)
        cotangent = torch.randn_like(expected)
        grads = torch.autograd.grad(expected, every, cotangent)
        for backend in ("reference", "sdpa"):
            actual = attention(*leaves, bias=encoding.bias(grid.positions(), 0), backend=backend)
            torch.testing.assert_close(actual, expected)
            for f, w in zip(torch.autograd.grad(actual, every, cotangent), grads, strict=True):
                torch.testing.assert_close(f, w, rtol=1e-6, atol=1e-8)


@cases("shape", [(4, 4), (3, 5)])
@cases("fused", [True, False])
def test_equals_the_attention_of_sam(shape, fused):
    torch.manual_seed(0)
    stock = SamAttention(DIM, HEADS, use_rel_pos=True, input_size=shape).double()
    stock.fused_attn = fused
    torch.nn.init.normal_(stock.rel_pos_h)
    torch.nn.init.normal_(stock.rel_pos_w)
    mine = vispe.Attention(DIM, HEADS, {"name": "decomposed", "grid": shape}).double()
    state = {f"attn.{name}": value for name, value in stock.state_dict().items()}
    mine.pos_enc.rename_checkpoint_keys(state, "attn.", "attn.pos_enc.")
    mine.load_state_dict({name.removeprefix("attn."): value for name, value in state.items()})
    for size in (shape, (6, 5), (2, 1), shape):  # other grids stretch the tables
        x = torch.randn(2, *size, DIM, dtype=torch.float64)
        expected = stock(x)
        actual = mine(x.flatten(1, 2), size).reshape(expected.shape)
        torch.testing.assert_close(actual, expected)
        cotangent = torch.randn_like(expected)
        sides = [
            torch.autograd.grad(y, [*module.parameters()], cotangent)
            for y, module in ((actual, mine), (expected, stock))
        ]
        theirs = dict(zip(dict(stock.named_parameters()), sides[1], strict=True))
        for name, grad in zip(dict(mine.named_parameters()), sides[0], strict=True):
            torch.testing.assert_close(grad, theirs[name.removeprefix("pos_enc.")])


def test_equals_a_sam_block_of_timm():
    torch.manual_seed(0)
    model = timm.create_model(
        "samvit_base_patch16", img_size=64, depth=1, embed_dim=24, num_heads=3, window_size=0, num_classes=0
    ).eval()
    block = model.blocks[0]
    for name in ("rel_pos_h", "rel_pos_w"):
        torch.nn.init.normal_(getattr(block.attn, name))
    mine = vispe.Attention(24, 3, {"name": "decomposed.sam", "grid": (4, 4)}).eval()
    state = dict(block.attn.state_dict())
    mine.pos_enc.rename_checkpoint_keys(state, "", "pos_enc.")
    mine.load_state_dict(state)
    x = torch.randn(2, 3, 64, 64)
    expected = model(x)
    block.attn.forward = lambda t: mine(t.flatten(1, 2), t.shape[1:3]).reshape(t.shape)
    torch.testing.assert_close(model(x), expected)


@cases("shape", [(5,), (3, 4), (2, 3, 2)])
def test_checkpoints_of_other_grids_are_stretched(shape):
    encoding, larger = build(shape), tuple(n + 2 for n in shape)
    other = build(larger)
    state = dict(encoding.state_dict())
    other.resample_checkpoint(state, "", None)
    for name, n in zip(TABLES[-len(shape) :], larger, strict=True):
        table = getattr(encoding, name).detach()
        expected = F.interpolate(table.t()[None], size=2 * n - 1, mode="linear")[0].t()
        torch.testing.assert_close(state[name], expected)
    other.load_state_dict(state)
    q, k, _ = content(Grid(larger).tokens)
    pos = Grid(larger).positions()
    dense = encoding.bias(pos, 0).dense(q=q, k=k)
    torch.testing.assert_close(dense, other.bias(pos, 0).dense(q=q, k=k))
    for grad in torch.autograd.grad(dense, [*encoding.parameters()], torch.randn_like(dense)):
        assert (grad != 0).all()
    with pytest.raises(EncodingMismatch, match="rel_pos_w has 4 entries"):
        other.resample_checkpoint({"rel_pos_w": torch.zeros(4, WIDTH)}, "", None)


def test_window_is_the_grid_of_the_tables():
    encoding = build((6, 6), window=[3, 4])
    assert (encoding.rel_pos_h.shape, encoding.rel_pos_w.shape) == ((5, WIDTH), (7, WIDTH))
    q, k, _ = content(12)
    pos = Grid((3, 4)).positions()
    torch.testing.assert_close(
        encoding.bias(pos, 0).dense(q=q, k=k), build((3, 4)).bias(pos, 0).dense(q=q, k=k)
    )
    state = dict(build((6, 6)).state_dict())
    encoding.resample_checkpoint(state, "", (6, 6))
    assert len(state["rel_pos_h"]) == 11


def test_dropped_tokens_on_each_sample():
    check_dropped_tokens(build((3, 4)), Grid((3, 4), 2).positions())


def test_invariant_to_translation():
    encoding, grid = build((4, 5)), Grid((4, 5))
    q, k, _ = (t[:1, :, :1].expand(-1, -1, grid.tokens, -1) for t in content(1))
    dense = encoding.bias(grid.positions(), 0).dense(q=q, k=k).unflatten(-1, (4, 5)).unflatten(-3, (4, 5))
    torch.testing.assert_close(dense[..., 1:, 2:, 1:, 2:], dense[..., :-1, :-2, :-1, :-2])


def test_a_converted_vit_is_unchanged_and_learns():
    torch.manual_seed(0)
    model = timm.create_model("test_vit", img_size=(64, 96), num_classes=3, global_pool="avg").eval()
    x = torch.randn(2, 3, 64, 96)
    before = model(x)
    vispe.convert(model, "decomposed", keep_abs=True)
    after = model(x)
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)
    after.backward(torch.randn_like(after))
    assert all((p.grad != 0).all() for name, p in model.named_parameters() if "pos_enc" in name)
    released = {
        name.replace("pos_enc.", ""): torch.randn_like(p) if "pos_enc" in name else p
        for name, p in model.state_dict().items()
    }
    model.load_state_dict(released)
    assert torch.equal(model.blocks[1].attn.pos_enc.rel_pos_w, released["blocks.1.attn.rel_pos_w"])


@cases(
    ("options", "message"),
    [
        ({"grid": []}, "grid needs a list of 1 to 3 integers above 0"),
        ({"window": [3]}, r"window needs one number for each of 2 axes, got window=\[3\]"),
        ({"scaled": 1}, "scaled is true or false, got scaled=1"),
        ({"std": -1}, "std needs a number of 0 or more, got std=-1"),
        ({"dim": 10}, "dim to be a multiple of num_heads, got dim=10, num_heads=3"),
    ],
)
def test_option_errors(options, message):
    with pytest.raises(OptionError, match=message):
        create_encoding("decomposed", **{"dim": DIM, "num_heads": HEADS, "grid": (3, 3), **options})


def test_positions_that_do_not_fit():
    for pos in (Grid((4,)).positions(), Positions(torch.zeros(1, 4, 2))):
        with pytest.raises(
            ShapeError, match=r"decomposed needs the tokens of a 2-axis grid, got [12] ax[ei]s"
        ):
            build((3, 3)).bias(pos, 0)
    with pytest.raises(ShapeError, match=r"query.*q, k and scale"):
        build((2, 2)).bias(Grid((2, 2)).positions(), 0).dense()
