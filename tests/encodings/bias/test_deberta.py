"""deberta against its definition, pair by pair, and the claims of its docstring."""

import copy
import math

import pytest
import timm
import torch

import vispe
from tests.attention import oracle
from tests.cases import cases
from tests.encodings.bias.products import DIM, HEADS, WIDTH, check_dropped_tokens, content, random_encoding
from vispe import Grid, Positions, create_encoding
from vispe.encodings.attention_layer import attend
from vispe.errors import OptionError, ShapeError, UnsupportedCombination

GRIDS = [Grid((9,), 1), Grid((2, 6), 2), Grid((1, 6)), Grid((2, 3, 2), 1)]
OPTIONS = [
    {"position_buckets": 4, "max_relative_positions": 7},
    {"terms": "p2c", "rescale": True, "position_buckets": None, "max_relative_positions": 2},
    {"terms": "c2p", "rescale": True, "position_buckets": 2, "max_relative_positions": 9},
    {"rescale": True},
]


def build(axes, **options):
    return random_encoding("deberta", axes=axes, **options)


def bucket(offset, count, most):
    """Return the bucket of one offset."""
    middle = count // 2
    if abs(offset) <= middle:
        return offset
    share = math.log(abs(offset) / middle) / math.log((most - 1) / middle)
    return int(math.copysign(math.ceil(round(share * (middle - 1), 9)) + middle, offset))


def embedding(encoding, p, q):
    """Return the sum of embeddings of the offsets of two cells along all axes."""
    total, span = 0, encoding.span
    for axis, (a, b) in enumerate(zip(p, q, strict=True)):
        d = a - b
        d = (
            d
            if encoding.position_buckets is None
            else bucket(d, encoding.position_buckets, encoding.max_relative_positions)
        )
        total = total + encoding.rel_embeddings[2 * span * axis + max(0, min(2 * span - 1, d + span))]
    return total


def slow(encoding, grid, q, k, v):
    """Return attention, by a loop over pairs of tokens."""
    cells = oracle.cells_of(grid.shape, grid.prefix)
    count = 3 if encoding.terms == "both" else 2
    factor = torch.ones(len(cells), 1, dtype=torch.float64)
    if encoding.rescale:
        factor[grid.prefix :] = count**-0.5
    logits = (q * factor) @ k.mT
    rows = []
    for i, p in enumerate(cells):
        row = []
        for j, o in enumerate(cells):
            term = torch.zeros(len(q), HEADS, dtype=torch.float64)
            if p is not None and o is not None:
                e = embedding(encoding, p, o)
                if encoding.terms != "p2c":
                    term = term + (q[:, :, i] * encoding.pos_key_proj(e).reshape(HEADS, WIDTH)).sum(-1)
                if encoding.terms != "c2p":
                    term = term + (k[:, :, j] * encoding.pos_query_proj(e).reshape(HEADS, WIDTH)).sum(-1)
            row.append(term * factor[i, 0])
        rows.append(torch.stack(row, -1))
    return ((logits + torch.stack(rows, -2)) * WIDTH**-0.5).softmax(-1) @ v


@cases("options", OPTIONS, ids=str)
def test_attention_and_all_gradients(options):
    for grid in GRIDS:
        encoding = build(grid.axes, **options)
        leaves = [t.requires_grad_() for t in content(grid.tokens)]
        every = [*leaves, *encoding.parameters()]
        expected = slow(encoding, grid, *leaves)
        cotangent = torch.randn_like(expected)
        grads = torch.autograd.grad(expected, every, cotangent)
        for backend in ("reference", "sdpa"):
            actual = attend(*leaves, encoding.parts(), grid.positions(), 0, backend=backend)
            torch.testing.assert_close(actual, expected)
            for f, w in zip(torch.autograd.grad(actual, every, cotangent), grads, strict=True):
                torch.testing.assert_close(f, w, rtol=1e-6, atol=1e-8)


def test_buckets():
    encoding = create_encoding(
        "deberta(position_buckets=8,max_relative_positions=20)", dim=DIM, num_heads=HEADS
    )
    offsets = torch.arange(-30, 31)
    assert encoding.buckets(offsets).tolist() == [bucket(int(o), 8, 20) for o in offsets]
    assert encoding.buckets(torch.tensor([-19, -5, -4, 0, 4, 5, 19])).tolist() == [-7, -5, -4, 0, 4, 5, 7]
    plain = create_encoding("deberta(position_buckets=null)", dim=DIM, num_heads=HEADS)
    assert torch.equal(plain.buckets(offsets), offsets)
    assert plain.rel_embeddings.shape == (2 * 2 * 128, DIM)


def test_dropped_tokens_on_each_sample():
    check_dropped_tokens(build(2), Grid((3, 4), 2).positions(), scale=0.5)


