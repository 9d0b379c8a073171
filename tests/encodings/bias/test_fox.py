"""fox and cable: sums of gates along lines and L-shaped paths, against walks from patch to patch."""

import pytest
import timm
import torch
from torch.nn import functional as F

from tests.cases import cases, pairwise
from vispe import Attention, Grid, attention, create_encoding
from vispe.attention import SumBias
from vispe.attention.bias.content import GatedBias
from vispe.attention.bias.decomposed import DecomposedBias
from vispe.errors import OptionError, ShapeError

FACTS = {"dim": 12, "num_heads": 3}


def build(spec="fox", **options):
    encoding = create_encoding({"name": spec, **options}, **FACTS).double()
    with torch.no_grad():
        encoding.gate.weight.mul_(3)
        encoding.gate.bias.normal_()
    return encoding


def log_gates(encoding, x):
    z = encoding.gate(x).transpose(1, 2)
    return F.logsigmoid(z) * encoding.scale if encoding.name == "fox" else -F.softplus(z)


def tokens(count, batch=2):
    return torch.randn(batch, count, 12, dtype=torch.float64).requires_grad_()


def step_costs(cells, gates):
    """Return the sum along a walk, half of the gates at both ends."""
    costs = [gates[cell] for cell in cells]
    return sum(costs) - (costs[0] + costs[-1]) / 2


def walk(line, other, start, end):
    """Return the costs (h,) of a path along one axis: `line` has the gates of its cells, `other` is fixed."""
    lo, hi = sorted((start, end))
    return step_costs(range(lo, hi + 1), [line[:, other, c] for c in range(line.shape[2])])


def slow(first, second, shape, prefix):
    """Return the bias (h, n, n) of an image, path by path, for gates (h, gh, gw) along rows and down columns."""
    n = prefix + shape[0] * shape[1]
    down = second.transpose(1, 2)
    zero = first.new_zeros(first.shape[0])
    rows = []
    for i in range(n):
        for j in range(n):
            if i < prefix or j < prefix:
                rows.append(zero)
                continue
            (ri, ci), (rj, cj) = (divmod(t - prefix, shape[1]) for t in (i, j))
            row_first = walk(first, ri, ci, cj) + walk(down, cj, ri, rj)
            column_first = walk(down, ci, ri, rj) + walk(first, rj, ci, cj)
            rows.append((row_first + column_first) / 2)
    return torch.stack(rows, 1).unflatten(1, (n, n))


def same_with_gradients(actual, expected, leaves):
    torch.testing.assert_close(actual, expected)
    cotangent = torch.randn_like(actual)
    ours = torch.autograd.grad(actual, leaves, cotangent, retain_graph=True)
    torch.testing.assert_close(ours, torch.autograd.grad(expected, leaves, cotangent))


@pairwise
@cases("shared", [True, False])
@cases("name", ["fox", "cable"])
@cases(("shape", "prefix"), [((3, 4), 2), ((1, 5), 0), ((5, 2), 1), ((1, 1), 1)])
def test_images(name, shared, shape, prefix):
    encoding, grid = (
        build(name, shared=shared, **({"scale": 0.7} if name == "fox" else {})),
        Grid(shape, prefix),
    )
    x = tokens(grid.tokens)
    actual = encoding.bias(grid.positions(), 0, x).dense()
    gates = log_gates(encoding, x)[..., prefix:].unflatten(-1, shape)
    first, second = (gates, gates) if shared else gates.split(3, 1)
    expected = torch.stack([slow(f, s, shape, prefix) for f, s in zip(first, second, strict=True)])
    same_with_gradients(actual, expected, [x, *encoding.parameters()])


@cases("mode", ["causal", "shared", "separate"])
def test_lines(mode):
    encoding = build(causal=mode == "causal", shared=mode != "separate")
    grid, x = Grid((5,), prefix=2), tokens(7)
    actual = encoding.bias(grid.positions(), 0, x).dense()
    gates = log_gates(encoding, x)[..., 2:]
    expected = torch.zeros(2, 3, 7, 7, dtype=torch.float64)
    for i in range(5):
        for j in range(5):
            lo, hi = min(i, j), max(i, j)
            if mode == "shared":
                middle = gates[..., lo : hi + 1].sum(-1) - (gates[..., i] + gates[..., j]) / 2
                value = middle
            elif mode == "separate":
                backward_gates, forward_gates = gates.split(3, 1)
                value = (backward_gates if i > j else forward_gates)[..., lo + 1 : hi + 1].sum(-1)
            else:
                value = gates[..., lo + 1 : hi + 1].sum(-1) * (1 if i >= j else -1)
            expected[..., i + 2, j + 2] = value
    same_with_gradients(actual, expected, [x, *encoding.parameters()])


def test_a_line_is_an_image_of_one_row():
    encoding, x = build(), tokens(6)
    line = encoding.bias(Grid((6,)).positions(), 0, x).dense()
    torch.testing.assert_close(encoding.bias(Grid((1, 6)).positions(), 0, x).dense(), line)
    torch.testing.assert_close(encoding.bias(Grid((6, 1)).positions(), 0, x).dense(), line)


