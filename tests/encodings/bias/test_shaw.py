"""shaw against its definition, pair by pair, and the claims of its docstring."""

import itertools

import pytest
import timm
import torch

import vispe
from tests.attention import oracle
from tests.cases import cases
from tests.encodings.bias.products import DIM, HEADS, WIDTH, content, random_encoding
from vispe import Grid, Positions, attention, create_encoding
from vispe.encodings.parts.bias.table_interpolation import resample_table
from vispe.errors import OptionError, ShapeError, VispeError

GRIDS = [Grid((5,), 1), Grid((3, 4), 2), Grid((1, 6)), Grid((2, 3, 2), 1)]
OPTIONS = [
    {},
    {"values": True, "shared": False},
    {"method": "key_query", "index": "key_query", "values": True},
    {"method": "key_query", "shared": False, "clip": (2, 1)},
    {"clip": (1, 3), "index": "key_query"},
    {"method": "offset_factor"},
    {"method": "offset_factor", "clip": (0, 2), "index": "key_query", "shared": False},
    {"method": "distance_factor", "shared": False},
    {"method": "distance_factor", "clip": (1, 1), "values": True},
]


def build(grid, **options):
    return random_encoding("shaw", grid=grid, **options)


def entry(encoding, shape, p, q, folded):
    """Return the row of the table for a pair of cells."""
    row = 0
    for a, b, n in zip(p, q, shape, strict=True):
        o, (least, most) = a - b, encoding.clip or (n - 1, n - 1)
        o = -o if encoding.index == "key_query" else o
        o = max(-least, min(most, o))
        row = row * (most + 1) + abs(o) if folded else row * (least + most + 1) + o + least
    return row


def read(encoding, grid, name):
    """Return the entries of the table of each head and pair (h, n, n, channels), by a loop over pairs."""
    folded = encoding.method == "distance_factor" and name.startswith("distance")
    table = getattr(encoding, name).weight
    table = table.unflatten(1, (1 if encoding.shared else HEADS, -1)).transpose(0, 1).expand(HEADS, -1, -1)
    cells = oracle.cells_of(grid.shape, grid.prefix)
    rows = [
        torch.zeros_like(table[:, 0])
        if p is None or q is None
        else table[:, entry(encoding, grid.shape, p, q, folded)]
        for p, q in itertools.product(cells, cells)
    ]
    return torch.stack(rows, 1).unflatten(1, (len(cells), len(cells)))


def slow(encoding, grid, q, k, v):
    scale = WIDTH**-0.5
    logits, r = scale * q @ k.mT, read(encoding, grid, "distance_embedding")
    if "factor" in encoding.method:
        logits = logits * (1 + r[..., 0])
    else:
        logits = logits + scale * torch.einsum("bhid,hijd->bhij", q, r)
    if encoding.method == "key_query":
        logits = logits + scale * torch.einsum("bhjd,hijd->bhij", k, r)
    attn = logits.softmax(-1)
    out = attn @ v
    if encoding.values:
        out = out + torch.einsum("bhij,hijd->bhid", attn, read(encoding, grid, "value_embedding"))
    return out


def fast(encoding, grid, q, k, v, backend="auto"):
    pos = grid.positions()
    return attention(
        q, k, v, bias=encoding.bias(pos, 0), value_term=encoding.value_term(pos, 0), backend=backend
    )


@cases("options", OPTIONS, ids=str)
def test_attention_and_all_gradients(options):
    for grid in GRIDS:
        encoding = build(grid.shape, **options)
        leaves = [t.requires_grad_() for t in content(grid.tokens)]
        every = [*leaves, *encoding.parameters()]
        expected = slow(encoding, grid, *leaves)
        cotangent = torch.randn_like(expected)
        grads = torch.autograd.grad(expected, every, cotangent)
        for backend in ("reference",) if encoding.values else ("reference", "sdpa"):
            actual = fast(encoding, grid, *leaves, backend=backend)
            torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
            for f, w in zip(torch.autograd.grad(actual, every, cotangent), grads, strict=True):
                torch.testing.assert_close(f, w, rtol=1e-8, atol=1e-10)


@cases("resample", ["geometric", "bicubic"])
@cases("method", ["key", "distance_factor"])
def test_another_grid_reads_a_resampled_table(method, resample):
    encoding = build((3, 4), method=method, resample=resample)
    other = build((5, 2), method=method)
    weight = encoding.distance_embedding.weight
    if method == "key":
        values = weight.t().reshape(-1, 5, 7)
    else:  # distances to both sides
        values = weight.t().reshape(-1, 3, 4)[:, [2, 1, 0, 1, 2]][:, :, [3, 2, 1, 0, 1, 2, 3]]
    values = resample_table(values, (3, 4), (5, 2), resample)
    values = values if method == "key" else values[:, 4:, 1:]
    with torch.no_grad():
        other.distance_embedding.weight.copy_(values.flatten(1).t())
    q, k, _ = content(11)
    pos = Grid((5, 2), 1).positions()
    dense = encoding.bias(pos, 0).dense(q=q, k=k, scale=0.5)
    torch.testing.assert_close(dense, other.bias(pos, 0).dense(q=q, k=k, scale=0.5))
    (grad,) = torch.autograd.grad(dense, weight, torch.randn_like(dense))
    assert (grad != 0).any()
    loaded = build((5, 2), method=method, resample=resample)
    state = encoding.state_dict()
    state._metadata = None
    loaded.resample_checkpoint(state, "", (3, 4))
    torch.testing.assert_close(state["distance_embedding.weight"], other.distance_embedding.weight.detach())