def test_invariant_to_translation():
    grid, encoding = Grid((4, 5)), build(2)
    q, k, _ = (t[:1, :, :1].expand(-1, -1, grid.tokens, -1) for t in content(1))
    dense = (
        encoding.bias(grid.positions(), 0)
        .dense(q=q, k=k, scale=1.0)
        .unflatten(-1, (4, 5))
        .unflatten(-3, (4, 5))
    )
    torch.testing.assert_close(dense[..., 1:, 2:, 1:, 2:], dense[..., :-1, :-2, :-1, :-2])


@cases("fused", [True, False])
@cases("biased", [True, False])
def test_shared_projections_are_those_of_attention(fused, biased):
    torch.manual_seed(0)
    layer = vispe.Attention(DIM, HEADS, "deberta(share_att_key=true)", fused_qkv=fused, qkv_bias=biased)
    attention_layer = vispe.Attention(DIM, HEADS, "deberta", fused_qkv=fused, qkv_bias=biased)
    x, grid = torch.randn(2, 13, DIM), Grid((3, 4), 1)
    with pytest.raises(UnsupportedCombination, match=r"got none\. Call tie\(attention\)"):
        layer(x, grid)
    layer.pos_enc.tie(layer)
    assert [n for n, _ in layer.pos_enc.named_parameters()] == ["rel_embeddings"]
    parts = (
        (layer.qkv.weight[:DIM], layer.qkv.weight[DIM : 2 * DIM]) if fused else (layer.q_proj, layer.k_proj)
    )
    bias = (layer.qkv.bias, DIM) if fused else None
    with torch.no_grad():
        attention_layer.load_state_dict(dict(layer.state_dict()), strict=False)
        for i, mine in enumerate(
            (attention_layer.pos_enc.pos_query_proj, attention_layer.pos_enc.pos_key_proj)
        ):
            mine.weight.copy_(parts[i] if fused else parts[i].weight)
            if biased:
                mine.bias.copy_(bias[0][i * DIM : (i + 1) * DIM] if fused else parts[i].bias)
    expected = attention_layer(x, grid)
    torch.testing.assert_close(layer(x, grid), expected)
    # a copy shares with the copy of its attention
    other = copy.deepcopy(layer)
    with torch.no_grad():
        for p in layer.parameters():
            p.zero_()
    torch.testing.assert_close(other(x, grid), expected)


def test_sharing_errors():
    encoding = create_encoding("deberta(share_att_key=true)", dim=DIM, num_heads=HEADS)
    for module in (torch.nn.Linear(DIM, DIM), vispe.Attention(2 * DIM, HEADS)):
        with pytest.raises(
            UnsupportedCombination, match="has no linear layers qkv, or q_proj and k_proj, from 12"
        ):
            encoding.tie(module)


def test_a_converted_vit_is_unchanged_and_learns_from_the_second_step():
    torch.manual_seed(0)
    model = timm.create_model("test_vit", img_size=(64, 96), num_classes=3, global_pool="avg").eval()
    x = torch.randn(2, 3, 64, 96)
    before = model(x)
    vispe.convert(model, "deberta", keep_abs=True)
    torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-5)
    mine = {name: p for name, p in model.named_parameters() if "pos_enc" in name}
    for step in range(2):
        out = model(x)
        grads = torch.autograd.grad(out, [*mine.values()], torch.randn_like(out))
        for (name, p), grad in zip(mine.items(), grads, strict=True):
            assert (grad != 0).any() == (step == 1 or "rel_embeddings" not in name), name
            p.data -= 0.1 * grad


@cases(
    ("options", "message"),
    [
        ({"terms": "p2p"}, "terms must be one of both, c2p, p2c, got 'p2p'"),
        (
            {"position_buckets": 1},
            "position_buckets needs an integer of 2 or more, got position_buckets=1",
        ),
        (
            {"position_buckets": 8, "max_relative_positions": 5},
            r"max_relative_positions above position_buckets / 2 \+ 1 = 5, got 5",
        ),
        ({"max_relative_positions": 0}, "max_relative_positions needs an integer above 0"),
        ({"std": -1}, "std needs a number of 0 or more, got std=-1"),
        ({"std": 0.5, "share_att_key": True}, "std=0.5 has no effect with share_att_key=True"),
        ({"axes": 4}, "axes needs an integer from 1 to 3, got axes=4"),
        ({"dim": 10}, "dim to be a multiple of num_heads, got dim=10, num_heads=3"),
    ],
)
def test_option_errors(options, message):
    with pytest.raises(OptionError, match=message):
        create_encoding("deberta", **{"dim": DIM, "num_heads": HEADS, **options})


def test_positions_that_do_not_fit():
    for pos in (Grid((4,)).positions(), Positions(torch.zeros(1, 4, 2))):
        with pytest.raises(ShapeError, match=r"deberta needs the tokens of a 2-axis grid, got [12] ax[ei]s"):
            build(2).bias(pos, 0)
    with pytest.raises(ShapeError, match=r"query.*q, k and scale"):
        build(1).bias(Grid((4,)).positions(), 0).dense()
