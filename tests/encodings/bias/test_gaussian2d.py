"""gaussian2d against its definition, its symmetries, and NACLIP's formula."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.models import VisionTransformer

import vispe
from tests.attention import oracle
from tests.cases import cases
from vispe import Grid, Positions, attention, create_encoding
from vispe.errors import OptionError, ShapeError

sides = st.integers(1, 7)
property_settings = settings(max_examples=25, deadline=None, derandomize=True)


def slow(grid, sigma=5.0, amplitude=1.0, wrap=False, spacing=None):
    """Return the matrix (n, n), entry by entry."""
    spacing = spacing or grid.spacing or (1.0, 1.0)
    cells = oracle.cells_of(grid.shape, grid.prefix)
    rows = [
        [
            0.0
            if p is None or q is None
            else amplitude
            * math.exp(-oracle.distance(p, q, grid.shape, spacing, "squared", wrap) / (2 * sigma**2))
            for q in cells
        ]
        for p in cells
    ]
    return torch.tensor(rows, dtype=torch.float64)


@cases("wrap", [False, True])
@cases("options", [{}, {"sigma": 0.6, "amplitude": -2.5}, {"spacing": (2.0, 0.25)}])
@cases("grid", [Grid((4, 4), 1), Grid((3, 5), 3, spacing=(0.5, 2.0)), Grid((1, 1), 2), Grid((1, 6))])
def test_values(grid, options, wrap):
    encoding = create_encoding({"name": "gaussian2d", "wrap": wrap, **options})
    bias = encoding.bias(grid.positions(), 0)
    expected = slow(grid, wrap=wrap, **options)
    torch.testing.assert_close(bias.dense()[0, 0].double(), expected, rtol=1e-5, atol=1e-6)
    table = bias.table(grid).double()
    wanted_table = oracle.table_matrix(table, grid)[0]
    torch.testing.assert_close(wanted_table, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(bias.mask(torch.float32), bias.dense())
    assert not list(encoding.parameters())


def test_attention_and_key():
    grid = Grid((3, 4), 1)
    pos, encoding = grid.positions(), create_encoding("gaussian2d(sigma=1.5)")
    q, k, v = torch.randn(3, 2, 3, 13, 8, dtype=torch.float64)
    for name in ("reference", "sdpa"):
        result = attention(q, k, v, bias=encoding.bias(pos, 0), backend=name)
        torch.testing.assert_close(
            result, oracle.attend(q, k, v, bias=slow(grid, 1.5)[None, None]), rtol=1e-6, atol=1e-6
        )
    other = create_encoding("gaussian2d(sigma=1.5,spacing=[2,2])").bias(pos, 0)
    assert other.mask(torch.float32)[0, 0, 1, 2] != encoding.bias(pos, 0).mask(torch.float32)[0, 0, 1, 2]


def test_free_coordinates_with_gradient():
    coords = (torch.rand(2, 5, 2, dtype=torch.float64) * 4).requires_grad_()
    encoding = create_encoding("gaussian2d(sigma=2)")
    bias = encoding.bias(Positions(coords), 0)
    assert bias.key is None
    target = torch.exp(-(coords[:, :, None] - coords[:, None]).square().sum(-1) / 8)
    torch.testing.assert_close(bias.dense()[:, 0], target)
    cotangent = torch.randn_like(target)
    actual, expected = (torch.autograd.grad(t, coords, cotangent)[0] for t in (bias.dense()[:, 0], target))
    torch.testing.assert_close(actual, expected)


def test_a_wide_gaussian_is_a_constant():
    pos = Grid((3, 4)).positions()
    q, k, v = torch.randn(3, 1, 2, 12, 4)
    wide = create_encoding("gaussian2d(sigma=1e6)").bias(pos, 0)
    torch.testing.assert_close(attention(q, k, v, bias=wide), attention(q, k, v))


@property_settings
@given(n=sides, prefix=st.integers(0, 3), wrap=st.booleans(), turns=st.integers(0, 3), flip=st.booleans())
def test_symmetries_of_the_square(n, prefix, wrap, turns, flip):
    dense = (
        create_encoding(f"gaussian2d(wrap={wrap},sigma=2)").bias(Grid((n, n), prefix).positions(), 0).dense()
    )
    image = torch.arange(n * n).reshape(n, n).rot90(turns)
    order = torch.cat([torch.arange(prefix), prefix + (image.flip(0) if flip else image).flatten()])
    assert torch.equal(dense[..., order, :][..., order], dense)
    assert torch.equal(dense, dense.transpose(-1, -2))


@property_settings
@given(h=sides, w=sides, wrap=st.booleans(), data=st.data())
def test_invariant_to_translation(h, w, wrap, data):
    down, right = data.draw(st.integers(0, h - 1)), data.draw(st.integers(0, w - 1))
    dense = create_encoding(f"gaussian2d(wrap={wrap},sigma=2)").bias(Grid((h, w)).positions(), 0).dense()
    dense = dense.reshape(h, w, h, w)
    assert torch.equal(
        dense[down:, right:, down:, right:], dense[: h - down, : w - right, : h - down, : w - right]
    )
    if wrap:
        assert torch.equal(dense.roll((down, right, down, right), (0, 1, 2, 3)), dense)


def test_dropped_tokens():
    pos, encoding = Grid((4, 3), 1).positions(), create_encoding("gaussian2d(wrap=true)")
    keep = torch.tensor([[0, 1, 12], [0, 5, 7]])
    dense, subset = encoding.bias(pos, 0).dense()[0], encoding.bias(pos.gather(keep), 0).dense()
    for b in range(2):
        assert torch.equal(subset[b], dense[:, keep[b]][:, :, keep[b]])


def test_layers_and_a_vit():
    last = create_encoding("gaussian2d.naclip", depth=4)
    pos = Grid((2, 2)).positions()
    assert [last.bias(pos, i) is not None for i in range(4)] == [False, False, False, True]
    some = create_encoding("gaussian2d(layers=[1,-4])", depth=4)
    assert [some.active(i) for i in range(4)] == [True, True, False, False]
    assert create_encoding("gaussian2d(layers=[2])").active(2)
    torch.manual_seed(0)
    model = VisionTransformer(
        img_size=24, patch_size=8, embed_dim=12, depth=3, num_heads=3, num_classes=0, global_pool="avg"
    ).eval()
    x = torch.randn(2, 3, 24, 24)
    before = model(x)
    vispe.convert(model, "gaussian2d.naclip(amplitude=50)", keep_abs=True)
    assert not torch.equal(model(x), before)
    vispe.convert(model, "gaussian2d.naclip(amplitude=0)", keep_abs=True)
    torch.testing.assert_close(model(x), before)


@cases(
    ("options", "message"),
    [
        ("sigma=0", "sigma needs a number above 0, got sigma=0"),
        ("sigma=wide", "sigma needs a number above 0, got sigma='wide'"),
        ("sigma=1e999", "sigma needs a number above 0, got sigma=inf"),
        ("amplitude=true", "amplitude needs a finite number, got amplitude=True"),
        ("wrap=1", "wrap is true or false, got wrap=1"),
        ("spacing=[1]", r"spacing needs one number for each of 2 axes, got spacing=\[1\]"),
        ("layers=3", "layers needs a list of integers, got layers=3"),
        ("layers=[0.5]", "layers needs a list of integers"),
        ("layers=[4]", r"block indices below depth=4, got \[4\]"),
        ("layers=[-5]", r"block indices below depth=4, got \[-5\]"),
    ],
)
def test_option_errors(options, message):
    with pytest.raises(OptionError, match=message):
        create_encoding(f"gaussian2d({options})", depth=4)


def test_other_errors():
    with pytest.raises(OptionError, match=r"layers=\[-1\] counts from the last block and needs depth"):
        create_encoding("gaussian2d.naclip")
    with pytest.raises(ShapeError, match="gaussian2d needs 2-axis positions, got 3 axes"):
        create_encoding("gaussian2d").bias(Grid((1, 2, 2)).positions(), 0)
