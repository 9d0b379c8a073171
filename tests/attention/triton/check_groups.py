"""Heads of keys and values shared by several query heads. `test_interpreter` runs this file."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vispe import Grid, attention, create_encoding
from vispe.attention import DistanceBias, ProfileBias, SumBias, TableBias
from vispe.attention.backends.triton import tiles as sizes
from vispe.attention.backends.triton.grid import operands
from vispe.attention.bias.strip.layout import Layout

pytestmark = pytest.mark.usefixtures("poisoned")

LIMITS = {torch.float32: (2e-6, 1e-5), torch.float16: (6e-4, 2e-3)}
# the last: 4 or 8 heads on a plane
KINDS = [
    "none",
    "fixed",
    "slopes",
    "table",
    "shared",
    "profile",
    "sum",
    "hides",
]


@pytest.fixture(autouse=True)
def _several_tiles(monkeypatch):
    size = {
        name: {64: sizes.Tiles(32, 32, 4, 1), 128: sizes.Tiles(32, 32, 4, 1)}
        for name in sizes.TABLES[90, "half"]
    }
    monkeypatch.setitem(sizes.TABLES, (90, "half"), size)
    monkeypatch.setitem(sizes.TABLES, (90, "float32"), size)


def parameters(kind, grid, heads):
    """Return the learned numbers of a bias."""
    sides = [2 * n - 1 for n in grid.shape]
    slopes, table, one = torch.rand(heads), torch.randn(heads, *sides), torch.randn(1, *sides)
    edge = [torch.randn(heads, 3)] if grid.prefix else []
    return {"slopes": [slopes], "table": [table, *edge], "shared": [one], "profile": [slopes, one],
            "sum": [slopes, table, *edge]}.get(kind, [])  # fmt: skip


def bias_of(kind, pos, heads, params):
    """Return a bias of learned numbers, or one without."""
    if kind == "hides":  # each head looks another way
        return create_encoding("lookhere", num_heads=heads, depth=2).bias(pos, 1)
    make = {
        "none": lambda: None,
        "fixed": lambda: DistanceBias(tuple(0.1 * (1 + h) for h in range(heads)), pos),
        "slopes": lambda s: DistanceBias(s, pos),
        "table": lambda t, e=None: TableBias(t, pos, e),
        "shared": lambda t: TableBias(t, pos),
        "profile": lambda s, t: ProfileBias(s, t, pos),
        "sum": lambda s, t, e=None: SumBias([DistanceBias(s, pos), TableBias(t, pos, e)]),
    }
    return make[kind](*params)


def inputs(grid, heads, groups, dtype, width=16, value=24, batch=2):
    """Return q, k and v, keys and values as slices of one projection."""
    n, few = grid.tokens, heads // groups
    kv = torch.randn(batch, n, few, width + value).to(dtype).transpose(1, 2)
    q = torch.randn(batch, n, heads, width).to(dtype).transpose(1, 2)
    return [t.detach().requires_grad_() for t in (q, *kv.split([width, value], -1))]


def compare(kind, grid, heads, groups, dtype=torch.float32, keep=None, **options):
    """Compare output and all gradients with the reference in float64, and return those gradients."""
    pos, qkv = grid.positions(), inputs(grid, heads, groups, dtype)
    params = [p.requires_grad_() for p in parameters(kind, grid, heads)]
    exact, wide = ([t.detach().double().requires_grad_() for t in arguments] for arguments in (qkv, params))
    arguments = {"key_padding_mask": keep, "enable_gqa": True, **options}
    out = attention(*qkv, bias=bias_of(kind, pos, heads, params), backend="triton", **arguments)
    expected = attention(*exact, bias=bias_of(kind, pos, heads, wide), backend="reference", **arguments)
    cotangent = torch.randn_like(out)
    ours = torch.autograd.grad(out, (*qkv, *params), cotangent)
    theirs = torch.autograd.grad(expected, (*exact, *wide), cotangent.double())
    assert (out.shape, out.dtype) == (expected.shape, dtype)
    assert (out.double() - expected).norm() <= LIMITS[dtype][0] * expected.norm()
    for mine, other, leaf in zip(ours, theirs, (*qkv, *params), strict=True):
        assert (mine.shape, mine.dtype) == (leaf.shape, leaf.dtype)
        # biases of prefix tokens are few sums over very many pairs
        slack = 5 if mine.shape == (heads, 3) else 1
        assert (mine.double() - other).norm() <= slack * LIMITS[dtype][1] * other.norm()
    return ours


@pytest.mark.parametrize(
    ("grid", "heads", "groups", "rows", "kinds"),
    [(Grid((5, 7), 5), 4, 2, False, KINDS), (Grid((6, 9)), 3, 3, False, KINDS[:-1]),
     (Grid((3, 13), 1), 8, 8, True, KINDS), (Grid((2, 3, 5), 2), 6, 3, True, KINDS[:-1])],
    ids=["5x7+5", "6x9", "3x13+1", "2x3x5+2"],
)  # fmt: skip
def test_output_and_gradients(monkeypatch, grid, heads, groups, rows, kinds):
    monkeypatch.setattr(operands, "layout_of", lambda shape, prefix: Layout(shape, prefix, rows))
    for kind in kinds:
        compare(kind, grid, heads, groups)


@pytest.mark.parametrize("kind", ["fixed", "sum", "hides"])
def test_strips_padding_and_half_precision(monkeypatch, kind):
    monkeypatch.setattr(operands, "layout_of", lambda shape, prefix: Layout(shape, prefix, False))
    grid = Grid((7, 6), 3)
    keep = torch.rand(2, grid.tokens) < 0.6
    keep[:, 0] = True
    compare(kind, grid, 4, 2, torch.float16, keep)


def test_gradients_are_deterministic():
    grads = []
    for _ in range(2):
        torch.manual_seed(3)
        grads.append(compare("sum", Grid((5, 7), 1), 6, 3, deterministic=True))
    for first, second in zip(*grads, strict=True):
        assert torch.equal(first, second)


def test_keys_and_values_are_not_repeated():
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "table_attention" in str(func):
                at = 1 if "grad" in str(func) else 0
                heads.append([t.shape[1] for t in args[at : at + 3]])
            return func(*args, **(kwargs or {}))

    heads, grid = [], Grid((4, 5), 1)
    q, k, v = inputs(grid, 6, 3, torch.float32)
    with Seen():
        out = attention(
            q, k, v, bias=DistanceBias((0.1,) * 6, grid.positions()), enable_gqa=True, backend="triton"
        )
        out.sum().backward()
    assert heads == [[6, 2, 2]] * 2


@pytest.mark.parametrize("moved", [False, True])
def test_rotated_keys_and_tokens_anywhere(moved):
    """Keys are rotated before they are shared; kernels for coordinates get them repeated."""
    pos = Grid((4, 7), 1).positions()
    turn = create_encoding("rope_axial", dim=64, num_heads=4, depth=2).transform(pos, 1)
    qkv = inputs(pos.grid, 4, 2, torch.float32)
    exact = [t.detach().double().requires_grad_() for t in qkv]
    bias = DistanceBias((0.1, 0.2, 0.3, 0.4), pos.with_spacing((1.0, 0.5)) if moved else pos)
    arguments = {"bias": bias, "enable_gqa": True, "transform": turn}
    out = attention(*qkv, backend="triton", **arguments)
    expected = attention(*exact, backend="reference", **arguments)
    cotangent = torch.randn_like(out)
    ours, theirs = (
        torch.autograd.grad(out, qkv, cotangent),
        torch.autograd.grad(expected, exact, cotangent.double()),
    )
    for mine, other in zip((out, *ours), (expected, *theirs), strict=True):
        assert (mine.double() - other).norm() <= 1e-5 * other.norm()