def test_clipped_tables_do_not_depend_on_the_grid():
    assert build((3, 4), clip=(2, 2)).extrapolates
    assert not build((3, 4)).extrapolates
    encoding = create_encoding("shaw(clip=[2,1],axes=1)", dim=DIM, num_heads=HEADS)
    assert encoding.distance_embedding.weight.shape == (4, WIDTH)
    # a row for tokens without a position
    assert encoding.bias(Grid((30,)).positions(), 0).weights.shape == (
        1,
        5,
        WIDTH,
    )


def test_a_converted_vit_is_unchanged_and_learns():
    torch.manual_seed(0)
    stock = timm.create_model("test_vit", img_size=(64, 96), num_classes=3, global_pool="avg").eval()
    x = torch.randn(2, 3, 64, 96)
    before = stock(x)
    for preset in ("values", "method1", "method2", "method4"):
        model = timm.create_model("test_vit", img_size=(64, 96), num_classes=3, global_pool="avg").eval()
        model.load_state_dict(stock.state_dict())
        vispe.convert(model, f"shaw.{preset}", keep_abs=True)
        after = model(x)
        torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)
        after.backward(torch.randn_like(after))
        for name, parameter in model.named_parameters():
            assert "pos_enc" not in name or (parameter.grad != 0).any(), name


def test_invariant_to_translation_and_distances_to_reflection():
    grid = Grid((4, 5))
    q, k, _ = (t[:1, :, :1].expand(-1, -1, grid.tokens, -1) for t in content(grid.tokens))
    for options in OPTIONS:
        dense = build((4, 5), **options).bias(grid.positions(), 0).dense(q=q, k=k, scale=1.0)
        dense = dense.unflatten(-1, (4, 5)).unflatten(-3, (4, 5))
        torch.testing.assert_close(dense[..., 1:, 2:, 1:, 2:], dense[..., :-1, :-2, :-1, :-2])
        if "distance" in options.get("method", ""):
            torch.testing.assert_close(dense.flip(-1, -3), dense)
            torch.testing.assert_close(dense.flip(-2, -4), dense)


def test_released_names_are_loaded():
    encoding = build((3, 3), values=True)
    state = {f"attn.{name}": value for name, value in encoding.state_dict().items()}
    encoding.rename_checkpoint_keys(state, "attn.", "attn.pos_enc.")
    assert set(state) == {f"attn.pos_enc.{name}.weight" for name in ("distance_embedding", "value_embedding")}


@cases(
    ("options", "message"),
    [
        ({"method": "method3"}, "method must be one of key, key_query, distance_factor, offset_factor"),
        ({"clip": [3]}, r"clip needs a list of 2 integers of 0 or more, got clip=\[3\]"),
        ({"clip": [-1, 2]}, "clip needs a list of 2 integers"),
        ({"clip": [2, 1], "method": "distance_factor"}, r"needs two equal numbers for clip, got \(2, 1\)"),
        ({"index": "key_query", "method": "distance_factor"}, "has no effect with method='distance_factor'"),
        ({"clip": [2, 1], "resample": "bicubic"}, r"resample='bicubic' has no effect with clip=\[2, 1\]"),
        ({"index": "key"}, "index must be one of query_key, key_query, got 'key'"),
        ({"grid": None}, "needs grid, the grid of its table, or clip"),
        ({"axes": 3}, r"axes=2 for the grid \(3, 3\) of the model, got axes=3"),
        ({"dim": 10}, "dim to be a multiple of num_heads, got dim=10, num_heads=3"),
    ],
)
def test_option_errors(options, message):
    with pytest.raises(OptionError, match=message):
        create_encoding("shaw", **{"dim": DIM, "num_heads": HEADS, "grid": (3, 3), **options})


def test_positions_and_content_that_do_not_fit():
    encoding = build((3, 3), values=True)
    for pos in (Grid((4,)).positions(), Positions(torch.zeros(1, 4, 2))):
        for part in (encoding.bias, encoding.value_term):
            with pytest.raises(ShapeError, match=r"shaw needs the tokens of a 2-axis grid, got [12] ax[ei]s"):
                part(pos, 0)
    for method in ("key", "offset_factor"):
        with pytest.raises(VispeError, match="q, k and scale"):
            build((2, 2), method=method).bias(Grid((2, 2)).positions(), 0).dense()