@cases("turns", [1, 2, 3])
@cases("flip", [False, True])
def test_rotations_and_flips(turns, flip):
    encoding, x = build("cable"), tokens(12)
    image = torch.arange(12).reshape(3, 4).rot90(turns)
    image = image.flip(1) if flip else image
    order = image.flatten()
    dense = encoding.bias(Grid((3, 4)).positions(), 0, x).dense()
    rotated = encoding.bias(Grid(tuple(image.shape)).positions(), 0, x[:, order]).dense()
    torch.testing.assert_close(rotated, dense[..., order, :][..., order])
    separate = build("cable", shared=False)
    dense = separate.bias(Grid((3, 4)).positions(), 0, x).dense()
    rotated = separate.bias(Grid(tuple(image.shape)).positions(), 0, x[:, order]).dense()
    assert torch.allclose(rotated, dense[..., order, :][..., order]) == (turns == 2)


def test_only_paths_between_two_patches_count():
    encoding, x = build(), tokens(20)
    inner = torch.arange(20).reshape(4, 5)[1:3, 1:4].flatten()
    dense = encoding.bias(Grid((4, 5)).positions(), 0, x).dense()
    part = encoding.bias(Grid((2, 3)).positions(), 0, x[:, inner]).dense()
    torch.testing.assert_close(dense[..., inner, :][..., inner], part)


def test_dropped_and_packed_patches():
    encoding, x, pos = build(), tokens(13), Grid((3, 4), 1).positions()
    every = torch.stack([torch.arange(13), torch.tensor([0, *range(12, 0, -1)])])
    rows = torch.arange(2)[:, None]
    dense = encoding.bias(pos, 0, x).dense()
    permuted = encoding.bias(pos.gather(every), 0, x[rows, every]).dense()
    for b in range(2):
        torch.testing.assert_close(permuted[b], dense[b][:, every[b]][:, :, every[b]])
    # patches that are not there cost nothing
    keep = torch.tensor([[0, 1, 4], [0, 2, 3]])
    subset = encoding.bias(pos.gather(keep), 0, x[rows, keep]).dense()
    gates = log_gates(encoding, x[rows, keep])
    torch.testing.assert_close(subset[..., 1, 2], (gates[..., 1] + gates[..., 2]) / 2)


def test_kernel_forms_and_backends():
    x = tokens(13)
    q, k, v = torch.randn(3, 2, 3, 13, 4, dtype=torch.float64)
    image = build().bias(Grid((3, 4), 1).positions(), 0, x)
    assert isinstance(image, SumBias)
    assert {(type(t), t.dot) for t in image.terms} == {(DecomposedBias, "query"), (DecomposedBias, "key")}
    line = build().bias(Grid((12,), 1).positions(), 0, x)
    assert isinstance(line, GatedBias)
    for bias in (image, line):
        expected = attention(q, k, v, bias=bias, backend="reference")
        torch.testing.assert_close(attention(q, k, v, bias=bias, backend="sdpa"), expected)


def test_start_and_half_precision():
    x = torch.randn(1, 12, 12)
    for name in ("fox", "cable"):
        encoding = create_encoding(name, dim=12, num_heads=3)
        with torch.no_grad():
            encoding.gate.weight.zero_()
        assert encoding.bias(Grid((3, 4)).positions(), 0, x).dense().abs().max() < 0.04
    encoding = build().half()
    actual = encoding.bias(Grid((3, 4)).positions(), 0, x.half()).dense()
    expected = encoding.float().bias(Grid((3, 4)).positions(), 0, x.half().float()).dense()
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected)


def test_a_layer_and_a_vit():
    layer = Attention(12, 3, "fox(causal=true)")
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    assert layer(torch.randn(2, 6, 12), Grid((6,)), attn_mask=mask).isfinite().all()
    model = timm.create_model("test_vit", pos_embed="fox", img_size=(48, 32), num_classes=3)
    model(torch.randn(2, 3, 48, 32)).square().sum().backward()
    gates = [p.grad for name, p in model.named_parameters() if "gate" in name]
    assert len(gates) == 2 * len(model.blocks)
    assert all(g is not None for g in gates)


def test_errors():
    with pytest.raises(OptionError, match="cable has a single gate with causal=True"):
        build("cable", causal=True, shared=False)
    with pytest.raises(OptionError, match="scale needs a number above 0, got scale=0"):
        build(scale=0)
    encoding, pos = build(causal=True), Grid((2, 3)).positions()
    with pytest.raises(ShapeError, match="fox needs 1 axis with causal=True, got 2 axes"):
        encoding.bias(pos, 0, tokens(6))
    with pytest.raises(ShapeError, match="fox reads the tokens and needs x"):
        build().bias(pos, 0)
    with pytest.raises(ShapeError, match="fox needs the tokens of a 1 or 2-axis grid, got 3 axes"):
        build().bias(Grid((2, 3, 2)).positions(), 0, tokens(12))
